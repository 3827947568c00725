# SPDX-License-Identifier: Apache-2.0
"""Communicators over several nodes: ringcomm's kernels in each node, a transport between nodes.

Read ``core.py`` first (the algorithms on the host), then ``calls.py`` (order and headers of calls).
"""
