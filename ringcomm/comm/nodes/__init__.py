"""Communicators over several nodes: ringcomm's kernels in each node, a transport between nodes.

Start with ``core.py`` (the algorithms on the host), then ``calls.py`` (order and headers of calls).
"""
