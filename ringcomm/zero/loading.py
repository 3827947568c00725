"""``load()``: continues from a checkpoint of any world and any stage."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ringcomm.errors import CheckpointError, where
from ringcomm.optim.agreement import agreed_load, all_or_none
from ringcomm.optim.loss_scaler import LossScaler
from ringcomm.optim.sharded import ShardedStep
from ringcomm.optim.sharded_adam import ShardedAdam
from ringcomm.zero import contents
from ringcomm.zero.checkpoint import Checkpoints, Reader
from ringcomm.zero.contents import Part
from ringcomm.zero.engine import Engine
from ringcomm.zero.extra_state import ExtraState, read_extra_state, set_extra_state
from ringcomm.zero.facts import VERSION, check_names, check_optimizer, take_optimizer
from ringcomm.zero.random_state import check_generators, load_generators
from ringcomm.zero.sharding import engine_of

Tensor = torch.Tensor


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Attributes:
        step: under which it was saved.
        data: the user's, as given to ``save()``.
        exact: whether the generators and each rank's buffers are restored, too: the world is as
            large as the one that saved.
    """

    step: int
    data: Any
    exact: bool


def load(
    root: str | os.PathLike[str],
    module: nn.Module,
    optimizer: ShardedAdam | None = None,
    *,
    step: int | None = None,
) -> Loaded:
    """Continues from what ``save()`` wrote, at any stage and in any world; collective.

    Files are verified before anything changes: all ranks load, or none. With the optimizer it
    takes over hyper-parameters, step numbers and the loss scaler's state, and in a world of equal
    size each rank's buffers, modules' extra state and random generators: training goes on with the
    same bits. In another world all ranks take rank 0's buffers and extra state. Modules'
    ``set_extra_state()`` comes last; where one raises, the rest is loaded.

    Args:
        root: the run's folder.
        module: what ``shard()`` returned.
        optimizer: on its parameters, or None to load the module alone, from which an optimizer
            that there is goes on.
        step: which checkpoint; default the latest.

    Raises:
        CheckpointError: there is none, it is damaged, or of another model; nothing was changed.
        ArgumentError: the module is not sharded, the optimizer is another's, or a parameter was
            replaced since ``shard()``.
    """
    engine = engine_of(module, "load")
    comm = engine.comm
    operation = where("load", comm.rank, comm.world_size)
    with torch.no_grad():
        sharded = contents.step_of(engine, optimizer, "load")
        engine.slots.check_all(comm, "load")
        with agreed_load(comm, operation) as agreement:
            checkpoints = Checkpoints(root)
            found = checkpoints.latest() if step is None else step
            loading = _Loading(engine, sharded, checkpoints.reader(found), operation)
            loading.check()
            agreement.append([found, loading.reader.manifest.to_text()])
        # Nobody reads this rank's chunks while they change.
        engine.free_for_step()
        comm.barrier()
        loading.take()
        comm.barrier()
        if loading.extra:
            # Behind the barrier, since a module may look at its parameters.
            with all_or_none(comm, "load"):
                set_extra_state(engine.parts.module, loading.extra, loading.fail)
    return Loaded(int(found or 0), loading.data["user"], loading.exact)


