# SPDX-License-Identifier: Apache-2.0
"""``pretrained()`` and ``load_pretrained()``: weights from Hugging Face, read straight to shards.

NOTE [Every rank reads its own]
A safetensors file has a tensor's elements in order, and a rank keeps contiguous parts of flattened
parameters. So each rank reads only the parts that it keeps: at stage 3 no rank has a whole model or
a whole parameter, and at no stage do values pass between ranks. At stages 0 to 2 a rank keeps all
elements of the parameters, and its share of the FP32 values before rounding.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ringcomm.comm.agreement import all_or_none, check_agreement
from ringcomm.errors import ArgumentError, CheckpointError, UnsupportedError
from ringcomm.json_reader import digest_of, read_bounded, read_json, shown
from ringcomm.memory import normal_tensors
from ringcomm.module_names import Chosen, IncompatibleKeys, KnownNames, ModuleNames, unwrapped
from ringcomm.optim.buckets import Bucket
from ringcomm.optim.dtensors import Sharding, local_of
from ringcomm.optim.layout import Chunk, Segment
from ringcomm.zero.checkpoint.format import (
    DTYPES,
    MOST_DIMS,
    SLICE_BYTES,
    DTensorBox,
    DTensorShard,
    bytes_of,
)
from ringcomm.zero.stages.access import write_master
from ringcomm.zero.stages.buckets import BucketParam, ParamBucket
from ringcomm.zero.stages.engine import ShardEngine
from ringcomm.zero.stages.sharding import engine_of, path_of
from ringcomm.zero.stages.shards import own_of, publish, requantize
from ringcomm.zero.stages.units import Values, WeightSource

# ---- Weights in safetensors files of Hugging Face's libraries, matched with a module -------------
# A source is one file, or a folder that contains ``model.safetensors``, or several files and an
# index that lists each file's names. Headers and index are checked before they are used. Elements
# are read into their final memory through a buffer of one slice, and nothing is unpickled.
#
# A model of the transformers library may have other names than its files, and may stack experts,
# which are separate tensors in the files, into one parameter. The library's own conversion tables
# are used if stacking the files' tensors gives the parameter's elements in their order.

Tensor = torch.Tensor

#: Maps names in the files to names in the module; None leaves the tensor out.
Rename = Mapping[str, str] | Callable[[str], str | None]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = f"{SINGLE_NAME}.index.json"
_DTYPE_OF_CODE = {code: dtype for dtype, (_, code) in DTYPES.items()}
# The limit of the safetensors library.
_MAX_HEADER_BYTES = 100_000_000
_MAX_INDEX_BYTES = 1 << 28
_MAX_EXTENT = 1 << 62
# A name without a folder, so that no index can refer outside of its folder.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*\.safetensors")
# Dtypes whose values can be converted into each other.
_FLOATING = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file.

    Attributes:
        name: its name in the file.
        code: its dtype, as safetensors names it ("BF16").
        shape: its shape.
        file: number of the file that contains it.
        begin_bytes: offset of its elements in the file, in bytes.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    file: int
    begin_bytes: int

    @property
    def elems(self) -> int:
        return prod(self.shape)

    @property
    def dtype(self) -> torch.dtype | None:
        """The torch dtype; None if torch has no such dtype."""
        return _DTYPE_OF_CODE.get(self.code)

    def becomes(self, dtype: torch.dtype) -> bool:
        """True if the tensor's values can be read into a tensor of this dtype."""
        return self.dtype is dtype or (self.dtype in _FLOATING and dtype in _FLOATING)


