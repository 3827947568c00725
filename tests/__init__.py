# SPDX-License-Identifier: Apache-2.0
"""The tests, in folders that mirror the sources.

``proof`` has what proves the protocol apart from the Python package: models, races, litmus tests,
compiled kernels, fuzzing, faults and soaks, with the mutants that each must reject. ``gpu`` has the
tests that run on a GPU where there is one, and otherwise on an emulated device. ``support`` has
what tests of several folders use, the emulated device among it.
"""
