# SPDX-License-Identifier: Apache-2.0
"""Unsupported modules are refused with a reason; unusual modules that are supported train right."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from ringcomm import zero
from ringcomm.errors import ArgumentError, MismatchError, UnsupportedError
from ringcomm.optim import AdamW, AdamWOptions
from ringcomm.zero.stages.resharded import Resharded
from tests.support.covering import covering, in_test_all
from tests.zero.models import assert_same_bits

Tensor = torch.Tensor
STAGES = [1, 3, *in_test_all(0, 2)]
BF16 = zero.ZeroOptions(precision=zero.Precision(param=torch.bfloat16, buffer=torch.bfloat16))


@pytest.fixture
def mesh():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def refuse(worlds, module: nn.Module, error: type[Exception], match: str, stage: int = 2) -> None:
    def work(comm):
        with pytest.raises(error, match=match):
            zero.shard(module, stage, comm=comm)

    worlds(1).run(work)


def test_a_module_of_fsdp2(worlds, mesh):
    module = nn.Sequential(nn.Linear(4, 4))
    fully_shard(module[0], mesh=mesh)
    refuse(worlds, module, ArgumentError, r"module '0' is sharded by fully_shard\(\).*use only one")


def test_a_module_whose_shapes_are_not_known_yet(worlds):
    module = nn.Sequential(nn.LazyLinear(4))
    refuse(worlds, module, ArgumentError, r"parameter 0\.weight has no shape yet.*run the module")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_writes_to_its_weight_in_forward(worlds, stage, kind):
    module = nn.Sequential(kind(5, 4, max_norm=1.0))
    refuse(worlds, module, UnsupportedError, r"module '0'.*max_norm=1\.0.*after each step", stage)
    assert type(module[0].weight) is nn.Parameter


class Wrapping(torch.Tensor):
    """A tensor subclass of 8-bit values and a scale, like torchao's quantized weights."""

    values_8bit: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, values, scale):
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)
        made.values_8bit, made.scale = values, scale
        return made

    def __tensor_flatten__(self):
        return ["values_8bit", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values_8bit, args[0].scale)
        args = [each.values_8bit * each.scale if type(each) is cls else each for each in args]
        return func(*args, **(kwargs or {}))


def fake(values):
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty_like(values)


WITHOUT_MEMORY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Wrapping": lambda values: Wrapping(values.to(torch.int8), torch.tensor(0.5)),
    "FakeTensor": fake,
    r"torch\.qint8": lambda values: torch.quantize_per_tensor(values, 0.1, 0, torch.qint8),
    r"torch\.sparse_coo": lambda values: values.to_sparse(),
    r"torch\.sparse_csr": lambda values: values.to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:Sparse CSR")
