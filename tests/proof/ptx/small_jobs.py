# SPDX-License-Identifier: Apache-2.0
"""Small jobs of a few ranks on emulated devices, whose results are known to the bit.

Together the jobs use every path of data: one-shot and ring, in place from the heap and through
slots, LL, messages, the optimizer's steps. Right behind each call, work on the stream overwrites
the tensors that the rank lent. As a program, this module runs one job with the PTX of its kernels.
The named lines of a subunit then order nothing, and a named slip is applied:

    python -m tests.proof.ptx.small_jobs JOB '{SUBUNIT: [LINE, ...], ...}' [SLIP]
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch

from ringcomm import (
    AbortedError,
    CollectiveTimeout,
    Communicator,
    PeerLost,
    RingcommError,
    _native,
    cuda,
)
from ringcomm.algorithms import spelled
from ringcomm.comm.device.launch import DeviceCallEngine, device_comm_of
from ringcomm.comm.host.core import Core
from ringcomm.comm.host.engine import Call
from ringcomm.optim import AdamW, AdamWOptions
from tests import ptx_interpreter as ptx
from tests.proof.ptx.orderings import without
from tests.ptx_interpreter import PtxSchedule
from tests.support.device_worlds import (
    OPTIONS,
    Devices,
    Stream,
    device_of,
    items_read,
    on_host,
    put,
    ready_word,
    room,
    set_ll_epoch,
)
from tests.support.emulator.library import DriverError
from tests.support.emulator.ptx import PtxKernels, ptx_of

# Slots have 2 KiB, since a ring of a step moves whole tiles of 512 elements. A channel has only two
# slots per peer, so each slot is written several times. The timeout ends a wait that a mutant
# blocks.
TIMEOUT_S = 20.0
QUICK = replace(OPTIONS, timeout=TIMEOUT_S, segment_bytes=2048, slots=2)
# Tensors for slots are short; tensors that peers read in place must not be (kZeroCopyMinBytes).
FEW_ELEMS, SOME_ELEMS, MANY_ELEMS = 131, 7_011, 26_011
FEW = dict.fromkeys(("plain", "heap", "mixed"), FEW_ELEMS)
SOME = dict.fromkeys(FEW, SOME_ELEMS)
MANY = {"plain": SOME_ELEMS, "heap": MANY_ELEMS, "mixed": MANY_ELEMS}
STEP_ELEMS = (6_001, 40, 3)
NORM_ELEMS = 2_048  # of a rank
# Two ranks share a device and a launch. In a ring of two both neighbours would be one rank.
RANKS = 3
CALLS_PER_CLEARING = 1 << 24  # kCallsPerClearing, ll.h
# Other slips than an access without its order: a pattern of the text, and the replacement.
SLIPS = {
    "a vector a word too far": (
        r"(\bld\.global\.L1::no_allocate\.v4\.u32\s.*\[%rd\d+)\]",
        r"\1+4]",
    ),
    "lanes that count a warp too few": (
        r"(\badd\.s(?:32|64)\s+%rd?\d+, %rd?\d+, )(?:256|384);",
        r"\1 224;",
    ),
    "a store's other operand": (
        r"(\bst\.global\.v4\.u32\s+\[[^\]]*\], \{(%r\d+), )%r\d+",
        r"\1\2",
    ),
    "too few lanes at a shuffle": (r"(\bshfl\.sync\.bfly\.b32\s.*, )[^,]+;", r"\1 65535;"),
    "lanes that store a status plainly": (
        r"\batom\.shared\.max\.s32\s+%r\d+, (\[%r\d+\], %r\d+;)",
        r"st.shared.u32 \1",
    ),
    "another lane of a shuffle": (
        r"(\bshfl\.sync\.bfly\.b32\s+[^,]+, [^,]+, )[^,]+(,.*;)",
        r"\1 3\2",
    ),
}


def subunit_of(unit: str, kernel: str) -> str:
    """Returns the smallest subunit that contains the kernel."""
    if unit.startswith(("reduce_", "quantize_")):
        return f"{unit}/{kernel.rsplit('_', 1)[1]}"
    if unit.startswith("adamw_"):
        # The prepare kernel, of no parameter dtype, is in every subunit: take a loaded one.
        last, grads = kernel.rsplit("_", 1)[1], unit.removeprefix("adamw_")
        return f"{unit}/{grads if last == 'prepare' else last}"
    return unit


def new_values(turn: int, ranks: int, elems: int) -> list[torch.Tensor]:
    """Returns new values of all ranks for each call, so no old value equals an expected one."""
    made = torch.Generator().manual_seed(turn)
    return [torch.randint(-999, 1000, (elems,), generator=made).float() for _ in range(ranks)]


# Fills 4-byte words with ones; 32 threads.
_FILL = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry fill(.param .u64 to, .param .u64 words)
{
  .reg .pred %p<2>;
  .reg .b32 %r<3>;
  .reg .b64 %rd<6>;
  ld.param.u64 %rd1, [to];
  ld.param.u64 %rd2, [words];
  mov.u32 %r1, %tid.x;
  cvt.u64.u32 %rd3, %r1;
  mov.u32 %r2, -1;
more:
  setp.ge.u64 %p1, %rd3, %rd2;
  @%p1 bra done;
  shl.b64 %rd4, %rd3, 2;
  add.s64 %rd5, %rd1, %rd4;
  st.global.u32 [%rd5], %r2;
  add.s64 %rd3, %rd3, 32;
  bra more;
done:
  ret;
}
"""


