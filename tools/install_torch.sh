#!/bin/sh
# SPDX-License-Identifier: Apache-2.0

# Installs the torch requirement $2 with the Python $1. On a machine without an NVIDIA driver it
# installs PyTorch's CPU build if its index can be reached, which avoids gigabytes of CUDA libraries.
set -eu
python=$1
requirement=$2
cpu_index=https://download.pytorch.org/whl/cpu

reachable='import sys, urllib.request
request = urllib.request.Request(sys.argv[1] + "/torch/", method="HEAD")
urllib.request.urlopen(request, timeout=5).close()'

if ! command -v nvidia-smi >/dev/null && "$python" -c "$reachable" "$cpu_index" 2>/dev/null; then
  exec "$python" -m pip install --no-compile --extra-index-url "$cpu_index" "$requirement"
fi
exec "$python" -m pip install --no-compile "$requirement"
