# SPDX-License-Identifier: Apache-2.0
"""The tests, in folders that mirror the folders of the sources.

``proof`` proves the protocol without the Python package: models, races, litmus tests, compiled
kernels, fuzzing, faults and soaks, each with the mutants that it must reject. The tests of ``gpu``
run on a GPU if the machine has one, otherwise on an emulated device. ``support`` has the helpers of
several folders, the emulated device among them.
"""