@covering(strength=1, kind=[*WITHOUT_MEMORY], stage=range(4))
def test_parameters_without_memory_of_their_own(worlds, stage, kind):
    """Such parameters are refused by name and class, unless the user lists them in ``ignored``."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[0].weight = nn.Parameter(WITHOUT_MEMORY[kind](torch.ones(4, 4)), requires_grad=False)
    match = rf"parameter 0\.weight: expected a dense tensor.*{kind}.*ignored=\('0\.weight',\)"
    refuse(worlds, module, UnsupportedError, match, stage)

    def work(comm):
        zero.shard(module, stage, comm=comm, options=zero.ZeroOptions(ignored=("0.weight",)))

    worlds(1).run(work)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_frozen_parameters_of_other_dtypes_are_not_cast(worlds, stage, dtype):
    def work(comm):
        module: Any = nn.Linear(4, 4)
        module.scale = nn.Parameter(torch.ones(3).to(dtype), requires_grad=False)
        zero.shard(module, stage, comm=comm, options=BF16)
        with zero.unsharded(module):
            assert module.scale.dtype is dtype
            assert module.weight.dtype is torch.bfloat16

    worlds(1).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_a_buffer_of_two_modules_stays_one(worlds, stage):
    def work(comm):
        module: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        table = torch.full((3,), comm.rank + 1.0)
        for child in module:
            child.register_buffer("table", table)
        zero.shard(module, stage, comm=comm, options=BF16)
        assert module[0].table is module[1].table
        assert module[0].table.dtype is torch.bfloat16
        assert module[0].table.tolist() == [1.0] * 3

    worlds(2).run(work)


def test_a_frozen_parameter_that_no_step_could_take():
    module = nn.Linear(4, 4)
    module.register_parameter("code", nn.Parameter(torch.ones(2, dtype=torch.uint8), False))
    with pytest.raises(ArgumentError, match=r"torch\.uint8.*frozen.*if p\.requires_grad"):
        AdamW(module.parameters())


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_torchs_own_scaler_on_one_rank(worlds, stage, unscales):
    def work(comm):
        module = zero.shard(nn.Linear(4, 4), stage, comm=comm)
        optimizer = AdamW(module.parameters())
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(module(torch.ones(1, 4)).sum()).backward()
        with pytest.raises(UnsupportedError, match=r"use ringcomm\.optim\.GradScaler"):
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)

    worlds(1).run(work)


@covering(strength=1, stage=STAGES, world_size=[1, 2], unused=["skip", "zero"])
def test_freezing_and_unfreezing_after_shard(worlds, world_size, stage, unused):
    """A frozen parameter takes no step, as in one process; a whole unit or a part may freeze."""
    base = nn.Sequential(*(nn.Linear(20, 20) for _ in range(3)))

    def turns(module: Any, optimizer: Any) -> None:
        params = dict(module.named_parameters())
        for turn in range(4):
            for name in ("0.weight", "0.bias", "1.weight"):
                params[name].requires_grad_(turn not in (0, 2))
            module(torch.ones(2, 20) + turn).square().mean().backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()

    reference = deepcopy(base)
    alone = AdamW(reference.parameters(), lr=0.1, comm="alone")
    alone.prepare()
    turns(reference, alone)

    def work(comm):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm)
        module[0].requires_grad_(False)
        options = AdamWOptions(unused=unused)
        turns(module, AdamW(module.parameters(), lr=0.1, options=options))
        return zero.full_state_dict(module)

    for state in worlds(world_size).run(work):
        assert_same_bits(state, dict(reference.state_dict()))


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_freeze_differently_take_no_step(worlds, stage):
    def work(comm):
        module: Any = zero.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), stage, comm=comm)
        optimizer = AdamW(module.parameters(), lr=0.1)
        before = zero.full_state_dict(module)
        params = dict(module.named_parameters())
        params["0.weight"].requires_grad_(comm.rank == 0)
        module(torch.ones(2, 4)).sum().backward()
        with pytest.raises(MismatchError, match=r"frozen parameters is .* \(0\.weight\)"):
            optimizer.step()
        assert_same_bits(zero.full_state_dict(module), before)

    worlds(2).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_from_before_a_parameter_was_frozen(worlds, stage):
    def work(comm):
        module: Any = zero.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), stage, comm=comm)
        optimizer = AdamW(module.parameters(), lr=0.1)
        module(torch.ones(2, 4)).sum().backward()
        module.requires_grad_(False)
        with pytest.raises(ArgumentError, match=r"frozen after its gradient .* zero_grad\(\)"):
            optimizer.step()
        optimizer.zero_grad()
        before = zero.full_state_dict(module)
        optimizer.step()
        assert_same_bits(zero.full_state_dict(module), before)

    worlds(2).run(work)


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_hook_from_before_shard_sees_every_gradient(worlds, stage):
    def work(comm):
        module, seen = nn.Linear(4, 4), []
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
        zero.shard(module, stage, comm=comm)
        for _ in range(2):
            module(torch.ones(2, 4)).sum().backward()
        assert seen == [True] * 4

    worlds(1).run(work)


class Tanh(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


@pytest.mark.parametrize("stage", STAGES)
def test_parts_of_torchscript(worlds, stage):
    """TorchScript parts with tensors are refused by name; parts without tensors train right."""
    for part in (
        torch.jit.script(nn.Linear(4, 4)),
        torch.jit.trace(nn.Linear(4, 4), torch.ones(4)),
    ):
        module = nn.Sequential(nn.Linear(4, 4), part)
        match = r"module '1' is a \w+ of TorchScript with parameter 'weight'.*torch\.compile\(\)"
        refuse(worlds, module, UnsupportedError, match, stage)
    refuse(worlds, torch.jit.script(nn.Linear(4, 4)), UnsupportedError, "of TorchScript", stage)

    def work(comm):
        module: Any = nn.Sequential(nn.Linear(4, 4), torch.jit.script(Tanh()))
        zero.shard(module, stage, comm=comm)
        optimizer = AdamW(module.parameters())
        module(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        with zero.unsharded(module, write_from=0):
            module.load_state_dict(module.state_dict())
        zero.remove_sharding(module.to("cpu"))

    worlds(1).run(work)


# ---- modules that stage 3 could break: the memory of their parameters comes and goes -----------

# Without prefetch, so that no parameter is present only because it came early.
ALONE = zero.ZeroOptions(bucket_elems=512, prefetch=0)


class InPlace(nn.Module):
    """In-place activations change a layer's output, which is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8), nn.ReLU(inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.view(2, 2, 8))


class Table(nn.Module):
    """A module that returns its parameter, or a view of it."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))
        self.cut = cut

    def forward(self) -> Any:
        return {"all": self.weight[:4] if self.cut else self.weight}


class Positions(nn.Module):
    def __init__(self, cut: bool = True) -> None:
        super().__init__()
        self.table = Table(cut)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.table()["all"])


class Detached(nn.Module):
    """The weight gets its gradient before another node, which reads it detached, has run."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.weight.detach()).tanh(), self.weight)


