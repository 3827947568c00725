# SPDX-License-Identifier: Apache-2.0
"""Native functions that replace operators in inductor's code: bits, errors, and no Python."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ringcomm
from ringcomm import AbortedError, Communicator, MismatchError, RingcommError, _native
from ringcomm import functional as F
from ringcomm.cli import doctor
from ringcomm.errors import ForkError
from ringcomm.functional import collectives, in_graph
from ringcomm.functional.collectives import DEFAULT, OPERATORS, key_of
from tests.comm.conftest import in_nodes
from tests.functional.compiling import alone
from tests.support.covering import covering
from tests.support.exact import MOVABLE, REDUCIBLE, operand, ops_for, same
from tests.support.rank_pool import default_group
from tests.support.ranks import run_ranks

Tensor = torch.Tensor
Function = Callable[..., Any]
_operators = {name: getattr(torch.ops.ringcomm, name).default for name in OPERATORS}
# The arguments between the tensor and the group.
CALLS = (
    ("all_gather", ()),
    ("all_reduce", ("SUM", 1.0)),
    ("all_reduce", ("AVG", 1.0)),
    ("all_reduce", ("MAX", 1.0)),
    ("all_to_all", (None, None)),
    ("broadcast", (1,)),
    ("reduce", (1,)),
    ("reduce_scatter", ("SUM", 1.0)),
    ("reduce_scatter", ("MIN", 1.0)),
)
by_hosts_of_one_node = pytest.mark.skipif(
    in_nodes(2) is not None, reason="calls over nodes are the operators'"
)


def native(name: str) -> Function:
    function: Function = getattr(torch.ops.ringcomm_in_graph, name)
    return function


class AskedError(Exception):
    """Raised if the operator is called."""


@contextmanager
def operators_replaced(by: Function) -> Iterator[None]:
    holders = cast(Any, collectives._holders).data
    in_graph.serve(holders, dict.fromkeys(OPERATORS, by))
    try:
        yield
    finally:
        in_graph.serve(holders, _operators)


def refuse(*arguments: Any) -> None:
    raise AskedError(arguments)


# ---- bits ---------------------------------------------------------------------------------------


@by_hosts_of_one_node
@covering(world_size=[2, 3, 5], dtype=[each for each in MOVABLE if not each.is_complex], call=CALLS)
def test_same_bits_as_the_operator(worlds, world_size, dtype, call):
    """The tensor may require grad: a graph reads parameters, and another graph differentiates."""
    name, arguments = call
    op = arguments[0] if name in ("all_reduce", "reduce_scatter") else "SUM"
    reduces = name in ("all_reduce", "reduce_scatter", "reduce")
    if reduces and op not in ops_for(dtype):
        pytest.skip(f"no {op} of {dtype}")
    inputs = [
        operand(2 * world_size * 9, rank, world_size, dtype, op if reduces else "MIN").view(-1, 9)
        if dtype in REDUCIBLE
        else torch.arange(2 * world_size * 9).add(rank).to(torch.uint8).view(dtype).view(-1, 9)
        for rank in range(world_size)
    ]

    def operator(comm: Communicator) -> Tensor:
        result: Tensor = _operators[name](inputs[comm.rank], *arguments, key_of(comm), world_size)
        return result

    def in_a_graph(comm: Communicator) -> Tensor:
        mine = inputs[comm.rank].clone()
        if dtype.is_floating_point:
            mine.requires_grad_()
        with torch.no_grad():
            result: Tensor = native(name)(mine, *arguments, key_of(comm), world_size)
        assert same(mine.detach(), inputs[comm.rank])
        return result

    world = worlds(world_size)
    want = world.run(operator)
    with operators_replaced(refuse):
        got = world.run(in_a_graph)
    for a, b in zip(got, want, strict=True):
        assert same(a, b)
        assert a.stride() == b.stride() and not a.requires_grad


@by_hosts_of_one_node
@pytest.mark.parametrize("elems", [1, 1000, 300_000])
def test_sizes_of_all_protocols(worlds, elems):
    """Rank 0 runs the operator, and its peers run the function that graphs use."""

    def body(comm):
        mine = torch.arange(elems, dtype=torch.float32) + comm.rank
        function = native("all_reduce") if comm.rank else _operators["all_reduce"]
        return function(mine, "SUM", 1.0, key_of(comm), 3)

    want = torch.arange(elems, dtype=torch.float32) * 3 + 3
    assert all(same(each, want) for each in worlds(3).run(body))


@by_hosts_of_one_node
def test_the_default_group_is_the_threads(worlds):
    def body(comm):
        return native("all_gather")(torch.tensor([comm.rank]), DEFAULT, comm.world_size)

    with operators_replaced(refuse):
        for n in (2, 3):
            assert all(each.tolist() == [*range(n)] for each in worlds(n).run(body))


# ---- what is left to the operator ---------------------------------------------------------------


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        return function(*arguments, **(keywords or {}))


def reduced(tensor: Any, op: str = "SUM", factor: float = 1.0) -> Function:
    return lambda key: (tensor, op, factor, key, 1)


T = torch.ones
TENSORS = {
    "transposed": lambda: T(3, 2).t(),
    "negated": lambda: torch._neg_view(T(3)),
    "complex": lambda: T(3, dtype=torch.complex64),
    "empty": lambda: T(0),
    "sparse": lambda: T(3).to_sparse(),
    "meta": lambda: T(3, device="meta"),
    "subclass": lambda: torch.nn.Buffer(T(3)).as_subclass(type("Other", (Tensor,), {})),
    "not a tensor": lambda: [1.0],
    "none": lambda: None,
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_the_operator_takes(name):
    tensor = TENSORS[name]()
    with alone() as comm, operators_replaced(lambda *arguments: arguments):
        for each, arguments in CALLS:
            asked = native(each)(tensor, *arguments, key_of(comm), 1)
            assert asked[0] is tensor and asked[1:] == (*arguments, key_of(comm), 1)


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "a factor": ("all_reduce", T(3), "PREMUL_SUM", 2.0),
    "an unknown op": ("all_reduce", T(3), "MEDIAN", 1.0),
    "no op": ("reduce_scatter", T(3), None, 1.0),
    "an op that the dtype lacks": ("all_reduce", T(3), "BAND", 1.0),
    "no sum of bytes": ("reduce", T(4, dtype=torch.uint8).view(torch.float8_e5m2), 0),
    "a scalar to gather": ("all_gather", torch.tensor(1.0)),
    "a scalar to scatter": ("reduce_scatter", torch.tensor(1.0), "SUM", 1.0),
    "a scalar to exchange": ("all_to_all", torch.tensor(1.0), None, None),
    "splits": ("all_to_all", T(3), [3], [3]),
    "no such source": ("broadcast", T(3), 7),
    "a source that is none": ("broadcast", T(3), None),
    "no such destination": ("reduce", T(3), 7),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_the_operator_takes(name):
    function, *arguments = ARGUMENTS[name]
    with alone() as comm, operators_replaced(lambda *arguments: "asked"):
        assert native(function)(*arguments, key_of(comm), 1) == "asked"


@by_hosts_of_one_node
@pytest.mark.parametrize(
    ("name", "arguments"), [("reduce_scatter", ("SUM", 1.0)), ("all_to_all", (None, None))]
)
def test_rows_that_do_not_divide(worlds, name, arguments):
    with operators_replaced(lambda *arguments: "asked"):
        body = lambda comm: native(name)(T(3), *arguments, key_of(comm), 2)  # noqa: E731
        assert worlds(2).run(body) == ["asked", "asked"]


@contextmanager
def dual_level() -> Iterator[None]:
    with forward_ad.dual_level():
        yield


@contextmanager
def transformed() -> Iterator[None]:
    with torch._functorch.eager_transforms.grad_increment_nesting():
        yield


CIRCUMSTANCES: dict[str, Callable[[Communicator], Any]] = {
    "queued": lambda comm: mock.patch.object(comm.engine.queue, "pending", 1),
    "triton": lambda comm: mock.patch.object(comm.engine, "kernels", "triton"),
    "another core": lambda comm: mock.patch.object(comm.engine, "fast", object()),
    "profiled": lambda comm: torch.profiler.profile(),
    "a mode": lambda comm: _Mode(),
    "forward mode": lambda comm: dual_level(),
    "a transform": lambda comm: transformed(),
}


@pytest.mark.parametrize("name", [*CIRCUMSTANCES, "none of them"])
def test_circumstances_in_which_the_operator_is_asked(name):
    tensor = T(3)
    with alone() as comm, operators_replaced(lambda *arguments: "asked"), ExitStack() as stack:
        key = key_of(comm)
        if name in CIRCUMSTANCES:
            stack.enter_context(CIRCUMSTANCES[name](comm))
        got = native("all_reduce")(tensor, "SUM", 1.0, key, 1)
        assert (got is not None and isinstance(got, str)) == (name in CIRCUMSTANCES)


@pytest.mark.parametrize(
    ("key", "world_size"),
    [("no such key", 1), (DEFAULT, 1), ("torch.distributed 0", 1), (None, 1), ("mine", 2), (1, 1)],
)
def test_groups_that_the_operator_finds(key, world_size):
    with alone() as comm, operators_replaced(lambda *arguments: "asked"):
        named = key_of(comm) if key == "mine" else key
        assert native("all_gather")(T(3), named, world_size) == "asked"


# ---- eager calls --------------------------------------------------------------------------------

EAGER: dict[str, Function] = {
    "all_gather": lambda tensor, comm: F.all_gather(tensor, comm),
    "all_reduce": lambda tensor, comm: F.all_reduce(tensor, group=comm),
    "all_to_all": lambda tensor, comm: F.all_to_all(tensor, group=comm),
    "broadcast": lambda tensor, comm: F.broadcast(tensor, 0, comm),
    "reduce_scatter": lambda tensor, comm: F.reduce_scatter(tensor, group=comm),
}


class _Seen(TorchFunctionMode):
    """Records the names of the torch functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        self.names.append(str(function))
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("name", EAGER)
def test_eager_calls_that_nothing_has_to_see(name):
    call = EAGER[name]
    with alone() as comm:
        with operators_replaced(refuse):
            assert same(call(T(3), comm), T(3))
            with torch.no_grad():
                assert same(call(T(3, requires_grad=True), comm), T(3))
        assert call(T(3, requires_grad=True), comm).grad_fn is not None
        with _Seen() as seen:
            call(T(3), comm)
        assert f"ringcomm.{name}" in seen.names or f"ringcomm.{name}.default" in seen.names


