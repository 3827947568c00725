# SPDX-License-Identifier: Apache-2.0
"""Sizes, bandwidth factors and exact inputs; wrong results are recognised as wrong."""

from dataclasses import replace
from fractions import Fraction
from unittest.mock import MagicMock

import pytest
import torch

from ringcomm.bench.board import Board
from ringcomm.bench.cases import (
    COLLECTIVES,
    DTYPES,
    MOST_RANKS_CHECKED,
    OPS,
    POISON,
    Case,
    CaseBuffers,
    Prepared,
    count_wrong,
    expected_values,
    input_values,
    wrong_elements,
)
from ringcomm.bench.collectives.systems import Unavailable
from ringcomm.bench.collectives.torch_groups import prepare
from ringcomm.bench.timing import Device
from tests.support.covering import covering


def make_case(name, world=2, rank=0, **changes):
    facts = {
        "requested_bytes": 64 << 10,
        "dtype_name": "float",
        "op": "sum",
        "root": world - 1,
        "placement": "out",
        **changes,
    }
    return Case(collective=COLLECTIVES[name], world=world, rank=rank, **facts)


class OneRankBoard(Board):
    """Replaces the ranks' shared board in a world of one rank."""

    def __init__(self):
        pass

    def barrier(self, rest_s=0.0):
        pass

    def exchange(self, value):
        return [value]


@pytest.mark.parametrize(
    ("name", "at_2", "at_4", "at_8"),
    [
        ("all_reduce", "1", "3/2", "7/4"),
        ("reduce_scatter", "1/2", "3/4", "7/8"),
        ("all_gather", "1/2", "3/4", "7/8"),
        ("all_to_all", "1/2", "3/4", "7/8"),
        ("gather", "1/2", "3/4", "7/8"),
        ("scatter", "1/2", "3/4", "7/8"),
        ("broadcast", "1", "1", "1"),
        ("reduce", "1", "1", "1"),
        ("send_recv", "1", "1", "1"),
    ],
)
def test_bus_bandwidth_factors(name, at_2, at_4, at_8):
    factor = COLLECTIVES[name].busbw_factor
    assert [factor(2), factor(4), factor(8)] == [Fraction(at_2), Fraction(at_4), Fraction(at_8)]


def test_bandwidths_are_of_the_larger_buffer():
    case = make_case("reduce_scatter", requested_bytes=1 << 20)
    assert case.algbw_gbps(time_us=1000.0) == pytest.approx(1.048576)
    assert case.busbw_gbps(time_us=1000.0) == pytest.approx(0.524288)


@pytest.mark.parametrize(
    ("name", "count", "inputs", "outputs"),
    [
        ("reduce_scatter", 256, 1024, 256),
        ("all_gather", 256, 256, 1024),
        ("gather", 256, 256, 1024),
        ("scatter", 256, 1024, 256),
        ("all_to_all", 256, 1024, 1024),
        ("all_reduce", 1024, 1024, 1024),
        ("broadcast", 1024, 1024, 1024),
        ("reduce", 1024, 1024, 1024),
        ("send_recv", 1024, 1024, 1024),
    ],
)
def test_what_a_size_means(name, count, inputs, outputs):
    case = make_case(name, world=4, requested_bytes=4096)
    assert (case.size_bytes, case.count_elems) == (4096, count)
    assert (case.input_elems, case.output_elems) == (inputs, outputs)


def test_a_size_that_does_not_divide_is_rounded_down_to_whole_chunks():
    case = make_case("all_gather", world=3, requested_bytes=4096)
    assert case.size_bytes == 341 * 3 * 4
    assert make_case("all_reduce", world=3, requested_bytes=4096).size_bytes == 4096


def reference(name, case, inputs):
    """Computes every collective from all ranks' inputs, in 64 bits."""
    chunks = [tensor.chunk(case.world) for tensor in inputs]
    stacked = torch.stack(inputs).to(torch.float64)
    reduced = {
        "sum": lambda: stacked.sum(0),
        "prod": lambda: stacked.prod(0),
        "min": lambda: stacked.amin(0),
        "max": lambda: stacked.amax(0),
        "avg": lambda: stacked.mean(0),
    }[case.op]
    if name in ("all_reduce", "reduce"):
        return reduced().to(case.dtype)
    if name == "reduce_scatter":
        return reduced().chunk(case.world)[case.rank].to(case.dtype)
    if name in ("all_gather", "gather"):
        return torch.cat(inputs)
    if name == "broadcast":
        return inputs[case.root]
    if name == "scatter":
        return chunks[case.root][case.rank]
    if name == "all_to_all":
        return torch.cat([piece[case.rank] for piece in chunks])
    return inputs[(case.rank - 1) % case.world]


