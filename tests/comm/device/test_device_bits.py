# SPDX-License-Identifier: Apache-2.0
"""``one_shot`` and ``ll`` sum in rank order and round once: the bits equal those of the host."""

import pytest
import torch

import ringcomm
from ringcomm.algorithms import spelled
from tests.support.call_checks import EMULATED, ops_on_device
from tests.support.device_worlds import on_host, put, room
from tests.support.exact import op_of, same

WORLD = 4
# Elements per rank: small enough for LL, for one hop of a two-shot all-reduce, and for neither.
COUNTS = (37, 150, 3001)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def drawn(count, dtype, op):
    """Returns values whose sums are rounded even in FP32, so that the order of addition shows."""
    generator = torch.Generator().manual_seed(count)
    drawn = torch.randn(WORLD, count * WORLD, generator=generator, dtype=torch.float64)
    if op != "PRODUCT":
        # Two large values that cancel, but only after another value has been added to the first.
        drawn /= 16
        drawn[0] *= 2**17
        drawn[2] = -drawn[0]
    return list(drawn.to(dtype))


def _algorithms(count, dtype):
    return ("one_shot", "ll") if count * WORLD * dtype.itemsize <= 1024 else ("one_shot",)


@pytest.fixture(scope="module")
def host_world():
    with ringcomm.local_world(WORLD, timeout=60.0) as world:
        yield world


def reduced_on_host(host_world, given, op):
    def body(comm):
        tensor = given[comm.rank].clone()
        comm.all_reduce(tensor, op_of(op), algorithm="two_shot")
        return tensor

    results = host_world.run(body)
    assert all(same(result, results[0]) for result in results)
    return results[0]


# Sums do not depend on the operands' memory, so each dtype is tested with one kind of memory.
LYING = [*zip(FLOATS, ("plain", "heap", "unaligned", "heap"), strict=True)]


@pytest.mark.parametrize(("dtype", "memory"), LYING, ids=str)
def test_the_bits_of_the_host(devices, host_world, dtype, memory):
    """The test detects a wrong order: the same values summed in reverse order have other bits."""
    cases = []
    for count in COUNTS:
        for op in EMULATED[dtype] if devices.emulated else ops_on_device(dtype):
            given = drawn(count, dtype, op)
            cases.append((count, op, given, reduced_on_host(host_world, given, op)))
    given, want = cases[-1][2], reduced_on_host(host_world, cases[-1][2], "SUM")
    assert not same(reduced_on_host(host_world, given[::-1], "SUM"), want)

    def body(comm):
        for count, op, given, want in cases:
            for algorithm in _algorithms(count, dtype):
                what = f"{op}, {algorithm}, {count}"
                tensor = put(comm, given[comm.rank], memory)
                comm.all_reduce(tensor, op_of(op), algorithm=spelled(algorithm, "all_reduce"))
                assert same(on_host(tensor), want), what
                output = room(comm, count, dtype, memory)
                source = put(comm, given[comm.rank], memory)
                comm.reduce_scatter_tensor(output, source, op_of(op), algorithm=algorithm)
                assert same(on_host(output), want.chunk(WORLD)[comm.rank]), what
            comm.reduce(source, 1, op_of(op))
            if comm.rank == 1:
                assert same(on_host(source), want), what

    devices.run(devices.world(WORLD), body)


# Includes numbers of sources with a loop of their own, and numbers that are added in batches.
@pytest.mark.parametrize("world", [2, 3, 5, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sums_and_means_of_each_number_of_sources(devices, world, dtype):
    """Also means of the smallest numbers: half of an odd one must be rounded."""
    count = 4001
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    cases = []
    with ringcomm.local_world(world, timeout=60.0) as host_world:
        for op, scale in (("SUM", 1.0), ("AVG", 1.0), ("AVG", least)):
            generator = torch.Generator().manual_seed(world)
            drawn = torch.randn(world, count * world, generator=generator, dtype=torch.float64)
            # At the smallest scale a few units in the last place, otherwise values of all sizes.
            given = list((drawn.mul(9).round() * scale if scale == least else drawn).to(dtype))
            cases.append((op, given, reduced_on_host(host_world, given, op)))

    def body(comm):
        for op, given, want in cases:
            tensor = put(comm, given[comm.rank], "heap")
            comm.all_reduce(tensor, op_of(op), algorithm="two_shot")
            assert same(on_host(tensor), want), op
            output, source = room(comm, count, dtype, "plain"), put(comm, given[comm.rank], "heap")
            comm.reduce_scatter_tensor(output, source, op_of(op), algorithm="one_shot")
            assert same(on_host(output), want.chunk(world)[comm.rank]), op

    devices.run(devices.world(world), body)


@pytest.mark.parametrize(
    ("dtype", "least_nan"), [(torch.bfloat16, 0x7F81), (torch.float16, 0x7C01)], ids=str
)
def test_one_source_is_narrowed_as_it_was_widened(devices, dtype, least_nan):
    """All 2^16 values: NaNs become quiet, those of float16 lose their payload; others stay."""
    given = torch.arange(1 << 16, dtype=torch.int32)
    magnitude = given & 0x7FFF
    quiet = given | 0x40 if dtype == torch.bfloat16 else (given & 0x8000) | 0x7E00
    want = torch.where(magnitude >= least_nan, quiet, given).to(torch.int16)

    def body(comm):
        tensor = put(comm, given.to(torch.int16).view(dtype), "heap")
        output = room(comm, 1 << 16, dtype, "heap")
        comm.reduce_scatter_tensor(output, tensor, op_of("SUM"), algorithm="one_shot")
        assert torch.equal(on_host(output).view(torch.int16), want)

    devices.run(devices.world(1), body)


def test_a_ring_repeats_itself_to_the_bit(devices):
    given = drawn(3001, torch.bfloat16, "SUM")

    def body(comm):
        tensors = [put(comm, given[comm.rank], memory) for memory in ("plain", "heap", "plain")]
        for tensor in tensors:
            comm.all_reduce(tensor, algorithm="ring")
        return [on_host(tensor) for tensor in tensors]

    results = [tensor for each in devices.run(devices.world(WORLD), body) for tensor in each]
    assert all(same(each, results[0]) for each in results)
