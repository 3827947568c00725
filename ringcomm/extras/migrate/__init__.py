"""Configurations of others, DeepSpeed's and FSDP2's, read as ringcomm's own."""
