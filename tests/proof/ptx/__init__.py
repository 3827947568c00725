# SPDX-License-Identifier: Apache-2.0
"""The CUDA and Triton kernels' PTX, executed instruction by instruction on an emulated device."""
