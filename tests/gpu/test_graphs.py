"""Captured once, replayed many times, with other inputs each time."""

import pytest
import torch

import ringcomm
from tests.gpu.device import DEVICE, PLAIN, REAL, capture, synchronize
from tests.gpu.worlds import ramp

# On an emulated device each takes milliseconds.
REPLAYS = 1000 if REAL else 12
CASES = [
    ("all_reduce", algorithm, count)
    for algorithm, count in (
        ("auto", 1 << 12),
        ("packet", 1 << 10),
        ("ring", 5000),
        ("direct", 5003),
    )
] + [
    (name, algorithm, 3001)
    for name in ("reduce_scatter", "all_gather")
    for algorithm in ("direct", "ring")
]


class Cell:
    """Static buffers of all ranks, the call on them, and what must come out."""

    def __init__(self, world, name, algorithm, count):
        self.world, self.name, self.algorithm, self.n = world, name, algorithm, len(world)
        whole = count * self.n
        sizes = {"reduce_scatter": (whole, count), "all_gather": (count, whole)}
        in_count, out_count = sizes.get(name, (count, count))
        self.inputs = [empty(in_count) for _ in range(self.n)]
        self.outputs = self.inputs
        if name != "all_reduce":
            self.outputs = [empty(out_count) for _ in range(self.n)]
        self.ramps = [ramp(in_count, rank) for rank in range(self.n)]

    def call(self):
        if self.name == "all_reduce":
            self.world.all_reduce(self.inputs, algorithm=self.algorithm)
        elif self.name == "reduce_scatter":
            self.world.reduce_scatter_tensor(self.outputs, self.inputs, algorithm=self.algorithm)
        else:
            self.world.all_gather_into_tensor(self.outputs, self.inputs, algorithm=self.algorithm)

    def fill(self, turn):
        """New inputs; the outputs are poisoned."""
        if self.name != "all_reduce":
            for output in self.outputs:
                output.fill_(99.0)
        given = [values + (turn % 11 - 5) for values in self.ramps]
        for tensor, values in zip(self.inputs, given, strict=True):
            tensor.copy_(values)
        return given

    def count_wrong(self, given):
        """On the device, without waiting for it."""
        if self.name == "all_gather":
            expected = [torch.cat(given)] * self.n
        else:
            total = torch.stack(given).sum(0)
            expected = [total] * self.n
            if self.name == "reduce_scatter":
                expected = list(total.chunk(self.n))
        pairs = zip(self.outputs, expected, strict=True)
        return torch.stack([(output != right).sum() for output, right in pairs]).sum()


def empty(count):
    return ringcomm.empty(count, dtype=torch.float32, device=DEVICE)


def recorded(cell):
    """Captures the cell's call, and returns the graph that replays it."""
    cell.fill(0)
    cell.call()  # what is made at a first call must not be made in a capture
    synchronize()
    with capture() as replay:
        cell.call()
    return replay


@pytest.mark.parametrize("n", [2, 4, 8] if REAL else [2])
@pytest.mark.parametrize(("name", "algorithm", "count"), CASES)
def test_many_replays(gpu_worlds, n, name, algorithm, count):
    cell = Cell(gpu_worlds(n), name, algorithm, count)
    replay = recorded(cell)
    wrong = torch.zeros((), dtype=torch.int64, device=PLAIN)
    for turn in range(REPLAYS):
        given = cell.fill(turn)
        replay()
        wrong += cell.count_wrong(given)
    assert wrong.item() == 0


def test_replays_and_plain_calls_alternate(gpu_worlds):
    cell = Cell(gpu_worlds(4), "all_reduce", "auto", 2000)
    replay = recorded(cell)
    wrong = torch.zeros((), dtype=torch.int64, device=PLAIN)
    for turn in range(min(REPLAYS, 100)):
        given = cell.fill(turn)
        cell.call() if turn % 3 == 0 else replay()
        wrong += cell.count_wrong(given)
    assert wrong.item() == 0


def test_a_chain_of_collectives_in_one_graph(gpu_worlds):
    world = gpu_worlds(4)
    scatter, gather = (
        Cell(world, "reduce_scatter", "auto", 1000),
        Cell(world, "all_gather", "auto", 1000),
    )
    gather.inputs = scatter.outputs
    for cell in (scatter, gather):
        cell.call()
    synchronize()
    with capture() as replay:
        scatter.call()
        gather.call()
    wrong = torch.zeros((), dtype=torch.int64, device=PLAIN)
    for turn in range(min(REPLAYS, 100)):
        total = torch.stack(scatter.fill(turn)).sum(0)
        replay()
        wrong += torch.stack([(output != total).sum() for output in gather.outputs]).sum()
    assert wrong.item() == 0
