# SPDX-License-Identifier: Apache-2.0
"""``save()`` and ``load()``: a sharded module and its optimizer in a crash-safe checkpoint."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ringcomm.comm.agreement import agreed_load, all_or_none
from ringcomm.errors import ArgumentError, CheckpointError, UnsupportedError, where
from ringcomm.json_reader import DAMAGE, decode, encode, exactly, in_words, shown
from ringcomm.memory import normal_tensors
from ringcomm.module_names import (
    Chosen,
    IncompatibleKeys,
    KnownNames,
    ModuleNames,
    PartialLoad,
    named_modules,
    named_parameters,
    some,
)
from ringcomm.optim.dtensors import TORCH_CLASSES
from ringcomm.optim.sharded import ShardedOptimizer
from ringcomm.optim.state import Debtors, merged_groups
from ringcomm.optim.step import ShardedStep
from ringcomm.zero.checkpoint import Checkpoints, FlatShard, Reader
from ringcomm.zero.checkpoint import state as module_state
from ringcomm.zero.checkpoint.format import dtype_name
from ringcomm.zero.checkpoint.state import (
    NAMES_IN_FACTS,
    SavedFacts,
    SavedOptimizer,
    SavedState,
    TensorShard,
    check_names,
    check_optimizer,
    describe,
    error_feedback_to_load,
    overlap,
    renamed,
    replicated_state,
    saved_state,
    shards_to_load,
    shards_to_save,
    state_shards,
    take_error_feedback,
    take_optimizer,
    with_unwrapped_names,
)
from ringcomm.zero.stages.engine import ShardEngine
from ringcomm.zero.stages.optimizer import refresh_masters
from ringcomm.zero.stages.resharded import Resharded
from ringcomm.zero.stages.sharding import check_step_number, engine_of, path_of
from ringcomm.zero.stages.shards import follow_quantized, own_of, requantize
from ringcomm.zero.stages.units import aliases

# ---- Each rank's own part of a checkpoint: random generators, and modules' extra state -----------
# Tensors are taken out of extra state and replaced by None; the rest is JSON data:
#
#     as {"layers.0": {"value": {"scale": 2, "history": None}, "tensors": [[[1], "cpu"]]}}
#
# Tensor number n of module "layers.0" is called "extra.layers.0.n". Its path consists of positions,
# since keys may be of any type: here the tensor was the second item of the dict.

Tensor = torch.Tensor
TreePath = tuple[int, ...]


def save_generators(device: torch.device) -> tuple[dict[str, Tensor], list[Any]]:
    """Returns the states of torch's generators (uint8, by name) and of Python's (JSON data)."""
    tensors = {"rng.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(device)
    version, numbers, gauss = random.getstate()
    return tensors, [version, list(numbers), gauss]


def check_generators(tensors: Mapping[str, Tensor], python: Any, device: torch.device) -> None:
    """Raises CheckpointError unless :func:`load_generators` can restore these states."""
    try:
        torch.Generator().set_state(tensors["rng.cpu"])
        if device.type == "cuda" and "rng.cuda" in tensors:
            torch.Generator(device).set_state(tensors["rng.cuda"])
        random.Random().setstate(_python_state(python))
    except DAMAGE as error:
        raise CheckpointError(
            f"random generators: cannot be restored: {in_words(error)}"
        ) from error


def load_generators(tensors: Mapping[str, Tensor], python: Any, device: torch.device) -> None:
    """Restores states of :func:`save_generators`; call :func:`check_generators` first."""
    random.setstate(_python_state(python))
    torch.set_rng_state(tensors["rng.cpu"])
    if device.type == "cuda" and "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"], device)


def _python_state(python: Any) -> tuple[Any, ...]:
    version, numbers, gauss = python
    return version, tuple(numbers), gauss


@dataclass(frozen=True)
class ExtraState:
    """The extra state of all modules of one rank.

    Attributes:
        data: JSON data, by module name.
        tensors: tensors, by name.
    """

    data: dict[str, Any]
    tensors: dict[str, Tensor]


def modules_with_extra_state(root: nn.Module) -> dict[str, nn.Module]:
    """Returns, by name, the modules whose class defines ``get_extra_state()``."""
    return {
        name: module
        for name, module in named_modules(root)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def save_extra_state(root: nn.Module, operation: str) -> ExtraState:
    """Copies the extra state of all modules.

    Raises:
        UnsupportedError: a value is neither JSON data nor a tensor; the message names the module.
    """
    data, tensors = {}, {}
    for name, module in modules_with_extra_state(root).items():
        called = f"{operation}: extra state of module {_shown(name, module)}"
        found: dict[TreePath, Tensor] = {}
        value = _take_out(module.get_extra_state(), (), found)
        encode(value, called)
        told = []
        for number, (path, tensor) in enumerate(found.items()):
            if tensor.layout is not torch.strided or tensor.device.type == "meta":
                raise UnsupportedError(
                    f"{called}: expected tensors that are dense and have values, got one of "
                    f"{tensor.layout} on {tensor.device}"
                )
            dtype_name(tensor.dtype, called)
            # The tensor may be a parameter, whose memory is freed when the parameter is resharded.
            tensors[_tensor_name(name, number)] = tensor.detach().clone()
            told.append([list(path), "cpu" if tensor.device.type == "cpu" else "device"])
        data[name] = {"value": value, "tensors": told}
    return ExtraState(data, tensors)


def read_extra_state(
    root: nn.Module,
    saved: ExtraState,
    device: torch.device,
    fail: Callable[[str], CheckpointError],
) -> dict[str, Any]:
    """Returns, by module name, the argument for each module's ``set_extra_state()``.

    Args:
        root: the root module; its modules must be the modules that were saved.
        saved: the result of :func:`save_extra_state`; tensors that its data do not name are
            ignored.
        device: the device for tensors that were not on the host.
        fail: makes an error from its message.

    Raises:
        CheckpointError: the modules with extra state are not the saved modules, or the saved state
            is damaged.
    """
    if not isinstance(saved.data, dict):
        raise fail("its extra state is damaged")
    mine, theirs = list(modules_with_extra_state(root)), list(saved.data)
    if mine != theirs:
        raise fail(
            f"expected extra state of the model's modules {mine}, got extra state of {theirs}"
        )
    values = {}
    for name, each in saved.data.items():
        try:
            found: dict[TreePath, Tensor] = {}
            for number, (path, kind) in enumerate(each["tensors"]):
                tensor = saved.tensors[_tensor_name(name, number)]
                found[tuple(path)] = tensor.to("cpu" if kind == "cpu" else device)
            values[name] = _put_in(each["value"], (), found)
            if found:
                raise ValueError(f"its value has no place for the tensors at {sorted(found)}")
        except DAMAGE as error:
            raise fail(f"extra state of module {name!r}: is damaged: {in_words(error)}") from error
    return values


def set_extra_state(
    root: nn.Module, values: Mapping[str, Any], fail: Callable[[str], CheckpointError]
) -> None:
    """Calls ``set_extra_state()`` of each module.

    Raises:
        CheckpointError: a module refuses its state; the modules before it have their new state.
    """
    for name, module in modules_with_extra_state(root).items():
        try:
            module.set_extra_state(values[name])
        # A user's method may raise anything.
        except Exception as error:
            raise fail(
                f"module {_shown(name, module)} does not take its extra state: {error!r}"
            ) from error


def _shown(name: str, module: nn.Module) -> str:
    return f"{name!r} ({type(module).__name__})"


def _tensor_name(module: str, number: int) -> str:
    return f"extra.{module}.{number}"


def _take_out(value: Any, path: TreePath, found: dict[TreePath, Tensor]) -> Any:
    """Returns ``value`` with None in place of tensors, which are added to ``found``."""
    if type(value) in TORCH_CLASSES and not isinstance(value, Resharded):
        found[path] = value
        return None
    return _rebuilt(value, lambda each, at: _take_out(each, (*path, at), found))


def _put_in(value: Any, path: TreePath, found: dict[TreePath, Tensor]) -> Any:
    """Undoes :func:`_take_out`: moves the tensors in ``found`` back into ``value``."""
    if value is None and path in found:
        return found.pop(path)
    return _rebuilt(value, lambda each, at: _put_in(each, (*path, at), found))


def _rebuilt(value: Any, change: Callable[[Any, int], Any]) -> Any:
    """Returns a container with ``change`` applied to each item; any other value unchanged."""
    kind = type(value)
    if kind is dict:
        return {key: change(each, at) for at, (key, each) in enumerate(value.items())}
    if kind in (list, tuple):
        return kind(change(each, at) for at, each in enumerate(value))
    return value


# ---- ``TrainState``: a sharded module and its optimizer for ``torch.distributed.checkpoint`` ----


class TrainState:
    """A Stateful of ``torch.distributed.checkpoint``, for any stage and any number of ranks.

    It needs a process group of torch, of any backend, with the ranks of the module's communicator::

        state = {"train": zero.TrainState(module, optimizer)}
        dcp.save(state, storage_writer=StorageWriter(path), planner=SavePlanner())
        dcp.load(state, storage_reader=StorageReader(path), planner=LoadPlanner())

    The writer, reader and planners of ``ringcomm.zero.checkpoint`` need no pickle; torch's own also
    work. torch loads tensors in place: after a failed load the state is a mixture, so load again.
    ``save()`` and ``load()`` are all or nothing, and include ranks' generators and buffers.

    Args:
        module: the module that ``shard()`` returned.
        optimizer: the optimizer on its parameters, or None.

    Raises:
        ArgumentError: the module is not sharded, or the optimizer belongs to another module.
    """

    def __init__(self, module: nn.Module, optimizer: ShardedOptimizer | None = None) -> None:
        self._engine = engine_of(module, "TrainState")
        with normal_tensors():
            self._step = module_state.step_of(self._engine, optimizer, "TrainState")

    def __repr__(self) -> str:
        comm = self._engine.comm
        return f"<ringcomm.zero.TrainState of stage {self._engine.stage} on {comm!r}>"

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's shard of each flat tensor, by name, to be saved or loaded in place.

        The entry "facts" has all other data of module and optimizer, as JSON. Buffers, and tensors
        in modules' extra state, are whole; the entry "extra" has the rest of the extra state.

        Raises:
            ArgumentError: called inside ``unsharded()`` or ``exchanged()``.
        """
        engine, step = self._engine, self._step
        engine.check_values("TrainState.state_dict")
        engine.reshard_for_change("TrainState.state_dict")
        params = module_state.copies_of_params(engine)
        tensors = [*params, *module_state.loose_shards(engine, True)]
        if step is not None:
            step.refuse_if_partly_updated("state_dict")
            tensors += state_shards(engine, step, True)
        shards = {each.name: each.shard() for each in tensors}
        buffers = module_state.buffers_of(engine.setup.module)
        extra = save_extra_state(engine.setup.module, "TrainState.state_dict")
        # A checkpoint of modules without extra state must not have the entry "extra".
        told = {"extra": json.dumps(encode(extra.data, "extra"))} if extra.data else {}
        return {
            **shards,
            **{f"model.{name}": buffer.detach() for name, buffer in buffers.items()},
            **extra.tensors,
            **told,
            "facts": json.dumps(describe(engine, step)),
        }

    @normal_tensors()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over all data except tensors, which torch has loaded in place.

        Raises:
            CheckpointError: the state is of another model, or its optimizer has other param groups.
        """
        engine, step = self._engine, self._step
        try:
            told = json.loads(state["facts"])
        except DAMAGE as error:
            raise _failed(f"is not a checkpoint of a TrainState: {in_words(error)}") from error
        known = KnownNames.of(engine.setup.module)
        SavedFacts.read(told, _failed)
        facts = SavedFacts.read(renamed(told, known, NAMES_IN_FACTS), _failed)
        check_names(engine, facts, _failed)
        groups = [] if step is None else check_optimizer(engine, step, facts, _failed)
        extra = self._read_extra(state)
        for bucket in engine.stored:
            if bucket.compression is None:
                bucket.wide = None
        engine.count_change()
        with engine.together("TrainState.load_state_dict"):
            if engine.setup.store is not None:
                _take(module_state.params_to_load(engine), state)
            if step is not None:
                self._take_copies(step, state)
                assert facts.optimizer is not None
                take_optimizer(engine, step, facts.optimizer, groups)
            else:
                follow_quantized(engine)
                refresh_masters(engine)
        engine.comm.barrier()
        requantize(engine)
        set_extra_state(engine.setup.module, extra, _failed)

    def _take_copies(self, step: ShardedStep, state: Mapping[str, Any]) -> None:
        """Takes over state of which torch has loaded copies: 8-bit state, and offloaded state."""
        if step.rule.quantized_state or not step.offload.in_memory:
            _take(shards_to_load(self._engine, step, step.groups), state)

    def _read_extra(self, state: Mapping[str, Any]) -> dict[str, Any]:
        try:
            data = decode(json.loads(state["extra"])) if "extra" in state else {}
        except DAMAGE as error:
            raise _failed(f"has extra state that is damaged: {in_words(error)}") from error
        engine = self._engine
        if isinstance(data, dict):
            known = KnownNames.of(engine.setup.module)
            data = {known.find_module(name): each for name, each in data.items()}
        saved = ExtraState(data, dict(state))
        return read_extra_state(engine.setup.module, saved, engine.comm.device, _failed)


def _take(shards: Iterator[TensorShard], state: Mapping[str, Any]) -> None:
    """Fills each shard from the tensor of ``state`` that contains its elements."""
    for shard in shards:
        given = state[shard.name]
        begin = shard.begin - given.begin
        shard.local.copy_(given.local[begin : begin + shard.local.numel()])


def _failed(text: str) -> CheckpointError:
    return CheckpointError(f"TrainState.load_state_dict: the checkpoint {text}")


def save(
    root: str | os.PathLike[str],
    step: int,
    module: nn.Module,
    optimizer: ShardedOptimizer | None = None,
    *,
    data: Any = None,
    keep: int | None = 2,
    trainable_only: bool = False,
) -> Path:
    """Saves a checkpoint in ``root``/step-00000100 and so on; collective.

    Each rank writes its chunks, which are the same at every stage, so any stage and any world can
    load them. If a rank is killed at any moment, earlier checkpoints stay intact.
    ``docs/checkpoint.md`` has the format: JSON and safetensors, no pickle.

    Args:
        root: the folder of the run, on a file system that all ranks see.
        step: a number that grows from save to save.
        module: the module that ``shard()`` returned.
        optimizer: the optimizer on its parameters, saved with its loss scaler; or None.
        data: JSON data, equal on all ranks, such as ``scheduler.state_dict()``.
        keep: number of checkpoints to keep, the latest ones; None keeps all.
        trainable_only: leave out the parameters that were frozen when the module was sharded. A
            load does not change these parameters; for equal results they must have the same values
            as at the save.

    Returns:
        The checkpoint's folder.

    Raises:
        ArgumentError: the module is not sharded, the optimizer belongs to another module, the step
            is not after all saved steps, or a parameter was replaced since ``shard()``.
        CheckpointError: a rank could not write; raised on all ranks.
        UnsupportedError: a module's extra state is neither JSON data nor tensors, on any rank.
    """
    root = path_of(root, "save", "root")
    check_step_number(step, "save")
    engine = engine_of(module, "save")
    with normal_tensors():
        engine.check_all("save")
        sharded = module_state.step_of(engine, optimizer, "save")
        if sharded is not None:
            sharded.refuse_if_partly_updated("save")
        extra = _extra_state(engine)
        buffers = module_state.buffers_of(engine.setup.module)
        tensors, generators = save_generators(engine.comm.device)
        own = {f"buffer.{name}": buffer.detach() for name, buffer in buffers.items()}
        checkpoints = Checkpoints(root, keep=keep, ranks=engine.ranks)
        left_out = frozen_names(engine) if trainable_only else []
        told = {"left_out": left_out} if left_out else {}
        tied = aliases(engine.setup.module)
        return checkpoints.save(
            step,
            shards_of(engine, sharded, left_out),
            data={
                "ringcomm": {**describe(engine, sharded), **told},
                "tied": {alias: name for alias, name in tied.items() if name not in left_out},
                "user": data,
            },
            rank_data={"generators": generators, "extra": extra.data},
            rank_tensors={**own, **tensors, **extra.tensors},
        )


def _extra_state(engine: ShardEngine) -> ExtraState:
    module, comm = engine.setup.module, engine.comm
    if not modules_with_extra_state(module):
        return ExtraState({}, {})
    with all_or_none(comm, "save", engine.mesh):
        return save_extra_state(module, where("save", comm.rank, comm.world_size))


def frozen_names(engine: ShardEngine) -> list[str]:
    """Returns the names of the parameters that were frozen when the module was sharded."""
    trained = set(engine.trainable.names)
    return [name for name, _ in named_parameters(engine.setup.module) if name not in trained]


def shards_of(
    engine: ShardEngine, step: ShardedStep | None, left_out: Collection[str] = ()
) -> dict[str, FlatShard]:
    """Returns this rank's shards to save, by name, without the parameters in ``left_out``."""
    shards = {shard.name: shard for shard in _tensor_shards(engine, step)}
    for name in left_out:
        del shards[f"model.{name}"]
    return {name: shard.saved_by(engine.mesh).shard() for name, shard in shards.items()}


