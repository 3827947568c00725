"""What holds for every test."""

import os

from hypothesis import settings

# Worlds are larger than the machine: one compute thread per rank, in spawned ranks too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Faults that tests provoke leave no traces; the tests of traces choose a folder of their own.
os.environ["RINGCOMM_TRACE_DIR"] = "off"

# No test asserts a time, and a failure in CI must be the same failure elsewhere.
settings.register_profile("ringcomm", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ringcomm")
