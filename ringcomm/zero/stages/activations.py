"""Activations on a disk: what autograd saves in forward, until backward needs it.

NOTE [What stays where it is]
Parameters and buffers are not written, nor their views: they are in memory anyway, or gathered by
stage 3, which gives their memory its values again. So are small tensors, whose transfer would cost
more than their bytes. What is saved while a backward runs, by a checkpoint that computes its layer
again, is needed at once, and stays in memory, too. So does whatever is no plain tensor.

NOTE [Changes in place]
With hooks torch does not look whether a saved tensor was changed since. So an alias of each saved
tensor is kept, which shares its version; that of a tensor on the disk has no memory.

NOTE [When the disk fails]
A rank that raised in the middle of a forward or a backward would leave the others waiting in a
reduction. So it goes on with the calls that they wait for: what is lost is NaN from then on. Its
backward raises the error at the end, after the reductions, and its next step or clipping refuses,
on all ranks, until the gradients are forgotten.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.host.arguments import only_inlined
from ringcomm.errors import ArgumentError, DiskError, UnsupportedError
from ringcomm.integers import integer
from ringcomm.json_reader import shown
from ringcomm.offload.activations import ActivationStore, Receipt, extent_of, reach_of, weak
from ringcomm.offload.scratch import Disk
from ringcomm.optim.dtensors import local_of, plainly
from ringcomm.optim.tiers import wait_limit_s
from ringcomm.zero.stages.engine import ShardEngine, owner_of

Tensor = torch.Tensor

LEAST_BYTES = 64 << 10


def activations_on(
    disk: Disk,
    *,
    module: nn.Module | Iterable[nn.Module] | None = None,
    least_bytes: int = LEAST_BYTES,
) -> Activations:
    """Keeps what forwards save for backward on a disk, within ``with``; see ``docs/disk.md``.

    Args:
        disk: where, how much memory the transfers may take, and how much of what was saved last
            stays in memory.
        module: the modules that run; sharded or not. Their buffers, and whatever else shares
            memory with their parameters and buffers, stay where they are. Without it that is sure
            of parameters and their views alone.
        least_bytes: smaller tensors stay in memory.

    Returns:
        A context manager of this thread, which may be entered any number of times. Backward may run
        inside or outside. Keep it from step to step: its file's space is used again.

    Raises:
        ArgumentError: an argument is none of the above.
        UnsupportedError: a module has parameters on a device.
        DiskError: the folder takes no file for it.
    """
    if not isinstance(disk, Disk):
        raise ArgumentError(f"activations_on: disk: expected a ringcomm.Disk, got {disk!r}")
    least = integer(least_bytes)
    if least is None or least < 1:
        raise ArgumentError(
            f"activations_on: least_bytes: expected an integer from 1 to 2^63 - 1, got "
            f"{shown(least_bytes)}"
        )
    modules = [module] if isinstance(module, nn.Module) else list(module or ())
    for each in modules:
        if not isinstance(each, nn.Module):
            raise ArgumentError(f"activations_on: module: expected torch modules, got {each!r}")
    return Activations(disk, modules, least)


class Activations(AbstractContextManager[None]):
    """A context that keeps saved tensors on a disk; :func:`activations_on` makes it."""

    def __init__(self, disk: Disk, modules: list[nn.Module], least_bytes: int) -> None:
        for module in modules:
            for param in module.parameters():
                expect_host(param.device)
        self._residents = _Residents(modules)
        rank = self._residents.rank
        owner = f"process {os.getpid()}" if rank is None else f"rank {rank}"
        residents = self._residents
        self._store = ActivationStore(
            disk,
            f"activations of {owner}",
            lambda: wait_limit_s(disk, residents.comms),
        )
        self._least_bytes = least_bytes
        # A backward may have a thread for each device, and forwards run in threads of their own.
        self._lock = threading.RLock()
        self._fault: DiskError | None = None
        # The backward that raises the fault at its end.
        self._raises_in = -1

    def __repr__(self) -> str:
        return f"<ringcomm.zero.Activations on {self._store.scratch.path}, {self.size_bytes} bytes>"

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return self._store.scratch.size_bytes

    @property
    def bytes_written(self) -> int:
        """Bytes that the disk has taken."""
        return self._store.scratch.bytes_written

    @property
    def bytes_read(self) -> int:
        """Bytes that the disk has brought."""
        return self._store.scratch.bytes_read

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that it takes now: at most ``buffer_bytes`` and ``resident_bytes``."""
        with self._lock:
            return self._store.held_bytes

    @property
    def blocks_in_use(self) -> int:
        """Number of blocks of the file that graphs still need."""
        with self._lock:
            return self._store.blocks_in_use

    def __enter__(self) -> None:
        self._residents.outdated = True
        saved_tensors_hooks(self._pack, self._unpack).__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The hooks are a stack of this thread's, so that any object ends the innermost ones.
        saved_tensors_hooks(self._pack, self._unpack).__exit__(kind, error, traceback)

    # ---- forward --------------------------------------------------------------------------------

    @only_inlined
    def _pack(self, tensor: Tensor) -> Receipt | _PartOnDisk | _InMemory:
        local = local_of(tensor)
        if not self._goes(tensor, local):
            return _InMemory(tensor)
        if local is tensor:
            return self._save(tensor, _Watch(tensor, _without_memory(tensor)))
        return _PartOnDisk(tensor, self._save(local, _watch_part(tensor)))

    def _goes(self, tensor: Tensor, local: Tensor) -> bool:
        """Returns whether a tensor goes to the disk; see NOTE [What stays where it is]."""
        if torch._C._current_graph_task_id() != -1 or not _is_plain(local):
            return False
        if self._residents.have(tensor, local):
            return False
        if local.is_meta or not local.numel():
            return False
        expect_host(local.device)
        begin, end = extent_of(local)
        return end - begin >= self._least_bytes

    def _save(self, tensor: Tensor, watch: _Watch) -> Receipt:
        with self._lock:
            if self._fault is None:
                try:
                    return self._store.save(tensor, watch)
                except DiskError as error:
                    self._fault = error
            return self._store.receipt(tensor, None, 0, watch)

    # ---- backward -------------------------------------------------------------------------------

    @only_inlined
    def _unpack(self, packed: Receipt | _PartOnDisk | _InMemory) -> Tensor:
        if isinstance(packed, Receipt):
            return self._restore(packed)
        if isinstance(packed, _PartOnDisk):
            return packed.around(self._restore(packed.receipt))
        return packed.tensor()

    def _restore(self, receipt: Receipt) -> Tensor:
        receipt.watch.check()
        self._residents.outdated = True
        with self._lock, torch.no_grad():
            if self._fault is None and receipt.content is not None:
                try:
                    backward = torch._C._current_graph_task_id()
                    storage, at = self._store.bring(receipt, backward)
                except DiskError as error:
                    self._fault = error
                else:
                    return _view(receipt, storage, at)
            self._tell_at_end()
        return _nothing_for(receipt)

    def _tell_at_end(self) -> None:
        """Has the running backward raise the fault; see NOTE [When the disk fails]."""
        assert self._fault is not None
        backward = torch._C._current_graph_task_id()
        if backward == -1:
            raise self._fault
        for engine in self._residents.engines:
            engine.placement.lost = self._fault
        if backward != self._raises_in:
            self._raises_in = backward
            # Behind what is queued when the last node has run, the reductions among it.
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(partial(queue, partial(_raise, self._fault)))


