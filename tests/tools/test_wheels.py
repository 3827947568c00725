# SPDX-License-Identifier: Apache-2.0
"""The tools that make wheels: the input they refuse, and their output, on fictitious wheels."""

import json
import platform
import runpy
import sys
import zipfile
from pathlib import Path

import pytest

from ringcomm import _native
from tools.commands import run
from tools.wheels import build, check, checksums, notices, trial

PARTS = [
    notices.BundledCode("nanobind", "3.1.0", "BSD-3-Clause", "Copyright A", "https://a.example"),
    notices.BundledCode("robin-map", "1.3.0", "MIT", "Copyright B", "https://b.example"),
    notices.BundledCode(
        "libcxx", "22.1.8", notices.LLVM_LICENCE, "Copyright C", "https://c.example"
    ),
]
METADATA = "Metadata-Version: 2.4\nName: ringcomm\nVersion: 1.2.3\nLicense-Expression: Apache-2.0\n"


@pytest.fixture
def info(tmp_path):
    """A `.dist-info` folder as the build leaves it, with notices added."""
    folder = tmp_path / "ringcomm-1.2.3.dist-info"
    (folder / "licenses").mkdir(parents=True)
    (folder / "METADATA").write_text(METADATA + "License-File: LICENSE\n\nThe text.\n")
    notices.add_notices(folder, PARTS)
    return folder


def test_notices_name_every_part(info):
    head, _, body = (info / "METADATA").read_text().partition("\n\n")
    assert body == "The text.\n"
    lines = head.splitlines()
    licences = "Apache-2.0 AND BSD-3-Clause AND MIT AND Apache-2.0 WITH LLVM-exception"
    assert f"License-Expression: {licences}" in lines
    assert [line for line in lines if line.startswith("License-File")] == [
        "License-File: LICENSE",
        *(f"License-File: LICENSE.{part.name}" for part in PARTS),
    ]
    for part in PARTS:
        assert (info / "licenses" / f"LICENSE.{part.name}").read_text() == part.text
    bill = json.loads((info / "sboms" / "ringcomm.cdx.json").read_text())
    assert bill["metadata"]["component"]["purl"] == "pkg:pypi/ringcomm@1.2.3"
    named = [(part["name"], part["version"]) for part in bill["components"]]
    assert named == [(part.name, part.version) for part in PARTS]
    references = [part["bom-ref"] for part in bill["components"]]
    assert bill["dependencies"] == [{"ref": "pkg:pypi/ringcomm@1.2.3", "dependsOn": references}]


def test_notices_refuse_metadata_of_another_licence(tmp_path):
    (tmp_path / "METADATA").write_text("Version: 1\nLicense-Expression: MIT\n\n")
    with pytest.raises(SystemExit, match=r"License-Expression: Apache-2\.0"):
        notices.add_notices(tmp_path, PARTS)


def pack(tmp_path, info, **files):
    wheel = tmp_path / "ringcomm-1.2.3-cp312-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in info.rglob("*.*"):
            archive.write(path, path.relative_to(tmp_path))
        for name, content in {"ringcomm/_native.abi3.so": b"module", **files}.items():
            archive.writestr(name, content)
    return wheel


def test_a_wheel_with_its_notices_has_nothing_wrong(tmp_path, info):
    backend = {"ringcomm/_kernels/src/kernels/c10d/backend.cpp": b"compiled by a command"}
    assert check.check_archive(pack(tmp_path, info, **backend), [tmp_path]) == []


@pytest.mark.parametrize(
    ("files", "wrong"),
    [
        ({"ringcomm/_native.cpython-312-x86_64-linux-gnu.so": b""}, "2 native modules"),
        ({"ringcomm/tests/a.py": b""}, "holds ringcomm/tests/a.py"),
        ({"ringcomm/bench/results/a.json": b""}, "holds ringcomm/bench/results/a.json"),
        ({"ringcomm/a.cpp": b""}, "holds ringcomm/a.cpp"),
        ({"ringcomm/a.py": b"x = '/somewhere/built/here'"}, "ringcomm/a.py names /somewhere/built"),
        ({"ringcomm/a.bin": bytes(check.MOST_BYTES)}, "bytes, more than"),
    ],
)
def test_what_does_not_belong_into_a_wheel_is_named(tmp_path, info, files, wrong):
    found = check.check_archive(pack(tmp_path, info, **files), [Path("/somewhere/built")])
    assert len(found) == 1
    assert wrong in found[0]


def test_missing_notices_are_named(tmp_path, info):
    for path in [*info.glob("licenses/*"), *info.glob("sboms/*")]:
        path.unlink()
    found = check.check_archive(pack(tmp_path, info), [])
    missing = ["no licence of nanobind", "no licence of robin-map", "no licence of libcxx"]
    assert found == [*missing, "no SBOM"]


