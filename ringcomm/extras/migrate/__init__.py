# SPDX-License-Identifier: Apache-2.0
"""Migration from DeepSpeed and FSDP2: ``settings.py`` for settings, ``convert.py`` for files."""
