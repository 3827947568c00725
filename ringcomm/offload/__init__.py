"""Offload to disks: scratch files, memory whose content is in them, and stored activations."""
