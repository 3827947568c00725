"""Communicators: who takes part, argument checks, ordering of calls, and results.

``engine`` runs calls in order on one native communicator, with ``call_queue`` in front of it;
``reductions``, ``gathers``, ``exchanges``, ``coalesced`` and ``messages`` check arguments and make
the calls; ``communicator`` joins them and knows how to find the peers (``environment``,
``node_store``). ``groups``, ``functions``, ``objects`` and ``peer_to_peer`` give the same the names
and semantics of ``torch.distributed``; ``local_world`` makes ranks of threads.
``flight_recorder`` reads what all ranks did last (``recording``) and leaves it in a file at a fault
(``trace_file``).
"""