class WeightFiles:
    """The tensors of a safetensors file, or of a folder of safetensors files.

    Attributes:
        source: the file or folder.
        tensors: the tensors, by name.
        digest: 64 bits that depend on names, dtypes, shapes and offsets of all tensors.

    Raises:
        CheckpointError: there are no weights, or files are damaged; the message names the file.
    """

    def __init__(self, source: str | os.PathLike[str]) -> None:
        self.source = Path(source)
        self.tensors: dict[str, StoredTensor] = {}
        self._files: list[int] = []
        self._paths: list[Path] = []
        self._closing = ExitStack()
        # One buffer serves all reads: malloc would keep the memory of freed buffers.
        self._buffer = torch.empty(SLICE_BYTES, dtype=torch.uint8, device="cpu")
        digest = hashlib.sha256()
        try:
            names_of = self._find()
            for path in names_of:
                header = self._open(path)
                digest.update(header)
                self._take(path, header, names_of[path])
        except BaseException:
            self.close()
            raise
        self.digest = digest.hexdigest()[:16]

    def close(self) -> None:
        """Closes the files; later reads are impossible."""
        self._closing.close()

    def read(self, stored: StoredTensor, begin: int, out: Tensor, via: torch.dtype) -> None:
        """Fills ``out`` with the elements of a flattened tensor from ``begin`` on.

        Args:
            stored: one of the values of ``tensors``.
            begin: the first element to read.
            out: [n], contiguous; of any floating-point dtype if ``stored`` has one.
            via: the dtype to which the elements are converted first.

        Raises:
            CheckpointError: the file has become shorter, or cannot be read.
        """
        dtype = stored.dtype
        assert dtype is not None
        exact = torch.promote_types(dtype, via) is via
        at = stored.begin_bytes + begin * dtype.itemsize
        if exact and out.dtype is dtype and out.device.type == "cpu":
            self._read_bytes(stored, at, out)
            return
        buffer = self._buffer.view(dtype)
        for done in range(0, out.numel(), buffer.numel()):
            target = out[done : done + buffer.numel()]
            here = buffer[: target.numel()]
            self._read_bytes(stored, at + done * dtype.itemsize, here)
            target.copy_(here if exact else here.to(via))

    def read_box(
        self, stored: StoredTensor, offsets: Sequence[int], out: Tensor, via: torch.dtype
    ) -> None:
        """Fills ``out`` [box] with a box of a tensor; reads whole rows; see :meth:`read`.

        Args:
            stored, out, via: as for :meth:`read`.
            offsets: offsets of the box, by dimension.
        """
        if not out.numel():
            return
        if not offsets:
            self.read(stored, 0, out.view(-1), via)
            return
        assert stored.dtype is not None
        row_elems = prod(stored.shape[1:])
        rows = max(1, SLICE_BYTES // max(1, row_elems * stored.dtype.itemsize))
        inner = [slice(o, o + n) for o, n in zip(offsets[1:], out.shape[1:], strict=True)]
        within = (slice(None), *inner)
        for row in range(0, out.shape[0], rows):
            target = out[row : row + rows]
            shape = (target.shape[0], *stored.shape[1:])
            slab = torch.empty(shape, dtype=stored.dtype, device="cpu")
            self.read(stored, (offsets[0] + row) * row_elems, slab.view(-1), stored.dtype)
            target.copy_(slab[within].to(via))

    def _read_bytes(self, stored: StoredTensor, at: int, buffer: Tensor) -> None:
        """Fills a contiguous tensor in host memory with bytes of a file."""
        view = bytes_of(buffer)
        path = self._paths[stored.file]
        while view:
            try:
                count = os.preadv(self._files[stored.file], [view], at)
            except OSError as error:
                raise _damaged(path, f"{shown(stored.name)}: cannot be read: {error}") from error
            if not count:
                raise _damaged(path, f"{shown(stored.name)}: the file ends before its elements do")
            view, at = view[count:], at + count

    # ---- index and headers ----------------------------------------------------------------------

    def _find(self) -> dict[Path, set[str] | None]:
        """Returns the files, each with its tensors' names in the index; None without index."""
        if not self.source.is_dir():
            return {self.source: None}
        if (self.source / SINGLE_NAME).exists():
            return {self.source / SINGLE_NAME: None}
        path = self.source / INDEX_NAME
        if not path.exists():
            raise CheckpointError(
                f"{self.source}: expected {SINGLE_NAME} or {INDEX_NAME} in it, and there is "
                "neither. Weights in pickles (.bin, .pt) are not read: save them as safetensors, "
                "as save_pretrained() does"
            )
        names_of: dict[Path, set[str] | None] = {}
        for name, file in _weight_map(path).items():
            names = names_of.setdefault(self.source / file, set())
            assert names is not None
            names.add(name)
        return names_of

    def _open(self, path: Path) -> bytes:
        """Opens a file and returns the bytes of its header."""
        try:
            # Without O_NONBLOCK, opening a pipe that no process writes to would hang.
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _damaged(path, f"cannot be opened: {error.strerror}") from error
        self._closing.callback(os.close, file)
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise _damaged(path, "is not a regular file")
        self._files.append(file)
        self._paths.append(path)
        try:
            header_bytes = int.from_bytes(os.pread(file, 8, 0), "little")
            if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, status.st_size - 8):
                raise _damaged(path, f"is not a safetensors file, with {status.st_size} bytes")
            return os.pread(file, header_bytes, 8)
        except OSError as error:
            raise _damaged(path, f"cannot be read: {error.strerror}") from error

    def _take(self, path: Path, header: bytes, expected: set[str] | None) -> None:
        """Checks a header, and adds its tensors."""
        file = len(self._files) - 1
        try:
            tensors = read_json(header)
            if not isinstance(tensors, dict):
                raise ValueError("no object")
            tensors.pop("__metadata__", None)
            found = [_stored(name, told, file, 8 + len(header)) for name, told in tensors.items()]
            _check_offsets(found, tensors, os.fstat(self._files[file]).st_size - 8 - len(header))
        except ValueError as error:
            raise _damaged(path, f"its header is damaged: {error}") from error
        for stored in found:
            if stored.name in self.tensors:
                other = self._paths[self.tensors[stored.name].file].name
                raise _damaged(path, f"{shown(stored.name)} is also in {other}")
            self.tensors[stored.name] = stored
        names = {stored.name for stored in found}
        if expected is not None and names != expected:
            name = min(names ^ expected)
            where = "is in it, but not in" if name in names else "is not in it, but in"
            raise _damaged(path, f"{shown(name)} {where} {INDEX_NAME}")


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}")


