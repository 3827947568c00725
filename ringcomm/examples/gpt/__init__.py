"""A byte-level GPT, its corpus and its training loop: what ringcomm train and demo run."""
