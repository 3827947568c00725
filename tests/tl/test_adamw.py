# SPDX-License-Identifier: Apache-2.0
"""The optimizer's Triton kernels in Triton's interpreter, compared bit by bit with native ones."""

import math
import time
import warnings
from datetime import timedelta
from importlib.util import find_spec

import pytest
import torch

from ringcomm import (
    CollectiveTimeout,
    MismatchError,
    RingcommError,
    UnsupportedError,
    _native,
)
from ringcomm.comm.host.arguments import DTYPE_CODES, DTYPE_NAMES
from tests.support.covering import EVERY_CASE, in_test_all
from tests.tl.interpreter import LIMIT_S, connect, run_ranks
from tests.tl.shards import Case, Memory, Steps, differences, wide_range

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# Each kind of master copy and of rounding; each type occurs.
KINDS = (
    (F32, F32, "own", False, False),
    (BF16, F32, "own", True, False),
    (F32, BF16, "fp32", True, False),
    (F16, F16, "fp32", False, False),
    (BF16, BF16, "fp32", False, True),
    (F16, F16, "none", False, True),
    (BF16, BF16, "remainder", False, False),
)


def _quiet():
    """Silences NumPy, on which the interpreter runs: infinities and NaN are intended here."""
    warnings.simplefilter("ignore", RuntimeWarning)


def _shards(store, rank, world):
    from ringcomm._tl.adamw_launch import launch_adamw_shard

    _quiet()
    wrong, changed = [], 0
    # Every other kind gets parameters of whole turns; all kinds get turns that are not whole.
    sizes = (1303, 5003)
    cases = [Case(sizes[turn % 2 == 0], *kind) for turn, kind in enumerate(KINDS)]
    cases += [Case(n, *kind) for kind in KINDS[1::2] for n in in_test_all(5003)]
    cases += [Case(n, *KINDS[0]) for n in (0, 1, 600)]
    for case in cases:
        ours, native = (Memory(case, 0, 1, hostile=case.elems > 700) for _ in range(2))
        before = ours.params.clone()
        grad = ours.grads.data_ptr()
        _native.adamw_shard(native.shard, grad, DTYPE_CODES[case.grad])
        launch_adamw_shard(ours.descriptor.data_ptr(), grad, case.elems, ours.kind("SUM", 1))
        changed += not torch.equal(ours.params, before)
        wrong += [(case, *each) for each in differences(ours, native)]
    return wrong, changed


def test_a_shard_is_updated_to_the_bits_of_the_native_kernel():
    ((wrong, changed),) = run_ranks(_shards, 1)
    assert wrong == []
    assert changed > len(KINDS)


