"""Programs that train with ringcomm, for its commands; ``train_gpt.py`` is the trainer."""
