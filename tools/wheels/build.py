"""Builds the sdist, and from it the wheels that travel: manylinux_2_28, x86-64 and AArch64.

Zig's clang compiles for both machines against glibc 2.28, and links its own libc++ statically, so
nothing but glibc is needed where a wheel is installed. CPython 3.10 and 3.11 have a wheel each, and
later ones share one of the stable ABI. The kernels for GPUs travel as sources, which are compiled
at first use.
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
    """Unpacks the sdist anew; returns the root of its tree."""
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


def write_compiler(folder: Path, architecture: str) -> Path:
    """Writes a compiler's command that compiles for the machine and glibc of the wheels."""
    path = folder / f"c++-{architecture}"
    target = f"{architecture}-linux-gnu.{GLIBC}"
    # Zig spells the levels of x86-64 with underscores, and knows no other spelling. It keeps
    # objects, so that what no interpreter concerns is compiled once for all of them, but not where
    # it has to list headers, which a tree that is built once has no use for. Headers of nanobind
    # print to stderr, and with libc++ and the stable ABI no other header declares that.
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
    """An environment of this interpreter with what builds ringcomm; returns its interpreter.

    Its nanobind is that of the running interpreter, whose licence and version the notices have.
    """
    shutil.rmtree(folder, ignore_errors=True)
    line = re.search(r"(?m)^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text())
    assert line is not None
    requirements = re.findall(r'"([^"]+)"', line[1])
    pins = [f"nanobind=={importlib.metadata.version('nanobind')}", "pip>=25"]
    return make_environment(python, folder, *requirements, *pins, "wheel")


def build_wheel(source: Path, builder: Path, architecture: str, work: Path) -> Path:
    """Builds a wheel from an unpacked sdist, with the tag of its platform, and without notices."""
    # libc++ would export operators new and delete to whatever else is in the process. nanobind's
    # exceptions are shared between modules.
    exports = work / "exports.map"
    exports.write_text("{ global: PyInit__native; *8nanobind*; local: *; };\n")
    print_include = "import sysconfig; print(sysconfig.get_paths()['include'])"
    options = [
        f"-DCMAKE_CXX_COMPILER={write_compiler(work, architecture)}",
        "-DRINGCOMM_CUDA=OFF",
        f"-DCMAKE_MODULE_LINKER_FLAGS=-Wl,--version-script={exports}",
        "-DCMAKE_SYSTEM_NAME=Linux",
        f"-DCMAKE_SYSTEM_PROCESSOR={architecture}",
        # CPython's headers are the same on both machines, which are of 64 bits.
        f"-DPython_INCLUDE_DIR={run(builder, '-c', print_include).strip()}",
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
    """Adds the notices, and names the module after the machine it is for; returns the wheel."""
    unpacked = wheel.parent / "unpacked"
    run(sys.executable, "-m", "wheel", "unpack", "--dest", unpacked, wheel)
    (tree,) = unpacked.iterdir()
    (info,) = tree.glob("*.dist-info")
    # The suffix is of the interpreter that built it. That of the stable ABI names no machine.
    for module in (tree / "ringcomm").glob("_native.cpython-*.so"):
        suffix = re.sub(r"-[a-z0-9_]+-linux-gnu\.so$", f"-{architecture}-linux-gnu.so", module.name)
        module.rename(module.with_name(suffix))
    add_notices(info, bundled)
    run(sys.executable, "-m", "wheel", "pack", "--dest-dir", out, tree)
    return out / wheel.name
