# SPDX-License-Identifier: Apache-2.0
"""Runs the wheel for AArch64, and the programs of the tests, under qemu: ``make aarch64-check``."""
