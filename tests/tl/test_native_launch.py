# SPDX-License-Identifier: Apache-2.0
"""The native module launches the same kernel that Triton would launch."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl

from ringcomm import _native
from ringcomm._tl import native_launch
from ringcomm._tl.geometry import Geometry
from ringcomm._tl.hooks import IS_INTERPRETED
from ringcomm._tl.launch import (
    OPTIONS,
    KernelPlan,
    RankPointers,
    arguments_of,
    launch_kernel,
    plan_all_gather,
    plan_all_reduce,
)
from ringcomm._tl.native_launch import RefusedError, native_kernel, native_or_warn, numbers_of
from tests.support.triton_device import StandIn, executed

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(IS_INTERPRETED, reason="TRITON_INTERPRET is set: nothing compiles"),
]

ONE_SHOT = _native.ALGORITHMS["one_shot"]
GEOMETRY = Geometry(1, 16, 4, 128 << 10, 1 << 20)
TIMEOUT_NS = 20_000_000_000
RANK = RankPointers(1 << 40, 1 << 41, 1 << 42)


@pytest.fixture(scope="module")
def gpu() -> Iterator[StandIn]:
    stand_in = StandIn(90)
    with executed(stand_in):
        yield stand_in


def all_reduce_of(size_bytes: int) -> KernelPlan:
    return plan_all_reduce(size_bytes, "float32", "SUM", ONE_SHOT, 1)


@pytest.fixture(scope="module")
def made(gpu: StandIn) -> Any:
    """A compiled kernel, as a launch by Triton returns it."""
    return launch_kernel(all_reduce_of(256), [RANK], TIMEOUT_NS, GEOMETRY)


def changed(made: Any, **changes: Any) -> Any:
    same = {name: getattr(made, name) for name in ("metadata", "src", "asm", "function")}
    return SimpleNamespace(**{**same, **changes})


NUMBERS = numbers_of(all_reduce_of(256), [RANK], TIMEOUT_NS)

# ---- each call gets the kernel that Triton has for it -------------------------------------------

# Near the limits of 32 bits, also for tagged numbers; 1, multiples of 16 and other numbers.
SIZES = (0, 1, 4, 16, 256, (1 << 29) - 64, (1 << 29) - 4, 1 << 29, (1 << 31) - 4, 1 << 31, 1 << 33)
TIMEOUTS_NS = (1, 16, 1_000_000, (1 << 31) - 1, 1 << 31, TIMEOUT_NS)
POINTERS = (
    RANK,
    replace(RANK, in_ptr=0),
    replace(RANK, in_ptr=(1 << 29) - 1),
    RankPointers(8, 4, 12),
)


def key_of(plan: KernelPlan, ranks: list[RankPointers], timeout_ns: int) -> str:
    """Returns the key under which Triton finds a compiled kernel."""
    *_, binder = plan.kernel.create_binder()
    _, specialization, _ = binder(
        *arguments_of(plan, ranks, timeout_ns), **plan.constants, G=GEOMETRY, **OPTIONS
    )
    return str(specialization)


def disagreements(kernel: _native.TritonKernel) -> int:
    """Counts the calls that Triton accepts and ``kernel`` does not, or the other way round."""
    mine = key_of(all_reduce_of(256), [RANK], TIMEOUT_NS)
    found = 0
    for size, timeout_ns, rank in itertools.product(SIZES, TIMEOUTS_NS, POINTERS):
        plan = all_reduce_of(size)
        same = key_of(plan, [rank], timeout_ns) == mine
        found += same != kernel.takes(numbers_of(plan, [rank], timeout_ns))
    return found


def test_a_kernel_takes_the_numbers_that_triton_would_give_it(made: Any) -> None:
    assert disagreements(native_kernel(made, NUMBERS)) == 0


@pytest.mark.parametrize("place", range(len(NUMBERS)))
def test_a_key_without_a_type_is_seen(gpu: StandIn, place: int) -> None:
    """The mutant: the key says the wrong type of one number."""
    parameters = [(number >= 1 << 31, True) for number in NUMBERS]
    parameters[place] = (not parameters[place][0], True)
    assert disagreements(_native.TritonKernel(1, 256, 0, parameters, 2)) > 0


@triton.jit(do_not_specialize=["single"])
def _specialized(numbers, single, out):
    """A kernel that Triton specializes by the numbers in its tuple."""
    tl.store(out + tl.full((), 0, tl.int64).to(tl.pointer_type(tl.int64)), numbers[0] + single)


VALUES = (
    0,
    1,
    2,
    3,
    15,
    16,
    17,
    32,
    48,
    (1 << 31) - 1,
    1 << 31,
    (1 << 31) + 1,
    -1,
    -16,
    -(1 << 31),
)


@pytest.mark.parametrize("inside", [True, False])
def test_values_in_tuples_count(gpu: StandIn, inside: bool) -> None:
    *_, binder = _specialized.create_binder()

    def key(value: int) -> str:
        return str(binder((value,) if inside else (7,), 7 if inside else value, 0)[1])

    kernel = _native.TritonKernel(1, 256, 0, [(False, inside)], 2)
    mutant = _native.TritonKernel(1, 256, 0, [(False, not inside)], 2)
    same = [key(value) == key(7) for value in VALUES]
    assert [kernel.takes([value]) for value in VALUES] == same
    assert [mutant.takes([value]) for value in VALUES] != same


def test_other_numbers_are_not_launched(made: Any) -> None:
    kernel = native_kernel(made, NUMBERS)
    for numbers in (NUMBERS[:-1], (*NUMBERS, 7), (*NUMBERS[:3], 1 << 33, *NUMBERS[4:])):
        assert not kernel.takes(numbers)


# ---- the module leaves unknown cases to Triton --------------------------------------------------


def test_the_kernel_is_loaded_and_has_the_parameters_of_its_ptx(made: Any) -> None:
    ptx = made.asm["ptx"]
    assert native_kernel(made, NUMBERS) is not None
    count = len(NUMBERS)
    assert f"all_reduce_kernel_param_{count + 1}" in ptx  # two for scratch memory
    assert f"all_reduce_kernel_param_{count + 2}" not in ptx


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("launch_pdl", True),
        ("launch_cooperative_grid", True),
        ("num_ctas", 2),
        ("global_scratch_size", 128),
        ("profile_scratch_size", 128),
        ("shared", 232 << 10),
    ],
)
def test_a_launch_with_more_than_blocks_is_refused(made: Any, field: str, value: Any) -> None:
    metadata = SimpleNamespace(**{**made.metadata._asdict(), field: value})
    with pytest.raises(RefusedError, match=field if field != "shared" else "shared memory"):
        native_kernel(changed(made, metadata=metadata), NUMBERS)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".param .u64 .ptr .global .align 1 all_reduce_kernel_param_11", ""),
        ("all_reduce_kernel_param_0,", "all_reduce_kernel_param_0, .param .u64 more,"),
        (".param .u32 all_reduce_kernel_param_3", ".param .u64 all_reduce_kernel_param_3"),
        (".param .u32 all_reduce_kernel_param_3", ".param .align 64 .b8 many[128]"),
        (".entry all_reduce_kernel", ".entry another"),
    ],
)
def test_other_parameters_are_refused(made: Any, old: str, new: str) -> None:
    ptx = made.asm["ptx"]
    assert old in ptx
    with pytest.raises(RefusedError, match=r"PTX|bytes"):
        native_kernel(changed(made, asm={"ptx": ptx.replace(old, new)}), NUMBERS)


def test_a_kernel_that_knows_more_of_its_numbers_is_refused(made: Any) -> None:
    src = made.src
    knows = SimpleNamespace(attrs={(0, 0): [["tt.divisibility", 16]]}, signature=src.signature)
    is_one = SimpleNamespace(
        attrs={}, signature={**src.signature, "tables": ("constexpr", *src.signature["tables"])}
    )
    is_float = SimpleNamespace(attrs={}, signature={**src.signature, "tables": ("fp32",)})
    for mutant in (knows, is_one, is_float):
        with pytest.raises(RefusedError):
            native_kernel(changed(made, src=mutant), NUMBERS)
    with pytest.raises(RefusedError, match="not compiled for the numbers"):
        native_kernel(made, (*NUMBERS[:3], 1 << 33, *NUMBERS[4:]))


def test_a_refusal_is_told_once(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_launch, "_warned", set())
    metadata = made.metadata._replace(launch_pdl=True)
    unknown = changed(made, metadata=metadata)
    with pytest.warns(RuntimeWarning, match=r"all_reduce_kernel to Triton .*launch_pdl"):
        assert native_or_warn(unknown, NUMBERS) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native_or_warn(unknown, NUMBERS) is None


def test_kernels_of_as_many_ranks_as_a_launch_carries_fit() -> None:
    ranks = [RANK] * _native.MAX_RANKS_PER_LAUNCH
    numbers = numbers_of(all_reduce_of(256), ranks, TIMEOUT_NS)
    parameters = [(True, True)] * len(numbers)
    assert _native.TritonKernel(1, 256, 0, parameters, 2) is not None
    with pytest.raises(ValueError, match="more parameters"):
        _native.TritonKernel(1, 256, 0, [(True, True)] * 39, 2)


def test_all_gathers_pass_one_size() -> None:
    plan = plan_all_gather(256, _native.DTYPES["int16"], 2, ONE_SHOT, 1)
    assert len(numbers_of(plan, [RANK], TIMEOUT_NS)) == len(NUMBERS) - 1
