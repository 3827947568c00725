"""The figures of ``ringcomm estimate``: what was asked, what comes of it, and its JSON."""

from __future__ import annotations

import argparse
import importlib
import math
import operator
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal, InvalidOperation
from typing import Any

import torch

from ringcomm.cli import estimate_disk
from ringcomm.cli.estimate_disk import Computing, DiskRow, StateDisk, disk_row, read_disk
from ringcomm.cli.estimate_network import Step
from ringcomm.comm.topology.cost import Cluster
from ringcomm.errors import ArgumentError
from ringcomm.memory.scratch import Disk
from ringcomm.zero.estimate import (
    STAGES,
    ActivationBytes,
    BytesPerElement,
    ModelElems,
    StateBytes,
    Transformer,
    WorkingBytes,
    World,
    largest_model,
    model_state,
    working_buffers,
)
from ringcomm.zero.estimate_model_parallel import (
    ModelParallel,
    stage_activations,
    stage_model,
)
from ringcomm.zero.estimate_tier import state_in_tier
from ringcomm.zero.estimate_time import (
    StepTime,
    Traffic,
    checkpoint_intensity,
    efficiency,
    leaving_node_bytes,
    params_intensity,
    state_intensity,
    step_flops,
    step_time,
    traffic,
)
from ringcomm.zero.options import ZeroOptions
from ringcomm.zero.precision import PRESETS

# What ``ringcomm estimate`` was asked: its options, read and checked.

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SUFFIXES = {"K": 3, "M": 6, "B": 9, "T": 12}
OPTIMIZERS = ("adamw", "adamw8bit")
SHAPE_OPTIONS = ("layers", "width", "heads", "vocab")


def parse_count(text: str) -> int:
    """ "7.5B", "125M", "1.3e9" or "124439808" as a number of elements, exactly.

    Raises:
        argparse.ArgumentTypeError: it is no positive whole number.
    """
    exponent = SUFFIXES.get(text[-1:].upper(), 0)
    try:
        count = Decimal(text[:-1] if exponent else text).scaleb(exponent)
        whole = count == count.to_integral_value() and 0 < count < 10**18
    except InvalidOperation:
        whole = False
    if not whole:
        raise argparse.ArgumentTypeError(
            f"expected a positive whole number such as 7.5B, 125M or 1.3e9, got {text!r}"
        )
    return int(count)


