# SPDX-License-Identifier: Apache-2.0
"""The flight recorder keeps the last calls of every rank; ``records.py`` defines its records."""
