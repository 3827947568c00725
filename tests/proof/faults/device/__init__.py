# SPDX-License-Identifier: Apache-2.0
"""Faults, streams, graphs and ends of communicators on devices."""
