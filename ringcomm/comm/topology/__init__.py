"""What connects the GPUs of a machine, and which rings and algorithms follow from that."""