def expect_host(device: torch.device) -> None:
    """Raises UnsupportedError for memory that the disk's threads do not reach."""
    if device.type not in ("cpu", "meta"):
        raise UnsupportedError(
            f"activations_on: expected tensors on the CPU, got one on {device}, whose way to a "
            "disk is through pinned memory, and that is not there yet. Use "
            "torch.autograd.graph.save_on_cpu(pin_memory=True) there"
        )


def _raise(error: DiskError) -> NoReturn:
    raise error


def _is_plain(tensor: Tensor) -> bool:
    """Returns whether a tensor is dense memory, and no other tensor inside some wrapper."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and torch._C._has_storage(tensor)
    )


def _view(receipt: Receipt, storage: torch.UntypedStorage, at: int) -> Tensor:
    """Returns a tensor like the one that was saved, in a storage with its content from ``at``."""
    offset = (at + receipt.offset_bytes) // receipt.dtype.itemsize
    empty = torch.empty(0, dtype=receipt.dtype, device="cpu")
    return empty.set_(storage, offset, receipt.shape, receipt.stride)


def _nothing_for(receipt: Receipt) -> Tensor:
    """Returns a tensor of NaN, or zeros of integers, like the one that was saved."""
    dtype = receipt.dtype
    value = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
    flat = torch.full((reach_of(receipt.shape, receipt.stride),), value, dtype=dtype, device="cpu")
    return flat.as_strided(receipt.shape, receipt.stride)


class _Residents:
    """The memory that stays: of parameters and buffers."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        # By address, which is not used again while the weak reference is there.
        self._storages: dict[int, StorageWeakRef] = {}
        self._engines: weakref.WeakSet[ShardEngine] = weakref.WeakSet()
        #: True if parameters may have moved since :meth:`have` last looked where they are.
        self.outdated = True

    @property
    def engines(self) -> list[ShardEngine]:
        """The engines of the sharded modules among those that are known."""
        self._refresh()
        return list(self._engines)

    @property
    def comms(self) -> list[Communicator]:
        """The communicators of the engines that are known so far."""
        return [engine.comm for engine in self._engines]

    @property
    def rank(self) -> int | None:
        """This rank in the world that shares a module; None if none is shared."""
        return next((engine.comm.rank for engine in self.engines), None)

    def have(self, tensor: Tensor, local: Tensor) -> bool:
        """Returns whether a tensor, of which this rank has ``local``, shares memory with them."""
        for each in (tensor, tensor._base):
            if each is not None and (
                isinstance(each, nn.Parameter) or (each.is_leaf and each.requires_grad)
            ):
                self._meet(each, self._storages)
                return True
        self._refresh()
        if local.untyped_storage()._cdata in self._storages:
            return True
        gatherers = (engine.gatherer for engine in self._engines)
        return any(gatherer is not None and gatherer.has(local) for gatherer in gatherers)

    def _meet(self, tensor: Tensor, storages: dict[int, StorageWeakRef]) -> None:
        """Notes where a parameter or buffer lies, and whose it is."""
        engine = owner_of(tensor)
        if engine is not None:
            self._engines.add(engine)
        local = local_of(tensor)
        if torch._C._has_storage(local):
            storage = local.untyped_storage()
            storages[storage._cdata] = weak(storage)

    def _refresh(self) -> None:
        if not self.outdated:
            return
        self.outdated = False
        # Another thread's forward may look things up meanwhile.
        storages: dict[int, StorageWeakRef] = {}
        with plainly():
            for module in self._modules:
                for tensor in (*module.parameters(), *module.buffers()):
                    self._meet(tensor, storages)
        self._storages = storages


