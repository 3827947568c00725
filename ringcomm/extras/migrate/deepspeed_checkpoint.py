"""Reads checkpoints of DeepSpeed, ZeRO stages 1 to 3: weights, masters and AdamW's state.

NOTE [DeepSpeed's checkpoints]
A folder ``global_step<N>`` has files of model states, one at stages 1 and 2 and one a rank at 3,
and one of optimizer states of each rank. A param group's trainable parameters are flattened one
after the other. At stages 1 and 2 that is cut into a partition for each rank;
``param_slice_mappings`` says which elements of the partition are which parameter's. At stage 3 each
parameter is padded to a multiple of W elements and cut, and a rank's parts of them are flattened
one after the other. FP32 masters and moments lie alike. At stage 3 a param group may be several
flat ones; the numbers in its "params" are those of the flat ones. DeepSpeed 0.19 writes this.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch

from ringcomm.errors import CheckpointError, UnsupportedError
from ringcomm.extras.migrate.foreign import (
    MOMENTS,
    ForeignState,
    ForeignTensor,
    hyper_of,
    plain,
    refuse_moments,
)
from ringcomm.extras.migrate.torch_file import Inert, MappedFile, TorchFile, sizes_of
from ringcomm.json_reader import read_bounded

Tensor = torch.Tensor
Runs = dict[str, list[Tensor]]  # of each parameter, one after the other

_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(optim|model)_states\.pt")
_OWN = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
    *("shared_params", "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd"),
    *("sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples"),
    *("dp_world_size", "mp_world_size", "ds_config", "ds_version"),
}


def find_folder(folder: Path) -> Path | None:
    """Returns the folder of a DeepSpeed checkpoint at ``folder`` or named by its "latest"."""
    latest = folder / "latest"
    if latest.is_file():
        try:
            name = read_bounded(latest, 4096).decode("utf-8", "replace").strip()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{latest}: cannot be read: {error}") from error
        if name != ".." and Path(name).name == name and (folder / name).is_dir():
            folder = folder / name
    return folder if any(folder.glob("*_optim_states.pt")) else None


def read_deepspeed(folder: Path, weights_only: bool) -> ForeignState:
    """Reads a checkpoint.

    Args:
        folder: that :func:`find_folder` has found.
        weights_only: leave the optimizer's state out.

    Raises:
        CheckpointError: files are missing or damaged.
        UnsupportedError: it is of model-parallel ranks, or of another optimizer than Adam or AdamW.
        Exception: one of ``DAMAGE``: they are not what DeepSpeed writes.
    """
    return _Checkpoint(folder).state(weights_only)


class _Checkpoint:
    """The files of a checkpoint, read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if any(folder.glob("*expert_*_states.pt")):
            raise UnsupportedError(
                f"{folder}: has experts of DeepSpeed-MoE, which are not converted"
            )
        states = self._by_rank("optim")
        self._size_bytes = 0
        self._optimizers = [self._read(path)["optimizer_state_dict"] for path in states]
        first = self._optimizers[0]
        stage = first["zero_stage"]
        # An enum, which is called with its value.
        self._stage = int(stage.args[0]) if isinstance(stage, Inert) else int(stage)
        counts = first["partition_count"]
        expected = max(counts) if isinstance(counts, list) else int(counts)
        if expected != len(states):
            self._fail(f"expected optimizer states of {expected} ranks, got {len(states)}")
        models = (
            self._by_rank("model") if self._stage == 3 else [folder / "mp_rank_00_model_states.pt"]
        )
        self._models = [self._read(path) for path in models]
        self._model = self._models[0]
        self._shapes = [
            {name: sizes_of(shape) for name, shape in each.items()}
            for each in self._model["param_shapes"]
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
                    f"{self._folder}: has files of model-parallel ranks, whose parameters are "
                    "parts; convert it to DeepSpeed's universal format and load that there"
                )
            found[int(match[1])] = path
        if sorted(found) != list(range(len(found))) or not found:
            self._fail(f"expected files of {kind} states of ranks 0 and on, got {sorted(found)}")
        return [found[rank] for rank in range(len(found))]

    def state(self, weights_only: bool) -> ForeignState:
        """Returns what was saved."""
        trained = [name for shapes in self._shapes for name in shapes]
        masters = self._tensors(self._flat_masters())
        tied = {str(alias): str(name) for alias, name in self._model["shared_params"].items()}
        made = ForeignState(
            "DeepSpeed",
            self._size_bytes,
            self._weights(masters, tied),
            masters,
            tied=tied,
            step=int(self._model["global_steps"]),
            data=self._data(),
        )
        if not weights_only:
            base = [self._base_state(state) for state in self._optimizers]
            for kind in self._kinds(base):
                made.moments[kind] = self._tensors(self._flat_moments(base, kind))
            made.steps = dict.fromkeys(trained, _steps_of(base[0]))
            made.groups = [hyper_of(group) for group in base[0]["param_groups"]]
            numbers = [group["params"] for group in base[0]["param_groups"]]
            if sorted(chain.from_iterable(numbers)) != list(range(len(self._shapes))):
                raise ValueError("its param groups have other parameters than its shapes")
            made.group_params = [
                [name for number in each for name in self._shapes[number]] for each in numbers
            ]
        return made

    def _data(self) -> dict[str, Any]:
        client = {key: each for key, each in self._model.items() if key not in _OWN}
        return {"client_state": plain(client), "lr_scheduler": plain(self._model["lr_scheduler"])}

    def _weights(
        self, masters: Mapping[str, ForeignTensor], tied: Mapping[str, str]
    ) -> dict[str, ForeignTensor]:
        """Returns parameters and buffers, in the model's order at stages 1 and 2."""
        module, buffers = self._model["module"], self._model["buffer_names"]
        if self._stage < 3:
            return {n: ForeignTensor.whole(each) for n, each in module.items() if n not in tied}
        found = {name: ForeignTensor.whole(module[name]) for name in buffers}
        for name, told in (self._model["frozen_param_shapes"] or {}).items():
            shape = sizes_of(told)
            parts = [each["frozen_param_fragments"][name].view(-1) for each in self._models]
            found[name] = ForeignTensor.of_runs(_cut(parts, prod(shape)), shape, name)
        return {**found, **masters}

    # ---- flat partitions ------------------------------------------------------------------------

    def _flat_masters(self) -> list[list[Tensor]]:
        """Returns by rank, then by group the FP32 masters."""
        key = "fp32_flat_groups" if self._stage == 3 else "single_partition_of_fp32_groups"
        return [list(state[key]) for state in self._optimizers]

    def _flat_moments(self, base: Sequence[Mapping[str, Any]], kind: str) -> list[list[Tensor]]:
        return [[each["state"][number][kind] for number in sorted(each["state"])] for each in base]

    def _base_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        key = "optimizer_state_dict" if self._stage == 3 else "base_optimizer_state"
        base: Mapping[str, Any] = state[key]
        if not isinstance(base, dict) or "state" not in base:
            self._fail(
                "was saved with elastic_checkpoint, whose state has no names; set it to false"
            )
        return base

    def _kinds(self, base: Sequence[Mapping[str, Any]]) -> list[str]:
        kinds = {
            name
            for number in base[0]["state"]
            for name, each in base[0]["state"][number].items()
            if isinstance(each, Tensor) and each.dim()
        }
        refuse_moments(sorted(kinds), str(self._folder))
        return [kind for kind in MOMENTS if kind in kinds]

    def _tensors(self, flat: list[list[Tensor]]) -> dict[str, ForeignTensor]:
        """Returns the parameters' tensors of ranks' flat partitions."""
        runs = self._runs_of_stage_3(flat) if self._stage == 3 else self._runs(flat)
        shapes = {name: shape for each in self._shapes for name, shape in each.items()}
        return {n: ForeignTensor.of_runs(runs.get(n, []), shapes[n], n) for n in shapes}

    def _runs(self, flat: list[list[Tensor]]) -> Runs:
        found: Runs = {}
        for rank, partitions in enumerate(flat):
            for partition, places in zip(
                partitions, self._optimizers[rank]["param_slice_mappings"], strict=True
            ):
                for name, place in places.items():
                    numel, start = _fragment(place)
                    if not 0 <= start <= start + numel <= partition.numel():
                        raise ValueError(f"a part of {name} lies outside of its partition")
                    found.setdefault(name, []).append(partition[start : start + numel])
        return found

    def _runs_of_stage_3(self, flat: list[list[Tensor]]) -> Runs:
        found: Runs = {}
        for group, shapes in enumerate(self._shapes):
            begin = 0
            for name, shape in shapes.items():
                elems = prod(shape)
                each = -(-elems // len(flat))
                parts = [partitions[group][begin : begin + each] for partitions in flat]
                found[name] = _cut(parts, elems)
                begin += each
        return found


def _cut(parts: Sequence[Tensor], elems: int) -> list[Tensor]:
    """Returns the first ``elems`` elements of parts that lie one after the other."""
    found: list[Tensor] = []
    for part in parts:
        found.append(part[:elems])
        elems -= found[-1].numel()
    return found


def _fragment(place: Any) -> tuple[int, int]:
    """Returns number and first of the elements that a ``fragment_address`` tells."""
    numel, start = place.args if place.args else (place.get("numel"), place.get("start"))
    return sizes_of((numel, start))  # type: ignore[return-value]


def _steps_of(base: Mapping[str, Any]) -> float:
    """Returns the steps taken, which some optimizers keep by parameter and some by group."""
    for holder in [*base["state"].values(), *base["param_groups"]]:
        if "step" in holder:
            return float(holder["step"])
    return 0.0
