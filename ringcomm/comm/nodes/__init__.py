"""Communicators that span nodes: ringcomm's kernels in each node, a carrier between them."""