@covering(
    dtype_name=["float", "bfloat16", "int8", "uint8"],
    name=[*COLLECTIVES],
    world=[2, 3, MOST_RANKS_CHECKED],
)
def test_expected_values_are_those_of_a_spelled_out_collective(name, dtype_name, world):
    for rank in range(world):
        case = make_case(name, world=world, rank=rank, dtype_name=dtype_name)
        inputs = [input_values(case, source) for source in range(world)]
        assert torch.equal(expected_values(case), reference(name, case, inputs))


@pytest.mark.parametrize("reduces", [True, False])
def test_a_collective_that_a_table_lacks_is_told(reduces):
    case = make_case("all_to_all")
    case = replace(case, collective=replace(case.collective, name="scan", reduces=reduces))
    with pytest.raises(NotImplementedError, match=r"bench/cases\.py has no case for scan"):
        expected_values(case)
    with pytest.raises(Unavailable, match=r"scan is not implemented for torch\.distributed"):
        prepare(MagicMock(), case, lambda count, dtype: torch.zeros(count, dtype=dtype))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2, 5, 16])
def test_every_op_has_exact_expected_values(op, world):
    for dtype_name in ("bfloat16", "half", "float"):
        case = make_case("all_reduce", world=world, op=op, dtype_name=dtype_name)
        inputs = [input_values(case, source) for source in range(world)]
        assert torch.equal(expected_values(case), reference("all_reduce", case, inputs))
        assert len(torch.unique(expected_values(case))) > 1


@pytest.mark.parametrize("dtype_name", DTYPES)
def test_the_poison_is_no_right_answer(dtype_name):
    case = make_case("all_reduce", world=MOST_RANKS_CHECKED, dtype_name=dtype_name)
    assert int(expected_values(case).max()) < POISON
    assert torch.full((1,), POISON, dtype=case.dtype).item() == POISON


@pytest.mark.parametrize("name", COLLECTIVES)
def test_one_corrupted_element_is_counted(name):
    case = make_case(name, rank=1)
    output = expected_values(case).clone()
    assert count_wrong(case, [output]) == 0
    output[-1] += 1
    output[7] += 1
    assert count_wrong(case, [output]) == 2
    assert count_wrong(case, [output, expected_values(case), output]) == 4


def test_misplaced_segments_are_counted():
    case = make_case("all_gather", requested_bytes=1 << 20)
    right = expected_values(case)
    for shift in (1, 4096, 32768):
        assert count_wrong(case, [right.roll(shift)]) > right.numel() // 2


def test_ranks_hold_different_inputs():
    case = make_case("all_gather", world=4)
    own, other = input_values(case, 0), input_values(case, 1)
    assert torch.count_nonzero(own != other) > own.numel() // 2


def check(case, *calls_of):
    """Returns the wrong elements of sets of buffers; ``calls_of`` makes each set's call."""
    sets = []
    for make in calls_of:
        source = torch.zeros(case.input_elems, dtype=case.dtype)
        target = torch.zeros(case.output_elems, dtype=case.dtype)
        sets.append(Prepared((CaseBuffers(case, source, target),), make(source, target)))
    return wrong_elements(OneRankBoard(), Device(), {"x": sets})["x"]


def copying(damage):
    def make(source, target):
        def call():
            target.copy_(source)
            target[:damage] += 1

        return call

    return make


@pytest.mark.parametrize("damage", [0, 1, 5])
def test_the_correctness_pass_counts_what_a_call_got_wrong(damage):
    case = make_case("send_recv", world=1, root=0)
    assert check(case, copying(damage)) == damage
    assert check(case, copying(damage), copying(0), copying(2)) == damage + 2


def test_the_correctness_pass_counts_a_call_that_does_nothing():
    case = make_case("send_recv", world=1, root=0)
    assert check(case, copying(0)) == 0
    # The output already holds the right answer; a call that leaves it unchanged is still wrong.
    assert check(case, lambda source, target: lambda: None) == case.output_elems


def test_the_correctness_pass_looks_at_every_rank_of_a_process():
    cases = [make_case("all_gather", world=3, rank=rank) for rank in range(3)]
    buffers = tuple(
        CaseBuffers(case, torch.zeros(case.input_elems), torch.zeros(case.output_elems))
        for case in cases
    )

    def call():
        for each in buffers:
            each.output.copy_(torch.cat([other.input for other in buffers]))
        buffers[2].output[11] += 1

    sets = [Prepared(buffers, call)]
    assert wrong_elements(OneRankBoard(), Device(), {"x": sets}) == {"x": 1}


def test_a_system_without_buffers_is_not_called_right():
    sets = [Prepared((), lambda: None)]
    assert wrong_elements(OneRankBoard(), Device(), {"x": sets}) == {"x": None}