class _Loading:
    """One load on one rank: everything is checked first, and taken over then."""

    def __init__(
        self, engine: Engine, step: ShardedStep | None, reader: Reader, operation: str
    ) -> None:
        self.engine = engine
        self.step = step
        self.reader = Reader(reader.folder, verify=False)
        self.operation = operation
        self.data = self._read_data(reader.data)
        self.saved: Mapping[str, Any] = self.data["ringcomm"]
        self.exact = self.saved["world_size"] == engine.comm.world_size
        self.names = set(reader.names())
        self.groups: list[dict[str, Any]] = []
        self.own: dict[str, Tensor] = {}
        self.generators: Any = None
        self.extra: Mapping[str, Any] = {}

    def fail(self, text: str) -> CheckpointError:
        """What to raise about the checkpoint."""
        return CheckpointError(f"{self.operation}: {self.reader.folder}: {text}")

    def _read_data(self, data: Any) -> Mapping[str, Any]:
        try:
            version = data["ringcomm"]["version"]
            if version != VERSION or not {"user", "tied"} <= set(data):
                raise ValueError(f"version {version}")
            for key in ("stage", "world_size", "params", "optimizer"):
                data["ringcomm"][key]
        except (KeyError, TypeError, ValueError) as error:
            raise self.fail(f"is no checkpoint of ringcomm.zero.save(): {error!r}") from error
        found: Mapping[str, Any] = data
        return found

    # ---- checks ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises CheckpointError unless everything can be taken over."""
        check_names(self.engine, self.saved, self.fail)
        if self.step is not None and self.saved["optimizer"] is None:
            raise self.fail("was saved without an optimizer; load the module alone")
        for part in self._model_parts():
            self._check_part(part)
        for name, buffer in contents.buffers_of(self.engine.parts.module).items():
            self._check_part(Part(f"model.{name}", buffer.numel(), 0, buffer, tuple(buffer.shape)))
        if self.step is not None:
            self.groups = check_optimizer(self.engine, self.step, self.saved, self.fail)
            for part in self._state_parts(self.step):
                self._check_part(part)
        self._verify()
        self._check_own()

    def _check_own(self) -> None:
        """What ranks have each for themselves, and what is read last."""
        rank = self.engine.comm.rank if self.exact else 0
        self.own = self.reader.rank_tensors(rank)
        for name, buffer in contents.buffers_of(self.engine.parts.module).items():
            saved = self.own.get(f"buffer.{name}")
            if saved is None or (saved.shape, saved.dtype) != (buffer.shape, buffer.dtype):
                got = "none" if saved is None else f"{saved.dtype} of shape {tuple(saved.shape)}"
                raise self.fail(
                    f"buffer {name} of rank {rank}: expected {buffer.dtype} of shape "
                    f"{tuple(buffer.shape)}, got {got}"
                )
        if self.exact:
            self.generators = self.reader.rank_data(rank)["generators"]
            check_generators(self.own, self.generators)
        extra = ExtraState(self.reader.rank_data(rank).get("extra", {}), self.own)
        engine = self.engine
        self.extra = read_extra_state(engine.parts.module, extra, engine.comm.device, self.fail)
        if self.step is not None and self.step.setting.loss_scaler is not None:
            LossScaler().load_state_dict(self.saved["optimizer"]["loss_scaler"])

    def _check_part(self, part: Part) -> None:
        if part.name not in self.names:
            raise self.fail(f"expected {part.name}, it is not there")
        shape, dtype = self.reader.shape(part.name), self.reader.dtype(part.name)
        if (shape, dtype) != (part.shape, part.local.dtype):
            raise self.fail(
                f"{part.name}: expected {part.local.dtype} of shape {part.shape}, as the module "
                f"has it, got {dtype} of shape {shape}"
            )

    def _verify(self) -> None:
        """Checksums of this rank's share of the files: together the ranks check them all."""
        comm = self.engine.comm
        self.reader.verify(sorted(self.reader.manifest.files)[comm.rank :: comm.world_size])

    # ---- what is taken over ---------------------------------------------------------------------

    def _model_parts(self) -> Iterator[Part]:
        """The parameters that this rank holds, whose elements are written by :meth:`take`."""
        yield from contents.param_parts(self.engine, whole=True)
        yield from contents.loose_parts(self.engine, whole=True)

    def _state_parts(self, step: ShardedStep) -> Iterator[Part]:
        """And of the optimizer's state."""
        for part in contents.state_parts(self.engine, step, whole=True):
            if part.name in self.names or ".max_exp_avg_sq." not in part.name:
                yield part

    def take(self) -> None:
        """Reads everything into place."""
        step = self.step
        if step is not None and "max_exp_avg_sq" in self.saved["optimizer"]["kinds"]:
            step.ensure_max()
        self._read(self._model_parts())
        for stored in self.engine.stored:
            stored.wide = None
        self._take_buffers()
        if step is not None:
            self._read(self._state_parts(step))
            take_optimizer(self.engine, step, self.saved, self.groups)
        else:
            self.engine.placement.refresh_masters()
        if self.exact:
            load_generators(self.own, self.generators, self.engine.comm.device)

    def _read(self, parts: Iterator[Part]) -> None:
        for part in parts:
            if part.local.numel():
                self.reader.read(part.name, part.begin, part.local)

    def _take_buffers(self) -> None:
        for name, buffer in contents.buffers_of(self.engine.parts.module).items():
            buffer.copy_(self.own[f"buffer.{name}"])