def _tensor_shards(
    engine: ShardEngine, step: ShardedStep | None
) -> Iterator[module_state.TensorShard]:
    yield from module_state.model_shards(engine)
    if step is not None:
        yield from shards_to_save(engine, step)


@dataclass(frozen=True)
class Loaded:
    """The result of a load.

    Attributes:
        step: the step under which the checkpoint was saved.
        data: the user's data that was passed to ``save()``.
        exact: True if the generators and each rank's buffers are also restored, since this world is
            as large as the world that saved.
        missing_keys: the parameters and buffers that keep their values, because the checkpoint
            lacks them; empty with ``strict``.
        unexpected_keys: the model's tensors that only the checkpoint has; empty with ``strict``.
    """

    step: int
    data: Any
    exact: bool
    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()


def load(
    root: str | os.PathLike[str],
    module: nn.Module,
    optimizer: ShardedOptimizer | None = None,
    *,
    step: int | None = None,
    strict: bool = True,
    only: Sequence[str] | None = None,
) -> Loaded:
    """Restores a checkpoint of ``save()``, at any stage and in any world; collective.

    Files are verified before anything changes: either all ranks load, or none. With the optimizer,
    a load restores hyper-parameters, step numbers and the loss scaler's state. In a world of equal
    size it also restores each rank's buffers, modules' extra state and random generators, so that
    training continues with the same bits. In another world all ranks take rank 0's buffers and
    extra state. Modules' ``set_extra_state()`` is called last; if one raises, the rest is loaded.

    Args:
        root: the folder of the run.
        module: the module that ``shard()`` returned.
        optimizer: the optimizer on its parameters, or None to load only the module; an existing
            optimizer then continues from the loaded parameters.
        step: the step of the checkpoint; None takes the latest.
        strict: refuse a checkpoint of a module with other names. False loads the tensors that both
            have, and the result lists the differences.
        only: patterns of modules, parameters and buffers to load, with everything inside them; a
            ``*`` matches one part of a name. With ``only``, or without ``strict``, generators and
            extra state are not loaded, and ``optimizer`` must be None.

    Raises:
        CheckpointError: no checkpoint, or a damaged one, or of another model; nothing was changed.
        ArgumentError: the module is not sharded, the optimizer belongs to another module or is
            passed for a partial load, ``only`` matches nothing, or a parameter was replaced.
    """
    return take_load(check_load(root, module, optimizer, step=step, strict=strict, only=only))


