# SPDX-License-Identifier: Apache-2.0
"""Tests on a CUDA device, which ``make gpu-check`` runs, or without one on an emulated device."""
