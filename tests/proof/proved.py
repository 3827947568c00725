"""Proofs that need not be repeated, since nothing that they read has changed.

The proofs of compiled code, memory orders, models, PTX and races read the kernels, themselves and
the tools, and nothing else of the tree. ``make prove`` runs them and leaves a digest of all that in
``proved.txt``. Where the digest is still the same, ``make test`` skips them; whoever changes a
kernel, or has another compiler, runs them. Who names them on the command line always does.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.support import ROOT

FOLDERS = ("compile", "litmus", "model", "ptx", "races")
RECORD = Path(__file__).with_name("proved.txt")
# What the proofs read, by folder, and the files in it that count.
_READ = ("kernels", "tests/support", "ringcomm/cuda", *(f"tests/proof/{name}" for name in FOLDERS))
_FILES = ("CMakeLists.txt", "setup.py", "tests/proof/proved.py")
_KINDS = {".h", ".c", ".cpp", ".cu", ".py", ".txt", ".pml"}
_TOOLS = (("c++", "--version"), ("aarch64-linux-gnu-g++", "--version"), ("spin", "-V"))
_PACKAGES = ("triton", "nvidia-cuda-nvrtc", "cupy-cuda13x", "torch")


def _said(command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except OSError:
        return "none"
    return done.stdout.partition("\n")[0]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def digest(root: Path = ROOT) -> str:
    """Returns the SHA-256 of the sources that the proofs read, and of their tools' versions."""
    files = [root / name for name in _FILES]
    for folder in _READ:
        files += (path for path in (root / folder).rglob("*") if path.suffix in _KINDS)
    found = hashlib.sha256()
    for path in sorted(set(files)):
        if path.is_file() and "__pycache__" not in path.parts:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            found.update(f"{path.relative_to(root)} {content}\n".encode())
    for line in (*map(_said, _TOOLS), *map(_version, _PACKAGES), sys.version):
        found.update(f"{line}\n".encode())
    return found.hexdigest()


def is_proved(record: Path = RECORD, root: Path = ROOT) -> bool:
    """Tells whether the proofs have passed for these sources and tools."""
    return record.is_file() and record.read_text().strip() == digest(root)


def skip_what_is_proved(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the proofs of a run of all tests as skipped, if they have passed for what is here."""
    asked = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    if asked or os.environ.get("RINGCOMM_PROVE") == "all" or not is_proved():
        return
    folders = [RECORD.parent / name for name in FOLDERS]
    skip = pytest.mark.skip(reason="proved for these sources and tools; make prove repeats it")
    for item in items:
        if any(folder in item.path.parents for folder in folders):
            item.add_marker(skip)


def main() -> int:
    """Runs the proofs, and records that they have passed."""
    before = digest()
    names = [str(RECORD.parent.relative_to(ROOT) / name) for name in FOLDERS]
    workers = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
    command = [sys.executable, "-m", "pytest", *workers, *names, *sys.argv[1:]]
    failed = subprocess.run(command, cwd=ROOT, check=False).returncode
    if failed or digest() != before:
        return failed or 1
    RECORD.write_text(before + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