def check_load(
    root: str | os.PathLike[str],
    module: nn.Module,
    optimizer: ShardedOptimizer | None = None,
    *,
    step: int | None = None,
    strict: bool = True,
    only: Sequence[str] | None = None,
) -> Loading:
    """Makes all checks of :func:`load` that depend on the checkpoint; collective.

    Nothing changes before :func:`take_load`.

    Args:
        root, module, optimizer, step, strict, only: as for :func:`load`.

    Raises:
        Exception: as for :func:`load`.
    """
    root = path_of(root, "load", "root")
    engine = engine_of(module, "load")
    comm = engine.comm
    operation = where("load", comm.rank, comm.world_size)
    choice = None
    if not strict or only is not None:
        if optimizer is not None:
            raise ArgumentError(
                f"{operation}: optimizer: expected None with strict=False or only=, since its "
                "state is loaded whole; an existing optimizer continues from the module"
            )
        names = ModuleNames.of(engine.setup.module)
        choice = PartialLoad(names, Chosen(names.first, only, "load"), strict)
    with normal_tensors():
        engine.check_all("load")
        sharded = module_state.step_of(engine, optimizer, "load")
        with agreed_load(engine.ranks, operation) as agreement:
            checkpoints = Checkpoints(root)
            found = checkpoints.latest() if step is None else step
            loading = Loading(engine, sharded, checkpoints.reader(found), operation)
            loading.check(choice)
            agreement.append([found, loading.reader.manifest.to_text()])
        loading.number = int(found or 0)
    return loading


