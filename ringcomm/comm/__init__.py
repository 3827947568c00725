"""Communicators: their ranks, argument checks, order of calls, and results.

Read ``communicator`` first: a communicator is composed of an engine, messages and step calls.
``host`` has them for one node, ``device`` for GPUs, ``nodes`` over several nodes. ``functions`` and
``objects`` have the names and semantics of ``torch.distributed``. ``local_world`` makes ranks of
threads. ``recorder`` reads the last calls of all ranks and writes them to a trace file at a fault.
"""
