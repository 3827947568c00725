"""Faults, streams, graphs and ends of communicators on devices."""
