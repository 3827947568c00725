# SPDX-License-Identifier: Apache-2.0
"""NOTE [Names without wrappers]: files hold no wrappers' names, and fit wrapped modules too."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ringcomm import module_names, zero
from ringcomm.errors import CheckpointError
from ringcomm.module_names import KnownNames, unwrapped_name, without_wrappers
from ringcomm.optim import AdamW
from ringcomm.zero.checkpoint import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from tests.support.covering import in_test_all
from tests.zero.models import assert_same_bits

Tensor = torch.Tensor


class Honest(nn.Module):
    """A model with a buffer, and with a child that is itself called "module", like DDP's child."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(6, 6)
        self.register_buffer("scale", torch.full((2,), 3.0))

    def get_extra_state(self) -> Any:
        return {"calls": 4}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"calls": 4}

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale
        assert isinstance(scale, Tensor)
        return self.module(x) * scale[0]


def new(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(5, 6), Honest(), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    )
    model[2][0].weight = model[1].module.weight  # type: ignore[index]
    return model


def each(model: nn.Sequential, wrap: Callable[[Any], Any]) -> nn.Sequential:
    for index in (0, 1, 2):
        model[index] = wrap(model[index])
    return model


def compiled(module: Any) -> Any:
    return torch.compile(module, backend="eager")


WRAPPED: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "plain": lambda model: model,
    "checkpoint": lambda model: each(model, checkpoint_wrapper),
    "compile": lambda model: each(model, compiled),
    "both": lambda model: each(model, lambda m: compiled(checkpoint_wrapper(m))),
    "parallel": lambda model: each(model, nn.DataParallel),
    "root": lambda model: checkpoint_wrapper(each(model, compiled)),
    "compiled root": lambda model: compiled(each(model, checkpoint_wrapper)),
}
NAMES = list(new().state_dict())
TENSORS = [name for name in NAMES if not name.endswith("_extra_state")]
FIRST = [name for name in TENSORS if name != "2.0.weight"]


def wrapped(kind: str, seed: int = 0) -> Any:
    return WRAPPED[kind](new(seed))


