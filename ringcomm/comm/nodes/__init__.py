"""Communicators that span nodes: ringcomm's kernels in each node, a transport between them."""
