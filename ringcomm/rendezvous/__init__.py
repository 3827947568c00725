# SPDX-License-Identifier: Apache-2.0
"""How the ranks of one machine find each other: environment variables, stores, heap handles."""
