"""Migration from DeepSpeed and FSDP2; ``settings.py`` translates settings, ``convert.py`` files."""
