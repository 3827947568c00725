# SPDX-License-Identifier: Apache-2.0
"""The systems that :mod:`.training` compares: each trains the same GPT on the same text."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ringcomm
from ringcomm.examples.corpus import Corpus, draw
from ringcomm.examples.train_gpt import GPT, VOCABULARY, ModelConfig, held_bytes

from . import training_deepspeed
from .timing import Device

Tensor = torch.Tensor
DDP, DDP_HERE = "ddp on gloo", "ddp on ringcomm"
FSDP2, FSDP2_HERE = "fsdp2 on gloo", "fsdp2 on ringcomm"
HSDP, HSDP_HERE = "hsdp on gloo", "hsdp on ringcomm"
DDP_NCCL, FSDP2_NCCL = "ddp on nccl", "fsdp2 on nccl"
STAGES = tuple(f"stage {stage}" for stage in range(4))
TORCH_ALONE = "torch alone"
RIVALS = (DDP, DDP_HERE, FSDP2, FSDP2_HERE, *training_deepspeed.STAGES, HSDP, HSDP_HERE)
# Systems that a process can train on a GPU, besides torch alone.
ON_GPU = (*STAGES, DDP_NCCL, FSDP2_NCCL)
# Lower bound of every system: the ranks share memory bandwidth and cores, but exchange no
# gradients.
ARITHMETIC = "forward and backward"
NCCL_BACKEND = "nccl"
# Eager steps before a step is captured: the first steps build objects that later steps reuse.
_WARM_UP = 3
# The name of a training step in reports.
TRAINING = "training_step"
LEARNING_RATE = 1e-3
SEED = 0

_zero_options, _compression = ringcomm.zero.ZeroOptions, ringcomm.zero.Compression
_QUANTIZED = _zero_options(compression=_compression(gradients="int8"))
_QUANTIZED_PARAMS = _zero_options(compression=_compression(gradients="int8", parameters="fp8"))
# Variants that exist only over several nodes. With quantized gradients, updated parameters are sent
# between nodes in their dtype or quantized; with state="node" quantized sums of gradients are sent
# instead. Stage 3 may store a copy of the state per node, as HSDP does, or divide the parameters
# among all ranks, as FSDP2 does.
QUANTIZED_OVER_NODES = {
    "stage 2 compression=int8": (2, _QUANTIZED),
    "stage 2 compression=int8 state=node": (2, replace(_QUANTIZED, state="node")),
    "stage 2 compression=int8 parameters=fp8": (2, _QUANTIZED_PARAMS),
    "stage 3 compression=int8 parameters=fp8": (3, _QUANTIZED_PARAMS),
}
UNCOMPRESSED_OVER_NODES = {
    "stage 3 state=node": (3, _zero_options(state="node")),
    "stage 3 params=world": (3, _zero_options(params="world")),
}
# Each system, and its twin: the system with the same losses and weights, to the bit. Quantized runs
# have no twin. DeepSpeed's stages and torch's wrappers have a twin only if each sum is of two
# ranks, since the sum of two numbers does not depend on their order. HSDP adds within a node and
# then over nodes, so it has a twin only with two nodes of at most two ranks each.
STAGE_TWINS = dict.fromkeys((*STAGES[1:], *UNCOMPRESSED_OVER_NODES), STAGES[0])
PAIR_TWINS = {DDP_HERE: DDP, FSDP2_HERE: FSDP2, **dict.fromkeys(training_deepspeed.STAGES, DDP)}
MESH_TWINS = {HSDP_HERE: HSDP}


class TorchLion(torch.optim.Optimizer):
    """Lion as a user of torch would write it: torch's operations on lists of tensors."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), params = group["betas"], group["params"]
            grads = [param.grad for param in params]
            moments = [
                self.state[param].setdefault("exp_avg", torch.zeros_like(param)) for param in params
            ]
            directions = torch._foreach_mul(moments, beta1)
            torch._foreach_add_(directions, grads, alpha=1 - beta1)
            torch._foreach_sign_(directions)
            torch._foreach_add_(params, directions, alpha=-group["lr"])
            torch._foreach_mul_(moments, beta2)
            torch._foreach_add_(moments, grads, alpha=1 - beta2)


