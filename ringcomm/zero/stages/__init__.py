# SPDX-License-Identifier: Apache-2.0
"""ZeRO stages 0 to 3: parameters in buckets, which are unsharded and reduced unit by unit.

Read ``sharding.py`` first, then ``engine.py``, which connects hooks, reduction and unsharding.
"""
