# SPDX-License-Identifier: Apache-2.0
"""Training gives bitwise equal parameters at any stage, world, offload and schedule.

The cases are a covering array: each pair of values of two axes occurs in one case, except for the
pairs that the library refuses (``REFUSALS``). Each case trains a model with the loop of
``models.train`` and compares parameters, buffers and gradient norms with a reference. The reference
differs in every setting that must not change bits: it has stage 0, one node, no offload, updates in
the step and no overlap. Quantized gradients and parameters have different bits on several nodes, so
their reference has stage 1 and the same nodes. Their values are checked against independent
arithmetic in ``test_quantized_params.py`` and ``test_error_feedback.py``, and training is compared
with torch's in ``test_stages.py``.

============ ===================================================================================
axis         what a passing case shows
============ ===================================================================================
stage        all stages reduce, update and gather the same numbers in the same order
model        tied weights, convolutions with buffers, frozen and unused parameters, layers in
             another order at each step and weights used by another module lose no gradient
optimizer    a rule distributed over ranks, by element, block or owner, equals the whole rule
precision    masters, remainders, stochastic rounding and gradients rounded to 16 bits round at the
             same places at all stages; modules that stay FP32 have neither masters nor rounding
nodes        sums over nodes equal those of one node that adds in groups of a node's ranks, whether
             a node has one rank, several, or another number than the next node
sharing      copies of state or parameters on each node end equal, and no norm counts a copy twice
offload      a disk returns the state or the parameters that it was given
update       updates in backward use the gradients, steps and rates of updates in the step;
             clipping uses the norm over all ranks
compression  quantized gradients are the same values at all stages, error feedback belongs to
             elements, not to ranks of a stage, and all nodes dequantize the same parameters
accumulation several backwards add up in the gradient's dtype or in FP32, each element once
schedule     buffers that are reduced, unsharded ahead or kept are neither read early nor late
============ ===================================================================================

``MUTANTS`` has a mistake for each axis that the mistake's case must catch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm import CommOptions, Communicator, Disk, LocalWorld, zero
from ringcomm.comm.host.arguments import OP_CODES
from ringcomm.comm.nodes import compressed_sums
from ringcomm.comm.nodes import core as sums
from ringcomm.errors import ArgumentError, UnsupportedError
from ringcomm.offload.scratch import DiskChunks
from ringcomm.optim import SGD, Adafactor, AdamW, AdamW8bit, AdamWOptions, Muon, state_offload
from ringcomm.optim.backends import Backend, OwnPlan, StepTable
from ringcomm.optim.clipping import NormBound
from ringcomm.optim.gradients import Accumulator, HostReducer
from ringcomm.zero.stages.buckets import ShardedBucket, WorldBucket
from ringcomm.zero.stages.unshard import HostCopier
from ringcomm.zero.stages.updates import BackwardUpdates
from tests.memory.disk_folder import skip_unless_disk
from tests.support.covering import Case, covering_array
from tests.zero.job import BF16
from tests.zero.models import MODELS, Run, State, assert_same_bits, new_model, train, train_world
from tests.zero.test_error_feedback import MUTANTS as FEEDBACK_MUTANTS

pytestmark = pytest.mark.long

Tensor = torch.Tensor
Ended = tuple[State, list[float]]
#: Values by axis; each value of one axis goes with any value of another.
Where = dict[str, tuple[Any, ...]]

# ---- the axes -----------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (AdamW, {}),
    "AdamW8bit": (AdamW8bit, {}),
    "SGD": (SGD, {"momentum": 0.9, "nesterov": True}),
    "Muon": (Muon, {}),
    "Adafactor": (Adafactor, {}),
    "torch.NAdam": (torch.optim.NAdam, {}),
}
PRECISIONS = {
    "fp32": zero.Precision(),
    "masters": BF16,
    "rounded": replace(BF16, reduce=torch.bfloat16, output=torch.float32),
    "remainders": replace(BF16, master="remainder"),
    "stochastic": replace(BF16, master="none", rounding="stochastic"),
    "kept": BF16,
    "kept stochastic": replace(BF16, master="none", rounding="stochastic"),
}
# By model, the modules that stay FP32 with "kept": in the root, whole units, parts of units.
KEPT_FP32 = {
    "mlp": ("head",),
    "conv": ("normal",),
    "partial": ("lora_a", "frozen", "head"),
    "wandering": ("layers.1",),
    "reaching": ("blocks",),
}
NODES = {"1": [1], "2": [2], "3": [3], "2+2": [2, 2], "1+1+1": [1, 1, 1], "2+1": [2, 1]}
SHARINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "state by node": {"state": "node"},
    "params by world": {"params": "world"},
}
COMPRESSIONS = {
    "plain": zero.Compression(),
    "gradients": zero.Compression(gradients="int8"),
    "fed back": zero.Compression(gradients="int4", error_feedback=True),
    "parameters": zero.Compression(parameters="int8"),
    "both": zero.Compression(gradients="int8", parameters="fp8"),
}
BACKWARDS = {"once": 1, "under no_sync": 2, "in fp32": 3, "added": 2}
SCHEDULES: dict[str, dict[str, Any]] = {
    "inline": {"overlap": False},
    "overlap": {"overlap": True},
    "one buffer": {"overlap": True, "in_flight": 1, "prefetch": 0},
    "ahead": {"overlap": True, "in_flight": 4, "prefetch": 3},
    "kept unsharded": {"overlap": True, "reshard_after_forward": False},
}
# The order of axes decides the array that is found: this order has few cases on several nodes.
AXES: dict[str, tuple[Any, ...]] = {
    "optimizer": tuple(OPTIMIZERS),
    "model": tuple(name for name in MODELS if "gpt" not in name),
    "schedule": tuple(SCHEDULES),
    "compression": tuple(COMPRESSIONS),
    "accumulation": tuple(BACKWARDS),
    "update": ("in step", "clipped", "in backward"),
    "nodes": tuple(NODES),
    "stage": (0, 1, 2, 3),
    "sharing": tuple(SHARINGS),
    "offload": ("none", "state", "parameters"),
    "precision": tuple(PRECISIONS),
}
USUAL: Case = {name: values[0] for name, values in AXES.items()}
SEVERAL = ("2+2", "1+1+1", "2+1")


NO_MASTERS = ("remainders", "stochastic", "kept stochastic")


@dataclass(frozen=True)
class Refusal:
    """A combination of values that the library refuses, and the error that it raises.

    Attributes:
        where: values by axis. Each value is refused together with each value of the other axes.
        error: class of the error.
        text: pattern of the error's message.
    """

    where: Where
    error: type[Exception]
    text: str


REFUSALS = [
    Refusal(
        {"stage": (0, 1, 2), "offload": ("parameters",)},
        ArgumentError,
        "offload_params: expected stage 3, got",
    ),
    Refusal(
        {"offload": ("parameters",), "nodes": ("2+2", "1+1+1"), "sharing": ("default",)},
        ArgumentError,
        'offload_params: expected also params="world" over several nodes',
    ),
    Refusal(
        {"offload": ("parameters",), "sharing": ("state by node",)},
        ArgumentError,
        'offload_params: expected also params="world" over several nodes',
    ),
    Refusal(
        {"stage": (0, 1), "update": ("in backward",)},
        ArgumentError,
        'update: expected "in_step" at stage',
    ),
    Refusal(
        {"offload": ("parameters",), "update": ("in backward",)},
        UnsupportedError,
        r'update: expected "in_step" with ZeroOptions\(offload_params=\)',
    ),
    Refusal(
        {"update": ("in backward",), "accumulation": ("added",)},
        ArgumentError,
        r"a backward has updated.* Call optimizer\.step\(\)",
    ),
    Refusal(
        {"stage": (0,), "compression": ("parameters", "both")},
        ArgumentError,
        "expected stage 1, 2 or 3, got 0",
    ),
    Refusal(
        {"sharing": ("state by node",), "compression": ("parameters", "both")},
        ArgumentError,
        'expected state="world", got "node"',
    ),
    Refusal(
        {"precision": NO_MASTERS, "compression": ("parameters", "both")},
        ArgumentError,
        'expected master="fp32" and rounding="nearest", since FP32',
    ),
    Refusal(
        {"offload": ("parameters",), "compression": ("parameters", "both")},
        UnsupportedError,
        "offload_params: expected None with compression: parameters",
    ),
    Refusal(
        {"offload": ("state",), "compression": ("parameters", "both")},
        UnsupportedError,
        "offload_state: expected None with",
    ),
    Refusal(
        {"nodes": ("2+1",), "sharing": ("state by node",)},
        UnsupportedError,
        'state="node": expected nodes with equally many ranks',
    ),
    Refusal(
        {"stage": (3,), "nodes": ("2+1",), "sharing": ("default",)},
        UnsupportedError,
        'params="node" at stage 3: expected nodes with equally many ranks',
    ),
    Refusal(
        {"nodes": ("2+1",), "compression": ("fed back",)},
        UnsupportedError,
        "error_feedback=True: expected nodes with",
    ),
    Refusal(
        {"optimizer": ("Muon", "Adafactor"), "precision": NO_MASTERS},
        UnsupportedError,
        'expected (kernels="native" and master="fp32"|rounding="nearest")',
    ),
    Refusal(
        {"optimizer": ("Muon", "Adafactor"), "update": ("in backward",)},
        ArgumentError,
        'update: expected "in_step", got "in_backward"',
    ),
    Refusal(
        {"optimizer": ("torch.NAdam",), "precision": NO_MASTERS},
        UnsupportedError,
        "needs the kernels of ringcomm.optim.AdamW",
    ),
]


ONE_NODE = ("1", "2", "3")
# Combinations that the library accepts and ignores; testing their pairs would prove nothing.
IDLE: list[Where] = [
    {"nodes": ONE_NODE, "compression": tuple(COMPRESSIONS)[1:]},
    {"nodes": ONE_NODE, "sharing": tuple(SHARINGS)[1:]},
    {"stage": (0,), "sharing": ("state by node",)},
    {"stage": (0, 1, 2), "sharing": ("params by world",)},
    {"stage": (0, 1), "schedule": tuple(SCHEDULES)[1:]},
    {"stage": (2,), "schedule": ("kept unsharded",)},
]


def has(case: Mapping[str, Any], where: Where) -> bool:
    """True if the case has one of the given values on each axis."""
    return all(name in case and case[name] in values for name, values in where.items())


def accepted(case: Mapping[str, Any]) -> bool:
    return not any(has(case, where) for where in (*(each.where for each in REFUSALS), *IDLE))


CASES = covering_array(AXES, accepted)


def name_of(case: Case) -> str:
    return ",".join(str(value) for value in case.values()).replace(" ", "_")


def run_of(case: Case, folder: Path) -> Run:
    """Returns the training settings of a case."""
    precision = PRECISIONS[case["precision"]]
    if case["precision"].startswith("kept"):
        precision = replace(precision, keep_fp32=KEPT_FP32[case["model"]])
    piece_bytes = state_offload.LEAST_BUFFERS * state_offload.LARGEST_ELEM_BYTES * 512
    adamw = AdamWOptions(
        update="in_backward" if case["update"] == "in backward" else "in_step",
        accumulate_dtype=torch.float32 if case["accumulation"] == "in fp32" else None,
        offload_state=Disk(folder, piece_bytes, 16 << 10) if case["offload"] == "state" else None,
    )
    options = {
        **SHARINGS[case["sharing"]],
        **SCHEDULES[case["schedule"]],
        "compression": COMPRESSIONS[case["compression"]],
    }
    if case["offload"] == "parameters":
        options["offload_params"] = Disk(folder, buffer_bytes=16 << 10, resident_bytes=4 << 10)
    kind, settings = OPTIMIZERS[case["optimizer"]]
    return Run(
        case["model"],
        case["stage"],
        steps=2,
        backwards=BACKWARDS[case["accumulation"]],
        quiet=case["accumulation"] != "added",
        clip=0.3 if case["update"] == "clipped" else None,
        precision=precision,
        options=options,
        adamw=adamw,
        kind=kind,
        settings=settings,
    )


def reference_of(case: Case) -> Case:
    """Returns a case's reference; its ``nodes`` name the world that adds in the same order."""
    changed: Case = {"offload": "none", "schedule": "inline", "stage": 0, "sharing": "default"}
    if case["update"] == "in backward":
        changed["update"] = "in step"
    # Stages 2 and 3 reduce each backward and add the sums; stages 0 and 1 first add gradients.
    if case["accumulation"] == "added" and case["stage"] >= 2:
        changed["stage"] = 2
    if case["nodes"] not in SEVERAL:
        changed["compression"] = "plain"  # only values sent between nodes are quantized
    elif case["compression"] != "plain":
        changed["stage"] = max(1, changed["stage"])
        # If each node has all state, sums of gradients cross nodes and are quantized again.
        if case["sharing"] == "state by node" and case["stage"] > 0:
            changed["sharing"] = "state by node"
    return {**case, **changed}