class Masters:
    """FP32 copies of a module's 16-bit parameters, which an optimizer of torch steps."""

    def __init__(self, module: nn.Module, make: Callable[[nn.Module], Any]) -> None:
        self.zero_grad = module.zero_grad
        masters = copy.deepcopy(module).float()
        self._pairs = list(zip(module.parameters(), masters.parameters(), strict=True))
        self._optimizer = make(masters)

    @torch.no_grad()
    def step(self) -> None:
        for param, master in self._pairs:
            assert param.grad is not None
            master.grad = param.grad.float()
        self._optimizer.step()
        self._optimizer.zero_grad()
        for param, master in self._pairs:
            param.copy_(master)


def _muon_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Returns Muon's parameter groups; AdamW also steps the embedding, which is shared with the
    head.
    """
    return ringcomm.optim.muon_groups(module, adamw=("embed.weight",), weight_decay=0.01)


def _torchs_muon(module: nn.Module) -> Any:
    """Returns two optimizers that step one module, as torch's Muon requires."""
    muon, adamw = _muon_groups(module)
    del muon["algorithm"], adamw["algorithm"]
    matrices: Any = torch.optim.Muon([muon], lr=LEARNING_RATE)
    others = torch.optim.AdamW([adamw], lr=LEARNING_RATE, fused=True)
    return SimpleNamespace(
        step=lambda: (matrices.step(), others.step()),
        zero_grad=lambda: (matrices.zero_grad(), others.zero_grad()),
    )


class Optimizers(NamedTuple):
    """One kind of optimizer: ringcomm's for a sharded module, and torch's for the other systems."""

    ours: Callable[[nn.Module], Any]
    torchs: Callable[[nn.Module], Any]


def _stepping(make: Any, **how: Any) -> Callable[[nn.Module], Any]:
    return lambda module: make(module.parameters(), lr=LEARNING_RATE, **how)


_of = ringcomm.optim
SHARDED = (_of.AdamW, _of.AdamW8bit, _of.SGD, _of.Lion, _of.Muon, _of.Adafactor)
_ADAMW, _SGD = _stepping(torch.optim.AdamW, fused=True), {"momentum": 0.9}
OPTIMIZERS = {
    "adamw": Optimizers(_stepping(_of.AdamW), _ADAMW),
    "adamw8bit": Optimizers(_stepping(_of.AdamW8bit), _ADAMW),
    "sgd": Optimizers(_stepping(_of.SGD, **_SGD), _stepping(torch.optim.SGD, fused=True, **_SGD)),
    "lion": Optimizers(_stepping(_of.Lion), _stepping(TorchLion)),
    "muon": Optimizers(
        lambda module: _of.Muon(_muon_groups(module), lr=LEARNING_RATE), _torchs_muon
    ),
    "adafactor": Optimizers(_stepping(_of.Adafactor), _stepping(torch.optim.Adafactor)),
}
# Fused SGD does not accept FSDP2's shards; Muon and Adafactor accept neither these nor DeepSpeed's.
TAKE_NO_SHARDS = ("sgd", "muon", "adafactor")


@dataclass(frozen=True)
class Shape:
    """A GPT whose embedding and head share a weight, its batch, and the kind of its optimizer.

    In bfloat16 all systems keep FP32 masters and moments.
    """

    width: int
    depth: int
    heads: int
    sequences: int
    context: int
    optimizer: str = "adamw"
    dtype: torch.dtype = torch.float32

    @property
    def parameters(self) -> int:
        """The number of trained elements."""
        return 12 * self.depth * self.width**2 + VOCABULARY * self.width

    def model(self) -> GPT:
        """Returns the model in FP32, with the same weights on every rank."""
        torch.manual_seed(SEED)
        return GPT(ModelConfig(self.width, self.depth, self.heads, self.context, tied=True))

    def __str__(self) -> str:
        kind = "" if self.optimizer == "adamw" else f", {self.optimizer}"
        return f"{self.width}x{self.depth}, {self.sequences}x{self.context} bytes a rank{kind}"


