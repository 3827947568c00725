# SPDX-License-Identifier: Apache-2.0
"""The check under qemu: the packages' source, missing programs, and the tests that it runs."""

from __future__ import annotations

import ast
import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT, compiler
from tests.support.compiler import NEEDS_COMPILER
from tools.aarch64 import __main__ as aarch64
from tools.aarch64 import debian_root
from tools.wheels import __main__ as make_wheels
from tools.wheels import trial


@pytest.mark.parametrize("test", aarch64.TESTS)
def test_each_named_test_exists(test):
    path, _, name = test.partition("::")
    nodes = ast.parse((ROOT / path).read_text()).body
    assert name in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_missing_programs_are_named_by_their_packages(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="apt-get install qemu-user-static g\\+\\+-aarch64"):
        aarch64.require_programs()


def test_the_source_of_the_packages_is_this_release():
    listed = "http://a/security/|book-security|main\nhttp://a/debian/|book|contrib\n"
    listed += "http://b/debian/|book|main\n"
    assert debian_root.mirror_in(listed, "book") == "http://b/debian/"
    with pytest.raises(SystemExit, match="no source of next/main"):
        debian_root.mirror_in(listed, "next")
    release = 'NAME="Debian GNU/Linux"\nID=debian\nVERSION_CODENAME=book\n'
    assert debian_root.system_of(release) == ("debian", "book")


def test_the_settings_stay_in_their_folder(tmp_path):
    folder = tmp_path / "apt"
    settings = debian_root.write_settings(folder, "Types: deb\n").read_text()
    paths = [line.split('"')[1] for line in settings.splitlines() if line.startswith("Dir::")]
    assert [path for path in paths if not Path(path).is_relative_to(folder)] == ["/dev/null"]
    assert 'APT::Architectures { "arm64"; };' in settings


def test_an_unpacked_root_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(debian_root, "run", None)
    (tmp_path / ".unpacked").write_text(" ".join(debian_root.PACKAGES))
    assert debian_root.make_root(tmp_path) == tmp_path


def test_only_missing_wheels_are_built(tmp_path, monkeypatch):
    calls = []

    def build_all(folder, versions, machines):
        calls.append((versions, machines))
        for machine in machines:
            (folder / f"ringcomm-1-cp311-cp311-manylinux_2_28_{machine}.whl").touch()

    monkeypatch.setattr(make_wheels, "build_all", build_all)
    build_all(tmp_path, ["3.11"], ["x86_64"])
    for _ in range(2):
        assert set(aarch64.wheels_for("3.11", tmp_path)) == {"x86_64", "aarch64"}
    assert calls[1:] == [(["3.11"], ["aarch64"])]


def test_wheels_with_different_bits_are_refused(tmp_path, monkeypatch):
    wheels = {each: tmp_path / f"{each}.whl" for each in ("x86_64", "aarch64")}
    monkeypatch.setattr(trial, "python_of", lambda root: Path("python3.11"))
    monkeypatch.setattr(aarch64, "interpreter", Path)
    monkeypatch.setattr(aarch64, "wheels_for", lambda version, folder: wheels)
    monkeypatch.setattr(trial, "try_bare", lambda python, wheel: "1.0 avx2\nab cd")
    foreign = {"text": "1.0 baseline\nab cd"}
    monkeypatch.setattr(trial, "try_foreign", lambda wheels, root: (wheels[0], foreign["text"]))
    aarch64.check_wheels(tmp_path, tmp_path)
    foreign["text"] = "1.0 baseline\nab ce"
    with pytest.raises(SystemExit, match="different bits"):
        aarch64.check_wheels(tmp_path, tmp_path)


@NEEDS_COMPILER
def test_programs_run_under_the_emulator(tmp_path, monkeypatch):
    """Programs start through the emulator, with their arguments, and without sanitizers."""
    emulator = tmp_path / "qemu-mine-static"
    emulator.write_text(f'#!/bin/sh\ntouch "{tmp_path}/emulated"\nexec "$@"\n')
    emulator.chmod(0o755)
    (tmp_path / "mine-linux-gnu-g++").symlink_to(shutil.which(str(compiler.COMPILER)))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("RINGCOMM_TEST_MACHINE", "mine")
    module = runpy.run_path(compiler.__file__)
    source = tmp_path / "three.cpp"
    source.write_text("int main(int argc, char**) { return argc == 2 ? 3 : 1; }")
    program = module["compile_to"](tmp_path / "three", tmp_path, source)
    assert subprocess.run([str(program), "a b"], check=False).returncode == 3
    assert (tmp_path / "emulated").exists()
    for flags in (module["THREAD_SANITIZER"], module["ADDRESS_SANITIZER"]):
        assert not any(flag.startswith("-fsanitize") for flag in flags)
