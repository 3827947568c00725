"""The connections between the GPUs of a machine, and the choice of algorithm and rings."""
