# SPDX-License-Identifier: Apache-2.0
"""Writes ringcomm/_native.pyi from the signatures in the native module, as ``make native`` does."""

from __future__ import annotations

import re

from nanobind.stubgen import StubGen, load_pattern_file

from ringcomm import _native
from tools.commands import ROOT

STUB = ROOT / "ringcomm" / "_native.pyi"
PATTERNS = ROOT / "kernels" / "bindings" / "stub.nb"


def native_stub() -> str:
    """Returns the built module's stub, without docstrings: `help()` reads them from the module."""
    patterns = load_pattern_file(str(PATTERNS))
    generator = StubGen(_native, include_docstrings=False, patterns=patterns)
    generator.put(_native)
    # Put blank lines only around classes.
    stub = re.sub(r"\n+(?=\n    )", "", generator.get())
    stub = re.sub(r"(?m)^((?:def |[A-Z_]+: ).*)\n+(?=\n(?:def |[A-Z_]+: ))", r"\1", stub)
    return f"# Generated from kernels/bindings by `make native`.\n{stub}"


if __name__ == "__main__":
    STUB.write_text(native_stub())
