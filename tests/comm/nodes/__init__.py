"""Tests of communicators over several nodes."""