@cache
def _fill_module() -> int:
    return ptx.load(_FILL)


def _write_over(comm: Communicator, *tensors: torch.Tensor) -> None:
    """Overwrites tensors on the current stream, like a user's kernel; the host does not wait."""
    runtime, device = cuda.current(), device_of(comm)
    for tensor in tensors:
        given = struct.pack("<QQ", tensor.data_ptr(), tensor.numel())

        def fill(given: bytes = given) -> None:
            ptx.run(_fill_module(), "fill", given)

        runtime.call_on_stream(device, runtime.current_stream(device), fill)


Form = Callable[[Communicator, int, str, int, str], None]


def _all_reduce(comm: Communicator, turn: int, algorithm: str, elems: int, memory: str) -> None:
    values = new_values(turn, comm.world_size, elems)
    tensor = put(comm, values[comm.rank], memory)
    comm.all_reduce(tensor, algorithm=spelled(algorithm, "all_reduce"))
    assert torch.equal(on_host(tensor), torch.stack(values).sum(0)), (algorithm, memory)
    comm.all_reduce(tensor, algorithm=spelled(algorithm, "all_reduce"))
    _write_over(comm, tensor)


def _halves(comm: Communicator, turn: int, algorithm: str, elems: int, memory: str) -> None:
    """Makes the halves of an all-reduce as calls of their own."""
    values = new_values(turn, comm.world_size, elems * comm.world_size)
    source = put(comm, values[comm.rank], memory)
    output = room(comm, elems, torch.float32, memory, 1)
    comm.reduce_scatter_tensor(output, source, algorithm=algorithm)
    _write_over(comm, source)
    want = torch.stack(values).sum(0)
    assert torch.equal(on_host(output), want.chunk(comm.world_size)[comm.rank]), (algorithm, memory)
    comm.all_gather_into_tensor(source, output, algorithm=algorithm)
    _write_over(comm, output)
    assert torch.equal(on_host(source), want), (algorithm, memory)


def _to_root(comm: Communicator, turn: int, _: str, elems: int, memory: str) -> None:
    """Reduce, gather and scatter: of two ranks, only one receives data from the other."""
    ranks, me, root = comm.world_size, comm.rank, turn % comm.world_size
    values = new_values(turn, ranks, elems)
    tensor = put(comm, values[me], memory)
    comm.reduce(tensor, root)
    if me == root:
        assert torch.equal(on_host(tensor), torch.stack(values).sum(0)), memory
    mine = put(comm, values[me], memory)
    parts = [room(comm, elems, torch.float32, memory, turn) for _ in range(ranks)]
    comm.gather(mine, parts if me == root else None, root)
    _write_over(comm, mine)
    back = room(comm, elems, torch.float32, memory, 1)
    if me == root:
        assert torch.equal(on_host(torch.cat(parts)), torch.cat(values)), memory
    comm.scatter(back, parts if me == root else None, root)
    _write_over(comm, *parts)
    assert torch.equal(on_host(back), values[me]), memory


def _movements(comm: Communicator, turn: int, _: str, elems: int, memory: str) -> None:
    """All-to-all, messages and broadcast, whose kernels other jobs do not use."""
    ranks, me = comm.world_size, comm.rank
    ahead, behind = (me + 1) % ranks, (me - 1) % ranks
    values = new_values(turn, ranks, elems * ranks)
    source = put(comm, values[me], memory)
    got = room(comm, elems * ranks, torch.float32, memory, 1)
    comm.all_to_all_single(got, source)
    _write_over(comm, source)
    want = [each.chunk(ranks)[me] for each in values]
    assert torch.equal(on_host(got), torch.cat(want)), memory
    mine = put(comm, values[me], memory)
    works = [comm.isend(mine, ahead), comm.irecv(got, behind)]
    assert all(work.wait() for work in works)
    _write_over(comm, mine)
    assert torch.equal(on_host(got), values[behind]), memory
    root = turn % ranks
    both = [put(comm, values[me], memory) for _ in range(2)]
    for tensor in both:
        comm.broadcast(tensor, root)
    _write_over(comm, both[1])
    assert torch.equal(on_host(both[0]), values[root]), memory


