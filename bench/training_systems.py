"""The systems that :mod:`.training` compares: one GPT, trained on the same text by each of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ringcomm
from ringcomm.examples.train_gpt import GPT, VOCABULARY, Corpus, ModelConfig, draw, held_bytes

from . import training_deepspeed

Tensor = torch.Tensor
DDP, DDP_HERE = "ddp on gloo", "ddp on ringcomm"
FSDP2, FSDP2_HERE = "fsdp2 on gloo", "fsdp2 on ringcomm"
HSDP, HSDP_HERE = "hsdp on gloo", "hsdp on ringcomm"
STAGES = tuple(f"stage {stage}" for stage in range(4))
# Over nodes stage 3 may keep state as HSDP does, with a copy on each node, or parameters as FSDP2.
STAGE_3_STATE_NODE, STAGE_3_PARAMS_WORLD = "stage 3 state=node", "stage 3 params=world"
# Gradients in codes, which have no twin: with them the updated parameters return as they are, or
# with copies of the state the sums do, in codes.
STAGE_2_CODED, STAGE_2_CODED_TWICE = "stage 2 wire=int8", "stage 2 wire=int8 state=node"
# And with the updated parameters in codes, too.
STAGE_2_CODED_PARAMS, STAGE_3_CODED_PARAMS = (
    f"stage {stage} wire=int8 parameters=fp8" for stage in (2, 3)
)
PLAIN = "torch alone"
# What no system can do without: the ranks share memory bandwidth and cores, but no gradients.
ARITHMETIC = "forward and backward"
# What reports call a training step.
TRAINING = "training_step"
TRACED_STEPS = 5
LEARNING_RATE = 1e-3
SEED = 0

# Whose losses and weights a system must have, to the bit: the stages those of stage 0; torch's
# wrappers those of the same wrapper on Gloo, and DeepSpeed's stages those of DDP, but only where
# each sum is of two ranks, since the sum of two numbers has one value whatever their order. HSDP's
# are over a node and then over nodes.
STAGE_TWINS = dict.fromkeys((*STAGES[1:], STAGE_3_STATE_NODE, STAGE_3_PARAMS_WORLD), STAGES[0])
PAIR_TWINS = {DDP_HERE: DDP, FSDP2_HERE: FSDP2, **dict.fromkeys(training_deepspeed.STAGES, DDP)}
MESH_TWINS = {HSDP_HERE: HSDP}


class Lion(torch.optim.Optimizer):
    """Lion as a user of torch would have it: its operations on lists of tensors."""

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
        self._module = module
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

    def zero_grad(self) -> None:
        self._module.zero_grad()


def _muon_groups(module: nn.Module) -> list[dict[str, Any]]:
    """AdamW steps the embedding, which is the head, too."""
    plain = module.module if isinstance(module, DistributedDataParallel) else module
    return ringcomm.optim.muon_groups(plain, adamw=("embed.weight",), weight_decay=0.01)


class Both:
    """Two optimizers that step one module, as torch's Muon asks for."""

    def __init__(self, module: nn.Module) -> None:
        muon, adamw = (
            {key: each for key, each in group.items() if key != "algorithm"}
            for group in _muon_groups(module)
        )
        self._optimizers = [
            torch.optim.Muon([muon], lr=LEARNING_RATE),
            torch.optim.AdamW([adamw], lr=LEARNING_RATE, fused=True),
        ]

    def step(self) -> None:
        for each in self._optimizers:
            each.step()

    def zero_grad(self) -> None:
        for each in self._optimizers:
            each.zero_grad()


@dataclass(frozen=True)
class Optimizers:
    """One kind of optimizer, by ringcomm and as users of torch have it.

    Attributes:
        ours: makes ringcomm's for a sharded module.
        torchs: makes torch's for a module.
        takes_shards: torch's takes the shards of FSDP2 and of DeepSpeed: fused SGD does not take
            FSDP2's, and Muon and Adafactor take neither.
    """

    ours: Callable[[nn.Module], Any]
    torchs: Callable[[nn.Module], Any]
    takes_shards: bool = True


SHARDED = (
    ringcomm.optim.AdamW,
    ringcomm.optim.AdamW8bit,
    ringcomm.optim.SGD,
    ringcomm.optim.Lion,
    ringcomm.optim.Muon,
    ringcomm.optim.Adafactor,
)
OPTIMIZERS = {
    "adamw": Optimizers(
        lambda module: ringcomm.optim.AdamW(module.parameters(), lr=LEARNING_RATE),
        lambda module: torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True),
    ),
    "adamw8bit": Optimizers(
        lambda module: ringcomm.optim.AdamW8bit(module.parameters(), lr=LEARNING_RATE),
        lambda module: torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True),
    ),
    "sgd": Optimizers(
        lambda module: ringcomm.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=0.9),
        lambda module: torch.optim.SGD(
            module.parameters(), lr=LEARNING_RATE, momentum=0.9, fused=True
        ),
        takes_shards=False,
    ),
    "lion": Optimizers(
        lambda module: ringcomm.optim.Lion(module.parameters(), lr=LEARNING_RATE),
        lambda module: Lion(module.parameters(), lr=LEARNING_RATE),
    ),
    "muon": Optimizers(
        lambda module: ringcomm.optim.Muon(_muon_groups(module), lr=LEARNING_RATE),
        Both,
        takes_shards=False,
    ),
    "adafactor": Optimizers(
        lambda module: ringcomm.optim.Adafactor(module.parameters(), lr=LEARNING_RATE),
        lambda module: torch.optim.Adafactor(module.parameters(), lr=LEARNING_RATE),
        takes_shards=False,
    ),
}


