"""Puts this source tree on the path of the interpreter that runs it (a virtual environment's).

The editable install's finder comes after the folders of sys.path. In a folder that holds the clone
under its own name, "ringcomm", that folder would be found first and taken for a namespace package.
"""

import sysconfig
from pathlib import Path

SOURCE_TREE = Path(__file__).resolve().parents[1]
site_packages = Path(sysconfig.get_paths()["purelib"])
(site_packages / "ringcomm-source-tree.pth").write_text(f"{SOURCE_TREE}\n")