def _weight_map(path: Path) -> dict[str, str]:
    """Reads an index; returns, by tensor name, the name of the file that has the tensor.

    Raises:
        CheckpointError: the file is not an index, or refers outside of its folder.
    """
    try:
        index = read_json(read_bounded(path, _MAX_INDEX_BYTES))
    except OSError as error:
        raise _damaged(path, f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    found = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(found, dict) or not found:
        raise _damaged(path, f"expected an object weight_map with names, got {shown(found)}")
    for name, file in found.items():
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise _damaged(
                path,
                f"{shown(name)}: expected the name of a .safetensors file of this folder, got "
                f"{shown(file)}",
            )
    return found


def _stored(name: str, told: Any, file: int, data_bytes: int) -> StoredTensor:
    """Reads a header's entry of a tensor; raises ValueError if it is invalid."""
    if not isinstance(told, dict) or {*told} != {"dtype", "shape", "data_offsets"}:
        raise ValueError(
            f"{shown(name)}: expected dtype, shape and data_offsets, got {shown(told)}"
        )
    code, shape, offsets = told["dtype"], told["shape"], told["data_offsets"]
    fits = isinstance(code, str) and _are_numbers(shape) and _are_numbers(offsets)
    # The product of many numbers takes time that grows with the square of their count.
    fits = fits and len(shape) <= MOST_DIMS
    if not fits or len(offsets) != 2 or offsets[0] > offsets[1] or prod(shape) > _MAX_EXTENT:
        raise ValueError(f"{shown(name)}: expected sizes, got {shown(told)}")
    stored = StoredTensor(name, code, tuple(shape), file, data_bytes + offsets[0])
    if stored.dtype is not None and offsets[1] - offsets[0] != stored.elems * stored.dtype.itemsize:
        raise ValueError(
            f"{shown(name)}: {code} of shape {shown(shape)} is not {offsets[1] - offsets[0]} bytes"
        )
    return stored


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(each) is int and 0 <= each <= _MAX_EXTENT for each in values
    )


