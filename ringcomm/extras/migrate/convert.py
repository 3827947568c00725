# SPDX-License-Identifier: Apache-2.0
"""``convert()`` turns checkpoints of DeepSpeed and of torch into ringcomm's.

NOTE [DeepSpeed's checkpoints]
A folder ``global_step<N>`` has files of model states, one file at stages 1 and 2 and one per rank
at stage 3, and one file of optimizer states per rank. A param group's trainable parameters are
concatenated to a flat tensor. At stages 1 and 2 the flat tensor is cut into one partition per rank;
``param_slice_mappings`` maps the partition's elements to parameters. At stage 3 each parameter is
padded to a multiple of the number of ranks and cut, and a rank's parts are concatenated. FP32
masters and moments have the same layout. At stage 3 a param group may consist of several flat
groups; its "params" are then the indices of the flat groups. DeepSpeed 0.19 writes this format.

NOTE [Checkpoints of torch]
The folder's ``.metadata`` is a pickle that names each tensor's chunks, and their offsets in the
files; each chunk is a complete ``torch.save()`` archive inside a file. The pickle also has the path
of each value: the keys that lead to it in nested dicts. The optimizer's paths contain "state" or
"param_groups", as in ``get_optimizer_state_dict()``, flattened or not. All other paths are the
model's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from ringcomm.errors import ArgumentError, CheckpointError, UnsupportedError
from ringcomm.extras.migrate.torch_file import (
    LARGEST_PICKLE_BYTES,
    Inert,
    MappedFile,
    TorchFile,
    attribute,
    entry,
    of_kind,
    read_pickle,
    sizes_of,
)
from ringcomm.integers import integer
from ringcomm.json_reader import DAMAGE, in_words, number_below, read_bounded, shown
from ringcomm.module_names import without_wrappers
from ringcomm.zero.checkpoint import Checkpoints, FlatShard
from ringcomm.zero.checkpoint.format import Box, host_slices
from ringcomm.zero.checkpoint.state import VERSION

Tensor = torch.Tensor
# The keys that lead to a value in nested dicts and lists.
Keys = tuple[Any, ...]

OPERATION = "convert"
# The file of torch's metadata.
METADATA = ".metadata"
# The result has at most this many times the source's bytes: a weight of one byte may become an FP32
# weight and three FP32 moments.
_MOST_GROWTH = 16
# The hyper-parameters of a param group that ringcomm's AdamW has as well. Other entries, such as
# "foreach", select torch's implementation.
HYPER = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "initial_lr")
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def convert(
    source: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    weights_only: bool = False,
    step: int | None = None,
) -> Path:
    """Converts another library's checkpoint to ringcomm's format, for :func:`ringcomm.zero.load`.

    It runs in one process. Pickles are read without running code. Tensors are views of the files
    and are written in slices, so the whole model need not fit into memory. Weights are written in
    FP32 if the source has FP32 masters or weights, and buffers as they were saved. A module of any
    precision can load the result: FP32 masters exactly, 16-bit parameters rounded.

    Args:
        source: folder of a checkpoint of DeepSpeed (ZeRO stages 1 to 3) or of
            ``torch.distributed.checkpoint``.
        root: a run's folder; the checkpoint becomes a folder in it, such as step-00000100.
        weights_only: True to leave out the optimizer's state.
        step: number of the checkpoint; by default the saved number, or 0.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: the source is damaged or not such a checkpoint, or the result cannot be
            written.
        UnsupportedError: the source has parts that cannot be converted; the message names them.
        ArgumentError: the step is not an integer, or not after the steps in ``root``.
    """
    state = _read(Path(source), weights_only)
    number = integer((state.step or 0) if step is None else step)
    if number is None:
        raise ArgumentError(f"{OPERATION}: step: expected a number from 0 on, got {shown(step)}")
    checkpoints = Checkpoints(root, keep=None)
    checkpoints.folder(number)
    latest = checkpoints.latest()
    if latest is not None and number <= latest:
        raise ArgumentError(
            f"{OPERATION}: {root}: expected a step after {latest}, the latest, got {number}"
        )
    tensors = {f"model.{name}": each for name, each in state.weights.items()}
    for kind, moments in state.moments.items():
        tensors |= {f"optim.{kind}.{name}": each for name, each in moments.items()}
    size_bytes = sum(prod(each.param_shape) * each.dtype.itemsize for each in tensors.values())
    if size_bytes > _MOST_GROWTH * state.size_bytes:
        raise CheckpointError(
            f"{OPERATION}: expected tensors of at most {_MOST_GROWTH} times the "
            f"{state.size_bytes} bytes of their files, got {size_bytes} bytes: tensors share memory"
        )
    data = {"ringcomm": state.facts(), "tied": state.tied, "user": state.data}
    own: dict[str, Any] = {"generators": None, "extra": {}}
    try:
        return checkpoints.save(number, tensors, data=data, rank_data=own)
    except (ArgumentError, CheckpointError) as error:
        raise CheckpointError(f"{OPERATION}: {str(error)[:1000]}") from error


def _read(source: Path, weights_only: bool) -> ForeignState:
    """Reads a checkpoint of another library.

    See :func:`convert` for the errors.
    """
    folder, state = None, None
    try:
        if (source / METADATA).is_file():
            state = _TorchCheckpoint(source).state(weights_only)
        else:
            folder = _find_folder(source) if source.is_dir() else None
            if folder is not None:
                state = _DeepSpeedCheckpoint(folder).state(weights_only)
        if state is not None:
            return state.settled()
    except (CheckpointError, UnsupportedError):
        raise
    except DAMAGE as error:
        kind = "torch.distributed.checkpoint" if folder is None else "DeepSpeed"
        told = in_words(error)
        if not isinstance(error, ValueError):  # checks of this module already say what is wrong
            told = f"its files hold other values than {kind} writes: {told}"
        raise CheckpointError(f"{source}: is no checkpoint of {kind}: {told}") from error
    except OSError as error:
        raise CheckpointError(f"{source}: cannot be read: {error}") from error
    raise CheckpointError(
        f"{OPERATION}: {source}: expected a folder of DeepSpeed, with files "
        "*_optim_states.pt or a file latest, or of torch.distributed.checkpoint, with .metadata"
    )


class ForeignTensor(FlatShard):
    """A tensor of another library's checkpoint, in pieces that are views of files.

    Args:
        shape: shape of the tensor.
        size: size of the tensor into which the offsets of the pieces point: ``shape``, or
            [elements] if the pieces are runs of the flattened tensor.
        pieces: offsets and elements of each piece; all pieces have one dtype.
        dtype: dtype in which to save the tensor; by default the pieces' dtype.

    Raises:
        ValueError: the pieces have several dtypes.
    """

    # Each piece, with its offsets, by the number of elements in all earlier pieces.
    pieces: dict[int, tuple[tuple[int, ...], Tensor]]

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        size: Sequence[int],
        pieces: Iterable[tuple[tuple[int, ...], Tensor]],
        dtype: torch.dtype | None = None,
    ) -> ForeignTensor:
        by_offset, elems, kinds = {}, 0, set()
        for offsets, piece in pieces:
            kinds.add(piece.dtype)
            if piece.numel():
                by_offset[elems] = (offsets, piece)
                elems += piece.numel()
        if len(kinds) > 1:
            raise ValueError(f"a tensor has pieces of {len(kinds)} dtypes")
        local = torch.empty(elems, dtype=dtype or next(iter(kinds), torch.float32), device="meta")
        made: ForeignTensor = cls._make(size, local)
        made.elems, made.begin, made.local = prod(size), 0, local
        made.param_shape, made.pieces, made.read = tuple(shape), by_offset, made.slices
        return made

    @classmethod
    def whole(cls, tensor: Tensor) -> ForeignTensor:
        """Returns a tensor in one piece."""
        return cls(tensor.shape, tensor.shape, [((0,) * tensor.dim(), tensor)])

    @classmethod
    def of_runs(cls, runs: Sequence[Tensor], shape: Sequence[int], called: str) -> ForeignTensor:
        """Returns the tensor whose flattened elements are the runs, one after the other.

        Raises:
            ValueError: the runs do not have as many elements as the tensor.
        """
        begins = [0, *accumulate(run.numel() for run in runs)]
        if begins[-1] != prod(shape):
            raise ValueError(f"{called} has {begins[-1]} elements of {prod(shape)}")
        pieces = [((begin,), run) for begin, run in zip(begins, runs, strict=False)]
        return cls(shape, begins[-1:], pieces)

    def in_fp32(self) -> ForeignTensor:
        """Returns the tensor with float32 as the dtype in which it will be saved."""
        return ForeignTensor(self.param_shape, self.size(), self.pieces.values(), torch.float32)

    def boxes(self) -> list[Box]:
        return [
            Box(offsets, tuple(piece.shape), self.local[at : at + piece.numel()].view(piece.shape))
            for at, (offsets, piece) in self.pieces.items()
        ]

    def slices(self, begin: int, end: int) -> Iterator[Tensor]:
        """Yields the elements, in slices, of the piece with ``begin`` elements before it."""
        for values in host_slices(self.pieces[begin][1]):
            yield values.to(self.dtype)


@dataclass
class ForeignState:
    """The state of a training run that another library has saved.

    Attributes:
        kind: kind of checkpoint, "DeepSpeed" or "DCP".
        size_bytes: bytes of the files with its tensors.
        weights: by name, parameters (their FP32 masters if there are any) and persistent buffers.
        moments: moments by kind, then by parameter.
        steps: number of steps that each parameter has taken.
        groups: hyper-parameters of the param groups.
        group_params: names of the parameters of each param group.
        tied: aliases of parameters, with the names whose tensors they share.
        step: number under which the state was saved; None if the checkpoint has no number.
        data: further JSON data.
    """

    kind: str
    size_bytes: int
    weights: dict[str, ForeignTensor]
    moments: dict[str, dict[str, ForeignTensor]] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    group_params: list[list[str]] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    step: int | None = None
    data: Any = None

    def settled(self) -> ForeignState:
        """Returns the state without wrappers' prefixes, and with moments of all trained parameters.

        Raises:
            ValueError, LookupError, TypeError, AttributeError: the parts do not fit each other.
        """
        self._check()
        unwrapped = without_wrappers([*self.weights, *self.tied])

        def moment(tensors: Mapping[str, ForeignTensor], name: str) -> ForeignTensor:
            if name in tensors:
                return tensors[name].in_fp32()
            # A parameter without a gradient so far has no state.
            shape = self.weights[name].param_shape
            return ForeignTensor.whole(torch.zeros((), device="cpu").expand(shape))

        trained = list(chain.from_iterable(self.group_params))
        return replace(
            self,
            weights={unwrapped[name]: each for name, each in self.weights.items()},
            moments={
                kind: {unwrapped[name]: moment(tensors, name) for name in trained}
                for kind, tensors in self.moments.items()
            },
            steps={unwrapped[name]: self.steps.get(name, 0.0) for name in trained},
            group_params=[[unwrapped[name] for name in each] for each in self.group_params],
            tied={unwrapped[alias]: unwrapped.get(name, name) for alias, name in self.tied.items()},
        )

    def _check(self) -> None:
        if not all(type(name) is str and name for name in (*self.weights, *self.tied)):
            raise ValueError("it has a tensor whose name is no text")
        for moments in self.moments.values():
            for name, tensor in moments.items():
                if name in self.weights and tensor.param_shape != self.weights[name].param_shape:
                    raise ValueError(f"{name} has another shape than its state")
        names = [name for group in self.group_params for name in group]
        if len(set(names)) != len(names):
            raise ValueError("a parameter is in two groups")
        for name in names:
            if not (name in self.weights and 0 <= self.steps.get(name, 0.0) < 2**53):
                raise ValueError(
                    f"{name} is not a parameter, or its number of steps is out of range"
                )
        if self.step is not None and not number_below(self.step, 2**53):
            raise ValueError(f"it has step {shown(self.step)}")

    def facts(self) -> dict[str, Any]:
        """Returns the data that ringcomm's own checkpoints have in addition to tensors."""
        facts: dict[str, Any] = {
            "version": VERSION,
            "stage": 0,
            # No run has 0 ranks, so loading does not look for a rank's own state.
            "world_size": 0,
            "converted": self.kind,
            "params": list(self.weights),
            "optimizer": None,
        }
        if self.groups:
            facts["optimizer"] = {
                "steps": self.steps,
                "steps_taken": max(self.steps.values(), default=0.0),
                "skipped_steps": 0.0,
                "groups": self.groups,
                "group_params": self.group_params,
                "kinds": sorted(self.moments),
                "loss_scaler": None,
            }
        return facts


