# SPDX-License-Identifier: Apache-2.0
"""The peer oneCCL: the arguments of its C functions, which a stand-in records."""

import ctypes
import re
from typing import Any

import pytest
import torch.distributed as dist

from ringcomm.bench.cases import COLLECTIVES, Case
from ringcomm.bench.collectives import oneccl
from ringcomm.bench.collectives.systems import PeerSetup, Unavailable
from ringcomm.bench.timing import Device

FLOAT, BFLOAT16, SUM, AVG = 7, 9, 0, 4
COMM = 77


class StandInFunction:
    """A C function that records its arguments, and returns the library's next status."""

    def __init__(self, name, library):
        self._name, self._library = name, library
        self.restype: Any = ctypes.c_int

    def __call__(self, *arguments):
        if self._name == "onecclGetVersion":
            arguments[0]._obj.value = 20220103
        if self._name == "onecclCommInitRank":
            arguments[0]._obj.value = COMM
        self._library.calls.append((self._name, arguments))
        return self.restype(self._library.status)


class StandInLibrary:
    def __init__(self):
        self.calls: list[Any] = []
        self.status = 0
        self._functions: dict[str, StandInFunction] = {}

    def __getattr__(self, name):
        return self._functions.setdefault(name, StandInFunction(name, self))


@pytest.fixture
def library(monkeypatch):
    made = StandInLibrary()
    monkeypatch.setenv("I_MPI_ROOT", "/nowhere")
    monkeypatch.setenv("CCL_WORKER_OFFLOAD", "0")
    monkeypatch.setattr(oneccl, "_load", lambda root: made)
    return made


@pytest.fixture
def system(library):
    how: dict[str, Any] = {"heap_tensors": False, "api": "", "algorithm": "", "heap_bytes": None}
    return oneccl.OneCcl(PeerSetup(rank=0, world=2, store=dist.HashStore(), device=Device(), **how))


def case_of(name, op="sum", placement="out", dtype="float"):
    return Case(COLLECTIVES[name], 4096, dtype, op, 1, 0, 2, placement)


@pytest.mark.parametrize(
    ("name", "placement", "function", "count", "more"),
    [
        ("all_reduce", "in", "AllReduce", 1024, [SUM]),
        ("reduce_scatter", "out", "ReduceScatter", 512, [SUM]),
        ("all_gather", "out", "AllGather", 512, []),
        ("broadcast", "in", "Broadcast", 1024, [1]),
        ("reduce", "out", "Reduce", 1024, [SUM, 1]),
        ("all_to_all", "out", "AllToAll", 512, []),
    ],
)
def test_a_call_passes_what_the_header_of_oneccl_names(
    system, library, name, placement, function, count, more
):
    prepared = system.prepare(case_of(name, placement=placement))
    prepared.call()
    called, (send, receive, size, *rest) = library.calls[-1]
    (buffers,) = prepared.buffers
    assert called == f"oneccl{function}"
    assert (send.value, receive.value) == (buffers.input.data_ptr(), buffers.output.data_ptr())
    assert (size.value, rest[:-2], rest[-1]) == (count, [FLOAT, *more], None)
    assert rest[-2].value == COMM


def test_types_and_operators_have_the_numbers_of_the_header(system, library):
    system.prepare(case_of("all_reduce", "avg", "in", "bfloat16")).call()
    assert library.calls[-1][1][3:5] == (BFLOAT16, AVG)


def test_a_status_other_than_0_is_an_error(system, library):
    call = system.prepare(case_of("all_gather")).call
    call()
    library.status = 3
    with pytest.raises(RuntimeError, match="oneCCL returned status 3"):
        call()


def test_a_collective_without_a_function_is_unavailable(system):
    with pytest.raises(Unavailable, match=re.escape("send_recv is not implemented for oneCCL")):
        system.prepare(case_of("send_recv"))


def test_the_communicator_is_closed(system, library):
    system.close()
    name, (comm,) = library.calls[-1]
    assert (name, comm.value) == ("onecclCommDestroy", COMM)