# ---- errors -------------------------------------------------------------------------------------


def failure_of(function: Function, *arguments: Any) -> tuple[type, str]:
    with pytest.raises(RingcommError) as error:
        function(*arguments)
    return error.type, str(error.value)


@by_hosts_of_one_node
@pytest.mark.parametrize("table", [native, _operators.__getitem__])
def test_a_fault_has_the_operators_type_and_words(table):
    """Each rank passes a different size, and then makes another call after the error."""

    def body(comm: Communicator) -> None:
        operands = (T(4 + 2 * comm.rank), "SUM", 1.0, key_of(comm), 2)
        kind, text = failure_of(table("reduce_scatter"), *operands)
        assert kind is MismatchError
        assert text.startswith(f"reduce_scatter_tensor on rank {comm.rank} of 2: ")
        for size_bytes in (16, 24):
            assert f"reduce_scatter(float32, SUM, {size_bytes} bytes, one_shot, call 1" in text
        assert len(re.findall(r"test_in_graph\.py:\d+", text)) == 2
        kind, text = failure_of(table("all_reduce"), *operands)
        assert kind is AbortedError
        assert text.startswith(
            f"all_reduce on rank {comm.rank} of 2: this communicator is unusable"
        )

    with ringcomm.local_world(2) as world:
        world.run(body)


