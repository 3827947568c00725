# SPDX-License-Identifier: Apache-2.0
"""A CUDA compiler that takes no time, and a tree of sources for it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ringcomm.cuda.build import KernelBuilder, KernelCache

SOURCES = {
    "kernels/cuda/kernels.cu": '#include <stdint.h>\n#include "kernels/cuda/body.h"\n',
    "kernels/cuda/body.h": '  #  include "ringcomm/core/platform.h"\n// the body\n',
    "kernels/include/ringcomm/core/platform.h": "// the platform\n",
    "kernels/include/ringcomm/unused.h": "// nobody includes it\n",
}


def make_tree(root: Path) -> Path:
    for name, text in SOURCES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


class FakeCompiler:
    """A compiler whose machine code names its sources; each compilation adds a line to ``log``.

    Attributes:
        error: if set, the next compilations raise it.
    """

    def __init__(self, log: Path, identity: str = "fake 1.0", takes_s: float = 0.0) -> None:
        self.log = log
        self.identity = identity
        self.takes_s = takes_s
        self.error: Exception | None = None

    def architectures(self) -> Sequence[int]:
        return (80, 90, 100)

    def compile(
        self, text: str, name: str, headers: Mapping[str, str], options: Sequence[str]
    ) -> bytes:
        # Appended by a single write, so that lines of concurrent processes do not mix.
        with open(self.log, "ab", buffering=0) as log:
            log.write(f"{os.getpid()} {name} {' '.join(options)}\n".encode())
        time.sleep(self.takes_s)
        if self.error is not None:
            raise self.error
        made_of = [self.identity, *options, text, *(f"{n}={headers[n]}" for n in sorted(headers))]
        return "\n".join(made_of).encode()

    def compilations(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


def builder_for(root: Path, compiler: FakeCompiler, folder: Path | None) -> KernelBuilder:
    """Returns a builder as another process would have it: only the folder is shared."""
    return KernelBuilder(root, None, lambda: compiler, KernelCache(folder))
