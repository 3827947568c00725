"""Triton kernels of ringcomm, and the device functions that they are made of.

Reached as ``ringcomm._tl``; ``ringcomm.tl`` is its public face. Importing it needs Triton.

NOTE [the oldest Triton]: kernels are written in what Triton 3.6 compiles, which is less than what
the tests' Triton does. It takes an attribute of a compile-time argument as an argument of a call if
that is a number or a type of elements; what is an object or a string is named first:

    TILES: tl.constexpr = G.tiles_of_4
    status = all_gather_ring(ws, own, chunks, status, tl.int32, TILES)

Nor does it take ``:=``, ``*args`` and keyword-only arguments, and it ignores the ``if`` of a list
comprehension. tests/tl/test_oldest_triton.py reads the sources for these, and
``make oldest-triton`` compiles all kernels with it.
"""
