"""Tests that need a CUDA device; ``make gpu-check`` runs them."""
