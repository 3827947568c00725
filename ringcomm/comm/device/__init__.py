"""Communicators whose tensors lie on GPUs."""
