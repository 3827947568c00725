"""Triton kernels of ringcomm, and the device functions that they are made of.

Reached as ``ringcomm._tl``; ``ringcomm.tl`` is its public face. Importing it needs Triton.
"""