def hyper_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the hyper-parameters of a saved param group, as JSON data."""
    return {name: as_data(group[name]) for name in HYPER if name in group}


def as_data(value: Any) -> Any:
    """Returns a saved value as JSON data, or None if it cannot be JSON data."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, (list, tuple)):
        return [as_data(each) for each in value]
    if isinstance(value, dict):
        return {str(key): as_data(each) for key, each in value.items()}
    return value if isinstance(value, (bool, int, float, str)) else None


def refuse_moments(names: Collection[str], called: str) -> None:
    """Raises UnsupportedError unless the names of a parameter's state tensors are Adam's."""
    if not {"exp_avg", "exp_avg_sq"} <= set(names) <= set(MOMENTS):
        raise UnsupportedError(
            f"{called}: expected the state of Adam or AdamW, exp_avg and exp_avg_sq, got "
            f"{', '.join(sorted(names)) or 'none'}; convert the weights alone"
        )


# ---- DeepSpeed: see NOTE [DeepSpeed's checkpoints] ----------------------------------------------

_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(optim|model)_states\.pt")
_OWN = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
    *("shared_params", "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd"),
    *("sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples"),
    *("dp_world_size", "mp_world_size", "ds_config", "ds_version"),
}


def _find_folder(folder: Path) -> Path | None:
    """Returns a DeepSpeed checkpoint's folder: ``folder``, or the folder that "latest" names."""
    latest = folder / "latest"
    if latest.is_file():
        try:
            name = read_bounded(latest, 4096).decode("utf-8", "replace").strip()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{latest}: cannot be read: {error}") from error
        if name != ".." and Path(name).name == name and (folder / name).is_dir():
            folder = folder / name
    return folder if any(folder.glob("*_optim_states.pt")) else None


