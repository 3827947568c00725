# SPDX-License-Identifier: Apache-2.0
"""Each collective is exact for all dtypes, ops, worlds, sizes, memories, algorithms and roots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.call_checks import CHECKS, REDUCTIONS, Case
from tests.support.covering import covering
from tests.support.exact import MOVABLE, REDUCIBLE, WORLD_SIZES, ops_for, same
from tests.support.memories import MEMORIES

ALGORITHMS = ("one_shot", "ring")
WITH_RINGS = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")


def has_algorithm(case: Any) -> bool:
    return case.get("algorithm") != "ring" or case.get("name", WITH_RINGS[0]) in WITH_RINGS


@covering(valid=has_algorithm, name=[*CHECKS], algorithm=ALGORITHMS)
def test_every_dtype_and_op(worlds, name, algorithm):
    def body(comm):
        for dtype in REDUCIBLE if name in REDUCTIONS else MOVABLE:
            for op in ops_for(dtype) if name in REDUCTIONS else ("",):
                CHECKS[name](comm, Case(131, dtype, op, "mixed", algorithm, root=1))

    worlds(3).run(body)


@covering(
    valid=has_algorithm,
    name=[*CHECKS],
    world_size=WORLD_SIZES,
    algorithm=ALGORITHMS,
    memory=MEMORIES,
    in_place=[False, True],
)
def test_every_world_and_size(worlds, name, world_size, algorithm, memory, in_place):
    """Counts: 0; 1; less than the ranks; not divisible; exactly one segment; many segments."""
    counts = (0, 1, world_size - 1, world_size + 1, 63, 64, 64 * world_size, 3001)

    def body(comm):
        for number, count in enumerate(counts):
            root, is_async = number * 3 % world_size, number % 3 == 1
            case = Case(count, torch.float32, "SUM", memory, algorithm, in_place, root, is_async)
            CHECKS[name](comm, case)

    worlds(world_size).run(body)


@pytest.mark.parametrize("name", WITH_RINGS)
def test_large_with_default_segments(worlds, name):
    """Large enough for results to be stored by streaming stores."""

    def body(comm):
        for algorithm in ALGORITHMS:
            for memory in ("plain", "heap"):
                CHECKS[name](comm, Case(2_200_001, memory=memory, algorithm=algorithm))

    worlds(2, segment_bytes=0).run(body)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_summed_in_fp32_and_rounded_once(worlds, dtype):
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(777, generator=generator).to(dtype) for _ in range(4)]
    a, b, c, d = (each.float() for each in inputs)

    def body(comm):
        tensor = inputs[comm.rank].clone()
        comm.all_reduce(tensor, algorithm="two_shot")
        assert same(tensor, (((a + b) + c) + d).to(dtype))

    worlds(4).run(body)


def test_nan_and_infinity_survive(worlds):
    def body(comm):
        tensor = torch.zeros(4)
        if comm.rank == 1:
            tensor[:] = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0])
        total, largest = tensor.clone(), tensor.clone()
        comm.all_reduce(total)
        comm.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        for result in (total, largest):
            assert result[0].isnan()
            assert result[1] == float("inf")
        assert total[2] == float("-inf")

    worlds(3).run(body)


# ---- any call -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A collective and the world for it."""

    name: str
    world_size: int
    case: Case


@st.composite
def calls(draw) -> Call:
    name = draw(st.sampled_from(sorted(CHECKS)))
    dtype = draw(st.sampled_from(REDUCIBLE if name in REDUCTIONS else MOVABLE))
    world_size = draw(st.sampled_from((1, 2, 3, 4, 6)))
    sizes = st.one_of(st.integers(0, 9), st.integers(10, 300), st.integers(301, 3000))
    case = Case(
        draw(sizes),
        dtype,
        draw(st.sampled_from(ops_for(dtype))) if name in REDUCTIONS else "",
        draw(st.sampled_from(MEMORIES)),
        draw(st.sampled_from(("auto", *ALGORITHMS))),
        draw(st.booleans()),
        draw(st.integers(0, world_size - 1)),
        draw(st.booleans()),
    )
    return Call(name, world_size, case)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(call=calls())
def test_any_call_is_exact(worlds, call):
    worlds(call.world_size).run(CHECKS[call.name], call.case)