# ---- worlds -------------------------------------------------------------------------------------


class Trainer:
    """The worlds of this file, and the final states of the trained references."""

    def __init__(self, worlds: Callable[[int], LocalWorld], folder: Path) -> None:
        self._worlds = worlds
        self._folder = folder
        self._over_nodes: dict[tuple[str, bool], LocalWorld] = {}
        self._ends: dict[str, Ended] = {}

    def _world(self, nodes: str, alone: bool) -> LocalWorld:
        """Returns a world of several nodes, or one node with the same sums if ``alone``."""
        sizes = NODES[nodes]
        # Sums over one-rank nodes, or over two nodes, the last of one rank, have no groups.
        if len(sizes) == 1 or (alone and nodes != "2+2"):
            return self._worlds(sum(sizes))
        built = self._over_nodes.get((nodes, alone))
        if built is None or any(comm.aborted for comm in built):
            self._over_nodes[nodes, alone] = ringcomm.local_world(
                sum(sizes),
                nodes=None if alone else sizes,
                options=CommOptions(sum_group_size=2 if alone else 0),
                timeout=60,
            )
        return self._over_nodes[nodes, alone]

    def train(self, case: Case) -> Ended:
        return train_world(self._world(case["nodes"], False), run_of(case, self._folder))

    def reference(self, case: Case) -> Ended:
        wanted = reference_of(case)
        name = name_of(wanted)
        if name not in self._ends:
            world = self._world(case["nodes"], wanted["compression"] == "plain")
            self._ends[name] = train_world(world, run_of(wanted, self._folder))
        return self._ends[name]

    def check(self, case: Case) -> None:
        """Raises AssertionError unless a case ends with the bits of its reference."""
        wanted, norms = self.reference(case)
        found, told = self.train(case)
        assert told == norms
        assert_same_bits(found, wanted)

    def close(self) -> None:
        for world in self._over_nodes.values():
            world.close()