def _job(form: Form, algorithm: str, elems: dict[str, int]) -> Callable[[Communicator], None]:
    def body(comm: Communicator) -> None:
        for turn, memory in enumerate(("plain", "heap", "mixed")):
            form(comm, turn, algorithm, elems[memory], memory)

    return body


def _await(true: Callable[[], bool]) -> None:
    """Waits by looking at a condition that gives no kernel any order of memory."""
    ends = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.001)


# Set when the rank that such a job observes has done its part.
_DONE = threading.Event()


@contextmanager
def _while_it_reads(comm: Communicator, reader: int) -> Iterator[Callable[[], bool]]:
    """Inside, the kernel by which ``reader`` reads this rank's next item cannot end.

    A kernel's end orders its reads before all later work, once the host waits for it. Yields a
    function that tells whether the item has been read. All ranks have made one barrier before.
    """
    on_host(room(comm, 1, torch.float32, "plain"))  # the barrier's own item has been published

    def is_read() -> bool:
        return items_read(comm, reader) > 1

    def hold() -> None:
        if is_read():
            _DONE.wait(TIMEOUT_S)

    with ptx.watching(ready_word(comm, reader) + 4, hold):
        try:
            yield is_read
        finally:
            _DONE.set()


def _found_free(comm: Communicator) -> None:
    """The slot is read before the call that rewrites it begins, so that call finds it free."""
    values = new_values(0, comm.world_size, FEW_ELEMS)
    tensors = [put(comm, values[comm.rank], "plain") for _ in range(QUICK.slots + 1)]
    comm.barrier()
    if comm.rank == comm.world_size - 1:
        with _while_it_reads(comm, 0) as is_read:
            for tensor in tensors[:-1]:
                comm.reduce(tensor, 0)
            _await(is_read)
            comm.reduce(tensors[-1], 0)
            on_host(tensors[-1])
        return
    for tensor in tensors:
        comm.reduce(tensor, 0)
    if comm.rank == 0:
        for tensor in tensors:
            assert torch.equal(on_host(tensor), torch.stack(values).sum(0))


_READY_WORDS: dict[int, int] = {}  # by rank; ranks are threads


def _found_read(comm: Communicator) -> None:
    """Peers have read a lent tensor when the rank first looks, so the first look must order memory.

    The rank is delayed at the word that gives a peer of another device the data's address.
    """
    root = comm.world_size - 1
    values = new_values(0, comm.world_size, MANY_ELEMS)
    parts = [put(comm, each, "heap") for each in values]
    back = room(comm, MANY_ELEMS, torch.float32, "plain")
    _READY_WORDS[comm.rank] = ready_word(comm, root)
    comm.barrier()
    if comm.rank == root:
        with (
            _while_it_reads(comm, 0) as is_read,
            ptx.watching(_READY_WORDS[0], lambda: _await(is_read)),
        ):
            comm.scatter(back, parts, root)
            _write_over(comm, parts[0])
            on_host(back)
    else:
        comm.scatter(back, None, root)
    assert torch.equal(on_host(back), values[comm.rank])


def _shared_again(comm: Communicator) -> None:
    """A slot of an all-reduce is written again before other ranks' next calls release anything.

    The rank on a device of its own shares data in both slots alternately, without a signal from the
    others, who join only afterwards.
    """
    root, others = comm.world_size - 1, range(comm.world_size - 1)
    values = new_values(0, comm.world_size, FEW_ELEMS)
    tensors = [put(comm, values[comm.rank], "plain") for _ in range(QUICK.slots + 1)]
    comm.barrier()
    comm.all_reduce(tensors[0], algorithm="two_shot")
    if comm.rank == root:
        _await(lambda: all(items_read(comm, peer, Stream.SHARED) > 0 for peer in others))
    else:
        _DONE.wait(TIMEOUT_S)
    try:
        for tensor in tensors[1:]:
            comm.broadcast(tensor, root)
        on_host(tensors[-1])
    finally:
        if comm.rank == root:
            _DONE.set()
    assert torch.equal(on_host(tensors[0]), torch.stack(values).sum(0))
    assert all(torch.equal(on_host(each), values[root]) for each in tensors[1:])