class _Watch:
    """Tells whether a tensor was changed since it was saved; see NOTE [Changes in place].

    Args:
        tensor: to be watched.
        alias: of its version, with its memory or without.
    """

    def __init__(self, tensor: Tensor, alias: Tensor) -> None:
        self.alias = alias
        self._version, self._shape = tensor._version, tensor.shape
        node = tensor.grad_fn
        self._maker = None if node is None else (tensor.output_nr, node.name())

    def check(self) -> None:
        """Raises RuntimeError, in torch's words, if the tensor was changed."""
        if self.alias._version == self._version:
            return
        of = ""
        if self._maker is not None:
            number, name = self._maker
            of = f", which is output {number} of {name},"
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{self.alias.type()} {list(self._shape)}]{of} is at version "
            f"{self.alias._version}; expected version {self._version} instead. Hint: enable "
            "anomaly detection to find the operation that failed to compute its gradient, with "
            "torch.autograd.set_detect_anomaly(True)."
        )


def _without_memory(tensor: Tensor) -> Tensor:
    """Returns an empty tensor with the version of another one, now and later."""
    alias = tensor.detach()
    alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias


def _watch_part(tensor: Any) -> _Watch:
    """Watches a DTensor, whose version its local tensor does not share."""
    alias = tensor.detach()
    alias._local_tensor = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return _Watch(tensor, alias)


class _PartOnDisk:
    """A DTensor, of which this rank's part is on the disk."""

    def __init__(self, tensor: Any, receipt: Receipt) -> None:
        self.receipt = receipt
        self._kind = type(tensor)
        names, self._context = tensor.__tensor_flatten__()
        self._others = {name: getattr(tensor, name) for name in names if name != "_local_tensor"}
        self._shape, self._stride = tensor.shape, tensor.stride()

    def around(self, local: Tensor) -> Tensor:
        """Returns the DTensor with its part here again."""
        inside = {**self._others, "_local_tensor": local}
        made: Tensor = self._kind.__tensor_unflatten__(
            inside, self._context, self._shape, self._stride
        )
        return made.detach()


class _InMemory:
    """A tensor that stays in memory: an alias, since what a node has made must not refer to it."""

    def __init__(self, tensor: Tensor) -> None:
        self._watch = _Watch(tensor, tensor.detach())

    def tensor(self) -> Tensor:
        """Returns it, if it was not changed since."""
        self._watch.check()
        return self._watch.alias
