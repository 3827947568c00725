# SPDX-License-Identifier: Apache-2.0
"""Training programs that ringcomm's commands run; ``train_gpt.py`` is the trainer."""
