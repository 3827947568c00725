# SPDX-License-Identifier: Apache-2.0
"""Runs the ``ringcomm`` command for ``python -m ringcomm``."""

import sys

from ringcomm.cli import main

sys.exit(main())
