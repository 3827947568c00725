"""Migration from DeepSpeed and FSDP2: ``settings.py`` for settings, ``convert.py`` for files."""
