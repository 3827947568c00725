# SPDX-License-Identifier: Apache-2.0
"""Errors over nodes name the program's call and line, and the rank and node that is missing."""

from collections.abc import Callable

import pytest
import torch

import ringcomm
from ringcomm import CollectiveTimeout, CommOptions, Communicator, MismatchError
from ringcomm.comm.recorder import reader
from ringcomm.errors import RingcommError
from tests.support.faults import leaving_together

TIMEOUT_S = 0.3
LINE = f" at {__file__}:"


@pytest.fixture(autouse=True)
def without_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(reader.VARIABLE, "off")


def errors_of(body: Callable[[Communicator], object], shape: tuple[int, ...]) -> list[str]:
    """Returns by rank the error's type and text, or "" for a rank without an error."""

    def caught(comm: Communicator) -> str:
        comm.barrier()
        comm.timeout = TIMEOUT_S
        try:
            body(comm)
        except RingcommError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    with ringcomm.local_world(sum(shape), nodes=shape, options=CommOptions(timeout=60)) as world:
        return world.run(leaving_together(caught, sum(shape)))


@pytest.mark.parametrize("missing", [1, 2])
def test_a_timeout_names_the_programs_call(missing: int) -> None:
    """A local peer or a rail peer makes no call; the error does not show the node's own calls."""

    def body(comm: Communicator) -> None:
        if comm.rank != missing:
            comm.all_reduce(torch.ones(100_000))

    texts = errors_of(body, (2, 1))
    assert texts.pop(missing) == ""
    for text in texts:
        assert text.startswith(f"{CollectiveTimeout.__name__}: all_reduce on rank ")
        assert "400000 bytes" in text and "reduce_scatter" not in text
        assert f"for rank {missing} (node {missing // 2})" in text
        assert LINE in text
        if missing == 1:
            assert f"Rank 1 (node 0)'s last call: barrier(){LINE}" in text


def test_the_rank_behind_a_local_peer_is_named_first() -> None:
    """Rank 1 waits for a local peer that waits for another node, and times out before this peer."""

    def body(comm: Communicator) -> None:
        if comm.rank < 2:
            comm.broadcast(torch.ones(100_000), 2)

    for text in errors_of(body, (2, 1))[:2]:
        assert "until its timeout ended, for rank 2 (node 1), which did not come" in text
        assert "a local peer, rank 0 (node 0), waits for that rank" in text
        assert (
            f"rank 1 (node 0) in broadcast(float32, root 2, 400000 bytes, one_shot){LINE}" in text
        )


@pytest.mark.parametrize("shape", [(2, 1), (1, 1)])
def test_a_mismatch_names_both_programs_calls(shape: tuple[int, ...]) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.all_reduce(torch.ones(100_000))
        else:
            comm.reduce_scatter_tensor(torch.ones(30), torch.ones(30 * comm.world_size))

    for text in errors_of(body, shape):
        assert text.startswith(MismatchError.__name__)
        assert "all_reduce" in text and " reduce_scatter" in text and "_partial" not in text
        assert LINE in text