def parse_positive(text: str) -> float:
    """A number above 0.

    Raises:
        argparse.ArgumentTypeError: it is none, or is not finite.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number


@dataclass(frozen=True)
class Timing:
    """The numbers from which times follow.

    Attributes:
        tokens: that a rank computes in a step.
        gbps: bandwidth of a rank, 1e9 bytes/s.
        peak_tflops: what it computes, 1e12 operations/s.
    """

    tokens: int
    gbps: float
    peak_tflops: float


@dataclass(frozen=True)
class Forward:
    """A forward on one rank; ``shape`` is None where only parameters are counted."""

    shape: Transformer | None
    micro_batch: int
    checkpointing: str
    every: int
    parallel: ModelParallel = field(default_factory=ModelParallel)

    @property
    def recomputes(self) -> bool:
        """True if the backward runs all of the forward again."""
        return self.checkpointing == "full"


@dataclass(frozen=True)
class Request:
    """All that the estimate depends on.

    Attributes:
        called: the model, for the headline.
        precision: dtypes, for the headline.
        elem_bytes: of an activation.
        budget_bytes: of a rank, or None.
        state_disk: where the state lies; None for memory.
    """

    called: str
    model: ModelElems
    world: World
    stages: tuple[int, ...]
    precision: str
    each: BytesPerElement
    elem_bytes: int
    options: ZeroOptions
    two_passes: bool
    forward: Forward
    timing: Timing | None
    budget_bytes: int | None
    state_disk: StateDisk | None

    @property
    def tier(self) -> Disk | str | None:
        """As in ``AdamWOptions``."""
        return None if self.state_disk is None else self.state_disk.tier


def has_model(args: argparse.Namespace) -> bool:
    """True if a model was given, by a count, a module or its shape."""
    names = ("params", "module", *SHAPE_OPTIONS)
    return args.untied or any(getattr(args, name) is not None for name in names)


def read_request(args: argparse.Namespace, cluster: Cluster | None = None) -> Request:
    """Reads the options, and builds the module if there is one.

    Args:
        args: as parsed.
        cluster: whose ranks are the world, if several nodes were given.

    Raises:
        ArgumentError: options do not go together, or the module cannot be built.
    """
    _check_counts(args)
    world = _world(args, cluster)
    shape = _shape(args)
    parallel = _parallel(args, shape, cluster)
    called, model = _model(args, shape, parallel)
    kept = _kept(args)
    dtype = DTYPES[kept.dtype]
    reduce = torch.float32 if kept.reduce == "fp32" else dtype
    return Request(
        called=called,
        model=model,
        world=world,
        stages=STAGES if args.stage is None else (args.stage,),
        precision=_told(kept, args),
        each=BytesPerElement.of(
            dtype,
            reduce,
            kept.master,
            args.amsgrad,
            eight_bits=args.optimizer == "adamw8bit",
            accumulate=torch.float32 if args.accumulate == "fp32" else None,
        ),
        elem_bytes=dtype.itemsize,
        options=ZeroOptions(bucket_elems=args.bucket_elems),
        two_passes=args.clip or kept.scaled,
        forward=Forward(
            shape, args.micro_batch, args.checkpointing, args.checkpoint_every, parallel
        ),
        timing=_timing(args),
        budget_bytes=None if args.budget_gb is None else round(args.budget_gb * 10**9),
        state_disk=read_disk(args),
    )


def _told(kept: _Kept, args: argparse.Namespace) -> str:
    """Words the precision of everything."""
    choices = {
        "gradients added in fp32": args.accumulate == "fp32",
        "amsgrad": args.amsgrad,
        "moments of 8 bits": args.optimizer == "adamw8bit",
    }
    return ", ".join([kept.told, *(name for name, chosen in choices.items() if chosen)])


def _world(args: argparse.Namespace, cluster: Cluster | None) -> World:
    if cluster is None and args.world is None:
        raise ArgumentError("expected --world, or --nodes with --gpus-per-node")
    if cluster is not None and args.world not in (None, cluster.world_size):
        raise ArgumentError(
            f"--world {args.world}: expected {cluster.nodes} nodes x {cluster.ranks_per_node} "
            f"GPUs = {cluster.world_size}, or no --world beside --nodes"
        )
    if cluster is None:
        for name in ("shard_params", "shard_state", "wire"):
            if getattr(args, name) is not None:
                raise ArgumentError(f"--{name.replace('_', '-')}: expected --nodes with it")
        return World(args.world)
    params, state = args.shard_params or "node", args.shard_state or "world"
    wire = args.wire or "fp32"
    return World(cluster.world_size, cluster.ranks_per_node, params, state, wire)


def _check_counts(args: argparse.Namespace) -> None:
    for name in ("world", "context", "micro_batch", "checkpoint_every"):
        value = getattr(args, name)
        if value is not None and value < 1:
            option = name.replace("_", "-")
            raise ArgumentError(f"--{option}: expected at least 1, got {value}")
    if args.checkpoint_every > 1 and args.checkpointing != "full":
        raise ArgumentError(
            f"--checkpoint-every {args.checkpoint_every}: expected --checkpointing full with it, "
            f"got {args.checkpointing}"
        )


def _shape(args: argparse.Namespace) -> Transformer | None:
    given = [name for name in SHAPE_OPTIONS if getattr(args, name) is not None]
    given += ["untied"] if args.untied else []
    if not given:
        return None
    missing = [name for name in (*SHAPE_OPTIONS, "context") if getattr(args, name) is None]
    if missing:
        raise ArgumentError(
            f"--{given[0]}: a transformer needs {', '.join(f'--{name}' for name in missing)} too"
        )
    return Transformer(
        args.layers, args.width, args.heads, args.context, args.vocab, tied=not args.untied
    )


def _parallel(
    args: argparse.Namespace, shape: Transformer | None, cluster: Cluster | None
) -> ModelParallel:
    """Reads how a replica is divided; that needs its shape."""
    parallel = ModelParallel(
        args.tp,
        args.pp,
        args.sequence_parallel,
        args.micro_batches,
        args.partition_checkpoints,
    )
    if parallel == ModelParallel():
        return parallel
    if shape is None or args.params is not None:
        raise ArgumentError(
            "--tp, --pp and --micro-batches: expected the model as --layers, --width, --heads, "
            "--context and --vocab, since they divide these"
        )
    if cluster is not None:
        raise ArgumentError("--tp, --pp: expected --world, since --nodes predicts replicas alone")
    if args.bandwidth_gbps is not None or args.peak_tflops is not None:
        raise ArgumentError("--tp, --pp: expected no times with them, which are those of replicas")
    if args.budget_gb is not None:
        raise ArgumentError(
            "--tp, --pp: expected no --budget-gb with them, since the largest model is that of an "
            "undivided replica"
        )
    if parallel.partitioned and args.checkpointing != "full":
        raise ArgumentError("--partition-checkpoints: expected --checkpointing full with it")
    parallel.check(shape)
    return parallel


def _model(
    args: argparse.Namespace, shape: Transformer | None, parallel: ModelParallel
) -> tuple[str, ModelElems]:
    if args.module is not None:
        return args.module, ModelElems.of_module(build_on_meta(args.module))
    if shape is not None and args.params is None:
        called = f"{shape.layers} layers of width {shape.width}"
        if parallel.ranks == 1:
            return called, shape.model
        called += f" / (tp {parallel.tp} x pp {parallel.pp})"
        return called, stage_model(shape, parallel)
    if args.params is None:
        raise ArgumentError(
            "no model: give --params COUNT, --module PACKAGE.MODULE:CALLABLE, or all of --layers, "
            "--width, --heads, --context and --vocab"
        )
    if shape is None:
        return "model", ModelElems(args.params)
    return "model", replace(shape.model, trainable=args.params)


def build_on_meta(named: str) -> torch.nn.Module:
    """Calls ``package.module:callable`` with no arguments; parameters take no memory.

    The current folder is searched first, as with ``python -m``.

    Raises:
        ArgumentError: there is no such callable, it fails, or gives no module.
    """
    place, colon, name = named.partition(":")
    if not (place and colon and name):
        raise ArgumentError(f"--module: expected PACKAGE.MODULE:CALLABLE, got {named!r}")
    try:
        with _current_folder_first(), torch.device("meta"):
            built = operator.attrgetter(name)(importlib.import_module(place))()
    except Exception as error:  # the callable is the user's: it can raise anything
        first_line = str(error).strip().partition("\n")[0]
        raise ArgumentError(f"--module {named}: {type(error).__name__}: {first_line}") from error
    if not isinstance(built, torch.nn.Module):
        raise ArgumentError(
            f"--module {named}: expected a torch.nn.Module, got {type(built).__name__}; name a "
            "class or function that gives one when called with no arguments"
        )
    return built


@contextmanager
def _current_folder_first() -> Iterator[None]:
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _timing(args: argparse.Namespace) -> Timing | None:
    if args.bandwidth_gbps is None and args.peak_tflops is None:
        return None
    if args.bandwidth_gbps is None or args.peak_tflops is None or args.context is None:
        raise ArgumentError(
            "times need --bandwidth-gbps, --peak-tflops and --context (tokens of a sequence)"
        )
    return Timing(args.context * args.micro_batch, args.bandwidth_gbps, args.peak_tflops)


@dataclass(frozen=True)
class _Kept:
    """The precision of everything, in the words of the options; ``scaled`` as of Precision."""

    dtype: str
    reduce: str
    master: str
    scaled: bool = False

    @property
    def told(self) -> str:
        """The choices, for the headline."""
        reduced = self.dtype if self.reduce == "param" else "fp32"
        kept = {"fp32": "master fp32", "remainder": "master as remainder", "none": "no master"}
        parts = [self.dtype, f"reduced to {reduced}"]
        return ", ".join(parts + ([] if self.dtype == "fp32" else [kept[self.master]]))


def _kept(args: argparse.Namespace) -> _Kept:
    if args.preset is None:
        return _Kept(args.dtype or "bf16", args.reduce or "fp32", args.master or "fp32")
    given = [name for name in ("dtype", "reduce", "master") if getattr(args, name) is not None]
    if given:
        raise ArgumentError(
            f"--preset {args.preset}: expected no {', '.join(f'--{name}' for name in given)} with "
            "it, which it decides"
        )
    precision = PRESETS[args.preset]
    dtype = next(name for name, each in DTYPES.items() if each is precision.param)
    reduce = "fp32" if precision.reduce is None else "param"
    return _Kept(dtype, reduce, precision.master or "fp32", precision.scaled)


# The figures of ``ringcomm estimate``, and their JSON.


@dataclass(frozen=True)
class Row:
    """One stage: bytes of a rank, what it sends, and how long a step takes it.

    Attributes:
        activation_bytes: 0 where they are not known.
        leaving_node_bytes: what of gradients and parameters leaves each node.
        time: None where the machine is not known.
        largest_elems: the largest model that fits beside buffers and activations; None without a
            budget.
        disk: of the state; None if it is in memory.
    """

    stage: int
    state: StateBytes
    working: WorkingBytes
    activation_bytes: int
    moved: Traffic
    leaving_node_bytes: int
    time: StepTime | None
    largest_elems: int | None
    disk: DiskRow | None

    @property
    def total_bytes(self) -> int:
        return self.state.total + self.working.total + self.activation_bytes


@dataclass(frozen=True)
class Report:
    """The question and its answer; ``activations`` is None where the shape is not known."""

    request: Request
    rows: tuple[Row, ...]
    activations: ActivationBytes | None


def work_out(request: Request) -> Report:
    """Does the arithmetic.

    Raises:
        ArgumentError: a size is not positive.
    """
    forward, held = request.forward, None
    if forward.shape is not None:
        held = stage_activations(
            forward.shape,
            forward.micro_batch,
            forward.parallel,
            forward.checkpointing,
            forward.every,
            request.elem_bytes,
        )
    rows = tuple(_row(request, stage, held.total if held else 0) for stage in request.stages)
    return Report(request, rows, held)


def total_bytes(report: Report, stage: int, world_size: int) -> int:
    """Returns the memory that a rank would need in another world."""
    request = report.request
    world = replace(request.world, ranks=world_size)
    state = model_state(request.model, stage, world, request.each, request.tier)
    working = _working(request, stage, world)
    held = report.activations
    return state.total + working.total + (held.total if held else 0)


def _working(request: Request, stage: int, world: World) -> WorkingBytes:
    return working_buffers(
        request.model,
        stage,
        world,
        request.each,
        request.options,
        request.two_passes,
        request.tier,
    )


def _row(request: Request, stage: int, activation_bytes: int) -> Row:
    model, world, each = request.model, request.world, request.each
    working = _working(request, stage, world)
    moved = traffic(model, stage, each)
    largest = None
    if request.budget_bytes is not None:
        other_bytes = working.total + activation_bytes
        largest = largest_model(request.budget_bytes, stage, world, each, other_bytes, request.tier)
    return Row(
        stage,
        model_state(model, stage, world, each, request.tier),
        working,
        activation_bytes,
        moved,
        leaving_node_bytes(model, stage, world, each),
        _step_time(request, moved.sent_bytes(world.ranks)),
        largest,
        _disk_row(request, stage),
    )


def _step_time(request: Request, sent_bytes: int) -> StepTime | None:
    timing = request.timing
    if timing is None:
        return None
    return step_time(_flops(request, timing), sent_bytes, timing.gbps, timing.peak_tflops)


def _flops(request: Request, timing: Timing) -> int:
    return step_flops(request.model.total, timing.tokens, request.forward.recomputes)


def _disk_row(request: Request, stage: int) -> DiskRow | None:
    disk, timing, world = request.state_disk, request.timing, request.world
    if disk is None:
        return None
    moved = state_in_tier(request.model, stage, world, request.each, request.options, disk.tier)
    computing = None
    if timing is not None:
        flops = _flops(request, timing)
        compute_s = step_time(flops, 0, timing.gbps, timing.peak_tflops).compute_s
        computing = Computing(flops, compute_s, timing.peak_tflops)
    return disk_row(moved, disk.rates, world.mates, computing)


def network_step(report: Report) -> Step:
    """Returns the facts from which the network's times of a step follow."""
    request = report.request
    times = [row.time for row in report.rows if row.time is not None]
    return Step(
        model=request.model,
        each=request.each,
        bucket_elems=request.options.bucket_elems,
        compute_s=times[0].compute_s if times else None,
        stages=request.stages,
        world=request.world,
    )


