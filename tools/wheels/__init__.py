# SPDX-License-Identifier: Apache-2.0
"""Builds, checks and tries the files of a release: the sdist and the wheels."""
