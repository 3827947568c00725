# SPDX-License-Identifier: Apache-2.0
"""An interpreter of PTX, which runs kernels without a GPU.

It takes the text that NVRTC and Triton emit for sm_90, refuses unknown instructions by name, and
runs kernels lane by lane under the weakest memory that PTX allows: a missing acquire, release,
fence or barrier fails each time. `docs/cuda.md`, "What the PTX shows", lists the mistakes that it
finds and those that it cannot find.

Running a kernel takes three steps::

    module = ptx_interpreter.load(text)
    ptx_interpreter.allow(tensor)  # the memory that kernels may use
    failed = ptx_interpreter.run(module, "kernel", parameters, grid=(2, 1), threads=64)

``failed`` says what the kernel did wrong, and where in the text. From then on all kernels of the
process end at once, until :func:`forget`.

A driver embeds the interpreter by its interface in C (``source/interpreter.h``): it links
``build.LIBRARY``, has its own memory served (``ptx_serve``), and says when a stream or the host has
waited. The emulated driver does so (``tests/support/emulator/ptx_kernels.cpp``).

==================  ===============================================================================
``source/``         the interpreter: ``parse`` and ``rows`` make a module of a text, ``warp`` runs
                    its blocks, ``instructions`` are the lanes' operations, ``memory`` and
                    ``history`` say what a load may see
``build.py``        its shared library
``interpreter.py``  the interface in Python
``tests/``          arithmetic against torch, exhaustively where there are 2^16 cases; each mistake
                    that it must find; what it refuses
==================  ===============================================================================
"""

from tests.ptx_interpreter.interpreter import (
    PtxSchedule,
    RefusedError,
    allow,
    be_strict,
    failure,
    forget,
    forget_allowed,
    load,
    reached,
    run,
    trips,
    watching,
)

__all__ = [
    "PtxSchedule",
    "RefusedError",
    "allow",
    "be_strict",
    "failure",
    "forget",
    "forget_allowed",
    "load",
    "reached",
    "run",
    "trips",
    "watching",
]