def test_a_communicator_that_is_gone_closed_or_aborted():
    def call(key: str) -> tuple[type, str]:
        found = failure_of(native("all_gather"), T(3), key, 1)
        assert found == failure_of(_operators["all_gather"], T(3), key, 1)
        return found

    aborted, closed, gone = (alone(name) for name in ("aborted", "closed", "gone"))
    aborted.abort("for a reason")
    assert "for a reason" in call(key_of(aborted))[1]
    key = key_of(closed)
    closed.close()
    assert "was closed" in call(key)[1]
    key = key_of(gone)
    gone.close()
    del gone
    gc.collect()
    assert "is gone" in call(key)[1]


def forks(store: Any, rank: int, world_size: int) -> None:
    with Communicator.from_store(store, rank, world_size) as comm:
        key = key_of(comm)
        child = os.fork()
        if child == 0:
            try:
                native("all_gather")(T(3), key, 1)
            except ForkError:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        with operators_replaced(refuse):
            assert native("all_gather")(T(3), key, 1).tolist() == [1, 1, 1]


def test_a_forked_child_is_told():
    run_ranks(forks, 1)


# ---- what the doctor says -----------------------------------------------------------------------


def test_the_doctor_says_what_makes_the_calls(monkeypatch):
    assert doctor.check_graphs() == doctor.Finding(
        "compiled graphs", doctor.OK, "inductor's code calls the native module"
    )
    with monkeypatch.context() as patch:
        patch.setattr(_native, "takes_fast_path", lambda tensor: False)
        assert "does not let its tensors be read" in doctor.check_graphs().value
    monkeypatch.setattr(in_graph, "_EMPTY", None)
    found = doctor.check_graphs()
    assert found.verdict == doctor.NOTE and "has no empty_strided_cpu" in found.value
    assert in_graph.name_in_graph("all_reduce") is None


