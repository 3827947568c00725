# SPDX-License-Identifier: Apache-2.0
"""Licences (PEP 639) and SBOM (PEP 770) of the third-party code in a wheel.

The SBOM is CycloneDX 1.6. It describes the Zig and nanobind of the running interpreter, which the
build also uses; their versions are read from their sources.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

OWN_LICENCE = "Apache-2.0"
LLVM_LICENCE = "Apache-2.0 WITH LLVM-exception"


@dataclass(frozen=True)
class BundledCode:
    """A third-party library whose code is in the native module."""

    name: str
    version: str
    licence: str  # an SPDX expression
    text: str
    home: str


def linked_in() -> list[BundledCode]:
    """Returns all libraries that are compiled or linked into the native module besides ringcomm."""
    zig = Path(str(resources.files("ziglang")))
    nanobind = importlib.metadata.distribution("nanobind")
    (licence,) = (path for path in nanobind.files or [] if path.name == "LICENSE")
    tsl = Path(str(resources.files("nanobind"))) / "ext" / "robin_map" / "include" / "tsl"
    policy = (tsl / "robin_growth_policy.h").read_text()
    robin = ".".join(
        found(rf"TSL_RH_VERSION_{part} (\d+)", policy) for part in ("MAJOR", "MINOR", "PATCH")
    )
    llvm = found(r"_LIBCPP_VERSION (\d+)", (zig / "lib/libcxx/include/__config").read_text())
    llvm = f"{int(llvm[:2])}.{int(llvm[2:4])}.{int(llvm[4:])}"
    notice = policy.split("*/")[0].removeprefix("/**")
    of_nanobind = ("nanobind", nanobind.version, "BSD-3-Clause", licence.read_text("utf-8"))
    of_llvm = [
        (name, llvm, LLVM_LICENCE, (zig / "lib" / name / "LICENSE.TXT").read_text())
        for name in ("libcxx", "libcxxabi", "libunwind")
    ]
    zig_version = importlib.metadata.version("ziglang")
    of_zig = ("zig-compiler-rt", zig_version, "MIT", (zig / "LICENSE").read_text())
    return [
        BundledCode(*of_nanobind, "https://github.com/wjakob/nanobind"),
        BundledCode("robin-map", robin, "MIT", notice, "https://github.com/Tessil/robin-map"),
        *(BundledCode(*part, "https://github.com/llvm/llvm-project") for part in of_llvm),
        BundledCode(*of_zig, "https://ziglang.org"),
    ]


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise SystemExit(f"wheels: no {pattern} in the sources that are linked in")
    return match[1]


def software_bill(version: str, bundled: list[BundledCode]) -> dict[str, object]:
    """Returns the SBOM of one wheel."""

    def component(ref: str, name: str, version: str, licence: str, **more: object) -> object:
        known = {"type": "library", "bom-ref": ref, "name": name, "version": version}
        return {**known, "licenses": [{"expression": licence}], **more}

    own, refs = f"pkg:pypi/ringcomm@{version}", [f"{part.name}@{part.version}" for part in bundled]
    homes = [[{"type": "website", "url": part.home}] for part in bundled]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component(own, "ringcomm", version, OWN_LICENCE, purl=own)},
        "components": [
            component(ref, part.name, part.version, part.licence, externalReferences=home)
            for ref, part, home in zip(refs, bundled, homes, strict=True)
        ],
        "dependencies": [{"ref": own, "dependsOn": refs}],
    }


def add_notices(info: Path, bundled: list[BundledCode]) -> None:
    """Writes licences and SBOM into a ``.dist-info``, and names the licences in its metadata."""
    metadata = info / "METADATA"
    head, blank, body = metadata.read_text().partition("\n\n")
    expressions = dict.fromkeys([OWN_LICENCE, *(part.licence for part in bundled)])
    own_line = f"License-Expression: {OWN_LICENCE}"
    if own_line not in head.splitlines():
        raise SystemExit(f"wheels: {metadata.name} has no line {own_line}")
    lines = head.replace(own_line, f"License-Expression: {' AND '.join(expressions)}")
    for part in bundled:
        name = f"LICENSE.{part.name}"
        (info / "licenses" / name).write_text(part.text)
        lines += f"\nLicense-File: {name}"
    metadata.write_text(lines + blank + body)
    (info / "sboms").mkdir()
    bill = software_bill(found(r"(?m)^Version: (.*)$", head), bundled)
    (info / "sboms" / "ringcomm.cdx.json").write_text(json.dumps(bill, indent=1) + "\n")
