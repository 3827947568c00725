# SPDX-License-Identifier: Apache-2.0
"""Checks a finished wheel without running it.

A wheel must run on each system that fits its tag, without anything else from the machine that built
it: the module links only glibc and exports no symbols of included libraries, no file contains a
path of the build, and no file belongs only to the source tree.
"""

from __future__ import annotations

import io
import re
import sys
import zipfile
from pathlib import Path

from tools.commands import run

# Wheels have no compiled GPU kernels, so a larger wheel contains files that do not belong there.
MOST_BYTES = 3_000_000
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
OF_GLIBC = re.compile(r"(lib(c|m|dl|pthread|rt)|ld-linux-(x86-64|aarch64))\.so\.\d")
# `ringcomm build-backend` compiles backend.cpp on the user's machine, against the installed torch.
NOT_WANTED = re.compile(
    r"(^|/)(tests|results|kernels/host|kernels/bindings)/"
    r"|(?<!/kernels/c10d/backend)\.cpp$|\.(csv|pyc|a|o)$"
)


def check_wheel(wheel: Path, build_paths: list[Path]) -> str:
    """Checks one wheel; returns a line that describes it.

    Raises:
        SystemExit: the wheel fails checks; the message lists all of them.
    """
    architecture = wheel.stem.rpartition("manylinux_2_28_")[2]
    wrong = check_archive(wheel, build_paths)
    with zipfile.ZipFile(wheel) as archive:
        (module,) = (name for name in archive.namelist() if name.endswith(".so"))
        data = archive.read(module)
    wrong += check_module(module, data, architecture)
    # auditwheel prints: ... is consistent with the following platform tag: "manylinux_2_27_x86_64".
    shown = run(sys.executable, "-m", "auditwheel", "show", wheel)
    tag = re.search(r'"manylinux_2_(\d+)_(\w+)"', shown)
    if tag is None or int(tag[1]) > 28 or tag[2] != architecture:
        wrong.append(f"auditwheel does not call it manylinux_2_28_{architecture}: {shown}")
    if wrong:
        raise SystemExit("\n".join(f"{wheel.name}: {each}" for each in wrong))
    assert tag is not None
    return f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, {tag[0]} by auditwheel"


def check_archive(wheel: Path, build_paths: list[Path]) -> list[str]:
    """Returns errors about the files of a wheel."""
    wrong = []
    if wheel.stat().st_size > MOST_BYTES:
        wrong.append(f"{wheel.stat().st_size} bytes, more than {MOST_BYTES}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        modules = [name for name in names if name.endswith(".so")]
        if len(modules) != 1:
            wrong.append(f"{len(modules)} native modules: {modules}")
        wrong += [f"holds {name}" for name in names if NOT_WANTED.search(name)]
        licences = [name for name in names if ".dist-info/licenses/" in name]
        for wanted in ("nanobind", "robin-map", "libcxx"):
            if not any(name.endswith(f"/LICENSE.{wanted}") for name in licences):
                wrong.append(f"no licence of {wanted}")
        if not any(re.search(r"\.dist-info/sboms/.*\.cdx\.json$", name) for name in names):
            wrong.append("no SBOM")
        for name in names:
            content = archive.read(name)
            wrong += [f"{name} names {path}" for path in build_paths if bytes(path) in content]
    return wrong


def check_module(name: str, data: bytes, architecture: str) -> list[str]:
    """Returns errors about the native module."""
    from elftools.elf.elffile import ELFFile  # a part of auditwheel, which tests do not need

    elf = ELFFile(io.BytesIO(data))
    wrong = []
    if elf["e_machine"] != MACHINES[architecture]:
        wrong.append(f"{name} is of {elf['e_machine']}, not {MACHINES[architecture]}")
    if "abi3" not in name and f"-{architecture}-" not in name:
        wrong.append(f"{name} is not named after {architecture}")
    kept = [part for part in (".symtab", ".debug_info") if elf.get_section_by_name(part)]
    wrong += [f"{name} is not stripped: it has {part}" for part in kept]
    dynamic = elf.get_section_by_name(".dynamic")
    for tag in dynamic.iter_tags():
        if tag.entry.d_tag == "DT_NEEDED" and not OF_GLIBC.fullmatch(tag.needed):
            wrong.append(f"{name} needs {tag.needed}")
        if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
            wrong.append(f"{name} has a search path")
    exported = {
        symbol.name
        for symbol in elf.get_section_by_name(".dynsym").iter_symbols()
        if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["bind"] != "STB_LOCAL"
    }
    # nanobind exports its exception classes, so that other modules built with nanobind share them.
    others = sorted(each for each in exported - {"PyInit__native"} if "8nanobind" not in each)
    if others or "PyInit__native" not in exported:
        wrong.append(f"{name} exports {others[:9]}, not only PyInit__native")
    return wrong