@pytest.fixture(scope="module")
def trainer(worlds, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    made = Trainer(worlds, skip_unless_disk(tmp_path_factory.mktemp("disk")))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def small_buckets_are_quantized(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Quantizes small buckets too, in segments of a few tiles; rank threads share one core."""
    monkeypatch.setattr(compressed_sums, "QUANTIZED_ABOVE_BYTES", 64)
    monkeypatch.setattr(sums, "SEGMENT_BYTES", 4096)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- the cases ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_case_ends_with_the_bits_of_its_reference(trainer: Trainer, case: Case) -> None:
    trainer.check(case)


def test_every_pair_of_values_is_in_a_case_or_refused():
    for (one, values), (other, others) in combinations(AXES.items(), 2):
        for pair in product(values, others):
            covered = any((case[one], case[other]) == pair for case in CASES)
            assert covered is accepted({one: pair[0], other: pair[1]}), (one, other, pair)


def refused_only_by(refusal: Refusal, values: Case) -> Case:
    """Returns a case with these values that only this refusal matches."""
    for stage, sharing in product((3, 2, 1), SHARINGS):
        case = {**USUAL, "nodes": "2+2", "stage": stage, "sharing": sharing, **values}
        if [each for each in REFUSALS if has(case, each.where)] == [refusal]:
            return case
    raise AssertionError(f"other values are refused with {values}")


def refuse(comm: Communicator, base: torch.nn.Module, run: Run, refusal: Refusal) -> None:
    with pytest.raises(refusal.error, match=refusal.text):
        train(comm, base, run)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: "-".join(refusal.where))
def test_values_that_do_not_go_together_are_refused(refusal: Refusal, tmp_path: Path) -> None:
    folder = skip_unless_disk(tmp_path)
    cases = [
        refused_only_by(refusal, dict(zip(refusal.where, values, strict=True)))
        for values in product(*refusal.where.values())
    ]
    for nodes in sorted({case["nodes"] for case in cases}):
        sizes = NODES[nodes]
        with ringcomm.local_world(sum(sizes), nodes=sizes, timeout=60) as world:
            for case in cases:
                if case["nodes"] == nodes:
                    world.run(refuse, new_model(case["model"]), run_of(case, folder), refusal)


@pytest.mark.parametrize("where", IDLE, ids="-".join)
def test_idle_values_change_nothing(trainer: Trainer, where: Where) -> None:
    for values in covering_array(where, strength=1):
        trainer.check({**USUAL, "stage": 2, "nodes": "2+2", **values})


# Values of an axis that give different bits, with a case in which they do.
OWN_BITS: list[tuple[str, tuple[Any, ...], Case]] = [
    ("optimizer", AXES["optimizer"], {}),
    # Remainders give the bits of masters, except for ties.
    ("precision", tuple(name for name in PRECISIONS if name != "remainders"), {"nodes": "3"}),
    ("nodes", (*ONE_NODE, "2+2"), {"accumulation": "added", "stage": 2}),
    (
        "sharing",
        ("default", "state by node"),
        {"stage": 1, "nodes": "2+2", "compression": "gradients"},
    ),
    ("update", ("in step", "clipped"), {}),
    ("compression", AXES["compression"], {"stage": 1, "nodes": "2+2"}),
    ("accumulation", AXES["accumulation"], {"stage": 2, "precision": "masters"}),
]


@pytest.mark.parametrize(("axis", "values", "rest"), OWN_BITS, ids=[own[0] for own in OWN_BITS])
def test_settings_with_bits_of_their_own_differ(
    trainer: Trainer, axis: str, values: tuple[Any, ...], rest: Case
) -> None:
    """Shows that references follow the settings of their case, and that comparisons see changes."""
    ends = [trainer.reference({**USUAL, **rest, axis: value}) for value in values]
    for (one, _), (other, _) in combinations(ends, 2):
        assert any(not torch.equal(one[name], other[name]) for name in one)


def test_nodes_do_not_have_the_bits_of_one_node_that_adds_in_one_go(
    trainer: Trainer, worlds: Callable[[int], LocalWorld], tmp_path: Path
) -> None:
    case = {**USUAL, "stage": 2, "nodes": "2+2", "accumulation": "added"}
    wanted, _ = trainer.reference(case)
    other, _ = train_world(worlds(4), run_of(case, tmp_path))
    assert any(not torch.equal(other[name], wanted[name]) for name in wanted)


# ---- mutants ------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def fills_once(patch: Patch, kind: type[ShardedBucket]) -> None:
    """Mutant: stage 3 keeps computing with the parameters of the first unsharding."""
    fill, first = kind.fill, dict[ShardedBucket, Tensor]()

    def stale(bucket: ShardedBucket) -> None:
        fill(bucket)
        bucket.flat.copy_(first.setdefault(bucket, bucket.flat.clone()))

    patch.setattr(kind, "fill", stale)


def fills_half(patch: Patch) -> None:
    def half(copier: HostCopier, bucket: ShardedBucket) -> None:
        bucket.fill()
        bucket.flat[bucket.flat.numel() // 2 :].zero_()

    patch.setattr(HostCopier, "_fill", half)


def with_argument(patch: Patch, position: int, value: Any) -> None:
    """Mutant: calls the native reduction of a bucket with another argument."""
    arguments = HostReducer._arguments

    def changed(reducer: HostReducer, *given: Any) -> tuple[Any, ...]:
        found: list[Any] = list(arguments(reducer, *given))
        found[position] = value
        return tuple(found)

    patch.setattr(HostReducer, "_arguments", changed)


def writes_hyper_once(patch: Patch) -> None:
    write = StepTable.write_hyper

    def first(table: StepTable, *given: Any) -> None:
        if not table._rows:
            write(table, *given)

    patch.setattr(StepTable, "write_hyper", first)


def steps_everything(patch: Patch) -> None:
    write = StepTable.write_active

    def every(table: StepTable, active: list[float], digest: float) -> None:
        write(table, [1.0] * len(active), digest)

    patch.setattr(StepTable, "write_active", every)


def adds_in_another_order(patch: Patch) -> None:
    terms = sums.NodesCore._terms

    def reverse(calls: sums.NodesCore, *given: Any) -> dict[int, list[int]]:
        return {target: ptrs[::-1] for target, ptrs in terms(calls, *given).items()}

    patch.setattr(sums.NodesCore, "_terms", reverse)


def writes_no_chunk(patch: Patch) -> None:
    leave = DiskChunks._leave
    patch.setattr(
        DiskChunks, "_leave", lambda store, chunk, write: leave(store, chunk, write=False)
    )


def rounds_no_gradient(patch: Patch) -> None:
    reduce = OwnPlan.reduce_norm

    def exact(plan: OwnPlan, *given: Any) -> None:
        if plan._rounded is not None:
            plan._rounded = lambda dtype: torch.float32
        reduce(plan, *given)

    patch.setattr(OwnPlan, "reduce_norm", exact)


def rounds_masters(patch: Patch) -> None:
    update = Backend.update_shard

    def rounded(backend: Backend, bucket: Any, grad: Tensor) -> None:
        update(backend, bucket, grad)
        bucket.state.master.copy_(bucket.own_params)

    patch.setattr(Backend, "update_shard", rounded)


def steps_at_each_bucket(patch: Patch) -> None:
    advance = BackwardUpdates._advance

    def again(updates: BackwardUpdates, *given: Any) -> None:
        advance(updates, *given)
        updates._owner.table.step.add_(1)

    patch.setattr(BackwardUpdates, "_advance", again)


def quantizes_otherwise(patch: Patch) -> None:
    fill = WorldBucket.fill

    def otherwise(bucket: WorldBucket) -> None:
        compression, bucket.compression = bucket.compression, "fp8"
        fill(bucket)
        bucket.compression = compression

    patch.setattr(WorldBucket, "fill", otherwise)


def adds_in_16_bits(patch: Patch) -> None:
    add = Accumulator.add

    def narrow(accumulator: Accumulator, param: Tensor, called: str) -> None:
        add(accumulator, param, called)
        for each in accumulator.flats():
            each.copy_(each.to(torch.bfloat16))

    patch.setattr(Accumulator, "add", narrow)


@dataclass(frozen=True)
class Mutant:
    """A mistake in the library.

    Attributes:
        axis: the axis whose handling is wrong.
        make: function that patches the mistake into the library.
        case: values of the case that must fail; the other axes have their default.
    """

    axis: str
    make: Callable[[Patch], None]
    case: Case


MUTANTS = {
    "parameters are stale": Mutant(
        "stage", lambda patch: fills_once(patch, ShardedBucket), {"stage": 3}
    ),
    "nobody averages": Mutant(
        "stage", lambda patch: with_argument(patch, 3, OP_CODES["SUM"]), {"stage": 2}
    ),
    "an unused parameter steps": Mutant(
        "model", steps_everything, {"stage": 1, "model": "partial"}
    ),
    "rates are stale": Mutant("optimizer", writes_hyper_once, {"stage": 1}),
    "gradients are not rounded": Mutant(
        "precision", rounds_no_gradient, {"stage": 1, "precision": "rounded"}
    ),
    "masters are rounded": Mutant(
        "precision", rounds_masters, {"stage": 3, "precision": "masters"}
    ),
    "sums over nodes follow the ranks": Mutant(
        "nodes", adds_in_another_order, {"stage": 1, "nodes": "1+1+1"}
    ),
    "parameters of other nodes are stale": Mutant(
        "sharing",
        lambda patch: fills_once(patch, WorldBucket),
        {"stage": 3, "nodes": "2+2", "sharing": "params by world"},
    ),
    "state on a disk is stale": Mutant(
        "offload",
        lambda patch: patch.setattr(state_offload.SwapBuffer, "swap_out", lambda *_: None),
        {"stage": 1, "offload": "state", "model": "narrow gpt"},
    ),
    "parameters on a disk are stale": Mutant(
        "offload", writes_no_chunk, {"stage": 3, "offload": "parameters", "model": "narrow gpt"}
    ),
    "updates in backward step twice": Mutant(
        "update", steps_at_each_bucket, {"stage": 2, "update": "in backward"}
    ),
    "a norm is not bounded": Mutant(
        "update",
        lambda patch: patch.setattr(
            NormBound, "coefficient", lambda bound, norm: torch.ones_like(norm)
        ),
        {"stage": 3, "update": "clipped"},
    ),
    "nothing is fed back": Mutant(
        "compression",
        lambda patch: patch.setattr(compressed_sums.FeedbackForm, *FEEDBACK_MUTANTS["nothing"]),
        {"stage": 2, "nodes": "2+2", "compression": "fed back"},
    ),
    "parameters cross in another format": Mutant(
        "compression",
        quantizes_otherwise,
        {"stage": 3, "nodes": "2+2", "sharing": "params by world", "compression": "parameters"},
    ),
    "sums are rounded": Mutant(
        "accumulation",
        adds_in_16_bits,
        {"stage": 1, "precision": "masters", "accumulation": "in fp32"},
    ),
    "the last backward counts alone": Mutant(
        "accumulation",
        lambda patch: with_argument(patch, 5, False),
        {"stage": 2, "accumulation": "added"},
    ),
    "half is unsharded ahead": Mutant("schedule", fills_half, {"stage": 3, "schedule": "overlap"}),
}


def test_each_axis_has_a_mutant():
    assert {mutant.axis for mutant in MUTANTS.values()} == set(AXES)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(trainer: Trainer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    case = {**USUAL, "nodes": "2", **mutant.case}
    trainer.check(case)
    mutant.make(monkeypatch)
    with pytest.raises(AssertionError):
        trainer.check(case)