# ---- in graphs ----------------------------------------------------------------------------------


def frames_of(function: Function, *arguments: Any) -> list[str]:
    """Returns the names of the library's Python functions that run in a call."""
    home = os.path.dirname(os.path.abspath(ringcomm.__file__)) + os.sep
    found = []

    def see(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(home):
            found.append(frame.f_code.co_name)

    sys.setprofile(see)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return found


def program(tensor: Tensor, weight: Tensor, group: Any) -> Tensor:
    """Uses only products, for which inductor calls no C++ compiler."""
    full = F.all_gather(weight, group)
    F.all_reduce(tensor, group=group)
    F.broadcast(tensor, 0, group)
    exchanged = F.all_to_all(tensor @ full, group=group)
    return F.reduce_scatter(exchanged @ full, group=group)


def calls_of(comm: Communicator, function: Function, *arguments: Any) -> list[Any]:
    """Returns the collectives that a function makes, as the flight recorder has them."""
    records = []
    for _ in range(2):
        mine = comm.recording().rank(comm.rank)
        assert mine is not None
        records.append(mine.collectives)
        if len(records) == 1:
            function(*arguments)
    before = {each.number for each in records[0]}
    return [each.call for each in records[1] if each.number not in before]


def step(function: Function, tensor: Tensor, weight: Tensor, group: Any) -> list[Tensor]:
    out = function(tensor, weight, group)
    (gradient,) = torch.autograd.grad(out, weight, out.detach().sign())
    return [out.detach(), gradient]


def compiled_program(rank: int, world_size: int) -> None:
    comm = default_group().communicator
    # For torch's default group a property finds the communicator; dynamo's guards read a name.
    for group, asked in (
        (comm, set()),
        (None, {"communicator"}),
        (default_group(), {"group_name"}),
    ):
        torch._dynamo.reset()
        tensor = torch.arange(16.0).view(4, 4) % 3 + rank
        weight = (torch.arange(8.0).view(2, 4) % 5 - rank).requires_grad_()
        want = step(program, tensor, weight, group)
        compiled = torch.compile(program, fullgraph=True)
        # The first call after a compilation runs under torch modes, so the operators make it.
        for _ in range(2):
            assert all(map(same, step(compiled, tensor, weight, group), want))
        assert set(frames_of(step, compiled, tensor, weight, group)) == asked
        made = calls_of(comm, step, compiled, tensor, weight, group)
        assert len(made) == 8
        assert made == calls_of(comm, step, program, tensor, weight, group)
    with mock.patch.object(collectives, "name_in_graph", return_value=None):
        torch._dynamo.reset()
        compiled = torch.compile(program, fullgraph=True)
        for _ in range(2):
            step(compiled, tensor, weight, comm)
        assert len(frames_of(step, compiled, tensor, weight, comm)) > 50


def test_a_graph_runs_no_python_of_the_library(compiling_ranks):
    """Forward and backward run no Python; the negative control with operators runs much of it."""
    compiling_ranks.run(compiled_program)
