# SPDX-License-Identifier: Apache-2.0
"""Scratch files: a rank's unnamed file on a disk, and memory chunks whose content the file has."""