def _norms(store, rank, world):
    from ringcomm._tl.adamw_launch import launch_grad_norm

    _quiet()
    wrong = []
    torch.manual_seed(0)
    # The dtype affects only loads, the size only the turns, so not all pairs are tested.
    sizes = [(9 * 512 + 3, dtype) for dtype in (F32, BF16, F16)] + [(n, F32) for n in (0, 1, 600)]
    for elems, dtype in sizes:
        given = wide_range(elems, 19).to(dtype)
        given[elems // 2 : elems // 2 + 9] = 2.0**-24 if dtype is F16 else 1e-40
        for poison in (None, math.inf, math.nan):
            if poison is not None:
                given[elems // 3 : elems // 3 + 1] = poison
            for kind, code in _native.GRAD_NORM_KINDS.items():
                both = torch.zeros(2, _native.GRAD_NORM_WORDS, dtype=torch.int64)
                native, ours = both
                at = given.data_ptr()
                _native.grad_norm(at, DTYPE_CODES[dtype], elems, code, native.data_ptr())
                launch_grad_norm(at, DTYPE_NAMES[dtype], elems, code, ours.data_ptr())
                if not torch.equal(native, ours):
                    wrong.append((dtype, elems, poison, kind))
    return wrong


def test_norms_have_the_words_of_the_native_kernel():
    assert run_ranks(_norms, 1) == [[]]


# Size, kind, operator, norm, accumulated, algorithm: each value occurs, but not each pair.
COLLECTIVES = (
    (2603, KINDS[0], "AVG", "l2", True, "one_shot"),
    (2000, KINDS[6], "SUM", "l1", False, "ring"),
    (600, KINDS[5], "AVG", "inf", False, "one_shot"),
    (600, KINDS[2], "SUM", "l2", True, "ring"),
    (1, KINDS[3], "AVG", "l1", False, "ring"),
    (0, KINDS[1], "SUM", "l2", False, "one_shot"),
    (2000, KINDS[4], "AVG", "inf", True, "ring"),
    (2000, KINDS[1], "SUM", "l1", False, "one_shot"),
)


def _collectives(store, rank, world):
    _quiet()
    wrong = []
    with connect(store, rank, world, kernels="native") as comm:
        # The interpreter is slow: only 2 ranks, which have a core each, run all cases.
        cases = {1: COLLECTIVES[3:4], 2: COLLECTIVES, 3: COLLECTIVES[2:4]}
        for elems, kind, op, norm, accumulate, algorithm in cases[world]:
            case = Case(elems, *kind, op=op)
            steps = Steps(comm, algorithm)
            # With three ranks a one-shot step takes one pass, and a ring step two.
            left_out = (
                {"one_shot": "two passes", "ring": "one pass"}[algorithm] if world == 3 else ""
            )
            for form in ("two passes", "one pass"):
                if form == left_out and not EVERY_CASE:
                    continue
                both = [Memory(case, rank, world) for _ in range(2)]
                for memory, kernels in zip(both, ("triton", "native"), strict=True):
                    if form == "one pass":
                        steps.one_pass(memory, kernels)
                    else:
                        steps.norm(memory, kernels, norm, accumulate)
                        steps.update(memory, kernels)
                wrong += [(form, case, algorithm, *each) for each in differences(*both)]
    return wrong


@pytest.mark.parametrize("world", [1, 3, *in_test_all(2)])
def test_collectives_have_the_bits_of_the_native_ones(world):
    assert run_ranks(_collectives, world) == [[]] * world


def _early(store, rank, world, waits):
    """Tells whether a slow peer's parameters have arrived when the call ends."""
    from ringcomm._tl import fused_steps as module

    update = vars(module)["update_run"]

    def update_late(*arguments):
        time.sleep(0.7)
        update(*arguments)

    if rank == 1:
        setattr(module, "update_run", update_late)  # noqa: B010
    if not waits:
        # Changes only the wait in return_offers(); the offers themselves are awaited.
        setattr(module, "await_acquire_sys", lambda *arguments: arguments[-2])  # noqa: B010
    case = Case(1024, *KINDS[0])
    with connect(store, rank, world, kernels="native") as comm:
        ours, native = Memory(case, rank, world), Memory(case, rank, world)
        steps = Steps(comm, "one_shot")
        steps.one_pass(ours, "triton")
        found = ours.params.clone()
        comm.barrier()
        steps.one_pass(native, "native")
    return torch.equal(found, native.params)


def test_without_its_last_wait_a_step_is_wrong():
    """The negative control of the test above."""
    assert run_ranks(_early, 2, True) == [True, True]
    assert run_ranks(_early, 2, False) == [False, True]


def _other_kernels(store, rank, world):
    with connect(store, rank, world, kernels="native") as comm:
        memory = Memory(Case(600, *KINDS[0]), rank, world)
        steps = Steps(comm, "one_shot")
        with pytest.raises(MismatchError) as caught:
            steps.norm(memory, ("native", "triton")[rank], "l2", False)
        with pytest.raises(RingcommError):
            steps.one_pass(memory, "triton")
    return str(caught.value)


def test_ranks_that_run_other_kernels_are_told_so():
    for text in run_ranks(_other_kernels, 2):
        assert "Triton kernels" in text and text.count("reduce_scatter_norm(") == 2


def _late(store, rank, world):
    with connect(store, rank, world, kernels="native") as comm:
        memory = Memory(Case(600, *KINDS[0]), rank, world)
        before = {name: tensor.clone() for name, tensor in memory.tensors.items()}
        steps = Steps(comm, "one_shot")
        comm.barrier()
        comm.timeout = 0.5
        if rank == 1:
            store.wait(["over"], timedelta(seconds=LIMIT_S))
            return ""
        try:
            with pytest.raises(CollectiveTimeout) as caught:
                steps.one_pass(memory, "triton")
        finally:
            store.set("over", "1")
        assert all(torch.equal(memory.tensors[name], was) for name, was in before.items())
    return str(caught.value)


def test_a_step_that_a_peer_does_not_join_changes_nothing():
    text, _ = run_ranks(_late, 2)
    assert "rank 1" in text and "reduce_scatter_adamw_all_gather(" in text


def _optimizer(store, rank, world):
    from ringcomm.optim import AdamW, AdamWOptions

    _quiet()
    ends, algorithms = [], ("one_shot", "ring")
    with connect(store, rank, world, kernels="native") as comm:
        for kernels in ("native", "triton"):
            for algorithm in algorithms:
                torch.manual_seed(0)
                params = [torch.randn(shape).to(BF16).requires_grad_() for shape in (700, (3, 5))]
                options = AdamWOptions(bucket_elems=1024, kernels=kernels, algorithm=algorithm)
                optimizer = AdamW(params, lr=0.1, comm=comm, options=options)
                norms = []
                for step in range(2):
                    for param in params:
                        param.grad = torch.full_like(param, 2.0 + rank + step)
                    if kernels == "triton":
                        with pytest.raises(UnsupportedError, match='use kernels="native"'):
                            optimizer.clip_grad_value_(1.0)
                    if algorithm == "one_shot":
                        norms.append(optimizer.clip_grad_norm_(1.0))
                    optimizer.step()
                ends.append(torch.cat([each.detach().float().flatten() for each in params + norms]))
    count = len(algorithms)
    return all(torch.equal(ends[k], ends[count + k]) for k in range(count))


def test_an_optimizer_steps_alike_on_both():
    assert run_ranks(_optimizer, 2) == [True, True]


def _small_segments(store, rank, world):
    from ringcomm.optim import AdamW, AdamWOptions

    with connect(store, rank, world, kernels="native", segment_bytes=1024) as comm:
        param = torch.ones(3, requires_grad=True)
        options = AdamWOptions(kernels="triton", algorithm="ring")
        param.grad = torch.ones(3)
        with pytest.raises(UnsupportedError, match="segment_bytes >= 2048, got 1024"):
            AdamW([param], comm=comm, options=options).step()
    return True


def test_a_ring_needs_segments_of_a_block():
    assert all(run_ranks(_small_segments, 2))
