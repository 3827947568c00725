"""Communicators: their ranks, argument checks, order of calls, and results.

``engine`` runs calls in order on one core. ``collectives`` and ``messages`` check arguments
(``arguments``) and make the calls. ``communicator`` joins them and builds the communicator
(``rendezvous``). ``groups``, ``functions`` and ``objects`` have the names and semantics of
``torch.distributed``. ``local_world`` makes ranks of threads. ``device`` holds the communicators of
GPUs, ``topology`` the choice of their algorithm and rings. ``recorder`` reads the last calls of all
ranks and writes them to a trace file at a fault.
"""
