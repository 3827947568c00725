# SPDX-License-Identifier: Apache-2.0
"""The benchmark harness: times ringcomm and other libraries in turn in the same processes.

``ringcomm bench`` starts ``python -m ringcomm.bench``. In the source tree ``ringcomm/bench`` is a
link to this folder; a wheel carries its files.
"""

import warnings

# Without NumPy torch warns in every process that imports it (pytorch issue 125678), and the harness
# needs no NumPy. Every program and rank of the harness imports this file before torch.
warnings.filterwarnings(
    "ignore", "Failed to initialize NumPy: No module named 'numpy'", UserWarning
)
