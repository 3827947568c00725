"""The benchmark harness: ringcomm and other libraries, timed in turn in the same processes.

Installed as ``ringcomm._bench`` (``ringcomm bench`` starts it) and runnable in a source tree
as ``python -m bench.collectives``.
"""

import warnings

# torch says it in every process that imports it (pytorch issue 125678), and the harness needs no
# NumPy. Each of its programs, and each rank that they start, passes here before it imports torch.
warnings.filterwarnings(
    "ignore", "Failed to initialize NumPy: No module named 'numpy'", UserWarning
)
