"""The process group that ``init_process_group("ringcomm")`` makes."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import GroupName

from ringcomm import cuda, memory
from ringcomm.c10d.barriers import Barriers, MonitoredBarrier
from ringcomm.c10d.calls import BACKEND_NAME
from ringcomm.c10d.collectives import CoalescedCollectives
from ringcomm.c10d.communicators import Communicators
from ringcomm.c10d.messages import PeerToPeer
from ringcomm.comm.admission import only_inlined_methods
from ringcomm.comm.arguments import CallChecks
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.options import seconds_of
from ringcomm.cuda import find_device
from ringcomm.errors import UnsupportedError


@only_inlined_methods
class ProcessGroup(  # type: ignore[misc]
    CoalescedCollectives, PeerToPeer, Barriers, torch.distributed.ProcessGroup
):
    """A process group of torch, over a communicator of the host and one of each device in use.

    A call goes where its tensors are. What has no tensors, as a barrier or an object, stays on the
    host unless a device is named or bound.

    torch takes it for the group and for its backend alike, so it answers to both. It has no
    method ``new_group``: torch would then make all subgroups through it, also those that ask for
    another backend.

    Args:
        store: seen by the members of the group only.
        communicators: of this group; the group closes them in ``shutdown``.
    """

    supports_splitting = True
    supports_coalescing = False
    supports_shrinking = False
    supports_time_estimate = False
    _supports_time_estimate = False  # its name from torch 2.15 on

    def __init__(self, store: Store, communicators: Communicators) -> None:
        host = communicators.host
        # The constructor with a store makes a group that cannot be subclassed in Python.
        super().__init__(host.rank, host.world_size)  # type: ignore[call-arg]
        self._store = store
        self._communicators = communicators
        self._of = communicators.of
        self._rank: int = host.rank
        self._size: int = host.world_size
        self._name = GroupName(host.name)
        self._desc = "undefined"
        self._sequence = 0
        self._coalescing = None
        self._monitored_barrier = MonitoredBarrier(store, self._rank, self._size, host.lookout())
        self._split_count = 0

    @property
    def communicator(self) -> Communicator:
        """The host's communicator, for calls that ``torch.distributed`` has no name for."""
        return self._communicators.host

    def communicator_on(self, device: torch.device | str | int) -> Communicator:
        """The communicator of a device; the first call for it is one of all members.

        Raises:
            ArgumentError: no device of this process.
            UnsupportedError: this process has no devices; says why.
            RingcommError: the members could not connect their devices.
        """
        index = find_device(device, "communicator_on")
        if index is None:
            return self._communicators.host
        return self._communicators.on_device(index, "communicator_on")

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return BACKEND_NAME

    def getBackendName(self) -> str:
        return BACKEND_NAME

    def _get_backend_name(self) -> str:
        return BACKEND_NAME

    @property
    def group_name(self) -> GroupName:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = GroupName(name)

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    # torch's C++ asks for these four by these names.
    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = GroupName(name)

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    @property
    def _device_types(self) -> list[torch.device]:
        # The CPU first: torch puts pickled objects there, and the host moves them without a copy.
        return [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: torch.device | str) -> ProcessGroup:  # type: ignore[override]
        """This group, which is its own backend.

        Raises:
            UnsupportedError: for a device that is neither the CPU nor a GPU.
        """
        if not _is_served(device):
            # torch's own words, by which callers recognise the case.
            raise UnsupportedError(
                f"No backend type associated with device type {torch.device(device).type}: "
                f"{BACKEND_NAME} serves tensors of the CPU and of CUDA devices"
            )
        return self

    get_backend = _get_backend

    @property
    def options(self) -> None:
        """The options that a split hands to its child: none, so the child takes the defaults."""
        return None

    def supports_tensor_alloc(self, device: torch.device | str) -> bool:
        return _is_served(device)

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        """A tensor of ``size`` elements in the heap, which collectives move without a copy.

        FSDP2 takes its buffers from here after
        ``set_allocate_memory_from_process_group_for_comm(True)``.
        """
        self._get_backend(device)
        return memory.empty(size, dtype=dtype, device=device)

    def get_group_store(self) -> Store:
        """The store of this group's members."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long the calls that follow wait for their peers."""
        self._communicators.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Restarts the count of collectives; all members must do so together."""
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        """Returns how many collectives this rank has issued on the group."""
        return self._sequence

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """See :class:`ringcomm.c10d.process_group.MonitoredBarrier`."""
        if timeout is None:
            timeout = default_pg_timeout
        elif not isinstance(timeout, timedelta):
            warnings.warn(f"Please specify timeout arg as a timedelta, not {timeout}", stacklevel=2)
            timeout = timedelta(seconds=seconds_of(timeout))
        self._monitored_barrier(timeout, wait_all_ranks)

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> ProcessGroup | None:
        """A group of some members of this one; only they take part.

        Args:
            new_ranks: ranks of this group, in the order of their ranks in the new one.
            timeout: of the new group; None takes this group's.
            opts: a ``ringcomm.CommOptions`` or None.
            group_name: of the new group; None makes one from the ranks.
            group_desc: free text.
            device_types: the new group serves CPU and CUDA tensors whichever of them are given.

        Returns:
            The new group, or None when this rank is not in ``new_ranks``.
        """
        new_ranks = CallChecks("split_group", self._rank, self._size).ranks("new_ranks", new_ranks)
        for device in device_types or ():
            self._get_backend(device)
        self._split_count += 1
        if self._rank not in new_ranks:
            return None
        name = group_name or (
            f"{self._name}/split{self._split_count}:{'_'.join(map(str, new_ranks))}"
        )
        store = PrefixStore(f"{name}/", self._store)
        communicators = self._communicators.meet(
            store,
            new_ranks.index(self._rank),
            len(new_ranks),
            name=name,
            timeout=self._communicators.host.timeout if timeout is None else timeout,
            options=opts,
            part_of=(self._communicators.host, new_ranks),
        )
        child = ProcessGroup(store, communicators)
        child._set_group_name(name)
        child._set_group_desc(group_desc or f"{self._desc}:split")
        return child

    splitGroup = split_group

    def comm_split_count(self) -> int:
        return self._split_count

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Nothing: a split concerns its members only."""

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Binds the group to a device and connects it there; all members call it.

        torch calls this where ``init_process_group`` was given a ``device_id``.
        """
        if device is not None and device.type != "cpu":
            self._communicators.on_device(device.index, "init_process_group")
            self.bound_device_id = device

    def _wait_for_pending_works(self) -> None:
        """Blocks until everything that was issued on this rank is done."""
        self._communicators.host.submit(list, "wait for pending works").wait()
        for device in self._communicators.devices():
            cuda.current().synchronize(device)

    def abort(self) -> None:
        """Makes the calls of all ranks on this group fail at once."""
        self._communicators.abort("the process group was aborted")

    def shutdown(self) -> None:
        """Ends the group on this rank."""
        self._communicators.close()


def _is_served(device: torch.device | str) -> bool:
    return torch.device(device).type in ("cpu", "cuda")
