# SPDX-License-Identifier: Apache-2.0
"""Paths that cannot be opened: every command that takes a path explains why, without traceback."""

import argparse
import contextlib
import ctypes
import importlib
import io
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ringcomm
from ringcomm import ArgumentError, CheckpointError, zero
from ringcomm.bench import collectives
from ringcomm.cli import COMMANDS, demo, main, module_of
from ringcomm.cli.output import write_file
from ringcomm.comm.recorder import reader
from ringcomm.zero.checkpoint import Checkpoints

PATH = "PATH"
TRAIN = ("train", "--data", "text", "--context", "8")
# Command lines by the argument for PATH: arguments that are read, then those that are written.
READING = {
    "train --data": ("train", "--data", PATH),
    "demo --data": ("demo", "--data", PATH),
    "topo --file": ("topo", "--file", PATH),
    "trace file": ("trace", PATH),
    "report run": ("report", PATH),
    "metrics file": ("metrics", PATH),
}
READING_FOLDERS = {
    "train --offload-state": (*TRAIN, "--offload-state", PATH),
    "train --offload-params": (*TRAIN, "--stage", "3", "--offload-params", PATH),
    "convert source": ("convert", PATH, "new"),
}
WRITING = {
    "train --json": (*TRAIN, "--json", PATH),
    "demo --json": ("demo", "--data", "text", "--json", PATH),
    "demo --tables": ("demo", "--data", "text", "--tables", PATH),
    "topo --save": ("topo", "--save", PATH),
    "trace --chrome": ("trace", "trace.json", "--chrome", PATH),
    "report --output": ("report", "trace.json", "--output", PATH),
}
WRITING_FOLDERS = {
    "train --save": (*TRAIN, "--save", PATH),
    "train --profile": (*TRAIN, "--profile", PATH),
    "convert target": ("convert", "foreign", PATH),
    "convert target of safetensors": ("convert", "run", PATH),
}
LINES = READING | READING_FOLDERS | WRITING | WRITING_FOLDERS
NO_PATHS = {"bench arguments", "report --title", "topo --placement"}
PATHS = {
    "ENAMETOOLONG": "x" * 300,
    "ENAMETOOLONG of the whole": "x/" * 3000 + "x",
    "ELOOP": "loop",
    "ELOOP above": "loop/x",
    "EISDIR": "folder",
    "ENOTDIR": "text/x",
    "EACCES": "shut",
    "EACCES above": "closed/x",
    "EACCES of a folder": "closed",
    "zero byte": "x\0",
    "surrogate": "\ud800",
}
# A checkpoint that cannot be read is an error of the file (1), not of usage (2).
UNREADABLE = {
    "convert source",
    "convert target",
    "convert target of safetensors",
}
NO_NAMES = {("convert target of safetensors", kind) for kind in ("zero byte", "surrogate")}
NO_NAMES |= {("convert source", "ENOTDIR")}
NO_TRACES = {
    (name, kind) for name in ("trace file", "metrics file") for kind in ("zero byte", "surrogate")
}
# Allowed: a folder to write in, or a readable folder without files of the kind.
FINE = {(name, "EISDIR") for name in ("train --offload-state", "train --offload-params")}
FINE |= {(name, "EISDIR") for name in ("train --save", "train --profile", "convert target")}
# If the disk tier cannot write in a folder, the ranks report it later.
FINE |= {(name, "EACCES of a folder") for name, _ in FINE if "--offload" in name}


