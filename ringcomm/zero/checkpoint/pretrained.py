"""``pretrained()`` and ``load_pretrained()``: Hugging Face's weights, straight into shards.

NOTE [Every rank reads its own]
A safetensors file has a tensor's elements in order, and a rank keeps runs of flattened parameters.
So each rank reads the runs that it keeps, and nothing else: no rank has a whole model, or a whole
parameter, and no values pass between ranks. At stages 0 to 2 what a rank keeps of the parameters is
everything, and of the FP32 values before rounding its share.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ringcomm.errors import CheckpointError, UnsupportedError
from ringcomm.json_reader import digest_of
from ringcomm.memory import normal_tensors
from ringcomm.module_names import IncompatibleKeys, ModuleNames
from ringcomm.optim.agreement import all_or_none, check_agreement
from ringcomm.optim.buckets import Bucket
from ringcomm.optim.dtensors import Sharding, local_of
from ringcomm.optim.layout import Chunk, Segment
from ringcomm.zero.checkpoint.format import Part, PartShard
from ringcomm.zero.checkpoint.weight_files import (
    Rename,
    StoredTensor,
    WeightFiles,
    match,
    own_initializer,
)
from ringcomm.zero.stages.access import write_master
from ringcomm.zero.stages.buckets import BucketParam, ParamBucket
from ringcomm.zero.stages.engine import ShardEngine
from ringcomm.zero.stages.sharding import engine_of, path_of
from ringcomm.zero.stages.shards import own_of, publish, recode
from ringcomm.zero.stages.units import Values, WeightSource

Tensor = torch.Tensor


def pretrained(
    source: str | os.PathLike[str],
    *,
    strict: bool = True,
    only: Sequence[str] | None = None,
    rename: Rename | None = None,
    init: Callable[[nn.Module], None] | None = None,
) -> Pretrained:
    """Returns what ``shard(init=)`` takes to fill a module from safetensors files.

    The module may be on the meta device: each rank reads the shards that it keeps, and no rank
    holds more than these and a block. Values are those of ``from_pretrained()`` or
    ``load_state_dict()`` before ``shard()``: converted to the dtypes of the module, and from there
    to those of its precision. All ranks must see the same files.

    Args:
        source: a .safetensors file, or a folder as ``save_pretrained()`` writes it, of one file or
            several with an index.
        strict: refuse files that have not all of the module's parameters and persistent buffers,
            or more than these. Without it ``missing_keys`` and ``unexpected_keys`` of what is
            returned tell them after ``shard()``; what is missing is initialised if it is on the
            meta device, and else keeps rank 0's values.
        only: patterns of modules, parameters and buffers to load, with everything inside; a ``*``
            stands for one part of a name. The rest counts neither as missing nor as unexpected.
        rename: names in the module by names in the files; a function may return None for what is
            not wanted. The models of the transformers library need none.
        init: fills a module's own parameters and buffers of which some on the meta device are not
            in the files, such as buffers that are not persistent. None has a model of the
            transformers library do it, and calls ``reset_parameters()`` of other modules.
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

    Each rank reads the shards that it keeps. Where the parameters are rounded, FP32 masters become
    the values before rounding, also those of an optimizer that there is; its moments stay.

    Args:
        module: what ``shard()`` returned.
        source: as of :func:`pretrained`.
        strict: as of :func:`pretrained`.
        only: as of :func:`pretrained`; what is not loaded keeps its values.
        rename: as of :func:`pretrained`.

    Returns:
        The names of what is missing in the files, and of what only they have.

    Raises:
        CheckpointError: files are missing or damaged, or do not fit; on all ranks, with nothing
            changed. If a file cannot be read any more once they were found to fit, the values are a
            mixture, which the error says.
        ArgumentError: the module is not sharded, or ``only`` names nothing of it.
        MismatchError: the ranks have found different files.
    """
    engine = engine_of(module, "load_pretrained")
    path_of(source, "load_pretrained", "source")
    comm = engine.comm
    found = Pretrained(source, _Choice(strict, only, rename), None)
    try:
        with all_or_none(comm, "load_pretrained", engine.mesh):
            engine.check("load_pretrained")
            found.open(engine.parts.module)
            # From here on no rank reads what its peers are about to change.
            engine.change("load_pretrained")
        check_agreement(comm, "load_pretrained", {"options": {"weight files": found.digest}})
        comm.barrier()
        _fill(engine, found)
        with all_or_none(comm, "load_pretrained", engine.mesh):
            found.settle()
    finally:
        found.close()
    return IncompatibleKeys(found.missing_keys, found.unexpected_keys)


@dataclass(frozen=True)
class _Choice:
    """The caller's choice among the tensors of files; see :func:`pretrained`."""

    strict: bool
    only: Sequence[str] | None
    rename: Rename | None


