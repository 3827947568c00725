# SPDX-License-Identifier: Apache-2.0
"""Kernels come from the package's build, or from a compilation whose result is cached."""

import json
import os
import sys
import threading

import pytest

from ringcomm.cuda import build, units
from ringcomm.cuda.build import KernelBuilder, KernelCache, Nvrtc, Prebuilt
from ringcomm.cuda.units import UNITS, Target
from ringcomm.errors import ArgumentError, UnsupportedError
from tests.support import nvrtc as wheel
from tests.support.fake_compiler import FakeCompiler, builder_for, make_tree

pytestmark = pytest.mark.compiles

HOPPER = (9, 0)


@pytest.fixture
def tree(tmp_path):
    return make_tree(tmp_path / "tree")


@pytest.fixture
def compiler(tmp_path):
    return FakeCompiler(tmp_path / "log")


@pytest.fixture
def builder(tmp_path, tree, compiler):
    return builder_for(tree, compiler, tmp_path / "cache")


def prebuilt_for(tree, folder, targets=units.PREBUILT):
    """Creates the files that a build with nvcc would leave."""
    folder.mkdir()
    (folder / "units.json").write_text(units.manifest(tree, "nvcc 1.0", targets))
    for name in UNITS:
        (folder / f"{name}.fatbin").write_bytes(f"fatbin of {name}".encode())
    return Prebuilt.read(folder)


def no_compiler():
    raise UnsupportedError("there is no compiler")


def test_a_unit_is_compiled_once_and_then_kept(tmp_path, tree, compiler, builder):
    first = builder.load("reduce_float32", HOPPER)
    assert b"-arch=sm_90a\n" in first
    assert b"-DRINGCOMM_UNIT_TYPE=float\n" in first
    assert b"--fmad=false\n" in first
    assert builder.load("reduce_float32", HOPPER) == first
    later = builder_for(tree, compiler, tmp_path / "cache")
    assert later.load("reduce_float32", HOPPER) == first
    assert len(compiler.compilations()) == 1


def test_the_compiler_gets_the_headers_that_are_included(builder):
    made = builder.load("move", HOPPER).decode()
    assert "kernels/cuda/body.h=" in made
    assert "ringcomm/core/platform.h=// the platform" in made
    assert "unused.h" not in made
    assert "stdint.h=" not in made


def test_several_units_are_compiled_at_once(tmp_path, tree, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    barrier = threading.Barrier(2, timeout=30)

    class Slow(FakeCompiler):
        def compile(self, *arguments):
            barrier.wait()
            return super().compile(*arguments)

    builder = builder_for(tree, Slow(tmp_path / "log"), tmp_path / "cache")
    made = builder.load_all(["move", "reduce_int8"], HOPPER)
    assert list(made) == ["move", "reduce_int8"]
    assert b"-DRINGCOMM_UNIT_MOVE" in made["move"]
    assert b"-DRINGCOMM_UNIT_TYPE=int8_t" in made["reduce_int8"]
    with pytest.raises(ArgumentError, match="got 'reduce_qint8'"):
        builder.load_all(["move", "reduce_qint8"], HOPPER)


def change_text(name):
    def change(tree, compiler, patch):
        path = tree / name
        path.write_text(path.read_text() + "// changed\n")

    return change


def change_identity(tree, compiler, patch):
    compiler.identity = "fake 1.1"


def change_options(tree, compiler, patch):
    changed = (*units.NVRTC_OPTIONS, "-lineinfo")
    patch.setattr("ringcomm.cuda.build.NVRTC_OPTIONS", changed)


@pytest.mark.parametrize(
    ("change", "compiles"),
    [
        (change_text("kernels/cuda/kernels.cu"), True),
        (change_text("kernels/cuda/body.h"), True),
        (change_text("kernels/include/ringcomm/core/platform.h"), True),
        (change_text("kernels/include/ringcomm/unused.h"), False),
        (change_identity, True),
        (change_options, True),
    ],
    ids=["source", "header", "nested header", "unused header", "compiler", "options"],
)
def test_what_a_kept_unit_depends_on(tree, compiler, builder, monkeypatch, change, compiles):
    before = builder.load("move", HOPPER)
    change(tree, compiler, monkeypatch)
    after = builder.load("move", HOPPER)
    assert len(compiler.compilations()) == 1 + compiles
    assert (after != before) == compiles


def test_units_and_architectures_are_kept_apart(compiler, builder):
    majors = (8, 9, 10)
    wanted = [
        (name, (m, 0)) for name, unit in UNITS.items() for m in majors if (m, 0) >= unit.since
    ]
    made = {builder.load(*each) for each in wanted}
    assert len(made) == len(wanted) == len(compiler.compilations())
    assert {builder.load(*each) for each in wanted} == made
    assert len(compiler.compilations()) == len(wanted)


def test_an_error_of_the_compiler_is_not_kept(compiler, builder):
    compiler.error = UnsupportedError("it does not compile")
    with pytest.raises(UnsupportedError, match="does not compile"):
        builder.load("move", HOPPER)
    compiler.error = None
    assert b"-arch=sm_90a" in builder.load("move", HOPPER)


def test_an_unknown_architecture_gets_ptx_of_the_one_before(builder):
    assert b"-arch=compute_100\n" in builder.load("move", (12, 0))


def test_an_architecture_before_all_that_are_known_is_refused(builder):
    with pytest.raises(UnsupportedError, match=r"capability 7\.0, and fake 1\.0 compiles for 80"):
        builder.load("move", (7, 0))


def test_a_device_without_a_units_instructions_is_refused(builder):
    with pytest.raises(
        UnsupportedError, match=r"9\.0 or later for unit 'multicast_float32', got 8"
    ):
        builder.load("multicast_float32", (8, 0))


def test_an_unknown_unit_is_refused(builder):
    with pytest.raises(ArgumentError, match=r"expected a unit among move, .*got 'reduce_qint8'"):
        builder.load("reduce_qint8", HOPPER)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)])
