# SPDX-License-Identifier: Apache-2.0
"""oneCCL through ctypes: the C functions of the wheel ``oneccl``, over Intel MPI.

The C functions are in libccl.so.2, which finds the CPU's library as a plug-in. The libraries come
from the wheels ``oneccl`` and ``oneccl-cpu``, and are in the folder of Intel MPI (I_MPI_ROOT).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ..cases import Case, CaseBuffers, Prepared
from .systems import Call, PeerSetup, System, Unavailable, find_call
from .torch_groups import allocate_buffers, plain

# In this order each library finds its dependencies among the loaded libraries: no wheel states
# where the other wheels' libraries are.
_LIBRARIES = ("libccl.so.2", "libccl.so.1", "libccl_legacy_cpu.so")
# The values of onecclDataType_t and onecclRedOp_t in oneapi/ccl/v2/types.h.
_DATATYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
_ID_BYTES = 4096


class _UniqueId(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char * _ID_BYTES),)


def _check(status: int) -> None:
    """Raises an error for a status other than 0; ctypes calls it with the result of each call."""
    if status != 0:
        raise RuntimeError(
            f"oneCCL returned status {status} (onecclResult_t in oneapi/ccl/v2/types.h); "
            "CCL_LOG_LEVEL=info makes it print the reason"
        )


def _load(root: Path) -> ctypes.CDLL:
    """Loads oneCCL's libraries from Intel MPI's folder, for ranks that have one core each."""
    variables = {
        "CCL_ATL_TRANSPORT": "mpi",
        "CCL_MPI_LIBRARY_PATH": str(root / "lib" / "libmpi.so.12"),
        "CCL_KVS_IFACE": "lo",
        # The calling thread moves the data. By default each rank has a second thread for this,
        # which spins while a call runs. On two cores with a load average of 11, calls of two ranks
        # took 16 to 36 ms with these threads (4 KiB), and 6 to 9 us without them.
        "CCL_WORKER_OFFLOAD": "0",
        "CCL_LOG_LEVEL": "error",  # else oneCCL warns of each of these variables
    }
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    loaded = [ctypes.CDLL(str(root / "lib" / name), ctypes.RTLD_GLOBAL) for name in _LIBRARIES]
    return loaded[0]


class OneCcl(System):
    """A communicator of all ranks, which Intel MPI's mpiexec must have started."""

    def __init__(self, setup: PeerSetup) -> None:
        self._allocate = plain(setup)
        library = self._library = _load(Path(os.environ["I_MPI_ROOT"]).resolve())
        for name in ("GetVersion", "GetUniqueId", "CommInitRank", "CommDestroy"):
            self._function(name)
        code, parts = ctypes.c_int(), (ctypes.c_int * 3)()
        library.onecclGetVersion(ctypes.byref(code))
        places = [ctypes.byref(parts, 4 * index) for index in range(3)]
        self._function("ExtractVersionComponents")(code, *places)
        offload = os.environ["CCL_WORKER_OFFLOAD"]
        self.version = f"oneCCL {'.'.join(map(str, parts))}, CCL_WORKER_OFFLOAD={offload}"
        identity = _UniqueId()
        if setup.rank == 0:
            library.onecclGetUniqueId(ctypes.byref(identity))
            setup.store.set("oneccl", bytes(identity).hex())
        else:
            found = bytes.fromhex(setup.store.get("oneccl").decode())
            ctypes.memmove(ctypes.byref(identity), found, _ID_BYTES)
        self._comm = ctypes.c_void_p()
        world, rank = ctypes.c_size_t(setup.world), ctypes.c_int(setup.rank)
        library.onecclCommInitRank(ctypes.byref(self._comm), world, identity, rank)

    def _function(self, name: str) -> Callable[..., object]:
        function: ctypes._NamedFuncPointer = getattr(self._library, f"oneccl{name}")
        function.restype = _check
        return function

    def prepare(self, case: Case) -> Prepared:
        if case.dtype not in _DATATYPES or case.op not in _OPS:
            raise Unavailable(f"oneCCL has no {case.op} of {case.dtype_name}")
        source, target = allocate_buffers(case, self._allocate)
        send, receive = (ctypes.c_void_p(each.data_ptr()) for each in (source, target))
        count, kind = ctypes.c_size_t(case.count_elems), _DATATYPES[case.dtype]
        op, root = [_OPS[case.op]], [case.root]
        begin, end = [send, receive, count, kind], [self._comm, None]
        calls: dict[str, Call] = {
            "all_reduce": (self._function("AllReduce"), [*begin, *op, *end]),
            "reduce_scatter": (self._function("ReduceScatter"), [*begin, *op, *end]),
            "all_gather": (self._function("AllGather"), [*begin, *end]),
            "broadcast": (self._function("Broadcast"), [*begin, *root, *end]),
            "reduce": (self._function("Reduce"), [*begin, *op, *root, *end]),
            "all_to_all": (self._function("AllToAll"), [*begin, *end]),
        }
        function, arguments = find_call(calls, case.collective.name, "oneCCL")
        return Prepared((CaseBuffers(case, source, target),), partial(function, *arguments))

    def close(self) -> None:
        self._library.onecclCommDestroy(self._comm)
