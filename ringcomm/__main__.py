"""``python -m ringcomm``."""

import sys

from ringcomm.cli import main

sys.exit(main())