class Started(Exception):
    """Raised when the command has checked its options and would start its ranks."""


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Rights(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


@contextlib.contextmanager
def no_rights_of_root():
    """Takes from this thread the capabilities that let root open any file."""
    calls, header, rights = ctypes.CDLL(None), _Header(0x20080522, 0), (_Rights * 2)()
    assert calls.capget(ctypes.byref(header), rights) == 0
    before, overrides = rights[0].effective, 0b110
    rights[0].effective = before & ~overrides
    assert calls.capset(ctypes.byref(header), rights) == 0
    try:
        yield
    finally:
        rights[0].effective = before
        assert calls.capset(ctypes.byref(header), rights) == 0


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A folder with the files that the command lines read and that PATHS names."""
    folder = tmp_path_factory.mktemp("places")
    (folder / "text").write_text("hello " * 1000)
    with ringcomm.local_world(1) as world:
        trace = reader.Trace(world[0].recording(), 0, 1.0, "")
    (folder / "trace.json").write_text(reader.text_of(trace))
    Checkpoints(folder / "run").save(1, {}, data={"tied": {}})
    dcp.save({"model": {"weight": torch.ones(2)}}, checkpoint_id=folder / "foreign", no_dist=True)
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "shut").touch(mode=0)
    (folder / "closed").mkdir(mode=0)
    yield folder
    (folder / "closed").chmod(0o700)


@pytest.fixture
def nothing_starts(monkeypatch, places):
    def start(*_, **__):
        raise Started

    monkeypatch.chdir(places)
    monkeypatch.setattr("ringcomm.cli.train.launch_ranks", start)
    monkeypatch.setattr(demo, "_run_all", start)
    with no_rights_of_root():
        yield


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("name", LINES)
def test_a_path_that_cannot_be_opened_is_named(name, kind, nothing_starts):
    path = PATHS[kind]
    words = [path if word == PATH else word for word in LINES[name]]
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            status = main(words)
        except Started:
            status = 0
    said = errors.getvalue()
    if (name, kind) in FINE:
        assert status == 0, said
        return
    is_of_file = name in UNREADABLE or (name, kind) in NO_TRACES
    assert status == (1 if is_of_file and (name, kind) not in NO_NAMES else 2)
    # A usage error has two lines about the usage before it.
    assert said.count("\n") == (3 if status == 2 else 1)
    assert said.splitlines()[-1].startswith(f"ringcomm {words[0]}: ")
    assert path in said


def test_every_argument_that_may_be_a_path_is_tried():
    found = set()
    for command in COMMANDS:
        parser = argparse.ArgumentParser(add_help=False)
        importlib.import_module(f"ringcomm.cli.{module_of(command)}").add_arguments(parser)
        for action in parser._actions:
            is_text = action.type in (None, str, Path) and action.nargs != 0
            if is_text and not action.choices:
                found.add(f"{command} {(action.option_strings or [action.dest])[-1]}")
    assert found == NO_PATHS | {" ".join(name.split()[:2]) for name in LINES}


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("option", ["--json", "--csv"])
def test_bench_refuses_a_file_that_cannot_be_written(option, kind, nothing_starts):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit, match="2"):
        collectives.parse(["all_reduce", option, PATHS[kind]])
    assert f"argument {option}: {PATHS[kind]}: cannot be written: " in said.getvalue()


@pytest.mark.parametrize("command", ["train", "demo"])
def test_data_of_a_user_that_there_is_not(command, nothing_starts, capsys):
    assert main([command, "--data", "~no-such-user/x"]) == 2
    assert "--data ~no-such-user/x: no such file or folder" in capsys.readouterr().err


# For a run, a file in place of its folder, or above it, means that no step is saved.
@pytest.mark.parametrize("kind", sorted(PATHS.keys() - {"EISDIR", "ENOTDIR", "EACCES"}))
def test_a_run_whose_folder_cannot_be_read_has_no_latest_step(kind, nothing_starts):
    with pytest.raises(CheckpointError, match="cannot be read: "):
        Checkpoints(PATHS[kind]).latest()
    with pytest.raises(CheckpointError, match=r"cannot be read: |expected a folder of DeepSpeed"):
        zero.convert(PATHS[kind], "new")


def test_a_file_that_cannot_be_written_at_the_end_is_told():
    with pytest.raises(ArgumentError, match=r"--json /dev/full: cannot be written: .*No space"):
        write_file("--json", "/dev/full", "text")