def _check_offsets(found: Sequence[StoredTensor], told: dict[str, Any], data_bytes: int) -> None:
    """Raises ValueError unless the tensors fill the file's data without gaps or overlaps."""
    end = 0
    for begin, stop, name in sorted(
        (*told[each.name]["data_offsets"], each.name) for each in found
    ):
        if begin != end:
            raise ValueError(f"{shown(name)} begins at byte {begin} of the data, and not at {end}")
        end = stop
    if end != data_bytes:
        raise ValueError(f"expected {end} bytes of data, as the header says, got {data_bytes}")


# ---- matching of names ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Matched:
    """The parameters and buffers of a module, matched with the tensors of files.

    Attributes:
        found: maps a tensor's name in the module (if it is tied, its first name) to the stored
            tensors whose elements, one after the other, are the elements of the flattened tensor.
        keys: the names that only the module or only the files have.
    """

    found: dict[str, tuple[StoredTensor, ...]]
    keys: IncompatibleKeys


def match(
    root: nn.Module,
    names: ModuleNames,
    files: WeightFiles,
    rename: Rename | None,
    only: Sequence[str] | None,
) -> Matched:
    """Matches the tensors of files with a module's parameters and buffers.

    Raises:
        ArgumentError: ``only`` matches nothing.
        CheckpointError: shapes or dtypes do not fit, or two tensors have the same name.
        UnsupportedError: a parameter is made from stored tensors in a way that does not keep their
            elements in order.
    """
    chosen = Chosen(names.first, only, "pretrained")
    rules = _Rules(root, names.first)
    renamed = (lambda name: rename.get(name, name)) if isinstance(rename, Mapping) else rename
    stacks: dict[str, _Stack] = {}
    unexpected = []
    for stored in files.tensors.values():
        name = stored.name if renamed is None else renamed(stored.name)
        if name is None:
            continue
        name, converter, pattern = rules.module_name(name)
        if name not in names.first:
            if name in chosen and not rules.ignores("unexpected", name):
                unexpected.append(stored.name)
        elif name in chosen:
            stacks.setdefault(name, _Stack(converter)).add(pattern, stored)
    found: dict[str, tuple[StoredTensor, ...]] = {}
    for name, stack in stacks.items():
        first = names.first[name]
        # A tied weight may be in the files under each of its names: its first name is used.
        if first not in found or name == first:
            found[first] = stack.in_order(name, names.tensors[first], files)
    missing = [
        name
        for name in names.tensors
        if name in chosen and name not in found and not rules.ignores("missing", name)
    ]
    return Matched(found, IncompatibleKeys(tuple(missing), tuple(unexpected)))


class _Stack:
    """Collects the stored tensors of one parameter, by the pattern that matched their names."""

    def __init__(self, converter: Any) -> None:
        self._converter = converter
        self._by_pattern: dict[str | None, list[StoredTensor]] = {}

    def add(self, pattern: str | None, stored: StoredTensor) -> None:
        self._by_pattern.setdefault(pattern, []).append(stored)

    def in_order(self, name: str, tensor: Tensor, files: WeightFiles) -> tuple[StoredTensor, ...]:
        """Returns the stored tensors in the order of the flattened parameter's elements."""
        shape = tuple(tensor.shape)
        runs = self._runs(name, len(shape))
        for each in runs:
            if not each.becomes(tensor.dtype):
                raise CheckpointError(
                    f"{files.source}: {each.name}: expected values that convert to {tensor.dtype}, "
                    f"the dtype of {name}, got {each.code}; quantized weights are not read"
                )
        made = self._converter is not None
        if not (_fill(runs, shape) if made else runs[0].shape == shape):
            several = f"{len(runs)} tensors of " if made else ""
            raise CheckpointError(
                f"{files.source}: {runs[0].name}: expected shape {shape}, which {name} has in the "
                f"module, got {several}shape {runs[0].shape}"
            )
        return tuple(runs)

    def _runs(self, name: str, dims: int) -> list[StoredTensor]:
        if self._converter is None:
            runs = [each for stored in self._by_pattern.values() for each in stored]
            if len(runs) > 1:
                raise CheckpointError(
                    f"{runs[0].name} and {runs[1].name} in the files are both {name} of the module"
                )
            return runs
        how = self._converter
        kinds = [(type(each).__name__, getattr(each, "dim", 0)) for each in how.operations]
        by_source = [
            sorted(self._by_pattern[each], key=lambda stored: _natural(stored.name))
            for each in how.source_patterns
            if each in self._by_pattern
        ]
        one_each = len({len(each) for each in by_source}) == 1
        stacked = kinds == [("MergeModulelist", 0)] and len(by_source) == 1
        joined = kinds == [("MergeModulelist", 0), ("Concatenate", 1)] and one_each and dims > 1
        whole = kinds == [("Concatenate", 0)] and all(len(each) == 1 for each in by_source)
        if not (stacked or joined or whole) or len(how.target_patterns) != 1:
            raise UnsupportedError(
                f"pretrained: {name} is made of {by_source[0][0].name} and others by "
                f"{[kind for kind, _ in kinds]}, which does not keep their elements in order; load "
                "the model with from_pretrained() and pass it to shard()"
            )
        return [each for row in zip(*by_source, strict=True) for each in row]