class Prefixed(nn.Module):
    """A trained parameter passes through a frozen layer before the input does."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.Parameter(torch.randn(2, 8, 5))
        self.turn = nn.Linear(5, 5)
        self.frozen = nn.Conv1d(8, 8, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.frozen(self.turn(self.frozen(self.prefix)).tanh()).mean()
        return x + self.frozen(x.unsqueeze(-1)).squeeze(-1) * scale


class Nested(nn.Module):
    """A checkpoint inside a checkpoint, with in-place changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return F.relu_(self.layers[1](F.relu_(self.layers[0](x))))

        def outer(x: Tensor) -> Tensor:
            return x + checkpoint(inner, x, use_reentrant=False)

        return self.layers[2](checkpoint(outer, x.view(2, 2, 8), use_reentrant=False))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "changed in place": InPlace,
    "returns a view": Positions,
    "returns a parameter": lambda: Positions(cut=False),
    "detached weight": lambda: nn.Sequential(nn.Linear(8, 8), Detached(), nn.Linear(8, 4)),
    "frozen prefix": lambda: nn.Sequential(nn.Linear(8, 8), Prefixed(), Prefixed()),
    "nested checkpoints": Nested,
    "attention": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2
    ),
    "parametrized": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 8)
    ),
}


def rows(comm, turn: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * turn + comm.rank))


def train(comm, base: nn.Module, stage: int, backward: Any) -> dict[str, Tensor]:
    module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=ALONE)
    optimizer = AdamW([param for param in module.parameters() if param.requires_grad], lr=1e-2)
    for turn in range(3):
        optimizer.zero_grad()
        backward(module, rows(comm, turn))
        optimizer.step()
        module.eval()
        with torch.no_grad():
            assert module(rows(comm, turn)).isfinite().all()
        module.train()
    return zero.full_state_dict(module)


def step_usually(module: nn.Module, x: Tensor) -> None:
    module(x).square().mean().backward()


@pytest.mark.parametrize("kind", MODULES)
def test_stage_3_trains_as_stage_1_does(worlds, kind):
    torch.manual_seed(3)
    base = MODULES[kind]()
    wanted = worlds(2).run(train, base, 1, step_usually)[0]
    for found in worlds(2).run(train, base, 3, step_usually):
        assert_same_bits(found, wanted)


def _gradient_of_a_gradient(module: nn.Module, x: Tensor) -> None:
    x.requires_grad_()
    (grad,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    other = module(x.detach() + 1.0)
    grad.square().sum().backward()
    other.square().mean().backward()


def _looking_meanwhile(module: nn.Module, x: Tensor) -> None:
    """Reads all parameters while backward is inside a unit."""

    def look(grad: Tensor) -> None:
        if "_ringcomm_engine" in vars(module):
            zero.full_state_dict(module)

    def watch(_: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(look)

    # Hooked between the layers of a unit.
    handle = module[1][1].register_forward_hook(watch)  # type: ignore[index]
    step_usually(module, x)
    handle.remove()


@pytest.mark.parametrize("backward", [_gradient_of_a_gradient, _looking_meanwhile])
def test_unusual_backwards_find_their_parameters(worlds, backward):
    torch.manual_seed(3)
    base = nn.Sequential(
        nn.Linear(8, 16),
        nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()),
        nn.Linear(16, 4),
    )
    wanted = worlds(2).run(train, base, 2, backward)[0]
    for found in worlds(2).run(train, base, 3, backward):
        assert_same_bits(found, wanted)


def test_a_graph_of_gradients_keeps_parameters_until_the_step(worlds):
    def work(comm):
        module: Any = zero.shard(nn.Linear(8, 8), 3, comm=comm)
        optimizer = AdamW(module.parameters())
        x = torch.ones(2, 8, requires_grad=True)
        torch.autograd.grad(module(x).sum(), x, create_graph=True)
        assert not any(isinstance(param, Resharded) for param in module._parameters.values())
        optimizer.step()
        assert all(isinstance(param, Resharded) for param in module.parameters())

    worlds(1).run(work)


def test_a_weight_that_was_looked_up_outlives_the_call_of_its_module(worlds):
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            weight = self.embed.weight
            return F.linear(self.embed(tokens), weight)

    def work(comm):
        module = zero.shard(deepcopy(base), 3, comm=comm)
        for _ in range(2):
            with torch.no_grad():
                assert torch.equal(module(torch.arange(3)), base(torch.arange(3)))
        assert all(isinstance(param, Resharded) for param in module.parameters())

    base = Both()
    worlds(1).run(work)


def test_a_returned_parameter_that_cannot_be_copied(worlds):
    class Holder:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    class Hidden(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return Holder(self.weight[:1])

    def work(comm):
        module = zero.shard(nn.Sequential(Hidden(8, 8)), 3, comm=comm)
        with pytest.raises(UnsupportedError, match=r"module '0' returned .* inside a Holder"):
            module(torch.ones(1, 8))

    worlds(1).run(work)


def test_outputs_that_refer_to_each_other(worlds):
    class Chained(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            chain: list[Any] = [super().forward(x)]
            chain.append(chain)
            return chain

    def work(comm):
        module = zero.shard(Chained(8, 8), 3, comm=comm)
        module(torch.ones(1, 8))[0].sum().backward()
        assert all(isinstance(param, Resharded) for param in module.parameters())

    worlds(1).run(work)
