# SPDX-License-Identifier: Apache-2.0
"""Hours of mixed collectives: checks every element, and the resources that the processes use."""
