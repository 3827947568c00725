# SPDX-License-Identifier: Apache-2.0
"""Modules of torch's compiler, imported by a process before it forks ranks that compile."""

from __future__ import annotations

import importlib

from torch._inductor import config

# Otherwise the import, and then every rank, would start compile processes.
config.compile_threads = 1
# Kernels of products come from a library. Other kernels need a C++ compiler and must fail here:
# compiling would take longer than all else.
config.cpp.cxx = ("no-compiler",)
importlib.import_module("torch._inductor.compile_fx")
importlib.import_module("torch._inductor.lowering")
