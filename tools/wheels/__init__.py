"""Builds, checks and tries the files of a release: the sdist and the wheels."""