def _come_around(comm: Communicator) -> None:
    """LL packets whose flags are about to wrap around, so that their memory is cleared."""
    set_ll_epoch(comm, CALLS_PER_CLEARING - 4)
    comm.barrier()
    for turn in range(6):
        _all_reduce(comm, turn, "ll", FEW_ELEMS, "plain")


_has_given_up = threading.Semaphore(0)  # one per rank that has given up


def _absent(stays: bool) -> Callable[[Communicator], None]:
    """The last rank makes no call: the others' kernels give up and record a fault.

    Unless ``stays``, the rank exits, so the loss is noticed at once, before any deadline, and
    several lanes of a block fail together.
    """

    def job(comm: Communicator) -> None:
        if comm.rank < comm.world_size - 1:
            try:
                _miss_last(comm)
            finally:
                _has_given_up.release()
        elif stays:
            assert _has_given_up.acquire(timeout=TIMEOUT_S)
            assert _has_given_up.acquire(timeout=TIMEOUT_S)

    return job


def _miss_last(comm: Communicator) -> None:
    core = cast(DeviceCallEngine, comm.engine).device_core
    region_ptr, page_ptr = core._allocation.ptr, core._page.host_ptr
    seen: dict[str, Any] = {}

    def look_at_region() -> None:
        page = core.runtime.read(core.device, region_ptr, _native.CONTROL_PAGE_BYTES)
        seen["peers"] = _native.fault_in_page(page, comm.rank, comm.world_size)

    def look_at_page() -> None:
        seen["host"] = core.native.fault()

    raised_ptr = page_ptr + 4  # HostPage.fault_raised, args.h
    with (
        ptx.watching(region_ptr + _native.ABORTED_OFFSET_BYTES, look_at_region),
        ptx.watching(raised_ptr, look_at_page),
    ):
        tensor = put(comm, torch.ones(SOME_ELEMS), "plain")

        def call() -> list[torch.Tensor]:
            comm.all_reduce(tensor, algorithm="two_shot")
            return [tensor]

        try:
            comm.engine.submit(call, "absent", timeout=0.3)
            comm.engine.finish_host_side()
        except (CollectiveTimeout, AbortedError, PeerLost) as error:
            assert f"rank {comm.world_size - 1}" in str(error), error
        else:
            raise AssertionError("a rank that makes no call was not missed")
    assert all(fault["op"] == "all_reduce" for fault in seen.values()), seen
    assert len(seen) == 2, seen


def _norm_alone(comm: Communicator) -> None:
    """The norm of an already reduced gradient of small integers, so that the norm is exact."""
    values = put(comm, new_values(0, 1, SOME_ELEMS)[0], "plain")
    words, wanted = torch.zeros(2, _native.GRAD_NORM_WORDS, dtype=torch.int64)
    given = (values.data_ptr(), _native.DTYPES["float32"], SOME_ELEMS, 0)

    def norm(core: Core) -> int:
        return device_comm_of(core).grad_norm(*given, words.data_ptr())

    comm.engine.start_call(Call("grad_norm", norm, []))
    _native.grad_norm(*given, wanted.data_ptr())
    assert torch.equal(on_host(words), wanted)


def _norm(algorithm: str) -> Callable[[Communicator], None]:
    """Reduces gradients and their norm, without a later call that would order the same reads.

    An optimizer adds the ranks' norms in another collective, which hides a missing order.
    """
    code, sums = _native.ALGORITHMS[algorithm], _native.OPS["SUM"]
    kind = _native.GRAD_NORM_KINDS["l2"]

    def body(comm: Communicator) -> None:
        elems, dtype = NORM_ELEMS * comm.world_size, _native.DTYPES["float32"]
        outs = []
        for turn in range(3):
            values = new_values(turn, comm.world_size, elems)
            grads = put(comm, values[comm.rank], "heap")
            out = room(comm, NORM_ELEMS, torch.float32, "plain")
            words = torch.zeros(_native.GRAD_NORM_WORDS, dtype=torch.int64)
            into = (out.data_ptr(), False, kind, words.data_ptr())
            given = (grads.data_ptr(), elems, dtype, sums, *into, code, 0)

            def norm(core: Core, given: Any = given) -> int:
                return device_comm_of(core).reduce_scatter_norm(*given)

            comm.engine.start_call(Call("reduce_scatter_norm", norm, [out, grads]))
            _write_over(comm, grads)
            outs.append((out, torch.stack(values).sum(0).chunk(comm.world_size)[comm.rank], words))
        for out, want, words in outs:
            wanted = torch.zeros_like(words)
            _native.grad_norm(want.data_ptr(), dtype, NORM_ELEMS, kind, wanted.data_ptr())
            assert torch.equal(on_host(out), want)
            assert torch.equal(on_host(words), wanted)

    return body


