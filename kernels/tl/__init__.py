# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of ringcomm and the device functions that they call; read collectives.py first.

The import name is ``ringcomm._tl``; the public module is ``ringcomm.tl``. Both need Triton.

NOTE [the oldest Triton]: kernels use only what Triton 3.6 compiles, which is less than the tests'
Triton compiles. Triton 3.6 takes an attribute of a compile-time argument as an argument of a call
only if the attribute is a number or an element type; a kernel names an object or a string first:

    TILES: tl.constexpr = G.tiles_of_4
    status = all_gather_ring(ws, own, chunks, status, tl.int32, TILES)

Triton 3.6 also rejects ``:=``, ``*args`` and keyword-only arguments, and it ignores the ``if`` of a
list comprehension. tests/tl/test_oldest_triton.py searches the sources for these, and
``make oldest-triton`` compiles all kernels with Triton 3.6.
"""