class _DeepSpeedCheckpoint:
    """The contents of the files of a DeepSpeed checkpoint.

    Raises:
        CheckpointError: files are missing or damaged.
        UnsupportedError: there are model-parallel ranks, or the optimizer is not Adam or AdamW.
        DAMAGE: an exception in this tuple, if the files are not as DeepSpeed writes them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._size_bytes = folder, 0
        if any(folder.glob("*expert_*_states.pt")):
            raise UnsupportedError(
                f"{folder}: has experts of DeepSpeed-MoE, which are not converted"
            )
        states = self._by_rank("optim")
        self._optimizers = [
            entry(self._read(path), "optimizer_state_dict", path, dict) for path in states
        ]
        names = ("zero_stage", "partition_count")
        stage, counts = (entry(self._optimizers[0], name, states[0]) for name in names)
        # The stage may be an enum, which is pickled as a call with the enum's value.
        self._stage = int(stage.args[0]) if isinstance(stage, Inert) else int(stage)
        expected = max(counts) if isinstance(counts, list) else int(counts)
        if expected != len(states):
            self._fail(f"expected optimizer states of {expected} ranks, got {len(states)}")
        model = [folder / "mp_rank_00_model_states.pt"]
        paths = self._by_rank("model") if self._stage == 3 else model
        self._models = [of_kind(self._read(path), dict, path) for path in paths]
        self._shapes = [
            {name: sizes_of(shape) for name, shape in of_kind(each, dict, paths[0]).items()}
            for each in entry(self._models[0], "param_shapes", paths[0], list)
        ]

    def _read(self, path: Path) -> Any:
        file = MappedFile(path)
        self._size_bytes += len(file.bytes)
        return TorchFile(file).read()

    def _fail(self, text: str) -> NoReturn:
        raise CheckpointError(f"{self._folder}: {text}")

    def _by_rank(self, kind: str) -> list[Path]:
        found: dict[int, Path] = {}
        for path in sorted(self._folder.glob(f"*_{kind}_states.pt")):
            match = _RANK.fullmatch(path.name)
            if match is None:
                continue
            if int(match[2]):
                raise UnsupportedError(
                    f"{self._folder}: has files of model-parallel ranks, with only parts of "
                    "parameters, which are not converted. To load it with DeepSpeed, convert it to "
                    "DeepSpeed's universal format"
                )
            found[int(match[1])] = path
        if sorted(found) != list(range(len(found))) or not found:
            self._fail(f"expected files of {kind} states of ranks 0 and on, got {sorted(found)}")
        return [found[rank] for rank in range(len(found))]

    def state(self, weights_only: bool) -> ForeignState:
        """Returns the state that was saved."""
        model, folder = self._models[0], self._folder
        shared = entry(model, "shared_params", folder, dict)
        client = {key: each for key, each in model.items() if key not in _OWN}
        tied = {str(alias): str(name) for alias, name in shared.items()}
        made = ForeignState(
            "DeepSpeed",
            self._size_bytes,
            self._weights(tied),
            tied=tied,
            step=int(entry(model, "global_steps", folder)),
            data={"client_state": as_data(client), "lr_scheduler": as_data(model["lr_scheduler"])},
        )
        if not weights_only:
            self._read_optimizer(made)
        return made

    def _weights(self, tied: Mapping[str, str]) -> dict[str, ForeignTensor]:
        """Returns parameters and buffers, in the model's order at stages 1 and 2."""
        model = self._models[0]
        key = "fp32_flat_groups" if self._stage == 3 else "single_partition_of_fp32_groups"
        flat = [list(entry(state, key, self._folder, list)) for state in self._optimizers]
        masters, module = self._tensors(flat), entry(model, "module", self._folder, dict)
        if self._stage < 3:
            whole = {n: each for n, each in module.items() if n not in tied}
            return {
                name: masters[name] if name in masters else ForeignTensor.whole(each)
                for name, each in whole.items()
            }
        found = {name: ForeignTensor.whole(module[name]) for name in model["buffer_names"]}
        for name, told in (model["frozen_param_shapes"] or {}).items():
            shape = sizes_of(told)
            fragments = [each["frozen_param_fragments"][name].view(-1) for each in self._models]
            found[name] = ForeignTensor.of_runs(_cut(fragments, prod(shape)), shape, name)
        return {**found, **masters}

    def _read_optimizer(self, made: ForeignState) -> None:
        key = "optimizer_state_dict" if self._stage == 3 else "base_optimizer_state"
        base = [state[key] for state in self._optimizers]
        if not all(isinstance(each, dict) and "state" in each for each in base):
            self._fail(
                "was saved with elastic_checkpoint, whose state has no names; set it to false"
            )
        states, groups = [each["state"] for each in base], base[0]["param_groups"]
        kinds = {
            name
            for number in states[0].values()
            for name, each in number.items()
            if isinstance(each, Tensor) and each.dim()
        }
        refuse_moments(kinds, str(self._folder))
        for kind in MOMENTS:
            if kind in kinds:
                flat = [[each[number][kind] for number in sorted(each)] for each in states]
                made.moments[kind] = self._tensors(flat)
        # Some optimizers count steps per parameter, others per group.
        steps = [each["step"] for each in (*states[0].values(), *groups) if "step" in each]
        step = float(steps[0]) if steps else 0.0
        made.steps = {name: step for shapes in self._shapes for name in shapes}
        made.groups = [hyper_of(group) for group in groups]
        numbers = [group["params"] for group in groups]
        if sorted(chain.from_iterable(numbers)) != list(range(len(self._shapes))):
            raise ValueError("its param groups do not match its param_shapes")
        made.group_params = [
            [name for number in each for name in self._shapes[number]] for each in numbers
        ]

    def _tensors(self, flat: list[list[Tensor]]) -> dict[str, ForeignTensor]:
        """Returns each parameter's tensor; ``flat`` has the flat partitions by rank, then group."""
        runs: dict[str, list[Tensor]] = {}
        if self._stage == 3:
            for group, shapes in enumerate(self._shapes):
                begin = 0
                for name, shape in shapes.items():
                    elems = -(-prod(shape) // len(flat))
                    fragments = [partitions[group][begin : begin + elems] for partitions in flat]
                    runs[name] = _cut(fragments, prod(shape))
                    begin += elems
        else:
            for partitions, optimizer in zip(flat, self._optimizers, strict=True):
                mappings = optimizer["param_slice_mappings"]
                for partition, each in zip(partitions, mappings, strict=True):
                    for name, mapping in each.items():
                        runs.setdefault(name, []).append(_fragment(partition, mapping, name))
        shapes = {name: shape for each in self._shapes for name, shape in each.items()}
        return {n: ForeignTensor.of_runs(runs.get(n, []), shapes[n], n) for n in shapes}


def _cut(fragments: Sequence[Tensor], elems: int) -> list[Tensor]:
    """Returns the first ``elems`` elements of the concatenated fragments."""
    found: list[Tensor] = []
    for fragment in fragments:
        found.append(fragment[:elems])
        elems -= found[-1].numel()
    return found


def _fragment(partition: Tensor, mapping: Any, name: str) -> Tensor:
    """Returns the elements of a partition at a ``fragment_address``."""
    numel, start = sizes_of(mapping.args or (mapping.get("numel"), mapping.get("start")))
    if start + numel > partition.numel():
        raise ValueError(f"a part of {name} lies outside of its partition")
    return partition[start : start + numel]


# ---- torch: see NOTE [Checkpoints of torch] -----------------------------------------------------

_STATE, _GROUPS = "state", "param_groups"


class _SavedChunk(NamedTuple):
    """The location of a chunk: the bytes of a ``torch.save()`` archive inside a file."""

    file: str
    begin: int
    size_bytes: int


class _TorchCheckpoint:
    """The metadata of a torch checkpoint, and its files, mapped into memory.

    Raises:
        CheckpointError: files are missing or damaged.
        UnsupportedError: the optimizer is neither Adam nor AdamW.
        DAMAGE: an exception in this tuple, if the files are not as torch writes them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, path = folder, folder / METADATA
        try:
            pickled = read_bounded(path, LARGEST_PICKLE_BYTES)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        metadata = read_pickle(pickled, str(path))
        self._described: dict[str, Any] = attribute(metadata, "state_dict_metadata", path, dict)
        paths: Mapping[str, Any] = metadata.get("planner_data") or {}
        self._paths = {name: _split(paths.get(name, (name,))) for name in self._described}
        # Lists, not dicts by offsets: an attacker can make the hashes of integers collide.
        self._chunks: dict[str, list[tuple[tuple[int, ...], _SavedChunk]]] = {}
        for index, info in attribute(metadata, "storage_data", path, dict).items():
            offset = sizes_of(index.get("offset") or ())
            self._chunks.setdefault(index.get("fqn"), []).append((offset, _chunk(info)))
        chunks = sorted(chunk for some in self._chunks.values() for _, chunk in some)
        for one, other in pairwise(chunks):
            if one.file == other.file and one.begin + one.size_bytes > other.begin:
                raise ValueError(f"two chunks share bytes of {one.file}")
        self._files = {each.file: MappedFile(folder / each.file) for each in chunks}

    def state(self, weights_only: bool) -> ForeignState:
        """Returns the state that was saved."""
        optimizer = self._prefix_of_optimizer()
        weights: list[tuple[Keys, ForeignTensor]] = []
        more: dict[str, Any] = {}
        for name, path in self._paths.items():
            if not _leads(optimizer, path):
                value = self._value(name)
                if isinstance(value, ForeignTensor):
                    weights.append((path, value))
                else:
                    more[name] = as_data(value)
        if not weights:
            raise ValueError("it has no tensors of a model")
        depth = _common([path for path, _ in weights])
        named = {".".join(map(str, path[depth:])): each for path, each in weights}
        if len(named) < len(weights):
            raise ValueError("two tensors have one name")
        size_bytes = sum(len(each.bytes) for each in self._files.values())
        made = ForeignState("DCP", size_bytes, named, data=more, step=_step_in(more))
        if optimizer is not None and not weights_only:
            self._read_optimizer(made, optimizer)
        return made

    def _prefix_of_optimizer(self) -> Keys | None:
        """Returns the path to the optimizer's state, or None if there is none."""
        heads: dict[str, dict[str, Keys]] = {_STATE: {}, _GROUPS: {}}
        for path in self._paths.values():
            for key in heads:
                if key in path:
                    head = path[: path.index(key)]
                    heads[key][str(head)] = head
        if len(heads[_GROUPS]) > 1:
            raise ValueError(f"it has {len(heads[_GROUPS])} optimizers; only one can be converted")
        return next((heads[_STATE][each] for each in heads[_GROUPS] if each in heads[_STATE]), None)

    def _value(self, name: str) -> Any:
        """Returns a saved value; for a tensor a ForeignTensor whose pieces are its saved chunks."""
        described, chunks = self._described[name], self._chunks[name]
        read = [
            (at, TorchFile(self._files[chunk.file], chunk.begin, chunk.size_bytes).read())
            for at, chunk in chunks
        ]
        if described.name.rpartition(".")[2] == "BytesStorageMetadata":
            ((_, value),) = read
            return value
        size = sizes_of(described.get("size"))
        return ForeignTensor(size, size, [(at or (0,) * len(size), each) for at, each in read])

    def _read_optimizer(self, made: ForeignState, prefix: Keys) -> None:
        groups: dict[Any, dict[str, Any]] = {}
        for full, path in self._paths.items():
            if not _leads(prefix, path):
                continue
            value, (head, *inner) = self._value(full), path[len(prefix) :]
            if head == _GROUPS and isinstance(inner[0], int):
                groups.setdefault(inner[0], {})[str(inner[1])] = value
                continue
            name, _, key = ".".join(map(str, inner)).rpartition(".")
            if name not in made.weights:
                raise ValueError(f"{shown(name)} is no parameter's name")
            if head != _STATE:
                groups.setdefault(name, {"params": [name]})[key] = value
            elif key == "step":
                step = value.pieces[0][1] if isinstance(value, ForeignTensor) else value
                made.steps[name] = float(step)
            elif isinstance(value, ForeignTensor):
                made.moments.setdefault(key, {})[name] = value
        refuse_moments(made.moments, str(self._folder))
        made.moments = {kind: made.moments[kind] for kind in MOMENTS if kind in made.moments}
        _put_groups(made, groups)


def _put_groups(made: ForeignState, groups: Mapping[Any, Mapping[str, Any]]) -> None:
    """Adds param groups; merges groups of one parameter that have equal hyper-parameters."""
    numbered = all(isinstance(key, int) for key in groups)
    alike: dict[str, list[str]] = {}
    for key in sorted(groups) if numbered else groups:
        hyper, params = hyper_of(groups[key]), [str(each) for each in groups[key]["params"]]
        told = repr(hyper)
        if not numbered and told in alike:
            alike[told] += params
        else:
            alike[told] = params
            made.groups.append(hyper)
            made.group_params.append(params)


def _chunk(info: Any) -> _SavedChunk:
    name = info.get("relative_path")
    begin, size_bytes = sizes_of((info.get("offset"), info.get("length")))
    if type(name) is not str or len(name) > 255 or Path(name).name != name:
        raise ValueError(f"a file is called {shown(name)}")
    if info.get("transform_descriptors"):
        raise ValueError("its files are compressed or otherwise transformed")
    return _SavedChunk(name, begin, size_bytes)


def _split(path: Any) -> Keys:
    """Returns the keys of a path; splits joined keys such as "state.name" of a flattened state."""
    found: list[Any] = []
    for key in path if isinstance(path, (tuple, list)) else (path,):
        head, dot, rest = key.partition(".") if isinstance(key, str) else (key, "", "")
        found += [head, rest] if dot and head in (_STATE, _GROUPS) else [key]
    if not all(type(key) is str or number_below(key, 1 << 16) for key in found):
        raise ValueError(f"expected a path of keys, got {shown(found)}")
    return tuple(found)


def _leads(prefix: Keys | None, path: Keys) -> bool:
    """True if a path leads into the optimizer's state, whose path is ``prefix``."""
    is_state = _STATE in path or _GROUPS in path
    return prefix is not None and path[: len(prefix)] == prefix and is_state


def _common(paths: list[Keys]) -> int:
    """Returns how many leading keys all paths share, not counting the last key of a path."""
    depth = 0
    while all(len(path) > depth + 1 and path[depth] == paths[0][depth] for path in paths):
        depth += 1
    return depth


def _step_in(more: Mapping[str, Any]) -> int | None:
    """Returns the step number among other saved values, or None."""
    for name, value in more.items():
        known = name.rpartition(".")[2] in ("step", "global_step", "global_steps")
        if known and type(value) is int:
            return value
    return None
