# SPDX-License-Identifier: Apache-2.0
"""Communicators: their ranks, argument checks, order of calls, and results.

Read ``communicator`` first: a communicator is composed of an engine, messages and step calls.
``host`` implements them for one node, ``device`` for GPUs, ``nodes`` over several nodes.
``functions`` and ``objects`` offer them under the names of ``torch.distributed``, ``local_world``
to ranks that are threads. ``recorder`` reads the last calls of all ranks and writes trace files.
"""