def outside_efficiency(request: Request) -> dict[str, float]:
    """Efficiency, 0 to 1, with each kind of data outside the device, not overlapped.

    Each rank moves all parameters and all its checkpoints, but only its shard of the state, for
    which the bandwidths of all ranks add up. Empty where the machine is not known.
    """
    timing, forward = request.timing, request.forward
    if timing is None:
        return {}
    gbps, peak = timing.gbps, timing.peak_tflops
    state = state_intensity(timing.tokens, forward.recomputes)
    shares = {
        "parameters": efficiency(params_intensity(timing.tokens), gbps, peak),
        "state": efficiency(state, gbps * request.world.ranks, peak),
    }
    if forward.shape is not None and forward.recomputes:
        intensity = checkpoint_intensity(forward.shape.width, forward.every)
        shares["checkpoints"] = efficiency(intensity, gbps, peak)
    return shares


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain JSON types: bytes, elements, seconds."""
    request = report.request
    return {
        "model": {"called": request.called, **asdict(request.model)},
        "world": request.world.ranks,
        "nodes": request.world.nodes,
        "shard_params": request.world.params,
        "shard_state": request.world.state,
        "wire": request.world.wire,
        "bytes_per_element": asdict(request.each),
        "activations": None if report.activations is None else asdict(report.activations),
        "budget_bytes": request.budget_bytes,
        "outside_efficiency": outside_efficiency(request),
        "stages": [_row_json(row, request.world.ranks) for row in report.rows],
    }


def _row_json(row: Row, world_size: int) -> dict[str, Any]:
    return {
        "stage": row.stage,
        "model_state_bytes": {**asdict(row.state), "total": row.state.total},
        "working_bytes": {**asdict(row.working), "total": row.working.total},
        "activation_bytes": row.activation_bytes,
        "total_bytes": row.total_bytes,
        "volume_elems": row.moved.volume_elems,
        "volume_bytes": row.moved.volume_bytes,
        "sent_elems": row.moved.sent_elems(world_size),
        "sent_bytes": row.moved.sent_bytes(world_size),
        "leaving_node_bytes": row.leaving_node_bytes,
        "time": None if row.time is None else _time_json(row.time),
        "largest_model_elems": row.largest_elems,
        "state_elsewhere": None if row.disk is None else estimate_disk.as_json(row.disk),
    }


def _time_json(time: StepTime) -> dict[str, float]:
    return {
        **asdict(time),
        "serial_s": time.serial_s,
        "serial_efficiency": time.serial_efficiency,
        "overlapped_s": time.overlapped_s,
        "overlapped_efficiency": time.overlapped_efficiency,
    }
