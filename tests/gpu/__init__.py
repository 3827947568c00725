# SPDX-License-Identifier: Apache-2.0
"""Tests on a CUDA device (``make gpu-check``), or, where there is none, on an emulated device."""
