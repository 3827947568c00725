"""``python -m ringcomm.cli``."""

import sys

from ringcomm.cli import main

sys.exit(main())
