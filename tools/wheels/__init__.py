"""Builds, checks and tries what a release has: the sdist and the wheels."""
