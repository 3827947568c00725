# SPDX-License-Identifier: Apache-2.0
"""Communicators whose tensors are on GPUs; read rendezvous.py first, then launch.py."""
