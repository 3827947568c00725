# SPDX-License-Identifier: Apache-2.0
"""Builds the sdist, and from it the wheels: manylinux_2_28, for x86-64 and AArch64.

Zig's clang compiles for both machines against glibc 2.28, and links its own libc++ statically, so
an installed wheel needs only glibc. CPython 3.10 and 3.11 have one wheel each, and later versions
share one wheel of the stable ABI. The wheels contain the kernels for GPUs as sources, which are
compiled at first use.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import sys
import tarfile
from pathlib import Path

from tools.commands import ROOT, make_environment, run
from tools.wheels.notices import BundledCode, add_notices

GLIBC = "2.28"
ARCHITECTURES = ("x86_64", "aarch64")


def build_sdist(out: Path) -> Path:
    """Builds the sdist from the source tree; returns its path."""
    for old in out.glob("ringcomm-*.tar.gz"):
        old.unlink()
    run(sys.executable, "-m", "build", "--sdist", "--outdir", out, ROOT)
    (sdist,) = out.glob("ringcomm-*.tar.gz")
    return sdist


def unpack_sdist(sdist: Path, folder: Path) -> Path:
    """Unpacks the sdist into an empty folder; returns the root of its tree."""
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


def write_compiler(folder: Path, architecture: str) -> Path:
    """Writes a compiler script that compiles for the machine and glibc of the wheels."""
    path = folder / f"c++-{architecture}"
    target = f"{architecture}-linux-gnu.{GLIBC}"
    # Zig accepts only underscores in names of x86-64 levels. Zig caches objects, so sources that do
    # not depend on the interpreter are compiled once for all interpreters; but it does not cache if
    # it must list headers (-MD), and a tree that is built once needs no list. nanobind's headers
    # use stderr, and with libc++ and the stable ABI only <cstdio> declares it.
    path.write_text(
        "#!/bin/sh\n"
        "option=\n"
        "for argument; do\n"
        "  shift\n"
        "  before=$option option=$argument\n"
        "  case $before in -MT | -MF) continue ;; esac\n"
        "  case $argument in\n"
        "    -MD | -MT | -MF) continue ;;\n"
        '    -march=x86-64-v*) argument="-march=x86_64_v${argument##*v}" ;;\n'
        "  esac\n"
        '  set -- "$@" "$argument"\n'
        "done\n"
        f'exec "{sys.executable}" -m ziglang c++ -target {target} -include cstdio "$@"\n'
    )
    path.chmod(0o755)
    return path


def make_builder(python: Path, folder: Path) -> Path:
    """Creates an environment with this interpreter and ringcomm's build tools.

    Its nanobind has the version of the running interpreter's nanobind, since the notices contain
    the licence and version of the latter. Returns the environment's interpreter.
    """
    shutil.rmtree(folder, ignore_errors=True)
    line = re.search(r"(?m)^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text())
    assert line is not None
    requirements = re.findall(r'"([^"]+)"', line[1])
    pins = [f"nanobind=={importlib.metadata.version('nanobind')}", "pip>=25"]
    return make_environment(python, folder, *requirements, *pins, "wheel")


def python_headers(include: Path, multiarch: str, work: Path) -> Path:
    """Returns a folder with CPython's headers that the compiler for both machines can read.

    Debian's pyconfig.h includes the pyconfig.h of the machine that is compiled for, below
    /usr/include, where zig does not look. The headers are the same on both machines, since both
    have 64 bits, so a copy gets this machine's pyconfig.h.
    """
    own = include.parent / multiarch / include.name / "pyconfig.h"
    if not own.exists():
        return include
    headers = work / "headers" / include.name
    shutil.rmtree(headers, ignore_errors=True)
    shutil.copytree(include, headers)
    shutil.copyfile(own, headers / "pyconfig.h")
    return headers


def build_wheel(source: Path, builder: Path, architecture: str, work: Path) -> Path:
    """Builds a wheel from an unpacked sdist, with its platform's tag, and without notices."""
    # Without this option libc++ would export operators new and delete to the whole process.
    # nanobind's exceptions are shared between modules.
    exports = work / "exports.map"
    exports.write_text("{ global: PyInit__native; *8nanobind*; local: *; };\n")
    told = "import sysconfig as s; print(s.get_path('include'), s.get_config_var('MULTIARCH'))"
    include, multiarch = run(builder, "-c", told).rsplit(maxsplit=1)
    options = [
        f"-DCMAKE_CXX_COMPILER={write_compiler(work, architecture)}",
        "-DRINGCOMM_CUDA=OFF",
        f"-DCMAKE_MODULE_LINKER_FLAGS=-Wl,--version-script={exports}",
        "-DCMAKE_SYSTEM_NAME=Linux",
        f"-DCMAKE_SYSTEM_PROCESSOR={architecture}",
        f"-DPython_INCLUDE_DIR={python_headers(Path(include), multiarch, work)}",
    ]
    out = work / "built"
    shutil.rmtree(out, ignore_errors=True)
    run(
        *(builder, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out),
        source,
        CMAKE_ARGS=" ".join(options),
        _PYTHON_HOST_PLATFORM=f"manylinux_{GLIBC.replace('.', '_')}_{architecture}",
    )
    (wheel,) = out.glob("*.whl")
    return wheel


def finish_wheel(wheel: Path, architecture: str, bundled: list[BundledCode], out: Path) -> Path:
    """Adds the notices, and renames the module for its machine; returns the wheel."""
    unpacked = wheel.parent / "unpacked"
    run(sys.executable, "-m", "wheel", "unpack", "--dest", unpacked, wheel)
    (tree,) = unpacked.iterdir()
    (info,) = tree.glob("*.dist-info")
    # The suffix names the building interpreter's machine. The stable ABI's suffix names no machine.
    for module in (tree / "ringcomm").glob("_native.cpython-*.so"):
        suffix = re.sub(r"-[a-z0-9_]+-linux-gnu\.so$", f"-{architecture}-linux-gnu.so", module.name)
        module.rename(module.with_name(suffix))
    add_notices(info, bundled)
    run(sys.executable, "-m", "wheel", "pack", "--dest-dir", out, tree)
    return out / wheel.name
