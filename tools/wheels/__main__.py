# SPDX-License-Identifier: Apache-2.0
"""Builds, checks and tries the sdist and the wheels of a release: ``make wheels``.

``python -m tools.wheels --help`` lists the options.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tools import matrix
from tools.commands import ROOT, interpreter
from tools.wheels import build, check, checksums, notices, trial

# Versions that build wheels; the wheels are also tried with later versions that are installed.
BUILT_WITH = ("3.10", "3.11", "3.12")


def build_all(out: Path, versions: Sequence[str], architectures: Sequence[str]) -> list[Path]:
    """Builds and checks all wheels, and writes the sums of the files; returns the wheels."""
    pythons = {version: interpreter(version) for version in versions}
    missing = [version for version, python in pythons.items() if python is None]
    if missing:
        raise SystemExit(f"wheels: no Python {', '.join(missing)}; --python selects the versions")
    sdist = build.build_sdist(out)
    print(f"{sdist.name}: {sdist.stat().st_size / 1e6:.2f} MB", flush=True)
    bundled = notices.linked_in()
    wheels = []
    # All versions build in one tree at one place, since zig's cache depends on the paths of
    # sources.
    work = ROOT / "build" / "wheels"
    sources = {each: build.unpack_sdist(sdist, work / each) for each in architectures}
    for version, python in pythons.items():
        assert python is not None
        builder = build.make_builder(python, work / f"builder-{version}")
        for architecture, source in sources.items():
            built = build.build_wheel(source, builder, architecture, work)
            wheel = build.finish_wheel(built, architecture, bundled, out)
            paths = [work, ROOT, Path(sys.prefix), python.parent.parent]
            print(check.check_wheel(wheel, paths), flush=True)
            wheels.append(wheel)
    print(f"{checksums.write_checksums(out).name}: SHA-256 of the files in {out}", flush=True)
    return wheels


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if the wheel that was tried with torch failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.wheels", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add("--arch", nargs="+", choices=build.ARCHITECTURES, default=build.ARCHITECTURES)
    add("--python", nargs="+", default=BUILT_WITH, metavar="X.Y", help="default: %(default)s")
    add("-o", "--output", type=Path, default=ROOT / "dist", help="default: %(default)s")
    add("--torch", metavar="X.Y", help="tries one wheel with this Python and torch, as make matrix")
    add("--try-only", action="store_true", help="builds nothing")
    told = "the root of a Linux for AArch64 with Python, to run those wheels under qemu"
    add("--foreign-root", type=Path, metavar="FOLDER", help=told)
    args = parser.parse_args(argv)
    begin = time.monotonic()
    args.output.mkdir(parents=True, exist_ok=True)
    if args.try_only:
        wheels = sorted(args.output.glob("ringcomm-*.whl"))
    else:
        wheels = build_all(args.output, args.python, args.arch)
    trial.try_all(wheels, args.foreign_root)
    print(f"{time.monotonic() - begin:.0f} s", flush=True)
    if args.torch is None:
        return 0
    case = str(matrix.Case(args.torch))
    return matrix.main(["--wheels", str(args.output), "--only", case])


if __name__ == "__main__":
    sys.exit(main())