def test_every_python_gets_its_wheel(tmp_path):
    tags = ["cp310-cp310", "cp311-cp311", "cp312-abi3"]
    machines = ["x86_64", "aarch64"]
    wheels = [
        tmp_path / f"ringcomm-1-{tag}-manylinux_2_28_{machine}.whl"
        for tag in tags
        for machine in machines
    ]
    for machine in machines:
        for version, tag in zip(["3.10", "3.11", "3.12", "3.14"], [*tags, tags[-1]], strict=True):
            chosen = trial.choose_wheel(wheels, version, machine)
            assert chosen.name == f"ringcomm-1-{tag}-manylinux_2_28_{machine}.whl"
    with pytest.raises(SystemExit, match=r"no wheel for CPython 3\.9"):
        trial.choose_wheel(wheels, "3.9", "x86_64")


def test_interpreters_without_a_wheel_are_not_tried(tmp_path, monkeypatch, capsys):
    """`make wheels OPTIONS="--python 3.12"` also passes if an older interpreter is installed."""
    wheel = tmp_path / f"ringcomm-1-cp312-abi3-manylinux_2_28_{platform.machine()}.whl"
    monkeypatch.setattr(trial, "interpreter", Path)
    monkeypatch.setattr(trial, "try_bare", lambda python, wheel: "1 baseline\nab cd")
    trial.try_all([wheel], None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        f"CPython {version}: no wheel for it was built, not tried" for version in ("3.10", "3.11")
    ]
    assert len(lines) == 5 and all("1 baseline" in line for line in lines[2:])


def test_the_compiler_names_levels_as_zig_does(tmp_path):
    script = build.write_compiler(tmp_path, "aarch64").read_text()
    assert "-target aarch64-linux-gnu.2.28" in script
    # Replaces the compiler by echo, to see the arguments that the script passes on.
    echo = tmp_path / "echo"
    echo.write_text(script.replace(f'exec "{sys.executable}" -m ziglang', "exec echo"))
    handed_on = run("sh", echo, "-march=x86-64-v3", "-O3", "a b")
    assert handed_on.split()[-4:] == ["-march=x86_64_v3", "-O3", "a", "b"]
    # Zig caches an object only without dependency options.
    handed_on = run(
        "sh", echo, "-O3", "-MD", "-MT", "a.o", "-MF", "a.o.d", "-o", "a.o", "-c", "a.cpp"
    )
    assert handed_on.split()[-5:] == ["-O3", "-o", "a.o", "-c", "a.cpp"]


def test_what_a_bare_wheel_is_tried_with(capsys):
    """This build also uses all instruction sets of the processor, with equal bits."""
    try:
        runpy.run_path(str(trial.BARE_USE))
    finally:
        _native.force_isa("")
    version_and_sets, checksums = capsys.readouterr().out.splitlines()
    assert version_and_sets.split()[-1] == _native.isa()
    # Sums are rounded as IEEE 754 says, in rank order, so all machines give the same bits.
    assert checksums == "4894b102 6f091ce7 ae495748"


def test_the_sums_of_a_release_are_those_of_sha256sum(tmp_path):
    for name in ("ringcomm-1.tar.gz", "ringcomm-1-cp312-abi3-any.whl", "other.txt"):
        (tmp_path / name).write_text(name)
    written = checksums.write_checksums(tmp_path).name
    checked = run("sha256sum", "--check", "--strict", written, cwd=tmp_path)
    assert checked.split() == ["ringcomm-1-cp312-abi3-any.whl:", "OK", "ringcomm-1.tar.gz:", "OK"]
    (tmp_path / "ringcomm-1.tar.gz").write_text("changed")
    with pytest.raises(SystemExit, match="sha256sum"):
        run("sha256sum", "--check", "--strict", written, cwd=tmp_path)


def test_the_headers_of_debian_have_this_machine_s_settings(tmp_path):
    include = tmp_path / "include" / "python3.11"
    own = tmp_path / "include" / "x86_64-linux-gnu" / "python3.11"
    for folder, text in ((include, "#include <x86_64-linux-gnu/python3.11/pyconfig.h>"), (own, "")):
        folder.mkdir(parents=True)
        (folder / "pyconfig.h").write_text(text)
    (include / "Python.h").write_text("")
    assert build.python_headers(include, "None", tmp_path) == include
    assert build.python_headers(include, "aarch64-linux-gnu", tmp_path) == include
    headers = build.python_headers(include, "x86_64-linux-gnu", tmp_path / "work")
    assert (headers / "Python.h").exists()
    assert (headers / "pyconfig.h").read_text() == ""