@dataclass(frozen=True)
class Shape:
    """A GPT with one weight for both ends, its batch, and the kind of its optimizer.

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
        """The number of elements that are trained."""
        return 12 * self.depth * self.width**2 + VOCABULARY * self.width

    def model(self) -> GPT:
        """Returns the model in FP32, with the same weights on every rank."""
        torch.manual_seed(SEED)
        return GPT(ModelConfig(self.width, self.depth, self.heads, self.context, tied=True))

    def __str__(self) -> str:
        kind = "" if self.optimizer == "adamw" else f", {self.optimizer}"
        return f"{self.width}x{self.depth}, {self.sequences}x{self.context} bytes a rank{kind}"


@dataclass(frozen=True)
class Batches:
    """The rows of each step's batch that are one rank's."""

    shape: Shape
    corpus: Corpus
    rank: int
    world: int
    device: torch.device

    def of(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, each int64 [sequences, context]."""
        rows, context = self.shape.sequences, self.shape.context
        tokens, targets = draw(self.corpus.train, SEED, step, (rows * self.world, context))
        own = slice(self.rank * rows, (self.rank + 1) * rows)
        return tokens[own].to(self.device), targets[own].to(self.device)


class Training:
    """A model that one system trains; a call is a step.

    Two steps are taken at once: the first builds what is built at a step, and the second what
    depends on that.

    Attributes:
        module: the model, as the system wraps it.
        losses: of this rank's rows, one FP32 scalar a step.
        held_bytes: what training adds to this rank's memory, between the backward and the
            optimizer's step.
    """

    def __init__(self, build: Callable[[], tuple[nn.Module, Any]], batches: Batches) -> None:
        before_bytes = held_bytes(batches.device, trim=True)
        self.module, self._optimizer = build()
        self._batches = batches
        self.losses: list[Tensor] = []
        self()
        self._backward()
        self.held_bytes = held_bytes(batches.device, trim=True) - before_bytes
        self._update()

    def __call__(self) -> None:
        self._backward()
        self._update()

    def _backward(self) -> None:
        tokens, targets = self._batches.of(len(self.losses))
        # On a GPU matrices are multiplied in bfloat16, as training does it.
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            loss = self.module(tokens, targets)
        if isinstance(self._optimizer, training_deepspeed.Engine):
            self._optimizer.backward(loss)
        else:
            loss.backward()
        self.losses.append(loss.detach())

    def _update(self) -> None:
        if self._optimizer is None:
            self.module.zero_grad()
            return
        self._optimizer.step()
        self._optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        """Returns what this rank can compare of the weights: all, or under FSDP2 its shards.

        Collective.
        """
        if isinstance(self._optimizer, SHARDED):
            return ringcomm.zero.full_state_dict(self.module)
        if isinstance(self._optimizer, training_deepspeed.Engine):
            return self._optimizer.weights()
        found = {}
        for name, param in self.module.named_parameters():
            data = param.detach()
            found[name] = data.to_local() if isinstance(data, DTensor) else data
        return found


def differences(trained: Training, twin: Training) -> int:
    """Counts this rank's losses and weights that differ in any bit from the twin's; collective."""
    unequal = int((torch.stack(trained.losses) != torch.stack(twin.losses)).sum())
    theirs = twin.weights()
    return unequal + sum(
        int((weight != theirs[name]).sum()) for name, weight in trained.weights().items()
    )


def twins(world: int, nodes: int) -> Mapping[str, str]:
    """The systems whose losses and weights must be another's, and that other's name."""
    pairs = PAIR_TWINS if world == 2 else {}
    mesh = MESH_TWINS if nodes == 2 and world // nodes <= 2 else {}
    return {**STAGE_TWINS, **pairs, **mesh}


def profiled_steps(
    batches: Batches, stage: int, comm: ringcomm.Communicator
) -> ringcomm.zero.StepProfile:
    """Profiles a few steps of a stage that overlaps: its communication, and waits for that."""
    options = ringcomm.zero.ZeroOptions(overlap=True)
    training = Training(lambda: _zero(batches.shape, stage, comm, options), batches)
    with ringcomm.zero.profiled(training.module) as profile:
        for _ in range(TRACED_STEPS):
            with profile.span("step", kind="compute"):
                training()
    return profile


