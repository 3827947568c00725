"""The flight recorder: what the ranks of a communicator did last."""
