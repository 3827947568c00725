"""Communicators whose tensors are on GPUs; read rendezvous.py first, then launch.py."""
