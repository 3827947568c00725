"""The systems that :mod:`.training` compares: one GPT, trained on the same text by each of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
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
# with copies of the state the sums do, in codes; or the updated parameters are in codes, too.
STAGE_2_CODED, STAGE_2_CODED_TWICE = "stage 2 wire=int8", "stage 2 wire=int8 state=node"
STAGE_2_CODED_PARAMS, STAGE_3_CODED_PARAMS = (
    f"stage {stage} wire=int8 parameters=fp8" for stage in (2, 3)
)
PLAIN = "torch alone"
# No system can do without: the ranks share memory bandwidth and cores, but no gradients.
ARITHMETIC = "forward and backward"
# The name of a training step in reports.
TRAINING = "training_step"
TRACED_STEPS = 5
LEARNING_RATE = 1e-3
SEED = 0

# Each system, and the one whose losses and weights it must have to the bit. DeepSpeed's stages and
# torch's wrappers only where each sum is of two ranks, since the sum of two numbers has one value
# whatever their order. HSDP's are over a node and then over nodes.
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
    """One kind of optimizer, by ringcomm for a sharded module, and as users of torch have it.

    Attributes:
        takes_shards: torch's takes the shards of FSDP2 and of DeepSpeed: fused SGD does not take
            FSDP2's, and Muon and Adafactor take neither.
    """

    ours: Callable[[nn.Module], Any]
    torchs: Callable[[nn.Module], Any]
    takes_shards: bool = True


def _stepping(make: Any, **how: Any) -> Callable[[nn.Module], Any]:
    return lambda module: make(module.parameters(), lr=LEARNING_RATE, **how)


_of = ringcomm.optim
SHARDED = (_of.AdamW, _of.AdamW8bit, _of.SGD, _of.Lion, _of.Muon, _of.Adafactor)
_ADAMW, _SGD = _stepping(torch.optim.AdamW, fused=True), {"momentum": 0.9}
OPTIMIZERS = {
    "adamw": Optimizers(_stepping(_of.AdamW), _ADAMW),
    "adamw8bit": Optimizers(_stepping(_of.AdamW8bit), _ADAMW),
    "sgd": Optimizers(
        _stepping(_of.SGD, **_SGD),
        _stepping(torch.optim.SGD, fused=True, **_SGD),
        takes_shards=False,
    ),
    "lion": Optimizers(_stepping(_of.Lion), _stepping(Lion)),
    "muon": Optimizers(
        lambda module: _of.Muon(_muon_groups(module), lr=LEARNING_RATE), Both, takes_shards=False
    ),
    "adafactor": Optimizers(
        _stepping(_of.Adafactor), _stepping(torch.optim.Adafactor), takes_shards=False
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
    options, wire = ringcomm.zero.ZeroOptions, ringcomm.zero.Wire
    coded = options(wire=wire(gradients="int8"))
    coded_params = options(wire=wire(gradients="int8", parameters="fp8"))
    stages = {
        STAGE_2_CODED: (2, coded),
        STAGE_2_CODED_TWICE: (2, replace(coded, state="node")),
        STAGE_2_CODED_PARAMS: (2, coded_params),
        STAGE_3_CODED_PARAMS: (3, coded_params),
        STAGE_3_STATE_NODE: (3, options(state="node")),
        STAGE_3_PARAMS_WORLD: (3, options(params="world")),
    }
    return {
        **{name: partial(_zero, shape, stage, comm, how) for name, (stage, how) in stages.items()},
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
    builds: dict[str, Callable[[], Built]] = {
        name: partial(_zero, shape, stage, comm) for stage, name in enumerate(STAGES)
    }
    if alone:
        builds[PLAIN] = lambda: _with_torchs(shape, shape.model().to(device, shape.dtype))
    else:
        builds[ARITHMETIC] = lambda: (shape.model().to(shape.dtype), None)
        gloo, here = (dist.new_group(backend=backend) for backend in ("gloo", "ringcomm"))
        builds |= {DDP: partial(_ddp, shape, gloo), DDP_HERE: partial(_ddp, shape, here)}
        if OPTIMIZERS[shape.optimizer].takes_shards:
            builds[FSDP2] = lambda: _fsdp2(shape, DeviceMesh.from_group(gloo, "cpu"))
            builds[FSDP2_HERE] = lambda: _fsdp2(shape, DeviceMesh.from_group(here, "cpu"))
            if training_deepspeed.installed_version():
                training_deepspeed.begin(batches.rank)
                for name, stage in training_deepspeed.STAGES.items():
                    builds[name] = partial(_deepspeed, shape, stage)
            if comm.num_nodes > 1:
                builds |= _over_nodes(shape, comm)
    return {name: Training(build, batches) for name, build in builds.items()}
