# SPDX-License-Identifier: Apache-2.0
"""The C++ backend: groups shared with other backends, torch's view of its calls, and its build."""

import ctypes
import datetime
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as BackendOfTorch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

import ringcomm
from ringcomm.c10d import backend
from ringcomm.c10d.comm_argument import find_communicator
from ringcomm.c10d.process_group import ProcessGroup, behind
from ringcomm.cli import doctor
from ringcomm.errors import (
    AbortedError,
    ArgumentError,
    CollectiveTimeout,
    ForkError,
    MismatchError,
    RingcommError,
    UnsupportedError,
)
from tests.c10d import (
    test_collectives,
    test_ddp,
    test_dispatch,
    test_fsdp,
    test_groups,
    test_profiler,
)
from tests.support import ROOT
from tests.support.compiler import COMPILER
from tests.support.rank_pool import RankPool, default_group

MIXED = "cpu:ringcomm,cuda:gloo"
CPU = torch.device("cpu")
SHORT = datetime.timedelta(seconds=0.3)


@pytest.fixture(scope="session", autouse=True)
def built() -> Path:
    """Builds the library, which the ranks find in the package's folder."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    return backend.build()


def our_group(group=None):
    """Returns the Python process group behind a group of torch."""
    group = group or default_group()
    assert type(group) is dist.ProcessGroup
    found = behind(group)
    assert isinstance(found, ProcessGroup)
    return found


# ---- groups ------------------------------------------------------------------------------------


def shared_with_gloo(rank, world_size):
    world = default_group()
    assert dist.get_backend() == MIXED
    ours, theirs = (world._get_backend(torch.device(kind)) for kind in ("cpu", "cuda"))
    assert ours.group is our_group() and ours.name() == "ringcomm" and theirs.name() == "gloo"
    assert test_groups.total(None, rank) == sum(range(world_size))
    dist.barrier()
    dist.monitored_barrier()
    objects = [None] * world_size
    dist.all_gather_object(objects, rank)
    assert objects == list(range(world_size))
    pair = dist.new_group([1, 0])
    assert test_groups.total(pair, rank) == 1 and our_group(pair).group_name == pair.group_name
    other = dist.new_group(backend="gloo")
    assert behind(other) is None and test_groups.total(other, rank) == 1
    alone = dist.new_group(backend="ringcomm")
    assert isinstance(alone, ProcessGroup) and test_groups.total(alone, rank) == 1


def beside_gloo(rank, world_size):
    """Gloo serves the CPU, but ringcomm still finds its own communicator for the CPU."""
    world = default_group()
    assert test_groups.total(None, rank) == 1
    assert behind(world, CPU) is None and behind(world, torch.device("cuda")) is behind(world)
    assert behind(world, torch.device("meta")) is None
    assert behind(world)._get_sequence_number_for_group() == 0
    tensor = torch.ones(2)
    ringcomm.all_reduce(tensor)
    assert tensor.tolist() == [2, 2]


def found_by_ringcomm(rank, world_size):
    """Every function of ringcomm that takes a torch group accepts a group with a C++ backend."""
    host = our_group().communicator
    tensor = torch.ones(2)
    ringcomm.all_reduce(tensor)
    ringcomm.all_reduce(tensor, group=default_group())
    mesh = init_device_mesh("cpu", (world_size,))
    assert find_communicator(mesh, "test", CPU) is host
    assert find_communicator(None, "test", CPU) is host
    assert ringcomm.Mesh(dp=world_size).get_group().size() == world_size
    summed = ringcomm.functional.all_reduce(tensor, group=default_group())
    assert summed.tolist() == [world_size**3] * 2
    module = torch.nn.Linear(4, 4)
    ringcomm.zero.shard(module, stage=1, comm=mesh)
    module(torch.ones(2, 4)).sum().backward()


def splits(rank, world_size):
    world = default_group()
    half = world.split_group([rank], timeout=datetime.timedelta(seconds=7), group_name=f"r{rank}")
    assert half.size() == 1 and half.group_name == f"r{rank}"
    assert our_group(half).communicator.timeout == datetime.timedelta(seconds=7)
    both = world.split_group([0, 1], group_name="both")
    assert type(both) is dist.ProcessGroup
    tensor = torch.tensor([rank + 1])
    both.allreduce([tensor]).wait()
    assert tensor.tolist() == [3]
    both.shutdown()


def one_for_both_devices(rank, world_size):
    world = default_group()
    assert world._get_backend(CPU) is world._get_backend(torch.device("cuda"))
    both = world.split_group([0, 1], group_name="both")
    assert our_group(both) is both._get_backend(torch.device("cuda")).group
    assert test_groups.total(None, rank) == 1


def options(rank, world_size):
    """torch hands the same options to each backend of a group."""
    theirs = BackendOfTorch.Options("gloo", SHORT)
    group = dist.new_group(backend=MIXED, pg_options=theirs)
    assert test_groups.total(group, rank) == 1
    ours = dist.new_group(backend=MIXED, pg_options=ringcomm.CommOptions(slots=8))
    assert our_group(ours).communicator.options.slots == 8
    group._get_backend(CPU).set_timeout(datetime.timedelta(seconds=7))
    assert our_group(group).communicator.timeout == datetime.timedelta(seconds=7)


def wrapped_by_torch(rank, world_size):
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps each backend in a backend of its own."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group(backend=MIXED)
        assert test_groups.total(group, rank) == 1
        assert behind(group, CPU) is our_group(group)
        assert find_communicator(group, "test", CPU) is our_group(group).communicator
        assert ringcomm.functional.all_reduce(torch.ones(1), group=group).tolist() == [2]
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def heap_memory(rank, world_size):
    served = default_group()._get_backend(CPU)
    assert served.supports_tensor_alloc(CPU)
    before = ringcomm.heap_stats()["used_bytes"]
    tensor = served.allocate_tensor(1 << 16, dtype=torch.float32, device=CPU)
    assert tensor.shape == (1 << 16,) and ringcomm.heap_stats()["used_bytes"] > before
    dist.all_reduce(tensor)


def ends(rank, world_size):
    groups = [default_group(), dist.new_group()]
    communicators = [our_group(group).communicator for group in groups]
    dist.destroy_process_group(groups[1])
    with pytest.raises(AbortedError, match="closed"):
        groups[1].allreduce([torch.ones(1)])
    assert test_groups.total(None, rank) == 1
    groups[0].shutdown()
    assert all(each.aborted for each in communicators)


@pytest.mark.parametrize(
    "check",
    [shared_with_gloo, found_by_ringcomm, options, wrapped_by_torch, heap_memory, ends],
)
def test_a_mixed_group(two_ranks, check):
    two_ranks.run(check, MIXED)


def test_a_mixed_group_with_gloo_for_the_cpu(two_ranks):
    two_ranks.run(beside_gloo, "cpu:gloo,cuda:ringcomm")


@pytest.mark.parametrize("check", [splits, one_for_both_devices])
def test_native(two_ranks, check):
    two_ranks.run(check, way="native")


# ---- the calls of the Python class, made through the dispatcher ----------------------------------


@pytest.mark.parametrize(
    "check",
    [
        test_collectives.all_reduce,
        test_collectives.rooted,
        test_collectives.gathers_and_scatters,
        test_collectives.exchanges,
        test_collectives.asynchronous,
        test_collectives.messages,
        test_collectives.objects,
        test_collectives.sparse,
        test_groups.subgroups,
    ],
)
def test_against_gloo(four_ranks, check):
    four_ranks.compare(check, way="native")


@pytest.mark.parametrize(
    "check",
    [
        test_collectives.coalesced,
        test_collectives.lists_of_uneven_tensors,
        test_collectives.layouts,
        test_collectives.movement_of_8_bit_floats,
        test_collectives.ops_that_gloo_lacks,
        test_collectives.timeouts,
        test_collectives.versions,
        test_dispatch.op_types,
        test_dispatch.same_without_modes,
    ],
)
def test_as_the_python_class(two_ranks, check):
    two_ranks.run(check, way="native")


@pytest.mark.parametrize(
    "check",
    [
        test_groups.aborted,
        test_groups.failures_reach_futures,
        test_groups.monitored_barriers,
        test_groups.one_rank_misses_a_monitored_barrier,
    ],
)
def test_groups_as_the_python_class(four_ranks, check):
    four_ranks.run(check, way="native")


@pytest.mark.parametrize("check", [test_ddp.buckets, test_fsdp.one_axis, test_fsdp.mixed_precision])
def test_training_as_on_gloo(two_ranks, check):
    two_ranks.compare(check, way="native")


def test_a_rank_dies_in_the_backward_pass():
    with closing(RankPool(2)) as pool, pytest.raises(AssertionError) as raised:
        pool.run(test_ddp.a_rank_dies, way="native")
    assert str(raised.value) == "rank 1: the process died"


# ---- torch's view --------------------------------------------------------------------------------


def step(x):
    y = x * 2
    dist.all_reduce(y)
    gathered = y.new_zeros(2 * len(y))
    dist.all_gather_into_tensor(gathered, y)
    return gathered


def traced(rank, world_size):
    """Fake tensors, graphs, the profiler and CommDebugMode see the same as with Gloo."""
    results: list[object] = []
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2))
        results.append(step(fake).shape)
    graph = make_fx(step)(torch.ones(2))
    results.append([str(node.target) for node in graph.graph.nodes])
    with CommDebugMode() as counts:
        step(torch.ones(2))
    results.append(counts.get_total_counts())
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step(torch.ones(2))
    names = {event.name for event in profiled.events() or ()}
    results.append(sorted(name for name in names if name.startswith("c10d::")))
    return results


def coalesced_warns(rank, world_size):
    def call(y):
        dist.all_reduce_coalesced([y])
        return [y]

    return test_dispatch._warned(call)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "check", [test_dispatch.under_modes, test_dispatch.backward_warns, traced, coalesced_warns]
)
def test_torch_sees_it_as_gloo(two_ranks, check):
    two_ranks.compare(check, way="native")


def test_a_profiler_sees_direct_calls(two_ranks):
    two_ranks.run(test_profiler.through_torch, way="native")


# ---- errors --------------------------------------------------------------------------------------


def errors(rank, world_size):
    """Errors have the types and texts of Python, both from a call and from its work."""
    with pytest.raises(ArgumentError, match=r"all_gather_into_tensor on rank \d of 2: "):
        dist.all_gather_into_tensor(torch.empty(3), torch.ones(2))
    group = dist.new_group(timeout=SHORT)
    if rank == 0:
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        with pytest.raises(CollectiveTimeout, match="all_reduce on rank 0 of 2") as raised:
            work.wait()
        assert work.is_completed() and not work.is_success()
        assert (
            "work = dist.all_reduce" in Path(__file__).read_text().splitlines()[_line(raised) - 1]
        )
        with pytest.raises(RingcommError, match="unusable"):
            dist.all_reduce(torch.ones(4), group=group)
    dist.barrier()
    mismatched = dist.new_group()
    with pytest.raises(MismatchError, match=re.escape(os.path.basename(__file__))):
        dist.all_reduce(torch.ones(2 + rank), group=mismatched)


def _line(raised) -> int:
    found = re.search(rf"{re.escape(os.path.basename(__file__))}:(\d+)", str(raised.value))
    assert found, raised.value
    return int(found[1])


def recorded(rank, world_size):
    dist.all_reduce(torch.ones(2))
    dist.barrier()
    mine = our_group().communicator.recording().rank(rank)
    assert mine is not None
    found = [(each.collective, each.site.partition(":")[0]) for each in mine.collectives[-2:]]
    assert found == [("all_reduce", __file__), ("barrier", __file__)]


def counted(rank, world_size):
    served = default_group()._get_backend(CPU)
    served._set_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    dist.barrier(async_op=True).wait()
    opts = dist.distributed_c10d.AllreduceOptions()
    opts.timeout = datetime.timedelta(seconds=50)
    default_group().allreduce([torch.ones(1)], opts).wait()
    assert served._get_sequence_number_for_group() == 5


def forked(rank, world_size):
    dist.all_reduce(torch.ones(1))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(1))
            answer = "no error"
        except BaseException as error:
            answer = type(error).__name__
        os.write(write, answer.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100).decode() == ForkError.__name__
    dist.all_reduce(torch.ones(1))


def interrupted(rank, world_size):
    """Ctrl-C ends a waiting call."""
    group = dist.new_group()
    if rank == 0:
        with mock.patch.object(signal, "default_int_handler"):
            signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                dist.all_reduce(torch.ones(4), group=group)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("check", [errors, recorded, counted, forked, interrupted])
def test_on_the_native_way(two_ranks, check):
    two_ranks.run(check, way="native")


# ---- calls without Python: NOTE [Direct calls] in kernels/c10d/backend.cpp -----------------------


def direct_calls(call) -> int:
    """Returns how many calls in ``call`` the backend makes without Python."""
    served = default_group()._get_backend(CPU)
    before = served.direct_count
    call()
    return served.direct_count - before


def common_calls_are_direct(rank, world_size):
    x, wide, shard = torch.full((4,), rank + 1.0), torch.zeros(8), torch.zeros(2)
    versions = [each._version for each in (x, wide, shard)]
    assert direct_calls(lambda: dist.all_reduce(x)) == 1 and x.tolist() == [3] * 4
    assert direct_calls(lambda: dist.all_reduce(x, dist.ReduceOp.MAX)) == 1
    assert direct_calls(lambda: dist.all_gather_into_tensor(wide, x)) == 1
    assert wide.tolist() == [3] * 8
    assert direct_calls(lambda: dist.reduce_scatter_tensor(shard, x)) == 1
    assert shard.tolist() == [6] * 2
    assert direct_calls(lambda: dist.broadcast(x, 1)) == 1
    assert direct_calls(dist.barrier) == 1
    advanced = [
        each._version - before for each, before in zip((x, wide, shard), versions, strict=True)
    ]
    assert advanced == [3 if rank == 0 else 2, 1, 1]  # a broadcast changes no root's tensor
    work = default_group().allreduce([x], _options())
    assert work.is_completed() and work.is_success() and work.wait()
    assert work.get_future().wait()[0] is x or torch.equal(work.get_future().wait()[0], x)


def _options(**fields):
    opts = dist.distributed_c10d.AllreduceOptions()
    opts.asyncOp = False
    for name, value in fields.items():
        setattr(opts, name, value)
    return opts


def refused(error, call):
    def made():
        with pytest.raises(error):
            call()

    return made


def other_calls_are_pythons(rank, world_size):
    """Calls that need Python reach Python, and refusals have the same texts."""
    group = default_group()

    def not_direct(call):
        assert direct_calls(call) == 0

    x = torch.ones(4)
    not_direct(lambda: dist.all_reduce(x, async_op=True).wait())
    not_direct(lambda: group.allreduce([x], _options(timeout=datetime.timedelta(seconds=50))))
    not_direct(lambda: dist.all_reduce(torch.ones(4, 4)[:, 1]))
    not_direct(lambda: group.allreduce([torch.ones(4, dtype=torch.complex64)], _options()))
    not_direct(lambda: dist.all_reduce(torch.eye(2).to_sparse()))
    not_direct(lambda: dist.all_reduce(torch.zeros(0)))
    not_direct(lambda: dist.all_reduce(x, dist._make_nccl_premul_sum(2.0)))
    not_direct(lambda: dist.barrier(device_ids=None, async_op=True).wait())
    parameter = torch.nn.Parameter(torch.ones(4))
    with torch.no_grad():
        not_direct(lambda: dist.all_reduce(parameter))
    with torch.inference_mode():
        inferred = torch.ones(4)
    not_direct(lambda: dist.all_reduce(inferred))
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    not_direct(refused(RingcommError, lambda: dist.all_reduce(freed)))
    laid_over = torch.ones(4)
    gather = partial(dist.all_gather_into_tensor, laid_over, laid_over[1:3])
    not_direct(refused(ArgumentError, gather))
    dist.barrier()


def in_order_after_queued_calls(rank, world_size):
    """A synchronous call after a queued call waits for it; the next call is direct again."""
    group, served = default_group(), default_group()._get_backend(CPU)
    engine = our_group().communicator.engine
    x, order = torch.ones(4), []
    gate = threading.Event()

    def first():
        gate.wait()
        our_group().communicator.all_reduce(x)
        order.append("queued")
        return []

    work = engine.submit(first, "first")
    before = served.direct_count

    def behind_it():
        dist.all_reduce(x)
        order.append("behind")

    caller = threading.Thread(target=behind_it)
    caller.start()
    gate.set()
    caller.join()
    work.wait()
    assert order == ["queued", "behind"] and served.direct_count == before
    group.allreduce([x], _options())
    assert served.direct_count == before + 1


def closed_and_aborted(rank, world_size):
    """An abort ends a waiting call; after a close no call uses freed memory."""
    group = dist.new_group()
    if rank == 0:
        timer = threading.Timer(0.2, group.abort)
        timer.start()
        with pytest.raises(AbortedError, match="all_reduce on rank 0 of 2"):
            dist.all_reduce(torch.ones(4), group=group)
        timer.join()
        with pytest.raises(AbortedError, match="unusable"):
            dist.all_reduce(torch.ones(4), group=group)
    other = dist.new_group()
    dist.all_reduce(torch.ones(4), group=other)
    our_group(other).communicator.close()
    with pytest.raises(AbortedError, match="closed"):
        dist.all_reduce(torch.ones(4), group=other)


def triton_is_asked(rank, world_size):
    """A group with the option ``kernels="triton"`` uses these kernels."""
    options = ringcomm.CommOptions(kernels="triton")
    group = dist.new_group(pg_options=options)
    x = torch.ones(4)
    with mock.patch.object(our_group(group), "allreduce") as asked, pytest.raises(RuntimeError):
        dist.all_reduce(x, group=group)
    assert asked.called


def other_version(rank, world_size):
    """A library for another version of the native module is refused."""
    words = (ctypes.c_uint64 * 8)(99, 64)
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )
    capsule = make(words, b"ringcomm.DirectCalls", None)
    native = type(default_group()._get_backend(CPU))
    with pytest.raises(RuntimeError, match="another version of ringcomm"):
        native(our_group(), None, (capsule, {}, [], None))
    with pytest.raises(ValueError, match="incorrect name"):
        native(our_group(), None, (make(words, b"other", None), {}, [], None))


@pytest.mark.parametrize(
    "check",
    [
        common_calls_are_direct,
        other_calls_are_pythons,
        in_order_after_queued_calls,
        closed_and_aborted,
        triton_is_asked,
        other_version,
    ],
)
def test_direct_calls(two_ranks, check):
    two_ranks.run(check, way="native")


# ---- the build -----------------------------------------------------------------------------------


def not_built(rank, world_size):
    with (
        mock.patch("ringcomm.c10d.backend.find", return_value=None),
        pytest.raises(UnsupportedError, match=r"RINGCOMM_BACKEND=native needs .* build-backend"),
    ):
        dist.new_group(backend="ringcomm")


def test_a_missing_library_is_no_silent_fallback(two_ranks):
    two_ranks.run(not_built, way="native")


def test_another_value_of_the_variable_is_refused(monkeypatch):
    monkeypatch.setenv("RINGCOMM_BACKEND", "cpp")
    with pytest.raises(ArgumentError, match="RINGCOMM_BACKEND: expected native or python"):
        backend.is_asked_for()


def test_the_doctor_says_which_is_used(built, monkeypatch):
    monkeypatch.delenv("RINGCOMM_BACKEND", raising=False)
    assert doctor.check_backend() == doctor.Finding(
        "C++ backend", doctor.OK, f"{built}, for groups that ringcomm shares with another backend"
    )
    monkeypatch.setenv("RINGCOMM_BACKEND", "native")
    assert doctor.check_backend().value == f"{built}, for all groups"
    monkeypatch.setattr(backend, "find", lambda: None)
    found = doctor.check_backend()
    assert found.verdict == doctor.FAIL and "run `ringcomm build-backend`" in found.advice
    monkeypatch.setenv("RINGCOMM_BACKEND", "python")
    found = doctor.check_backend()
    assert found.verdict == doctor.OK and found.value.startswith("not built; ")
    monkeypatch.setenv("RINGCOMM_BACKEND", "cpp")
    found = doctor.check_backend()
    assert found.verdict == doctor.FAIL and "expected native or python" in found.advice


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A separate package with the same sources as this one."""
    sources = tmp_path / "src"
    for name in backend._SOURCES:
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / name).write_bytes((ROOT / name).read_bytes())
    package = tmp_path / "package"
    package.mkdir()
    monkeypatch.setattr(backend, "source_root", lambda: sources)
    monkeypatch.setattr(backend, "_package", lambda: package)
    monkeypatch.setenv("RINGCOMM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def test_a_stale_library_is_not_loaded(built, copy, monkeypatch):
    """A library from other sources, or for another torch or Python, is stale."""
    (copy / "package" / built.name).write_bytes(built.read_bytes())
    assert backend.find() is not None
    source = copy / "src" / backend._SOURCES[0]
    text = source.read_text()
    source.write_text(text + "\n")
    assert backend.find() is None
    source.write_text(text)
    assert backend.find() is not None
    monkeypatch.setattr(torch.version, "git_version", "another")
    assert backend.find() is None
    with pytest.raises(UnsupportedError, match="run `ringcomm build-backend`"):
        backend.load("this")


def test_a_library_in_a_cache_that_others_may_write_is_not_loaded(built, copy):
    cache = copy / "cache"
    cache.mkdir(mode=0o700)
    (cache / built.name).write_bytes(built.read_bytes())
    assert backend.find() == cache / built.name
    cache.chmod(0o777)
    assert backend.find() is None


def test_a_damaged_library_is_worded(built, copy):
    (copy / "package" / built.name).write_bytes(b"no library")
    with pytest.raises(UnsupportedError, match=r"cannot be loaded: .*--force"):
        backend.load("this")


@pytest.mark.parametrize(
    ("compiler", "words"),
    [
        ("false", "does not compile with false"),
        ("/no/such/compiler", "/no/such/compiler does not run"),
        (None, "expected a C\\+\\+20 compiler, found none"),
    ],
)
def test_a_build_that_fails_says_why(copy, monkeypatch, compiler, words):
    if compiler is None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(shutil, "which", lambda name: None)
    else:
        monkeypatch.setenv("CXX", compiler)
    with pytest.raises(UnsupportedError, match=words):
        backend.build()
    assert not list((copy / "package").glob("*.so*"))


def test_it_goes_into_the_cache_where_the_package_is_not_writable(copy, monkeypatch):
    def compile(compiler, headers, target):
        target.touch()

    monkeypatch.setenv("CXX", "c++")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(backend, "_compile", compile)
    built = backend.build()
    assert built.parent == copy / "cache" and backend.find() == built
    built.unlink()
    built.parent.chmod(0o777)
    with pytest.raises(UnsupportedError, match=r"not writable and .* others may write to it"):
        backend.build()


def test_a_build_removes_those_of_earlier_sources(copy, monkeypatch):
    package = copy / "package"
    name = backend._file_name()
    stem = name.rpartition(".")[0].rpartition(".")[0]
    others = [package / f"{stem}.0123.so", package / "_backend.torch1.0.cpython-311.0123.so"]
    for each in others:
        each.touch()
    monkeypatch.setenv("CXX", str(copy / "compiler"))
    (copy / "compiler").write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; touch "$2"\n')
    (copy / "compiler").chmod(0o755)
    assert backend.build() == package / name
    assert sorted(package.glob("*.so")) == sorted([package / name, others[1]])


def test_missing_headers_are_named(copy, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(copy))
    with pytest.raises(UnsupportedError, match=r"expected Python\.h in .*python3-dev"):
        backend.build()


def test_the_command(built):
    done = subprocess.run(
        [sys.executable, "-m", "ringcomm", "build-backend"], capture_output=True, text=True
    )
    assert done.returncode == 0 and str(built) in done.stdout
    assert "already built for torch" in done.stdout
    environment = {**os.environ, "CXX": "false"}
    command = [sys.executable, "-m", "ringcomm", "build-backend", "--force"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "does not compile with false" in done.stderr
