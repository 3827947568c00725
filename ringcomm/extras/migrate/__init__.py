"""Migration from DeepSpeed and FSDP2: settings (``settings.py``), checkpoints (``convert.py``)."""
