"""The benchmark harness: ringcomm and other libraries, timed in turn in the same processes.

``ringcomm bench`` starts ``python -m ringcomm.bench``. In the source tree ``ringcomm/bench`` is a
link to this folder; a wheel carries its files.
"""

import warnings

# torch says it in every process that imports it (pytorch issue 125678), and the harness needs no
# NumPy. Each of its programs, and each rank that they start, passes here before it imports torch.
warnings.filterwarnings(
    "ignore", "Failed to initialize NumPy: No module named 'numpy'", UserWarning
)