def test_what_the_build_left_is_taken_first(tmp_path, tree, capability):
    prebuilt = prebuilt_for(tree, tmp_path / "_kernels")
    builder = KernelBuilder(tree, prebuilt, no_compiler, KernelCache(None))
    assert builder.load("move", capability) == b"fatbin of move"
    assert "compiled with the package by nvcc 1.0" in builder.describe(capability)


def test_what_the_build_left_is_not_taken_where_it_will_not_do(tmp_path, tree, compiler):
    folder = tmp_path / "_kernels"
    prebuilt = prebuilt_for(tree, folder, [Target(9, 0)])
    builder = KernelBuilder(tree, prebuilt, lambda: compiler, KernelCache(tmp_path / "cache"))
    assert builder.load("move", HOPPER).startswith(b"fatbin")
    # The build is not used for another GPU, when its binary is missing, or after sources changed.
    assert b"-arch=sm_100a" in builder.load("move", (10, 0))
    assert "for other GPUs or from other sources" in builder.describe((10, 0))
    (folder / "move.fatbin").unlink()
    assert b"-arch=sm_90a" in builder.load("move", HOPPER)
    (folder / "move.fatbin").write_bytes(b"fatbin of move")
    assert builder.load("move", HOPPER).startswith(b"fatbin")
    change_text("kernels/cuda/body.h")(tree, compiler, None)
    assert b"// changed" in builder.load("move", HOPPER)


def test_serial_loops_are_compiled_and_kept_apart(tmp_path, tree, compiler):
    prebuilt = prebuilt_for(tree, tmp_path / "_kernels")
    cache = KernelCache(tmp_path / "cache")
    loaded = {}
    for loops in (units.SERIAL, units.BATCHED):
        builder = KernelBuilder(tree, prebuilt, lambda: compiler, cache, loops)
        loaded[loops] = builder.load("move", HOPPER)
        assert (builder.prebuilt_by("move", HOPPER) is None) == (loops == units.SERIAL)
        assert ("RINGCOMM_KERNELS" in builder.describe(HOPPER)) == (loops == units.SERIAL)
    assert loaded[units.BATCHED] == b"fatbin of move"
    assert b"-DRINGCOMM_SERIAL_LOOPS=1" in loaded[units.SERIAL]
    both = [KernelBuilder(tree, None, lambda: compiler, cache, each) for each in loaded]
    assert len({builder.load("move", HOPPER) for builder in both}) == 2
    assert len(compiler.compilations()) == 2


