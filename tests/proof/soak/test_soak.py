# SPDX-License-Identifier: Apache-2.0
"""A soak run of some seconds, and the faults that it must report."""

import os
import random
import threading
from dataclasses import replace

import pytest
import torch

import ringcomm
from tests.proof.soak import cases
from tests.proof.soak.__main__ import report
from tests.proof.soak.cases import CALLS, Case, random_case, run_case
from tests.proof.soak.ranks import Soak, soak_rank
from tests.proof.soak.usage import PRIVATE_SLACK_BYTES, Sample, complaints, growth
from tests.support.ranks import run_ranks

SHORT = Soak(seconds=3.0, seed=1, heap_bytes=64 << 20, calls_per_communicator=4)
_kept: list[torch.Tensor] = []


def _keeps_a_descriptor():
    os.dup(0)


def _keeps_a_thread():
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def _keeps_heap_memory():
    _kept.append(ringcomm.zeros(64))


def test_mixed_calls_leave_nothing():
    done = run_ranks(soak_rank, 4, SHORT)
    assert len({(each.calls, each.communicators) for each in done}) == 1
    text, wrong = report(done, SHORT.heap_bytes)
    # In seconds malloc and the heap do not touch all of their pages, so growth in bytes is allowed.
    assert [each for each in wrong if "_bytes grew" not in each or "heap_bytes" in each] == []
    assert f"{done[0].calls} calls on 4 ranks" in text


@pytest.mark.parametrize(
    ("planted", "name"),
    [
        (_keeps_a_descriptor, "descriptors"),
        (_keeps_a_thread, "threads"),
        (_keeps_heap_memory, "heap_bytes"),
    ],
)
def test_what_is_kept_is_told(planted, name):
    done = run_ranks(soak_rank, 2, replace(SHORT, seconds=1.5, planted=planted))
    _, wrong = report(done, SHORT.heap_bytes)
    assert [text for text in wrong if f"rank 0: {name} grew by" in text], wrong


def _samples(**growing):
    steady = Sample(0.0, 1 << 30, 1 << 30, 500, 20, 3, 4096)
    return [
        replace(
            steady,
            **{name: getattr(steady, name) + int(step * i) for name, step in growing.items()},
        )
        for i in range(100)
    ]


@pytest.mark.parametrize("name", ["private_bytes", "shared_bytes", "mappings", "descriptors"])
def test_growth_is_told(name):
    assert complaints(_samples(), 1 << 20) == []
    step = PRIVATE_SLACK_BYTES / 10
    samples = _samples(**{name: step})
    # Growth is measured from the middle of the second quarter to the middle of the last.
    assert growth(samples)[name] == pytest.approx(50 * step, abs=1)
    assert [text.split()[0] for text in complaints(samples, 1 << 20)] == [name]


def test_a_short_run_is_told():
    done = run_ranks(soak_rank, 2, replace(SHORT, seconds=0.01))
    assert "run longer" in report(done, SHORT.heap_bytes)[1][0]


@pytest.mark.parametrize("kind", CALLS)
def test_every_kind_is_checked(kind, monkeypatch):
    """A wrong element is reported by its first wrong byte."""
    case = Case(kind, 1000, torch.float32, "SUM", 0, "auto", "plain", False)
    right = CALLS[kind]

    def wrong(comm, each):
        got, want = right(comm, each)
        if got.numel():
            got.view(torch.uint8)[29] ^= 1
        return got, want

    with ringcomm.local_world(2, timeout=60) as world:
        world.run(lambda comm: run_case(comm, case))
        if kind == "barrier":
            return
        monkeypatch.setitem(cases.CALLS, kind, wrong)
        with pytest.raises(AssertionError, match=rf"{kind}.*rank [01], byte 29: "):
            world.run(lambda comm: run_case(comm, case))


def test_ranks_draw_the_same_calls_in_groups_of_any_size():
    first, second = random.Random(5), random.Random(5)
    for _ in range(100):
        one, other = random_case(first, 2), random_case(second, 3)
        assert replace(one, root=0) == replace(other, root=0)