def _fill(runs: Sequence[StoredTensor], shape: tuple[int, ...]) -> bool:
    """True if the tensors, concatenated in dimension 0, fill a parameter of this ``shape``."""
    last = shape[-(len(runs[0].shape) - 1) :] if len(runs[0].shape) > 1 else ()
    elems = sum(each.elems for each in runs)
    return elems == torch.Size(shape).numel() and all(each.shape[1:] == last for each in runs)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Returns a sort key that orders numbers in names as numbers."""
    parts = name.split(".")
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


class _Rules:
    """The transformers library's rules for names, if the model is a model of this library."""

    def __init__(self, root: nn.Module, names: Mapping[str, str]) -> None:
        root = unwrapped(root)
        self._names = names
        self._known = KnownNames(names)
        self._prefix = getattr(root, "base_model_prefix", "") if is_transformers(root) else ""
        self._ignored = {
            kind: [*map(re.compile, getattr(root, f"_keys_to_ignore_on_load_{kind}", None) or ())]
            for kind in ("missing", "unexpected")
        }
        self._renamings: list[Any] = []
        self._converters: list[Any] = []
        # Older releases of the library have no tables: models and files have the same names.
        tables = "transformers.conversion_mapping"
        if is_transformers(root) and tables in sys.modules:
            for each in sys.modules[tables].get_model_conversion_mapping(root):
                kind = self._converters if hasattr(each, "operations") else self._renamings
                kind.append(each)

    def module_name(self, name: str) -> tuple[str, Any, str | None]:
        """Returns the name in the module for a name in the files, and its converter and pattern."""
        name = self._known.find(name)
        if name in self._names:
            return name, None, None
        for each in self._renamings:
            name, _ = each.rename_source_key(name)
        for each in self._converters:
            name, pattern = each.rename_source_key(name)
            if pattern is not None:
                return self._with_prefix(name), each, pattern
        return self._with_prefix(name), None, None

    def _with_prefix(self, name: str) -> str:
        """Returns a name with the base model's prefix added or removed, if the module has it."""
        others = (f"{self._prefix}.{name}", name.removeprefix(f"{self._prefix}."))
        if self._prefix and name not in self._names:
            return next((each for each in others if each in self._names), name)
        return name

    def ignores(self, kind: str, name: str) -> bool:
        """True if the library ignores a name that is "missing" or "unexpected"."""
        return any(pattern.search(name) for pattern in self._ignored[kind])


def is_transformers(root: nn.Module) -> bool:
    # Do not import the library: if nobody imported it, no module can be one of its models.
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(root, library.PreTrainedModel)


def own_initializer(root: nn.Module) -> Callable[[nn.Module], None]:
    """Returns an initializer of modules: ``_init_weights()`` of the model, or reset_parameters().

    A model of the transformers library defines how its modules are initialized, including buffers
    that are in no file (rotary frequencies).
    """
    # The innermost model of the library that contains each module.
    owners: dict[int, nn.Module] = {}
    for model in filter(is_transformers, root.modules()):
        owners |= {id(module): model for module in model.modules()}

    def fill(module: nn.Module) -> None:
        owner = owners.get(id(module))
        if owner is not None:
            owner._init_weights(module)  # type: ignore[operator]
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]
        else:
            raise ArgumentError(
                f"pretrained: a {type(module).__name__} has parameters or buffers on the meta "
                "device that are not in the files, and no reset_parameters(); pass init=, which "
                "fills them"
            )

    return fill