def test_the_environment_chooses_the_loops(monkeypatch):
    monkeypatch.setenv("RINGCOMM_KERNELS", "serial")
    assert build._builder().loops == "serial"
    monkeypatch.setenv("RINGCOMM_KERNELS", "fast")
    with pytest.raises(ArgumentError, match="expected batched, sliced or serial, got 'fast'"):
        build.load_unit("move", HOPPER)
    with pytest.raises(ArgumentError, match="expected batched, sliced or serial, got 'fast'"):
        build.describe_source(HOPPER)


def test_a_build_without_nvcc_leaves_nothing(tmp_path):
    assert Prebuilt.read(tmp_path) is None


@pytest.mark.parametrize("damage", ["{", "[]", '{"targets": ["sm_9"]}', '{"targets": []}'])
def test_a_damaged_manifest_is_said(tmp_path, damage):
    (tmp_path / "units.json").write_text(damage)
    with pytest.raises(UnsupportedError, match=r"is damaged: .*Install ringcomm again"):
        Prebuilt.read(tmp_path)


def test_the_manifest_names_every_unit(tree):
    record = json.loads(units.manifest(tree, "nvcc 1.0", units.PREBUILT))
    assert record["targets"] == ["sm_80", "sm_90a", "sm_100a", "compute_100"]
    assert set(record["sources"]) == set(UNITS)
    assert len(set(record["sources"].values())) == len(UNITS)


def test_a_description_says_where_kernels_come_from(tmp_path, tree, compiler, builder):
    said = builder.describe(HOPPER)
    assert said == f"sm_90a, compiled by fake 1.0 at first use, kept in {tmp_path / 'cache'}"
    assert compiler.compilations() == []
    (tmp_path / "file").write_text("")
    unkept = builder_for(tree, compiler, tmp_path / "file" / "cache").describe(HOPPER)
    assert "at first use, not kept: " in unkept


@pytest.fixture
def nvrtc(monkeypatch):
    """The real compiler, found where CuPy would have installed it."""
    wheel.stand_in_for_cupy(monkeypatch)
    build._compiler.cache_clear()
    yield wheel
    build._compiler.cache_clear()


def test_without_cupy_the_remedy_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy_backends", None)
    with pytest.raises(
        UnsupportedError, match=r"needs CuPy.*pip install cupy-cuda13x nvidia-cuda-nvrtc"
    ):
        Nvrtc()


def test_without_nvrtc_the_remedy_is_said(nvrtc, monkeypatch):
    def missing():
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(nvrtc, "getVersion", missing)
    with pytest.raises(UnsupportedError, match=r"no NVRTC.*libnvrtc\.so\.13.*nvidia-cuda-nvrtc"):
        Nvrtc()


def test_nvrtc_compiles_the_sources_that_lie_here(tmp_path, nvrtc, monkeypatch):
    """Compiles the real sources with the real compiler, as a user's first call does."""
    monkeypatch.setenv("RINGCOMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "PREBUILT_FOLDER", tmp_path)
    said = build.describe_source(HOPPER)
    assert said.startswith("sm_90a, compiled by NVRTC ")
    assert said.endswith(f"kept in {tmp_path}")
    code = build.load_unit("multicast_float16", HOPPER)
    assert code.startswith(b"\x7fELF")
    (kept,) = [path for path in tmp_path.iterdir() if path.suffix != ".lock"]
    assert kept.read_bytes().endswith(code)
    assert build.load_unit("multicast_float16", HOPPER) == code


def test_the_compilers_words_are_shown(tmp_path, tree, nvrtc):
    (tree / "kernels/cuda/kernels.cu").write_text('#include "kernels/cuda/body.h"\n')
    (tree / "kernels/cuda/body.h").write_text("int x = no_such_name;\n")
    cache = KernelCache(tmp_path / "cache")
    builder = KernelBuilder(tree, None, Nvrtc, cache)
    with pytest.raises(UnsupportedError) as raised:
        builder.load("move", HOPPER)
    words = str(raised.value)
    assert "kernels.cu does not compile with -std=c++20" in words
    assert 'kernels/cuda/body.h(1): error: identifier "no_such_name" is undefined' in words