def trained(kind: str, stage: int, comm: Any, seed: int = 0) -> tuple[Any, AdamW]:
    """Returns a sharded module after a step, with its optimizer."""
    module = zero.shard(wrapped(kind, seed), stage, comm=comm)
    optimizer = AdamW(module.parameters(), lr=1e-2, comm=comm)
    module(torch.ones(3, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


@pytest.fixture
def old_names(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Returns a context manager in which names keep wrappers, as in earlier releases."""

    def context() -> Any:
        patch = pytest.MonkeyPatch.context()

        class Old:
            def __enter__(self) -> None:
                patch.__enter__().setattr(module_names, "unwrapped_name", lambda root, name: name)

            def __exit__(self, *error: Any) -> None:
                patch.__exit__(*error)

        return Old()

    return context


@pytest.mark.parametrize(
    "kind",
    ["both", "parallel", "root", *in_test_all("plain", "checkpoint", "compile", "compiled root")],
)
def test_files_have_unwrapped_names(worlds, tmp_path, kind):
    """Every function that names tensors writes unwrapped names, which fit unwrapped models."""

    def work(comm: Any, stage: int) -> Any:
        folder = tmp_path / str(stage)
        module, optimizer = trained(kind, stage, comm)
        state = zero.full_state_dict(module)
        assert list(state) == NAMES
        with zero.unsharded(module):
            assert list(module.state_dict()) == NAMES
        zero.save(folder / "run", 1, module, optimizer)
        zero.save_pretrained(module, folder / "weights")
        assert sorted(zero.local_shards(module)) == sorted(set(FIRST) - {"1.scale"})
        if comm.rank == 0:
            zero.export_safetensors(folder / "run" / "step-00000001", folder / "exported")
            for each in ("weights", "exported"):
                assert sorted(load_file(folder / each / "model.safetensors")) == sorted(TENSORS)
        comm.barrier()
        other, of_other = trained("plain", 3 - stage, comm, seed=1)
        zero.load(folder / "run", other, of_other)
        loaded = zero.full_state_dict(other)
        zero.load_pretrained(other, folder / "weights")
        tensors = {name: state[name] for name in TENSORS}
        assert_same_bits({name: loaded[name] for name in TENSORS}, tensors)
        states = [each.full_state_dict() for each in (optimizer, of_other)]
        assert_same_bits(*({str(n): s["exp_avg"] for n, s in x["state"].items()} for x in states))

    for stage in (1, 3) if kind == "both" else (3,):
        worlds(2).run(lambda comm, stage=stage: work(comm, stage))


@pytest.mark.parametrize(
    ("stage", "kind"),
    [(1, "both"), (3, "compiled root"), *in_test_all(*((3, kind) for kind in WRAPPED))],
)
def test_files_of_other_wrappers_are_read(worlds, tmp_path, old_names, kind, stage):
    """Checkpoints, weights and state dicts of earlier releases load into each kind of module."""
    raw = wrapped(kind).state_dict()
    save_file({n: raw[n].clone() for n in raw if "_extra" not in n}, tmp_path / "raw.safetensors")

    def save(comm: Any) -> Any:
        module, optimizer = trained(kind, stage, comm)
        zero.save(tmp_path / "run", 1, module, optimizer)
        return module, optimizer

    with old_names():
        saved = worlds(2).run(lambda comm: zero.full_state_dict(save(comm)[0]))[0]
    expected = dict(zip(NAMES, saved.values(), strict=True))

    def load(comm: Any, into: str, strict: bool) -> Any:
        module, optimizer = trained(into, 4 - stage, comm, seed=1)
        if strict:
            zero.load(tmp_path / "run", module, optimizer)
        else:
            loaded = zero.load(tmp_path / "run", module, strict=False)
            assert not loaded.missing_keys and not loaded.unexpected_keys
        state = zero.full_state_dict(module)
        assert_same_bits({n: state[n] for n in TENSORS}, {n: expected[n] for n in TENSORS})
        assert not any(zero.load_pretrained(module, tmp_path / "raw.safetensors"))
        for names in (NAMES, list(raw)):
            values = [torch.full_like(raw[n], 2) if "_extra" not in n else raw[n] for n in raw]
            with zero.unsharded(module, write_from=0):
                module.load_state_dict(dict(zip(names, values, strict=True)))
            assert all(
                (v == 2).all() for n, v in zero.full_state_dict(module).items() if n in TENSORS
            )

    for into in ("plain", "both", "parallel", "root"):
        worlds(2).run(lambda comm, into=into: load(comm, into, into != "root"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("kind", "old"), [("checkpoint", True), ("both", False)])
def test_through_torch(worlds, tmp_path, old_names, kind, old):
    def save(comm: Any) -> Any:
        module, optimizer = trained(kind, 3, comm)
        state = {"train": zero.TrainState(module, optimizer)}
        writer = StorageWriter(tmp_path / "step-00000001")
        dcp.save(state, storage_writer=writer, planner=SavePlanner(), no_dist=True)
        return zero.full_state_dict(module)

    with old_names() if old else nullcontext():
        saved = worlds(1).run(save)[0]

    def load(comm: Any, into: str) -> None:
        module, optimizer = trained(into, 2, comm, seed=1)
        state = {"train": zero.TrainState(module, optimizer)}
        reader = StorageReader(tmp_path / "step-00000001")
        dcp.load(state, storage_reader=reader, planner=LoadPlanner(), no_dist=True)
        found = zero.full_state_dict(module)
        assert all(
            torch.equal(found[n], v)
            for n, v in zip(NAMES, saved.values(), strict=True)
            if n in TENSORS
        )

    for into in ("plain", "checkpoint", "parallel"):
        worlds(1).run(lambda comm, into=into: load(comm, into))


def test_exports_of_old_checkpoints_have_unwrapped_names(worlds, tmp_path, old_names):
    with old_names():
        worlds(1).run(lambda comm: zero.save(tmp_path, 1, *trained("both", 3, comm)) and None)
    zero.export_safetensors(tmp_path / "step-00000001", tmp_path / "all")
    assert sorted(load_file(tmp_path / "all" / "model.safetensors")) == sorted(TENSORS)
    names = ["0.weight", "1._orig_mod.module.bias"]
    zero.export_safetensors(tmp_path / "step-00000001", tmp_path / "two", names=names)
    assert sorted(load_file(tmp_path / "two" / "model.safetensors")) == [
        "0.weight",
        "1.module.bias",
    ]


def test_options_name_modules_without_wrappers(worlds):
    """``units``, ``per_unit``, ``ignored`` and ``keep_fp32`` accept unwrapped module names."""

    def work(comm: Any, kind: str) -> Any:
        options = zero.ZeroOptions(
            units=lambda name, module: name in ("0", "2.0"),
            per_unit={"2.0": zero.UnitOptions(reshard_after_forward=False)},
            ignored=("1.module.bias",),
            precision=zero.Precision(param=torch.bfloat16, keep_fp32=("0",)),
        )
        module = zero.shard(wrapped(kind), 3, comm=comm, options=options)
        return {name: shard.values.dtype for name, shard in zero.local_shards(module).items()}

    expected = worlds(2).run(lambda comm: work(comm, "plain"))
    assert expected[0]["0.weight"] is torch.float32
    for kind in WRAPPED:
        assert worlds(2).run(lambda comm, kind=kind: work(comm, kind)) == expected


def test_other_names_are_still_refused(worlds, tmp_path):
    """A child called "module" without a wrapper keeps its place in the name."""
    values = {name: value for name, value in new().state_dict().items() if name in TENSORS}
    values["1.weight"] = values.pop("1.module.weight").clone()
    values["2.0.weight"] = values["2.0.weight"].clone()
    save_file(values, tmp_path / "other.safetensors")

    def work(comm: Any) -> None:
        module = zero.shard(new(), 3, comm=comm)
        with pytest.raises(CheckpointError, match=r"the module has no '1\.weight'"):
            zero.load_pretrained(module, tmp_path / "other.safetensors")

    worlds(1).run(work)


def test_names():
    counting = nn.DataParallel(nn.Linear(1, 1))
    counting.register_buffer("calls", torch.zeros(1))
    model = nn.Sequential(
        nn.DataParallel(Honest()), counting, compiled(checkpoint_wrapper(Honest()))
    )
    assert [unwrapped_name(model, name) for name, _ in model.named_parameters()] == [
        *("0.module.weight", "0.module.bias"),
        # The wrapper has a tensor of its own, so its child's name keeps "module".
        *("1.module.weight", "1.module.bias"),
        *("2.module.weight", "2.module.bias"),
    ]
    known = KnownNames(["a.module.weight", "b.weight", "module.c"])
    assert known.find("module.a._orig_mod.module.module.weight") == "a.module.weight"
    assert known.find("a.weight") == "a.weight"
    assert known.find("module.module.c") == "module.c"
    assert known.find("module.b._fsdp_wrapped_module.weight") == "b.weight"
    assert known.find(".".join(["module"] * 10_000)) == ".".join(["module"] * 10_000)
    assert without_wrappers(["a._orig_mod.b", "a.b", "c._orig_mod.d", "_orig_mod"]) == {
        "a._orig_mod.b": "a._orig_mod.b",
        "a.b": "a.b",
        "c._orig_mod.d": "c.d",
        "_orig_mod": "_orig_mod",
    }
