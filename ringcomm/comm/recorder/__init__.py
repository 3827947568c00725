"""The flight recorder, which keeps the last calls of every rank of a communicator."""