def take_load(loading: Loading) -> Loaded:
    """Loads a checked checkpoint into the module and the optimizer; collective."""
    engine = loading.engine
    comm = engine.comm
    with normal_tensors():
        # No rank may still read this rank's chunks when they change.
        engine.change("load")
        comm.barrier()
        with engine.together("load"):
            loading.take()
        comm.barrier()
        requantize(engine)
        if loading.extra:
            # Called after the barrier, since a module may read its parameters.
            with all_or_none(comm, "load", engine.mesh):
                set_extra_state(engine.setup.module, loading.extra, loading.fail)
    return Loaded(loading.number, loading.data["user"], loading.exact, *loading.keys)


_MASTER = "optim.master."


def _are_names(names: Any) -> bool:
    return isinstance(names, list) and all(isinstance(each, str) for each in names)


class Loading:
    """A load on one rank: everything is checked before anything changes."""

    def __init__(
        self, engine: ShardEngine, step: ShardedStep | None, reader: Reader, operation: str
    ) -> None:
        self.engine = engine
        self.step = step
        self.reader = reader
        self.operation = operation
        self.number = 0  # the checkpoint's step
        known = KnownNames.of(engine.setup.module)
        # Check the types of the saved data first: with_unwrapped_names() replaces names in them.
        SavedFacts.read(self._read_data(reader.data)["ringcomm"], self.fail)
        self.data = self._read_data(with_unwrapped_names(reader.manifest, known).data)
        self.saved = SavedFacts.read(self.data["ringcomm"], self.fail)
        # FP32 weights of another library's checkpoint can be loaded into any precision.
        self.converted = self.saved.converted
        self.reader = Reader(reader.folder, verify=False, rounds=self.converted)
        self.reader.manifest = with_unwrapped_names(self.reader.manifest, known)
        mesh = None if engine.mesh is None else engine.mesh.sizes
        world = self.saved.world_size, self.saved.mesh
        same = world == (engine.comm.world_size, mesh)
        self.exact = same and reader.world_size == engine.ranks.world_size
        self.names = set(self.reader.names())
        self.keys = IncompatibleKeys((), ())
        # For each tensor to load, its name here and its name in the checkpoint.
        self.sources: dict[str, str] = {}
        self.groups: list[dict[str, Any]] = []
        self.state = SavedState([], {})
        self.debtors: Debtors | None = None
        self.own: dict[str, Tensor] = {}
        self.generators: Any = None
        self.extra: Mapping[str, Any] = {}

    def fail(self, text: str) -> CheckpointError:
        """Makes a CheckpointError that names the operation and the checkpoint's folder."""
        return CheckpointError(f"{self.operation}: {self.reader.folder}: {text}")

    def _read_data(self, data: Any) -> Mapping[str, Any]:
        try:
            found: Mapping[str, Any] = exactly(data, dict)
            tied = exactly(found["tied"], dict)
            if not {"user", "ringcomm"} <= found.keys() or not _are_names([*tied, *tied.values()]):
                raise ValueError("names of parameters")
        except (KeyError, ValueError) as error:
            raise self.fail(
                f"is not a checkpoint of ringcomm.zero.save(): {in_words(error)}"
            ) from error
        return found

    # ---- checks ---------------------------------------------------------------------------------

    def check(self, partial: PartialLoad | None) -> None:
        """Raises CheckpointError unless the checkpoint has all data that this load reads."""
        if partial is None:
            check_names(self.engine, self.saved, self.fail)
        self.sources = self._find_sources(partial)
        for shard in self._model_shards(module_state.param_shards(self.engine, whole=True)):
            self._check_shard(shard)
        for name, buffer in self._buffers().items():
            self._check_shard(
                TensorShard(f"model.{name}", buffer.numel(), 0, buffer, tuple(buffer.shape))
            )
        if self.step is not None:
            self.groups = check_optimizer(self.engine, self.step, self.saved, self.fail)
            self.sources |= self._params_from_masters(self.step)
            given, groups = self.saved.optimizer, merged_groups(self.step.groups, self.groups)
            assert given is not None
            self.state = saved_state(self.engine, self.step, given, groups, self.names)
            for shard in (
                *self.state.shards.values(),
                *replicated_state(self.engine, self.step, True),
            ):
                self._check_shard(shard)
            self._check_states(given)
            self.debtors = module_state.debtors_of(self.step, self.saved)
            if self.debtors is not None:
                for shard in error_feedback_to_load(
                    self.engine, self.step, self.debtors, self.names
                ):
                    self._check_shard(shard)
        self._verify()
        self._check_own(partial is None)

    def _check_states(self, given: SavedOptimizer) -> None:
        """Checks that the checkpoint has all state tensors that its optimizer data name."""
        for name in (each.name for stored in self.engine.stored for each in stored.params):
            state = given.states.get(name)
            for kind in () if state is None else state.tensors:
                if f"optim.{kind}.{name}" not in self.names:
                    raise self.fail(f"expected optim.{kind}.{name}, but it is not there")

    def _find_sources(self, partial: PartialLoad | None) -> dict[str, str]:
        """Returns, for each name to load, the tensor's name in the checkpoint."""
        root = self.engine.setup.module
        if partial is None:
            left_out = set(self.saved.left_out)
            lacking = sorted(left_out.intersection(self.engine.trainable.names))
            if lacking:
                raise self.fail(
                    f"was saved without the frozen parameters, and {some(lacking)} of them are "
                    "trained here; freeze them, or pass strict=False to keep their values"
                )
            names = [*dict(named_parameters(root)), *module_state.buffers_of(root)]
            return {f"model.{name}": f"model.{name}" for name in names if name not in left_out}
        saved = {name.removeprefix("model.") for name in self.names if name.startswith("model.")}
        found, self.keys = partial.match(saved, self.data["tied"])
        if partial.strict and any(self.keys):
            raise self.fail(
                f"expected exactly the module's tensors, but {self.keys.in_words('it has')}. Pass "
                "strict=False to load the tensors that both have"
            )
        return {f"model.{name}": f"model.{source}" for name, source in found.items()}

    def _params_from_masters(self, step: ShardedStep) -> dict[str, str]:
        """Returns the name of the saved master of each parameter that has no master here."""
        found = {}
        for stored, bucket in zip(self.engine.stored, step.buckets, strict=True):
            if bucket.state.master is not None:
                continue
            for entry in stored.params:
                master = f"{_MASTER}{entry.name}"
                if master in self.names:
                    found[f"model.{entry.name}"] = master
        return found

    def _buffers(self) -> dict[str, Tensor]:
        """Returns the buffers to load."""
        found = module_state.buffers_of(self.engine.setup.module)
        return {name: each for name, each in found.items() if f"model.{name}" in self.sources}

    def _check_own(self, whole: bool) -> None:
        """Checks the saved buffers, generators and extra state of this rank, or else of rank 0."""
        rank = self.engine.ranks.rank if self.exact else 0
        self.own = self.reader.rank_tensors(rank)
        if self.converted:
            self.own |= self._converted_buffers()
        for name, buffer in self._buffers().items():
            saved = self._own_buffer(name)
            if saved is None or (saved.shape, saved.dtype) != (buffer.shape, buffer.dtype):
                got = "none" if saved is None else f"{saved.dtype} of shape {tuple(saved.shape)}"
                raise self.fail(
                    f"buffer {name} of rank {rank}: expected {buffer.dtype} of shape "
                    f"{tuple(buffer.shape)}, got {got}"
                )
        self.exact = self.exact and whole
        if not whole:
            return
        told, device = self.reader.rank_data(rank), self.engine.comm.device
        if type(told) is not dict or "generators" not in told:
            raise self.fail(f"expected the data of rank {rank}, got {shown(told)}")
        if self.exact:
            self.generators = told["generators"]
            check_generators(self.own, self.generators, device)
        extra = ExtraState(told.get("extra", {}), self.own)
        self.extra = read_extra_state(self.engine.setup.module, extra, device, self.fail)

    def _converted_buffers(self) -> dict[str, Tensor]:
        """Reads the buffers of another library's checkpoint, which are equal on all ranks."""
        found = {}
        for name, buffer in self._buffers().items():
            source = self.sources[f"model.{name}"]
            values = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
            self.reader.read(source, 0, values.view(-1))
            found[f"buffer.{source.removeprefix('model.')}"] = values
        return found

    def _own_buffer(self, name: str) -> Tensor | None:
        source = self.sources[f"model.{name}"].removeprefix("model.")
        return self.own.get(f"buffer.{source}")

    def _check_shard(self, shard: TensorShard) -> None:
        name = self._source(shard)
        if name not in self.names:
            raise self.fail(f"expected {name}, but it is not there")
        shape, dtype = self.reader.shape(name), self.reader.dtype(name)
        mine = shard.local.dtype
        fits = dtype == mine or (
            self.converted and dtype.is_floating_point and mine.is_floating_point
        )
        if shape != shard.shape or not fits:
            raise self.fail(
                f"{shard.name}: expected {shard.local.dtype} of shape {shard.shape}, as the module "
                f"has it, got {dtype} of shape {shape}"
            )

    def _verify(self) -> None:
        """Verifies this rank's share of the files; all ranks together verify all files."""
        ranks = self.engine.ranks
        self.reader.verify(sorted(self.reader.manifest.files)[ranks.rank :: ranks.world_size])

    def _source(self, shard: TensorShard) -> str:
        """Returns the name of the checkpoint's tensor from which a shard is read.

        If the checkpoint has no masters, masters are read from its parameters.
        """
        is_master = shard.name.startswith(_MASTER)
        if is_master and (self.converted or shard.name not in self.names):
            return f"model.{shard.name.removeprefix(_MASTER)}"
        return self.sources.get(shard.name, shard.name)

    # ---- taking over -----------------------------------------------------------------------------

    def _model_shards(self, params: Iterator[TensorShard]) -> Iterator[TensorShard]:
        """Yields the shards to load: of ``params``, and of parameters without a bucket."""
        for shard in chain(params, module_state.loose_shards(self.engine, whole=True)):
            if shard.name in self.sources:
                yield shard

    def _state_shards(self, step: ShardedStep) -> Iterator[TensorShard]:
        """Yields the optimizer's shards that the checkpoint has; fills all others with zeros."""
        known = {
            *self.state.shards,
            *(shard.name for shard in replicated_state(self.engine, step, True)),
        }
        taken = merged_groups(step.groups, self.groups)
        for shard in shards_to_load(self.engine, step, taken):
            if shard.name in known:
                yield shard
            else:
                shard.local.zero_()

    def take(self) -> None:
        """Reads everything into the memory of the module and the optimizer."""
        step = self.step
        if step is not None:
            step.ensure(self.state.kinds)
        self._read(self._model_shards(module_state.params_to_load(self.engine)))
        self._forget_wide()
        self._take_buffers()
        if step is not None:
            self._read(self._state_shards(step))
            assert self.saved.optimizer is not None
            take_optimizer(self.engine, step, self.saved.optimizer, self.groups)
            if self.debtors is not None:
                take_error_feedback(self.engine, step, self.debtors, self.names, self._read)
        else:
            named = named_parameters(self.engine.setup.module)
            loaded = {id(param) for name, param in named if f"model.{name}" in self.sources}
            refresh_masters(self.engine, loaded)
        if self.exact:
            load_generators(self.own, self.generators, self.engine.comm.device)

    def _forget_wide(self) -> None:
        """Updates or drops ``wide``, the unrounded values, for parameters that were loaded."""
        for stored in self.engine.stored:
            loaded = [each for each in stored.params if f"model.{each.name}" in self.sources]
            if len(loaded) == len(stored.params) and stored.compression is None:
                stored.wide = None
            if stored.wide is None:
                continue
            with stored.here():
                for entry in loaded:
                    low, high = overlap(entry, stored.state_chunk)
                    here = slice(low - stored.state_chunk.begin, high - stored.state_chunk.begin)
                    stored.wide[here] = own_of(stored)[here]

    def _read(self, shards: Iterator[TensorShard]) -> None:
        for shard in shards:
            if shard.sharding is None and shard.local.numel():
                self.reader.read(self._source(shard), shard.begin, shard.local)
            elif shard.local.numel():
                for box in shard.shard().boxes():
                    self.reader.read_box(self._source(shard), box.offsets, box.local)

    def _take_buffers(self) -> None:
        for name, buffer in self._buffers().items():
            saved = self._own_buffer(name)
            assert saved is not None
            buffer.copy_(saved)
