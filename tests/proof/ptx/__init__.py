# SPDX-License-Identifier: Apache-2.0
"""The PTX of CUDA and Triton kernels, executed by an interpreter on an emulated device."""
