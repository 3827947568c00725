"""The benchmark harness: ringcomm and other libraries, timed in turn in the same processes.

Installed as ``ringcomm._bench`` (``ringcomm bench`` starts it) and runnable in a source tree
as ``python -m bench.collectives``.
"""
