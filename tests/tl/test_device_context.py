# SPDX-License-Identifier: Apache-2.0
"""Contexts of ``ringcomm.tl``: their faults, their memory, refused arguments, and loading."""

import io
import os
import re
import runpy
import signal
import socket
import sys
import time
from contextlib import redirect_stdout
from datetime import timedelta
from importlib.util import find_spec

import pytest
import torch

import ringcomm
from ringcomm import AbortedError, ArgumentError, CollectiveTimeout, MismatchError, PeerLost
from ringcomm.launch import rank_variables
from tests.support import ROOT, fork_server
from tests.support import ranks as plain_ranks
from tests.support.ranks import RanksFailed
from tests.tl.interpreter import LIMIT_S, Ranks, open_context, run_kernel, run_ranks

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


# ---- faults -------------------------------------------------------------------------------------


def _lonely(store, rank, world, end):
    comm, context, _ = open_context(store, rank, world)
    from tests.tl.device_kernels import lonely_kernel

    if end == "late":
        comm.timeout = 1.0
    word = torch.zeros(1, dtype=torch.int32)
    if rank == 0:
        try:
            store.set("waits", "1")
            run_kernel(context, lonely_kernel, (1,), word)
        finally:
            store.set("over", "1")
        return
    store.wait(["waits"], timedelta(seconds=LIMIT_S))
    time.sleep(0.3)
    if end == "aborts":
        comm.abort("rank 1 has had enough")
    elif end == "closes":
        comm.close()
    elif end == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    store.wait(["over"], timedelta(seconds=LIMIT_S))


@pytest.mark.parametrize(
    ("end", "kind", "text"),
    [
        ("late", CollectiveTimeout, r"lonely_kernel on rank 0 of 2: .*rank 1 \(item 3"),
        ("aborts", AbortedError, "rank 1 aborted the communicator: rank 1 has had enough"),
        ("closes", PeerLost, "rank 1 to take part, but it has closed"),
        ("dies", PeerLost, "rank 1 to take part, but its process has ended"),
    ],
)
def test_a_wait_in_vain_says_for_whom(end, kind, text):
    with Ranks(_lonely, 2, end) as ranks:
        (outcome,) = ranks.wait(LIMIT_S, [0])
    assert isinstance(outcome.error, kind), outcome.describe()
    with pytest.raises(kind, match=text):
        raise outcome.error


def _stuck(store, rank, world):
    _, context, _ = open_context(store, rank, world, timeout=0.2)
    from tests.tl.device_kernels import stuck_kernel

    run_kernel(context, stuck_kernel, (1,), torch.zeros(100, dtype=torch.int32))


def test_a_block_does_not_wait_for_ever_for_one_that_is_not_there():
    with pytest.raises(RanksFailed, match="CollectiveTimeout"):
        run_ranks(_stuck, 1)


# ---- the context --------------------------------------------------------------------------------


def _used_bytes():
    return ringcomm.heap_stats()["used_bytes"]


def _memory(store, rank, world):
    comm, context, rc = open_context(store, rank, world)
    from tests.tl.device_kernels import shift_kernel

    before = _used_bytes()
    padding = ringcomm.empty(100 * rank)  # offsets differ between ranks
    first = context.zeros((3, 5), torch.float64)
    assert first.tensor.shape == (3, 5) and not first.tensor.any()
    assert first.ptrs[rank] == first.tensor.data_ptr()
    assert context.keep("words", lambda: 1) == context.keep("words", lambda: 2) == 1
    with pytest.raises(
        ArgumentError, match=r"shift_kernel on rank \d of 2: grid: expected at most"
    ):
        run_kernel(context, shift_kernel, (9,))
    with pytest.raises(ArgumentError, match="blocks: expected 1 to"):
        rc.Context(comm, 0)
    held = first.tensor
    del first, padding
    assert _used_bytes() > before  # a peer's kernel may still access it
    context.close()
    context.close()
    del held
    assert _used_bytes() == before
    dropped = rc.Context(comm)
    dropped.empty(1000)
    del dropped
    assert _used_bytes() > before
    comm.barrier()
    comm.close()


def test_memory_lives_until_all_ranks_close():
    run_ranks(_memory, 2)


def _different_sizes(store, rank, world):
    comm, context, _ = open_context(store, rank, world)
    with (
        comm,
        pytest.raises(MismatchError, match="Option bytes is 4 on rank 0 and 8 on rank 1"),
    ):
        context.empty(1 + rank)


def _different_blocks(store, rank, world):
    with pytest.raises(MismatchError, match="Option blocks is 1 on rank 0 and 2 on rank 1"):
        open_context(store, rank, world, blocks=1 + rank)


@pytest.mark.parametrize("fn", [_different_sizes, _different_blocks])
def test_ranks_that_ask_for_different_things_are_told(fn):
    run_ranks(fn, 2)


def _threads(store, rank, world):
    from ringcomm import tl as rc

    with (
        ringcomm.local_world(2) as ranks,
        pytest.raises(ringcomm.UnsupportedError, match="is a thread of this process"),
    ):
        ranks.run(rc.Context)


def test_threads_as_ranks_are_refused():
    run_ranks(_threads, 1)


def _compiled(store, rank, world):
    from ringcomm import tl as rc

    with (
        ringcomm.Communicator.from_store(store, rank, world) as comm,
        pytest.raises(ringcomm.UnsupportedError, match="TRITON_INTERPRET=1"),
    ):
        rc.Context(comm)


def test_compiled_kernels_on_the_host_are_refused():
    plain_ranks.run_ranks(_compiled, 1)


def test_without_triton_it_says_so():
    code = "import sys; sys.modules['triton'] = None\nimport ringcomm\nringcomm.tl"
    done = fork_server.run([sys.executable, "-c", code], cwd=ROOT)
    assert "UnsupportedError: ringcomm.tl: it needs Triton" in done.stderr


def _example(store, rank, world, script, port):
    """Returns the program's output. The program reads this process's environment."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {**shared, **rank_variables(rank, world)}
    assert os.environ["TRITON_INTERPRET"] == "1"
    with redirect_stdout(io.StringIO()) as said:
        runpy.run_path(script, run_name="__main__")
    return said.getvalue()


def test_the_documented_example_runs(tmp_path):
    example, *_ = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/triton.md").read_text(), re.DOTALL
    )
    script = tmp_path / "shift.py"
    script.write_text(example)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert run_ranks(_example, 2, str(script), port) == ["rank 0 got 1\n", "rank 1 got 0\n"]