class Pretrained(WeightSource):
    """Files of weights for one module on one rank; :func:`pretrained` makes it.

    Attributes:
        missing_keys: once opened, the names that the files do not have.
        unexpected_keys: those that only the files have.
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
                f"{matched.keys.in_words('they have')}. Pass strict=False to load what both have, "
                "or rename= if names differ"
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
        """Returns the values of a parameter in the dtype that they have in the files."""
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
                f"pretrained: {name} is made of {len(runs)} tensors in the files, of which this "
                "rank has a part; load the model with from_pretrained() and divide it then"
            )
        part = None
        if sharding is not None:
            part = Part(sharding.shape, sharding.offsets, tuple(local_of(tensor).shape))
        return StoredValues(self, runs, dtype or runs[0].dtype, part)

    def initialize(self, module: nn.Module) -> None:
        assert self._fill is not None
        self._fill(module)

    def read(self, work: Callable[[WeightFiles], None]) -> None:
        """Reads something, unless reading has failed before."""
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
    """The values of a parameter or buffer, in files.

    Args:
        source: reads them.
        runs: the stored tensors whose elements follow each other.
        dtype: that the elements get first: the parameter's in the module, or that of the files.
        part: which part of it this rank has; None for all.
    """

    def __init__(
        self,
        source: Pretrained,
        runs: Sequence[StoredTensor],
        dtype: torch.dtype | None,
        part: Part | None,
    ) -> None:
        self._source = source
        self._runs = runs
        assert dtype is not None
        self._dtype, self._part = dtype, part

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def read(self, begin: int, out: Tensor) -> None:
        self._source.read(lambda files: self._read(files, begin, out))

    def _read(self, files: WeightFiles, begin: int, out: Tensor) -> None:
        if self._part is not None:
            for box in PartShard(self._part, begin, out).boxes():
                files.read_box(self._runs[0], box.offsets, box.local, self._dtype)
            return
        first = 0
        for stored in self._runs:
            low, high = max(begin, first), min(begin + out.numel(), first + stored.elems)
            if low < high:
                files.read(stored, low - first, out[low - begin : high - begin], self._dtype)
            first += stored.elems


# ---- into a module that is sharded --------------------------------------------------------------


def _fill(engine: ShardEngine, source: Pretrained) -> None:
    """Writes this rank's pieces of what the files have, and shares them; collective."""
    owner = engine.placement.owner
    with engine.together("load_pretrained"):
        for number, bucket in enumerate((*engine.stored, *engine.parts.stored_frozen)):
            masters = owner.buckets[number] if owner is not None and bucket.trains else None
            with bucket.here(write=True):
                _fill_bucket(bucket, masters, source)
    publish(engine)
    recode(engine)
    _fill_rest(engine, source)


def _fill_bucket(bucket: ParamBucket, masters: Bucket | None, source: Pretrained) -> None:
    """Writes this rank's pieces of what the files have of a bucket."""
    for placed, values, piece in _pieces(bucket, source):
        own = own_of(bucket)[piece.begin : piece.end]
        begin = bucket.state_chunk.begin + piece.begin - placed.begin
        rounds = bucket.trains and own.dtype is not torch.float32
        if bucket.wire is not None:
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
    """Yields the parameters of which this rank keeps a piece, and where it lies in ``own_of``."""
    chunk = bucket.state_chunk
    for number, placed in enumerate(bucket.params):
        low, high = max(placed.begin, chunk.begin), min(placed.end, chunk.end)
        values = source.stored_values_of(placed.param)
        if values is not None and low < high:
            yield placed, values, Segment(low - chunk.begin, high - chunk.begin, number)


def _fill_rest(engine: ShardEngine, source: Pretrained) -> None:
    """Reads parameters without a bucket, and buffers, which every rank has whole."""
    root = engine.parts.module
    buckets = (*engine.stored, *engine.parts.stored_frozen)
    placed = {id(each.param) for bucket in buckets for each in bucket.params}
    for param in root.parameters():
        values = None if id(param) in placed else source.values_of(param)
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