def pretrained(
    source: str | os.PathLike[str],
    *,
    strict: bool = True,
    only: Sequence[str] | None = None,
    rename: Rename | None = None,
    init: Callable[[nn.Module], None] | None = None,
) -> Pretrained:
    """Returns an argument for ``shard(init=)`` that fills a module from safetensors files.

    The module may be on the meta device: each rank reads the shards that it keeps, and no rank
    holds more than its shards and one slice. The values are the same as with ``from_pretrained()``
    or ``load_state_dict()`` before ``shard()``: converted to the dtypes of the module, and then to
    the dtypes of its precision. All ranks must see the same files.

    Args:
        source: a .safetensors file, or a folder that ``save_pretrained()`` wrote, with one file or
            several files and an index.
        strict: refuse files that lack parameters or persistent buffers of the module, or have other
            tensors. With False, the returned object lists both in ``missing_keys`` and
            ``unexpected_keys`` after ``shard()``; missing tensors are initialized if they are on
            the meta device, and otherwise keep rank 0's values.
        only: patterns of modules, parameters and buffers to load, with everything inside them; a
            ``*`` matches one part of a name. All others are neither missing nor unexpected.
        rename: maps names in the files to names in the module; a function may return None to leave
            a tensor out. Models of the transformers library need no ``rename``.
        init: a function that fills a module's own tensors. It is called with each module that has
            meta tensors of its own that the files lack, such as buffers that are not persistent.
            None calls the model's method in models of the transformers library, and
            ``reset_parameters()`` in others.
    """
    path_of(source, "pretrained", "source")
    return Pretrained(source, _Choice(strict, only, rename), init)


@normal_tensors()
def load_pretrained(
    module: nn.Module,
    source: str | os.PathLike[str],
    *,
    strict: bool = True,
    only: Sequence[str] | None = None,
    rename: Rename | None = None,
) -> IncompatibleKeys:
    """Fills a sharded module from safetensors files; collective.

    Each rank reads the shards that it keeps. If parameters are rounded, FP32 masters get the values
    before rounding, also masters of an existing optimizer, whose moments stay unchanged.

    Args:
        module: the module that ``shard()`` returned.
        source: as for :func:`pretrained`.
        strict: as for :func:`pretrained`.
        only: as for :func:`pretrained`; tensors that are not loaded keep their values.
        rename: as for :func:`pretrained`.

    Returns:
        The names of tensors that the files lack, and of tensors that only the files have.

    Raises:
        CheckpointError: files are missing or damaged, or do not fit; on all ranks, with nothing
            changed. If a file can no longer be read after these checks, the values are a mixture,
            and the error says so.
        ArgumentError: the module is not sharded, or ``only`` matches nothing in it.
        MismatchError: the ranks have found different files.
    """
    engine = engine_of(module, "load_pretrained")
    path_of(source, "load_pretrained", "source")
    comm = engine.comm
    found = Pretrained(source, _Choice(strict, only, rename), None)
    try:
        with all_or_none(comm, "load_pretrained", engine.mesh):
            engine.check("load_pretrained")
            found.open(engine.setup.module)
            # From here on no rank reads memory that its peers are about to change.
            engine.change("load_pretrained")
        check_agreement(comm, "load_pretrained", {"options": {"weight files": found.digest}})
        comm.barrier()
        _fill_engine(engine, found)
        with all_or_none(comm, "load_pretrained", engine.mesh):
            found.settle()
    finally:
        found.close()
    return IncompatibleKeys(found.missing_keys, found.unexpected_keys)


@dataclass(frozen=True)
class _Choice:
    """The caller's choice of tensors in the files; see :func:`pretrained`."""

    strict: bool
    only: Sequence[str] | None
    rename: Rename | None