class GpuShape(Shape):
    """A shape whose weights are initialized once and copied for each model, to save a second per
    model.
    """

    @cached_property
    def _first(self) -> GPT:
        return super().model()

    def model(self) -> GPT:
        """Same as :meth:`Shape.model`."""
        return copy.deepcopy(self._first)


class Batches(NamedTuple):
    """One rank's rows of each step's batch."""

    shape: Shape
    corpus: Corpus
    rank: int
    world: int
    device: torch.device

    def of(self, step: int) -> tuple[Tensor, Tensor]:
        """Returns tokens and targets, each int64 [sequences, context]."""
        rows, context = self.shape.sequences, self.shape.context
        tokens, targets = draw(self.corpus.train, SEED, step, (rows * self.world, context))
        own = slice(self.rank * rows, (self.rank + 1) * rows)
        return tokens[own].to(self.device), targets[own].to(self.device)


class ResidentBatches:
    """Batches that are on the device before the timing, so that no step waits for the host."""

    COUNT = 4

    def __init__(self, batches: Batches) -> None:
        self.device = batches.device
        self._held = [batches.of(step) for step in range(self.COUNT)]

    def of(self, step: int) -> tuple[Tensor, Tensor]:
        """Same as :meth:`Batches.of`, but after the last batch it starts again with the first."""
        return self._held[step % self.COUNT]


