# SPDX-License-Identifier: Apache-2.0
"""The modules of torch's compiler, which a process imports before it forks ranks that compile."""

from __future__ import annotations

import importlib

from torch._inductor import config

# Else the import would start processes that compile, and so would every rank.
config.compile_threads = 1
# Kernels of products are of a library. What a C++ compiler would be needed for fails: it would take
# longer than all else.
config.cpp.cxx = ("no-compiler",)
importlib.import_module("torch._inductor.compile_fx")
importlib.import_module("torch._inductor.lowering")
