# SPDX-License-Identifier: Apache-2.0
"""MPI through mpi4py, on raw addresses, so that calls cost no conversion of arrays.

The peers "mpi" and "impi" both use this module: the launcher of the ranks decided which MPI it is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from mpi4py import MPI

from ..cases import Case, CaseBuffers, Prepared
from .systems import Call, PeerSetup, System, Unavailable, find_call
from .torch_groups import allocate_buffers, plain

# MPICH can reduce bfloat16 (MPIX_BFLOAT16 of its mpi.h, since 4.3), but mpi4py 4.1 has no name for
# this type: its BFLOAT16_T is a null handle with MPICH. Other MPIs can only move these bytes.
_MPICH_BFLOAT16 = 0x4C00024C

_DATATYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
}
_OPS = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}


class Mpi(System):
    """The world communicator of this process, which mpiexec must have started."""

    def __init__(self, setup: PeerSetup) -> None:
        self._comm = MPI.COMM_WORLD
        self._allocate = plain(setup)
        if self._comm.size != setup.world:
            raise RuntimeError(
                f"MPI sees {self._comm.size} ranks where the harness has {setup.world}: "
                "the ranks must be started by the mpiexec of the installed MPI"
            )
        self._is_mpich = MPI.get_vendor()[0] == "MPICH"
        self.version = MPI.Get_library_version().splitlines()[0].strip()

    def prepare(self, case: Case) -> Prepared:
        name, comm, root = case.collective.name, self._comm, case.root
        at_root = case.rank == root
        datatype = self._datatype(case)
        source, target = allocate_buffers(case, self._allocate)
        own = receive = _spec(target, datatype)
        send = MPI.IN_PLACE if case.in_place else _spec(source, datatype)
        if case.in_place and name == "reduce_scatter":
            # MPI writes the result of an in-place reduce-scatter to the beginning of the buffer.
            receive, target = _spec(source, datatype), source.narrow(0, 0, case.chunk_elems)
        at = [receive if at_root else None, root]
        right, left = (case.rank + 1) % case.world, (case.rank - 1) % case.world
        reduced = [own, None] if case.in_place and not at_root else [send, at[0]]
        op = [_op(case)] if case.collective.reduces else []
        calls: dict[str, Call] = {
            "all_reduce": (comm.Allreduce, [send, receive, *op]),
            "reduce_scatter": (comm.Reduce_scatter_block, [send, receive, *op]),
            "all_gather": (comm.Allgather, [send, receive]),
            "broadcast": (comm.Bcast, [receive, root]),
            "reduce": (comm.Reduce, [*reduced, *op, root]),
            "gather": (comm.Gather, [send, *at]),
            "scatter": (comm.Scatter, [send if at_root else None, receive, root]),
            "all_to_all": (comm.Alltoall, [send, receive]),
            "send_recv": (comm.Sendrecv, [send, right, 0, receive, left, 0]),
        }
        function, arguments = find_call(calls, name, "MPI")
        return Prepared((CaseBuffers(case, source, target),), partial(function, *arguments))

    def close(self) -> None:
        self._comm.Barrier()

    def _datatype(self, case: Case) -> MPI.Datatype:
        if case.dtype in _DATATYPES:
            return _DATATYPES[case.dtype]
        if not case.collective.reduces:
            # A call that only moves data may use any type of two bytes.
            return MPI.UINT16_T
        if case.dtype == torch.bfloat16 and self._is_mpich:
            return MPI.Datatype.fromhandle(_MPICH_BFLOAT16)
        if case.dtype == torch.float16 and MPI.FLOAT16_T != MPI.DATATYPE_NULL:
            return MPI.FLOAT16_T
        raise Unavailable(f"this MPI does not reduce {case.dtype_name}")


def _op(case: Case) -> MPI.Op:
    if case.op not in _OPS:
        raise Unavailable(f"MPI has no {case.op.upper()}")
    return _OPS[case.op]


def _spec(tensor: torch.Tensor, datatype: MPI.Datatype) -> Any:
    return [MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), datatype]