def _loss_of(module: nn.Module, optimizer: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """Runs forward and backward; returns the loss."""
    # On a GPU matrices are multiplied in bfloat16, as usual in training.
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        loss: Tensor = module(tokens, targets)
    # DeepSpeed's engine has its own backward.
    getattr(optimizer, "backward", Tensor.backward)(loss)
    return loss.detach()


def _update(module: nn.Module, optimizer: Any) -> None:
    if optimizer is None:
        module.zero_grad()
        return
    optimizer.step()
    optimizer.zero_grad()


def _end(module: nn.Module, optimizer: Any) -> None:
    """Undoes sharding, so that the next sharded module is the only one; collective."""
    if isinstance(optimizer, SHARDED):
        ringcomm.zero.remove_sharding(module)


class TrainedModel:
    """A model that one system trains; each call makes a step.

    The constructor makes two steps: the first builds objects that a step needs, and the second
    builds objects that depend on the first. ``held_bytes`` is the memory that training adds to this
    rank, between backward and the optimizer's step.
    """

    def __init__(
        self, build: Callable[[], tuple[nn.Module, Any]], batches: Batches | ResidentBatches
    ) -> None:
        before_bytes = held_bytes(batches.device, trim=True)
        self.module, self._optimizer = build()
        self._batches = batches
        self.losses: list[Tensor] = []  # losses of this rank's rows, one FP32 scalar per step
        self()
        self._backward()
        self.held_bytes = held_bytes(batches.device, trim=True) - before_bytes
        self._update()

    def __call__(self) -> None:
        self._backward()
        self._update()

    def _backward(self) -> None:
        batch = self._batches.of(len(self.losses))
        self.losses.append(_loss_of(self.module, self._optimizer, *batch))

    def _update(self) -> None:
        _update(self.module, self._optimizer)

    def end(self) -> None:
        """Ends the training and undoes sharding; collective."""
        _end(self.module, self._optimizer)

    def weights(self) -> dict[str, Tensor]:
        """Returns the weights that this rank can compare: all weights, or under FSDP2 its shards.

        Collective.
        """
        if isinstance(self._optimizer, SHARDED):
            return ringcomm.zero.full_state_dict(self.module)
        if isinstance(self._optimizer, training_deepspeed.Engine):
            return self._optimizer.weights()
        params = {name: param.detach() for name, param in self.module.named_parameters()}
        return {
            name: each.to_local() if isinstance(each, DTensor) else each
            for name, each in params.items()
        }


class GraphedModel:
    """A model whose step is one graph; a call copies the next batch in, and replays the graph.

    ``zero.GraphedStep`` captures ringcomm's steps; torch's are captured as its documentation says.
    """

    def __init__(
        self, build: Callable[[], tuple[nn.Module, Any]], batches: ResidentBatches, device: Device
    ) -> None:
        self._batches, self._calls = batches, 0
        module, optimizer = self._built = build()

        def step(tokens: Tensor, targets: Tensor) -> Tensor:
            loss = _loss_of(module, optimizer, tokens, targets)
            _update(module, optimizer)
            return loss

        self._step: Callable[[Tensor, Tensor], Tensor]
        if isinstance(optimizer, SHARDED):
            self._step = ringcomm.zero.GraphedStep(step, optimizer, warmup=_WARM_UP)
        else:
            self._step = step
        for _ in range(_WARM_UP):
            self()
        if self._step is step:
            self._step = _captured(step, batches.of(0), device)
        self()

    def __call__(self) -> None:
        self._loss = self._step(*self._batches.of(self._calls))
        self._calls += 1

    def end(self) -> None:
        """Same as :meth:`TrainedModel.end`."""
        _end(*self._built)

    @property
    def loss(self) -> float:
        """The loss of the last step."""
        return float(self._loss)


def _captured(
    step: Callable[[Tensor, Tensor], Tensor], batch: tuple[Tensor, Tensor], device: Device
) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a step that replays a graph of ``step``; each replay overwrites the loss."""
    tokens, targets = (each.clone() for each in batch)
    losses: list[Tensor] = []

    def capture() -> None:
        losses[:] = [step(tokens, targets)]

    replay = device.capture([capture], 1)

    def replayed(*given: Tensor) -> Tensor:
        tokens.copy_(given[0])
        targets.copy_(given[1])
        replay()
        return losses[0]

    return replayed


def differences(trained: TrainedModel, twin: TrainedModel) -> int:
    """Counts this rank's losses and weights that differ in any bit from the twin's; collective."""
    unequal = int((torch.stack(trained.losses) != torch.stack(twin.losses)).sum())
    theirs = twin.weights()
    return unequal + sum(
        int((weight != theirs[name]).sum()) for name, weight in trained.weights().items()
    )


def twins(world: int, nodes: int) -> Mapping[str, str]:
    """Returns the systems that have a twin, with the twin's name."""
    pairs = PAIR_TWINS if world == 2 else {}
    mesh = MESH_TWINS if nodes == 2 and world // nodes <= 2 else {}
    return {**STAGE_TWINS, **pairs, **mesh}


Built = tuple[nn.Module, Any]
_CPU = torch.device("cpu")


def _zero(
    shape: Shape,
    stage: int,
    comm: ringcomm.Communicator,
    options: ringcomm.zero.ZeroOptions | None = None,
) -> Built:
    model = shape.model().to(comm.device, shape.dtype)
    module = ringcomm.zero.shard(model, stage, comm=comm, options=options)
    return module, OPTIMIZERS[shape.optimizer].ours(module)


def _with_torchs(shape: Shape, module: nn.Module) -> Built:
    make = OPTIMIZERS[shape.optimizer].torchs
    return module, make(module) if shape.dtype == torch.float32 else Masters(module, make)


def _ddp(shape: Shape, group: dist.ProcessGroup, device: torch.device = _CPU) -> Built:
    model, optimizer = _with_torchs(shape, shape.model().to(device, shape.dtype))
    how: Any = {"process_group": group, "gradient_as_bucket_view": True}
    return DistributedDataParallel(model, **how), optimizer


def _deepspeed(shape: Shape, stage: int) -> Built:
    model = shape.model().to(shape.dtype)
    optimizer = OPTIMIZERS[shape.optimizer].torchs(model)
    engine = training_deepspeed.Engine(model, optimizer, stage)
    return engine.module, engine


def _mesh(comm: ringcomm.Communicator, backend: str) -> DeviceMesh:
    """Returns the mesh of nodes by local ranks, whose groups use ``backend``; collective."""
    ranks_of = range(comm.world_size)
    nodes = [
        [rank for rank in ranks_of if comm.node_of(rank) == node] for node in range(comm.num_nodes)
    ]
    rails = [list(ranks) for ranks in zip(*nodes, strict=True)]
    divide: Any = dist.new_subgroups_by_enumeration
    groups = [divide(ranks, backend=backend)[0] for ranks in (rails, nodes)]
    names = ("replicate", "shard")
    return DeviceMesh.from_group(groups, "cpu", mesh=nodes, mesh_dim_names=names)


def _fsdp2(shape: Shape, mesh: DeviceMesh) -> Built:
    model = shape.model().to(mesh.device_type)
    policy = MixedPrecisionPolicy(None if shape.dtype == torch.float32 else shape.dtype)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model, OPTIMIZERS[shape.optimizer].torchs(model)


def _capturable(built: Built) -> Built:
    """Keeps the step count of torch's optimizer on the device, as a graph requires."""
    for group in getattr(built[1], "param_groups", ()):
        if "capturable" in group:
            group["capturable"] = True
    return built


def on_gpu(
    batches: Batches, comm: ringcomm.Communicator, system: str
) -> dict[str, Callable[[], Built]]:
    """Returns functions that build torch alone and one system of :data:`ON_GPU`; collective.

    If several sharded modules existed, the ranks would have to agree on their order in each
    backward, so a process builds only one of them.
    """
    shape, device = batches.shape, batches.device
    if system in STAGES:
        build = partial(_zero, shape, STAGES.index(system), comm)
    else:
        nccl = dist.new_group(backend=NCCL_BACKEND)
        build = partial(_ddp, shape, nccl, device)
        if system == FSDP2_NCCL:
            build = partial(_fsdp2, shape, DeviceMesh.from_group(nccl, device.type))
    return {
        TORCH_ALONE: lambda: _capturable(
            _with_torchs(shape, shape.model().to(device, shape.dtype))
        ),
        system: build,
    }


def _warm_up(batches: Batches, comm: ringcomm.Communicator) -> None:
    """Trains a tiny model, so that the memory of the first system has no cost of first calls.

    The first backward and the first optimizer of a process take about 30 MB. Collective.
    """
    tiny = batches._replace(shape=replace(batches.shape, width=32, depth=1, heads=1))
    TrainedModel(partial(_zero, tiny.shape, 0, comm), tiny).end()


def entrants(batches: Batches, comm: ringcomm.Communicator) -> dict[str, TrainedModel]:
    """Begins training on each system; ``batches`` is this rank's, ``comm`` has all ranks.
    Collective.
    """
    shape = batches.shape
    _warm_up(batches, comm)
    builds: dict[str, Callable[[], Built]] = {
        name: partial(_zero, shape, stage, comm) for stage, name in enumerate(STAGES)
    }
    builds[ARITHMETIC] = lambda: (shape.model().to(shape.dtype), None)
    gloo, here = (dist.new_group(backend=backend) for backend in ("gloo", "ringcomm"))
    builds |= {DDP: partial(_ddp, shape, gloo), DDP_HERE: partial(_ddp, shape, here)}
    if shape.optimizer not in TAKE_NO_SHARDS:
        builds[FSDP2] = lambda: _fsdp2(shape, DeviceMesh.from_group(gloo, "cpu"))
        builds[FSDP2_HERE] = lambda: _fsdp2(shape, DeviceMesh.from_group(here, "cpu"))
        if training_deepspeed.installed_version():
            training_deepspeed.begin(batches.rank)
            for name, stage in training_deepspeed.STAGES.items():
                builds[name] = partial(_deepspeed, shape, stage)
        if comm.num_nodes > 1:
            for name, (stage, how) in {
                **QUANTIZED_OVER_NODES,
                **UNCOMPRESSED_OVER_NODES,
            }.items():
                builds[name] = partial(_zero, shape, stage, comm, how)
            builds[HSDP] = lambda: _fsdp2(shape, _mesh(comm, "gloo"))
            builds[HSDP_HERE] = lambda: _fsdp2(shape, _mesh(comm, "ringcomm"))
    return {name: TrainedModel(build, batches) for name, build in builds.items()}
