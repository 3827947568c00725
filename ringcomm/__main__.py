# SPDX-License-Identifier: Apache-2.0
"""Runs the ``ringcomm`` command, which is also ``python -m ringcomm``."""

import sys


def main() -> int:
    """Runs the command, and returns its exit status; 130 if Ctrl-C ends it."""
    try:
        from ringcomm.cli import main as run

        return run()
    except KeyboardInterrupt:  # Ctrl-C may come during the import, too
        return 130


if __name__ == "__main__":
    sys.exit(main())