class Pretrained(WeightSource):
    """Weights in files for one module on one rank; made by :func:`pretrained`.

    Attributes:
        missing_keys: after opening, the names that the files do not have.
        unexpected_keys: after opening, the names that only the files have.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        choice: _Choice,
        init: Callable[[nn.Module], None] | None,
    ) -> None:
        self._source = source
        self._choice = choice
        self._init = init
        self._fill = init
        self._files: WeightFiles | None = None
        self._names = ModuleNames()
        self._found: dict[str, tuple[StoredTensor, ...]] = {}
        self._of_param: dict[int, str] = {}
        self._error: CheckpointError | None = None
        self.missing_keys: tuple[str, ...] = ()
        self.unexpected_keys: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<ringcomm.zero.Pretrained of {os.fspath(self._source)}>"

    def open(self, root: nn.Module) -> None:
        self.close()
        self._error = None
        self._files = WeightFiles(self._source)
        self._names = ModuleNames.of(root)
        choice = self._choice
        matched = match(root, self._names, self._files, choice.rename, choice.only)
        if choice.strict and any(matched.keys):
            raise CheckpointError(
                f"{self._files.source}: expected the weights of the module, but "
                f"{matched.keys.in_words('they have')}. Pass strict=False to load the tensors that "
                "both have, or rename= if names differ"
            )
        self._found = matched.found
        self._of_param = {id(self._names.tensors[name]): name for name in matched.found}
        self._fill = own_initializer(root) if self._init is None else self._init
        self.missing_keys, self.unexpected_keys = matched.keys

    @property
    def digest(self) -> str:
        assert self._files is not None
        return digest_of({"files": self._files.digest, "names": sorted(self._found)})

    def values_of(self, param: Tensor) -> StoredValues | None:
        return self._values(self._of_param.get(id(param)), param, param.dtype)

    def values_of_buffer(self, owner: nn.Module, key: str) -> StoredValues | None:
        name, buffer = self._names.buffers.get((id(owner), key)), owner._buffers[key]
        return None if buffer is None else self._values(name, buffer, buffer.dtype)

    def stored_values_of(self, param: Tensor) -> StoredValues | None:
        """Returns the values of a parameter, in the dtype that they have in the files."""
        return self._values(self._of_param.get(id(param)), param, None)

    def _values(
        self, name: str | None, tensor: Tensor, dtype: torch.dtype | None
    ) -> StoredValues | None:
        runs = () if name is None else self._found.get(name, ())
        if not runs:
            return None
        sharding = Sharding.of(tensor)
        if sharding is not None and len(runs) > 1:
            raise UnsupportedError(
                f"pretrained: {name} is made of {len(runs)} tensors in the files, and a DTensor is "
                "read from one tensor only; load the model with from_pretrained(), and then divide "
                f"{name}"
            )
        box = None
        if sharding is not None:
            box = DTensorBox(sharding.shape, sharding.offsets, tuple(local_of(tensor).shape))
        return StoredValues(self, runs, dtype or runs[0].dtype, box)

    def initialize(self, module: nn.Module) -> None:
        assert self._fill is not None
        self._fill(module)

    def read(self, work: Callable[[WeightFiles], None]) -> None:
        """Calls ``work`` to read values, unless an earlier read has failed."""
        if self._error is not None:
            return
        assert self._files is not None
        try:
            work(self._files)
        except CheckpointError as error:
            self._error = error

    def settle(self) -> None:
        self.close()
        if self._error is not None:
            raise CheckpointError(
                f"{self._error}: the files have changed since they were opened, or their disk has "
                "failed. If the module was sharded before, its values are a mixture: load again"
            ) from self._error

    def close(self) -> None:
        if self._files is not None:
            self._files.close()


class StoredValues(Values):
    """The values of a parameter or buffer in files.

    Args:
        source: the object that reads them.
        runs: the stored tensors whose concatenated elements are these values.
        dtype: dtype to which elements are converted first: the module's, or the files' dtype.
        box: this rank's part of the tensor; None for the whole tensor.
    """

    def __init__(
        self,
        source: Pretrained,
        runs: Sequence[StoredTensor],
        dtype: torch.dtype | None,
        box: DTensorBox | None,
    ) -> None:
        self._source = source
        self._runs = runs
        assert dtype is not None
        self._dtype, self._box = dtype, box

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def read(self, begin: int, out: Tensor) -> None:
        self._source.read(lambda files: self._read(files, begin, out))

    def _read(self, files: WeightFiles, begin: int, out: Tensor) -> None:
        if self._box is not None:
            for box in DTensorShard(self._box, begin, out).boxes():
                files.read_box(self._runs[0], box.offsets, box.local, self._dtype)
            return
        first = 0
        for stored in self._runs:
            low, high = max(begin, first), min(begin + out.numel(), first + stored.elems)
            if low < high:
                files.read(stored, low - first, out[low - begin : high - begin], self._dtype)
            first += stored.elems


# ---- loading into a sharded module ---------------------------------------------------------------


def _fill_engine(engine: ShardEngine, source: Pretrained) -> None:
    """Reads this rank's parts of the values, and sends them to ranks with copies; collective."""
    owner = engine.placement.owner
    with engine.together("load_pretrained"):
        for number, bucket in enumerate((*engine.stored, *engine.setup.stored_frozen)):
            masters = owner.buckets[number] if owner is not None and bucket.trains else None
            with bucket.here(write=True):
                _fill_bucket(bucket, masters, source)
    publish(engine)
    requantize(engine)
    _fill_rest(engine, source)


