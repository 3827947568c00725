"""What ``ringcomm estimate`` was asked: its options, read and checked."""

from __future__ import annotations

import argparse
import importlib
import math
import operator
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation

import torch

from ringcomm.cli.estimate_disk import (
    ActivationsDisk,
    ParamsDisk,
    StateDisk,
    read_activations_disk,
    read_disk,
    read_params_disk,
)
from ringcomm.comm.topology.cost import Cluster
from ringcomm.errors import ArgumentError
from ringcomm.memory.scratch import Disk
from ringcomm.optim.options import Wire
from ringcomm.zero.estimate import STAGES, BytesPerElement, StateBytes, World, model_state
from ringcomm.zero.estimate_model import ModelElems, Transformer
from ringcomm.zero.estimate_model_parallel import ModelParallel, stage_model
from ringcomm.zero.options import ZeroOptions
from ringcomm.zero.precision import PRESETS

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
    """A finite number above 0.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    number = _number_in(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number


def parse_not_negative(text: str) -> float:
    """A finite number from 0 on.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    number = _number_in(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return number


def _number_in(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


@dataclass(frozen=True)
class TimingInputs:
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
        activations_disk: where the activations are kept; None for memory.
        params_disk: where parameters lie at stage 3; None for memory.
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
    timing: TimingInputs | None
    budget_bytes: int | None
    state_disk: StateDisk | None
    activations_disk: ActivationsDisk | None
    params_disk: ParamsDisk | None

    @property
    def tier(self) -> Disk | str | None:
        """As in ``AdamWOptions``."""
        return None if self.state_disk is None else self.state_disk.tier

    @property
    def params_tier(self) -> Disk | None:
        """As in ``ZeroOptions``."""
        return None if self.params_disk is None else self.params_disk.tier

    def model_state(self, stage: int, world: World) -> StateBytes:
        """Returns the model state of a rank."""
        return model_state(self.model, stage, world, self.each, self.tier, self.params_tier)


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
    kept = _kept(args)
    _check_masters(args, world, kept)
    if args.update == "in_backward" and (args.clip or kept.scaled):
        raise ArgumentError(
            "--update: expected in_step with --clip or a scaled preset, got in_backward: "
            "parameters change before all gradients are known"
        )
    shape = _shape(args)
    parallel = _parallel(args, shape, cluster)
    called, model = _model(args, shape, parallel)
    dtype = DTYPES[kept.dtype]
    reduce = torch.float32 if kept.reduce == "fp32" else dtype
    return Request(
        called=called,
        model=model,
        world=world,
        stages=STAGES if args.stage is None else (args.stage,),
        precision=_told(kept, args),
        each=replace(
            BytesPerElement.of(
                dtype,
                reduce,
                kept.master,
                args.amsgrad,
                eight_bits=args.optimizer == "adamw8bit",
                accumulate=torch.float32 if args.accumulate == "fp32" else None,
            ),
            keeps_reduced=args.update == "in_step",
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
        activations_disk=read_activations_disk(args),
        params_disk=read_params_disk(args),
    )


def _told(kept: _PrecisionChoice, args: argparse.Namespace) -> str:
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
        for name in ("shard_params", "shard_state", "wire", "wire_parameters", "error_feedback"):
            if getattr(args, name) not in (None, False):
                raise ArgumentError(f"--{name.replace('_', '-')}: expected --nodes with it")
        return World(args.world)
    params, state = args.shard_params or "node", args.shard_state or "world"
    wire, param_wire = args.wire or "fp32", args.wire_parameters or "param"
    return World(
        cluster.world_size,
        cluster.ranks_per_node,
        params,
        state,
        wire,
        param_wire,
        args.error_feedback,
    )


def _check_masters(args: argparse.Namespace, world: World, kept: _PrecisionChoice) -> None:
    """Raises ArgumentError unless parameters that cross in codes have masters, in memory."""
    wire = Wire(parameters=world.param_wire)
    rounding = "nearest" if args.preset is None else PRESETS[args.preset].rounding or "nearest"
    wire.check_parameters(world.state, kept.master, rounding)
    if wire.codes_parameters and (args.state_on, args.params_on) != ("memory", "memory"):
        raise ArgumentError("--wire-parameters: expected state and parameters in memory with it")


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


def _timing(args: argparse.Namespace) -> TimingInputs | None:
    if args.bandwidth_gbps is None and args.peak_tflops is None:
        return None
    if args.bandwidth_gbps is None or args.peak_tflops is None or args.context is None:
        raise ArgumentError(
            "times need --bandwidth-gbps, --peak-tflops and --context (tokens of a sequence)"
        )
    return TimingInputs(args.context * args.micro_batch, args.bandwidth_gbps, args.peak_tflops)


@dataclass(frozen=True)
class _PrecisionChoice:
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


def _kept(args: argparse.Namespace) -> _PrecisionChoice:
    if args.preset is None:
        return _PrecisionChoice(args.dtype or "bf16", args.reduce or "fp32", args.master or "fp32")
    given = [name for name in ("dtype", "reduce", "master") if getattr(args, name) is not None]
    if given:
        raise ArgumentError(
            f"--preset {args.preset}: expected no {', '.join(f'--{name}' for name in given)} with "
            "it, which it decides"
        )
    precision = PRESETS[args.preset]
    dtype = next(name for name, each in DTYPES.items() if each is precision.param)
    reduce = "fp32" if precision.reduce is None else "param"
    return _PrecisionChoice(dtype, reduce, precision.master or "fp32", precision.scaled)
