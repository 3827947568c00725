"""``make gpu-check``: builds, tests, sanitizes, times and records on a machine with a GPU.

``python -m tools.gpu_check`` runs it with the interpreter's own packages; nothing is fetched.
"""
