# SPDX-License-Identifier: Apache-2.0
"""Which units and targets exist, which target covers which GPU, and what a compilation reads."""

import pytest

from ringcomm import _native
from ringcomm.cuda import units
from ringcomm.cuda.units import PREBUILT, UNITS, Target, best_target, compiler_target
from ringcomm.errors import ArgumentError, UnsupportedError
from tests.support.fake_compiler import make_tree


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 5), None),
        ((8, 0), "sm_80"),
        ((8, 9), "sm_80"),  # machine code also runs on later minor versions
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "compute_100"),  # sm_100a code runs on compute capability 10.0 alone
        ((12, 1), "compute_100"),
    ],
)
def test_what_a_driver_would_load_of_the_package(capability, expected):
    target = best_target(PREBUILT, capability)
    assert (target and str(target)) == expected


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 0), None),
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "compute_86"),
        ((9, 0), "sm_90a"),
        ((10, 0), "compute_90"),
    ],
)
def test_what_a_compiler_makes_for_a_device(capability, expected):
    target = compiler_target((80, 86, 90), capability)
    assert (target and str(target)) == expected


@pytest.mark.parametrize("text", ["sm_80", "sm_90a", "sm_100a", "sm_103", "compute_121"])
def test_a_target_reads_what_it_writes(text):
    assert str(Target.parse(text)) == text


@pytest.mark.parametrize("text", ["sm_90", "compute_90a", "sm_9", "sm90", "", "sm_80 "])
def test_what_is_no_target_is_refused(text):
    with pytest.raises(ValueError, match="not a target"):
        Target.parse(text)


def test_there_is_a_unit_for_every_type_that_is_reduced_every_quantized_format_and_rows():
    floats = ["float32", "bfloat16", "float16", "float64"]
    dtypes = [*floats, "uint8", "int8", "int16", "int32", "int64", "bool"]
    optimizer = [f"adamw_{dtype}" for dtype in floats if dtype != "float64"]
    reductions = [f"reduce_{dtype}" for dtype in dtypes]
    multicast = [f"multicast_{dtype}" for dtype in ("float32", "bfloat16", "float16")]
    quantize = [f"quantize_{compression}" for compression in _native.QUANT_FORMATS]
    assert list(UNITS) == ["move", *reductions, *optimizer, *multicast, *quantize, "rows"]
    assert "rc_all_reduce_bxor" in UNITS["reduce_int32"].kernels
    assert "rc_all_reduce_bxor" not in UNITS["reduce_float32"].kernels


def test_the_build_reads_the_units_line_by_line(capsys):
    units.main(["units"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "move -DRINGCOMM_UNIT_MOVE"
    assert len(lines) == len(UNITS)
    units.main(["targets"])
    assert capsys.readouterr().out.split() == [str(target) for target in PREBUILT]
    units.main(["targets", "12.0", "8.9", "8.0", "7.5"])
    assert capsys.readouterr().out.split() == ["sm_80", "compute_100"]
    units.main(["targets", "7.5"])
    assert capsys.readouterr().out.split() == []
    with pytest.raises(SystemExit, match="expected options, targets, units or manifest"):
        units.main(["nonsense"])


def test_a_missing_header_is_said(tmp_path):
    tree = make_tree(tmp_path)
    (tree / "kernels/cuda/body.h").unlink()
    with pytest.raises(UnsupportedError, match=r"header 'kernels/cuda/body\.h' is missing"):
        units.read_source(tree, UNITS["move"])


def test_a_header_of_two_names_is_refused(tmp_path):
    """NVRTC identifies headers by name, so it would include this header twice."""
    tree = make_tree(tmp_path)
    (tree / "kernels/cuda/body.h").write_text(
        '#include "ringcomm/core/platform.h"\n#include "kernels/include/ringcomm/core/platform.h"\n'
    )
    with pytest.raises(UnsupportedError, match=r"as 'kernels/include/.* and as 'ringcomm/core/"):
        units.read_source(tree, UNITS["move"])


def test_fingerprints_keep_apart_what_runs_together():
    def of(**headers):
        return units.UnitSource(UNITS["move"], "text", headers).fingerprint()

    assert len({of(), of(a="bc"), of(ab="c"), of(a="b", c=""), of(a="b", d="")}) == 5


def test_the_loops_are_batched_unless_asked_for(monkeypatch):
    monkeypatch.delenv("RINGCOMM_KERNELS", raising=False)
    assert units.chosen_loops() == units.BATCHED
    monkeypatch.setenv("RINGCOMM_KERNELS", "")
    assert units.chosen_loops() == units.BATCHED
    assert units.deals_tiles()
    monkeypatch.setenv("RINGCOMM_KERNELS", "serial")
    assert units.chosen_loops() == units.SERIAL
    assert not units.deals_tiles()
    monkeypatch.setenv("RINGCOMM_KERNELS", "sliced")
    assert units.chosen_loops() == units.BATCHED
    assert not units.deals_tiles()


def test_unknown_loops_are_refused(monkeypatch):
    monkeypatch.setenv("RINGCOMM_KERNELS", "Serial")
    with pytest.raises(
        ArgumentError, match=r"RINGCOMM_KERNELS: expected batched, sliced or serial, got 'S"
    ):
        units.chosen_loops()


FLOATS = ("float32", "bfloat16", "float16")


def test_every_unit_has_serial_loops_of_its_own():
    for name in UNITS:
        batched, serial = units.unit(name), units.unit(name, units.SERIAL)
        assert batched == UNITS[name]
        assert serial.macros == (*batched.macros, "RINGCOMM_SERIAL_LOOPS=1")
        assert set(serial.kernels) == {units.kernel_name(k, units.SERIAL) for k in batched.kernels}
        assert [units.kernel_name(k, units.BATCHED) for k in batched.kernels] == [*batched.kernels]


def test_a_serial_kernel_takes_what_several_do():
    """Serial units have no kernels for rings or many ranks; their other kernels do this work."""
    names = {k: units.kernel_name(k, units.SERIAL) for k in UNITS["adamw_float32"].kernels}
    assert {k for k, serial in names.items() if serial != k} == {
        "rc_ring_norm",
        *(f"rc_adamw_{form}_{p}" for form in ("many", "ring") for p in FLOATS),
    }
    assert names["rc_adamw_ring_float16"] == "rc_adamw_step_float16"
    assert names["rc_ring_norm"] == "rc_reduce_scatter_norm"


def test_sources_lie_in_the_tree():
    root = units.source_root()
    assert (root / units.SOURCE).is_file()
    source = units.read_source(root, UNITS["move"])
    assert "ringcomm/core/platform.h" in source.headers