Built = tuple[nn.Module, Any]


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


def _ddp(shape: Shape, group: dist.ProcessGroup) -> Built:
    model = shape.model().to(shape.dtype)
    module = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    made = _with_torchs(shape, model)[1]
    return module, made


def _deepspeed(shape: Shape, stage: int) -> Built:
    model = shape.model().to(shape.dtype)
    optimizer = OPTIMIZERS[shape.optimizer].torchs(model)
    engine = training_deepspeed.Engine(model, optimizer, stage)
    return engine.module, engine


def _mesh(comm: ringcomm.Communicator, backend: str) -> DeviceMesh:
    """Returns the mesh of nodes by places, whose groups are of ``backend``; collective."""
    nodes: list[list[int]] = [[] for _ in range(comm.num_nodes)]
    for rank in range(comm.world_size):
        nodes[comm.node_of(rank)].append(rank)
    rails = [list(ranks) for ranks in zip(*nodes, strict=True)]
    divide: Any = dist.new_subgroups_by_enumeration
    groups = [divide(ranks, backend=backend)[0] for ranks in (rails, nodes)]
    names = ("replicate", "shard")
    return DeviceMesh.from_group(groups, "cpu", mesh=nodes, mesh_dim_names=names)


def _fsdp2(shape: Shape, mesh: DeviceMesh) -> Built:
    model = shape.model()
    in_16_bits = shape.dtype != torch.float32
    policy = MixedPrecisionPolicy(param_dtype=shape.dtype if in_16_bits else None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, OPTIMIZERS[shape.optimizer].torchs(model)


def _over_nodes(shape: Shape, comm: ringcomm.Communicator) -> dict[str, Callable[[], Built]]:
    """Returns the systems that there are over several nodes alone."""
    state_node = ringcomm.zero.ZeroOptions(state="node")
    params_world = ringcomm.zero.ZeroOptions(params="world")
    coded = ringcomm.zero.ZeroOptions(wire=ringcomm.zero.Wire(gradients="int8"))
    coded_twice = replace(coded, state="node")
    coded_params = replace(coded, wire=ringcomm.zero.Wire(gradients="int8", parameters="fp8"))
    return {
        STAGE_2_CODED: lambda: _zero(shape, 2, comm, coded),
        STAGE_2_CODED_TWICE: lambda: _zero(shape, 2, comm, coded_twice),
        STAGE_2_CODED_PARAMS: lambda: _zero(shape, 2, comm, coded_params),
        STAGE_3_CODED_PARAMS: lambda: _zero(shape, 3, comm, coded_params),
        STAGE_3_STATE_NODE: lambda: _zero(shape, 3, comm, state_node),
        STAGE_3_PARAMS_WORLD: lambda: _zero(shape, 3, comm, params_world),
        HSDP: lambda: _fsdp2(shape, _mesh(comm, "gloo")),
        HSDP_HERE: lambda: _fsdp2(shape, _mesh(comm, "ringcomm")),
    }


def entrants(batches: Batches, comm: ringcomm.Communicator, *, alone: bool) -> dict[str, Training]:
    """Begins training on each system; collective.

    Args:
        batches: of this rank.
        comm: of all ranks.
        alone: they compete with torch without communication, as on a GPU, and not with Gloo.
    """
    shape, device = batches.shape, batches.device
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # loads 80 MB that are no model's
    builds: dict[str, Callable[[], Built]] = {
        name: lambda stage=stage: _zero(shape, stage, comm)  # type: ignore[misc]
        for stage, name in enumerate(STAGES)
    }
    if alone:
        builds[PLAIN] = lambda: _with_torchs(shape, shape.model().to(device, shape.dtype))
    else:
        builds[ARITHMETIC] = lambda: (shape.model().to(shape.dtype), None)
        gloo, here = (dist.new_group(backend=backend) for backend in ("gloo", "ringcomm"))
        builds[DDP] = lambda: _ddp(shape, gloo)
        builds[DDP_HERE] = lambda: _ddp(shape, here)
        takes_shards = OPTIMIZERS[shape.optimizer].takes_shards
        if takes_shards:
            builds[FSDP2] = lambda: _fsdp2(shape, DeviceMesh.from_group(gloo, "cpu"))
            builds[FSDP2_HERE] = lambda: _fsdp2(shape, DeviceMesh.from_group(here, "cpu"))
            if training_deepspeed.installed_version():
                training_deepspeed.begin(batches.rank)
                for name, stage in training_deepspeed.STAGES.items():
                    builds[name] = lambda stage=stage: _deepspeed(shape, stage)  # type: ignore[misc]
        if comm.num_nodes > 1 and takes_shards:
            builds |= _over_nodes(shape, comm)
    return {name: Training(build, batches) for name, build in builds.items()}
