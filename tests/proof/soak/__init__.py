# SPDX-License-Identifier: Apache-2.0
"""Hours of mixed collectives, every element checked, and what the processes use meanwhile."""
