"""Builds the sdist and the wheels of a release, checks them, and tries them: ``make wheels``.

``python -m tools.wheels --help`` has its options. ``--try-only`` tries the wheels that are there.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tools.matrix import PYTHONS, interpreter
from tools.wheels import build, check, notices, trial

# Wheels are built with these, and tried with the later ones that there are, too.
BUILT_WITH = ("3.10", "3.11", "3.12")


def build_all(out: Path, versions: Sequence[str], architectures: Sequence[str]) -> list[Path]:
    """Builds and checks; returns the wheels."""
    missing = [version for version in versions if interpreter(version) is None]
    if missing:
        raise SystemExit(
            f"wheels: no Python {', '.join(missing)}; --python says which to build for"
        )
    sdist = build.build_sdist(out)
    print(f"{sdist.name}: {sdist.stat().st_size / 1e6:.2f} MB", flush=True)
    parts = notices.linked_in()
    wheels = []
    # One tree for all versions, at one place: zig keeps objects by the paths of their sources.
    work = build.ROOT / "build" / "wheels"
    sources = {each: build.unpack_sdist(sdist, work / each) for each in architectures}
    for version in versions:
        python = interpreter(version)
        assert python is not None
        builder = build.make_builder(python, work / f"builder-{version}")
        for architecture, source in sources.items():
            built = build.build_wheel(source, builder, architecture, work)
            wheel = build.finish_wheel(built, architecture, parts, out)
            paths = [work, build.ROOT, Path(sys.prefix), python.parent.parent]
            print(check.check_wheel(wheel, paths), flush=True)
            wheels.append(wheel)
    return wheels


def try_all(wheels: list[Path], foreign_root: Path | None) -> None:
    """Tries what can run here, and prints what each said.

    Raises:
        SystemExit: one failed, or not all have the same bits.
    """
    found = {}
    here = [wheel for wheel in wheels if wheel.stem.endswith(platform.machine())]
    for version in PYTHONS:
        python = interpreter(version)
        if python is None:
            print(f"CPython {version}: not here, not tried")
            continue
        wheel = trial.choose_wheel(here, version, platform.machine())
        said = trial.try_bare(python, wheel).splitlines()
        print(f"CPython {version}, {wheel.name}: {said[0]}", flush=True)
        found[version] = said[-1]
    foreign = [wheel for wheel in wheels if wheel not in here]
    if foreign and foreign_root is not None:
        python = trial.foreign_python(foreign_root)
        version = python.name.removeprefix("python")
        wheel = trial.choose_wheel(foreign, version, trial.architecture_of(foreign[0]))
        said = trial.try_foreign(wheel, foreign_root).splitlines()
        print(f"CPython {version} under qemu, {wheel.name}: {said[0]}", flush=True)
        found[f"{version} under qemu"] = said[-1]
        foreign.remove(wheel)
    for wheel in foreign:
        print(f"{wheel.name}: another machine's, or interpreter's: checked, not run")
    if len(set(found.values())) > 1:
        raise SystemExit(f"wheels: they do not add to the same bits: {found}")


def try_torch(wheels: list[Path], version: str) -> list[str]:
    """Tries the wheel for CPython ``version`` with torch; returns what was said."""
    python = interpreter(version)
    if python is None:
        raise SystemExit(f"wheels: no Python {version} to try a wheel with")
    wheel = trial.choose_wheel(wheels, version, platform.machine())
    with tempfile.TemporaryDirectory(prefix="ringcomm-trial-") as folder:
        said = trial.try_with_torch(python, wheel, Path(folder))
    return [f"{wheel.name} with torch:", *said]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.wheels", description=__doc__)
    add = parser.add_argument
    add("--arch", nargs="+", choices=build.ARCHITECTURES, default=build.ARCHITECTURES)
    add("--python", nargs="+", default=BUILT_WITH, metavar="X.Y", help="default: %(default)s")
    add("-o", "--output", type=Path, default=build.ROOT / "dist", help="default: %(default)s")
    add(
        "--torch",
        metavar="X.Y",
        help="tries one wheel with this Python and torch, too: ringcomm doctor, demo, exact tests",
    )
    add("--try-only", action="store_true", help="builds nothing")
    add(
        "--foreign-root",
        type=Path,
        metavar="FOLDER",
        help="the root of a Linux for AArch64 with Python, to run those wheels under qemu",
    )
    args = parser.parse_args(argv)
    begin = time.monotonic()
    args.output.mkdir(parents=True, exist_ok=True)
    if args.try_only:
        wheels = sorted(args.output.glob("ringcomm-*.whl"))
    else:
        wheels = build_all(args.output, args.python, args.arch)
    try_all(wheels, args.foreign_root)
    if args.torch:
        print(*try_torch(wheels, args.torch), sep="\n")
    print(f"{time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
