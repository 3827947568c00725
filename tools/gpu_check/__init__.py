# SPDX-License-Identifier: Apache-2.0
"""``make gpu-check``: builds, tests, sanitizes, times and records on a machine with a GPU."""
