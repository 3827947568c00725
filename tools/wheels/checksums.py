# SPDX-License-Identifier: Apache-2.0
"""Writes the SHA-256 sums of a release's files, in the format of sha256sum."""

from __future__ import annotations

import hashlib
from pathlib import Path

NAME = "SHA256SUMS"


def write_checksums(out: Path) -> Path:
    """Writes the sums of the sdist and the wheels in ``out``; ``sha256sum --check`` reads them."""
    files = sorted([*out.glob("ringcomm-*.tar.gz"), *out.glob("ringcomm-*.whl")])
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    path = out / NAME
    path.write_text("".join(sums))
    return path