def _fill_bucket(bucket: ParamBucket, masters: Bucket | None, source: Pretrained) -> None:
    """Fills this rank's part of a bucket with the values of parameters that are in the files."""
    for entry, values, piece in _pieces(bucket, source):
        own = own_of(bucket)[piece.begin : piece.end]
        begin = bucket.state_chunk.begin + piece.begin - entry.begin
        rounds = bucket.trains and own.dtype is not torch.float32
        if bucket.compression is not None:
            assert bucket.wide is not None
            values.read(begin, bucket.wide[piece.begin : piece.end])
        elif rounds and masters is not None:
            wide = torch.empty(own.numel(), dtype=torch.float32, device=own.device)
            values.read(begin, wide)
            first = bucket.state_chunk.begin + piece.begin
            write_master(masters, Chunk(first, first + wide.numel()), wide)
        elif rounds and (bucket.wide is not None or values.dtype is not own.dtype):
            if bucket.wide is None:
                bucket.wide = own_of(bucket).float()
            values.read(begin, bucket.wide[piece.begin : piece.end])
            own.copy_(bucket.wide[piece.begin : piece.end])
        else:
            values.read(begin, own)


def _pieces(
    bucket: ParamBucket, source: Pretrained
) -> Iterator[tuple[BucketParam, StoredValues, Segment]]:
    """Yields this rank's parts of a bucket's parameters, with positions in ``own_of(bucket)``."""
    chunk = bucket.state_chunk
    for number, entry in enumerate(bucket.params):
        low, high = max(entry.begin, chunk.begin), min(entry.end, chunk.end)
        values = source.stored_values_of(entry.param)
        if values is not None and low < high:
            yield entry, values, Segment(low - chunk.begin, high - chunk.begin, number)


def _fill_rest(engine: ShardEngine, source: Pretrained) -> None:
    """Reads parameters without a bucket, and buffers, which every rank has whole."""
    root = engine.setup.module
    buckets = (*engine.stored, *engine.setup.stored_frozen)
    bucketed = {id(each.param) for bucket in buckets for each in bucket.params}
    for param in root.parameters():
        values = None if id(param) in bucketed else source.values_of(param)
        if values is not None:
            values.read(0, local_of(param).detach().view(-1))
    for owner in root.modules():
        for key, buffer in owner._buffers.items():
            values = source.values_of_buffer(owner, key)
            if buffer is None or values is None:
                continue
            there = local_of(buffer)
            fresh = torch.empty(there.shape, dtype=there.dtype, device=there.device)
            values.read(0, fresh.view(-1))
            there.copy_(fresh)