def _steps(algorithm: str, clip: bool) -> Callable[[Communicator], None]:
    """AdamW with gradients of small integers, whose sums are exact in any order."""

    def body(comm: Communicator) -> None:
        starts = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in STEP_ELEMS]
        params = [torch.nn.Parameter(put(comm, start, "plain")) for start in starts]
        plain = [torch.nn.Parameter(start.clone()) for start in starts]
        optimizer = AdamW(params, lr=1e-2, comm=comm, options=AdamWOptions(algorithm=algorithm))
        reference = torch.optim.AdamW(plain, lr=1e-2, foreach=False, fused=True)
        for turn in range(3):
            for param, same in zip(params, plain, strict=True):
                values = new_values(turn, comm.world_size, param.numel())
                if param.grad is None:
                    param.grad = put(comm, values[comm.rank], "plain")
                else:  # the gradient is in the heap, where peers read it
                    param.grad.copy_(values[comm.rank])
                same.grad = torch.stack(values).sum(0) / comm.world_size
            if clip:
                norm = on_host(optimizer.clip_grad_norm_(0.5))
                wanted = torch.nn.utils.clip_grad_norm_(plain, 0.5)
                assert torch.allclose(norm, wanted, rtol=1e-6)
            optimizer.step()
            _write_over(comm, *(param.grad for param in params if param.grad is not None))
            reference.step()
            for param, same in zip(params, plain, strict=True):
                # The gradient's mean is rounded once and each product once, each by some 2^-23.
                got = on_host(param.detach())
                assert torch.allclose(got, same.detach(), rtol=1e-6, atol=1e-7), turn
        comm.engine.finish_host_side()

    return body


# Each rank has a third of the elements of an all-reduce.
_THIRDS = {memory: elems // 3 for memory, elems in MANY.items()}
JOBS: dict[str, Callable[[Communicator], None]] = {
    "one_shot": _job(_all_reduce, "one_shot", MANY),
    "ring": _job(_all_reduce, "ring", SOME),
    "ll": _job(_all_reduce, "ll", FEW),
    "one-shot halves": _job(_halves, "one_shot", _THIRDS),
    "ring halves": _job(_halves, "ring", dict.fromkeys(FEW, SOME_ELEMS // 3)),
    "ll halves": _job(_halves, "ll", dict.fromkeys(FEW, FEW_ELEMS // 3)),
    "one hop": _job(_all_reduce, "one_shot", FEW),
    "movements": _job(_movements, "", _THIRDS),
    "to a root": _job(_to_root, "", MANY),
    "found free": _found_free,
    "found read": _found_read,
    "shared again": _shared_again,
    "norm alone": _norm_alone,
    "ll comes around": _come_around,
    "absent": _absent(stays=True),
    "lost": _absent(stays=False),
    "one-shot norm alone": _norm("one_shot"),
    "ring norm alone": _norm("ring"),
    "one-shot step": _steps("one_shot", False),
    "ring step": _steps("ring", False),
    "one-shot norm": _steps("one_shot", True),
    "ring norm": _steps("ring", True),
}


def run(job: str, kernels: PtxKernels) -> None:
    """Runs a job on devices of its own; raises a wrong result or a kernel's mistake."""
    devices = Devices("emulated", ptx=kernels)
    with devices.new_world(RANKS, (0, 1), QUICK) as world:
        devices.run(world, JOBS[job])
    devices.close()


def main() -> None:
    job, changes, *slips = sys.argv[1], json.loads(sys.argv[2]), *sys.argv[3:]

    def text_of(subunit: str) -> str:
        text = without(ptx_of(subunit), changes.get(subunit, ()))
        for slip in slips:
            text = re.sub(*SLIPS[slip], text)
        return text

    kernels = PtxKernels(PtxSchedule(even_are_late=True), subunit=subunit_of, text_of=text_of)
    try:
        run(job, kernels)
    except (AssertionError, RingcommError, DriverError) as error:
        print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), flush=True)
        os._exit(0)  # after a kernel has failed, the device cannot be closed
    print(json.dumps({"reached": kernels.reached()}), flush=True)


if __name__ == "__main__":
    main()
