# SPDX-License-Identifier: Apache-2.0
"""Bad input is refused before any change; errors name ranks that differ; faults fail all ranks."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm.errors import ArgumentError, MismatchError, RingcommError, UnsupportedError
from ringcomm.optim import (
    SGD,
    Adafactor,
    Adam,
    AdamW,
    AdamW8bit,
    AdamWOptions,
    GradScaler,
    Lion,
    Muon,
    Sharded,
)
from tests.optim.problems import SMALL_BUCKETS, Problem, assert_same_state, values

Tensor = torch.Tensor
NAN, INF = float("nan"), float("inf")


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape or (3,), dtype=dtype).requires_grad_()


@pytest.mark.parametrize("kind", [AdamW, Adam])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": NAN}, "lr: expected a number >= 0, got nan"),
        ({"lr": -1.0}, "lr: expected a number >= 0"),
        ({"lr": INF}, "lr: expected a number >= 0"),
        ({"lr": "fast"}, "lr: expected a number >= 0"),
        ({"lr": torch.tensor(NAN)}, "lr: expected a number >= 0"),
        ({"lr": torch.tensor([0.1, 0.2])}, "lr: expected a tensor of one"),
        ({"lr": torch.tensor(1)}, "lr: expected a tensor of one floating-point element"),
        ({"lr": torch.tensor(0.1, device="meta")}, "lr: expected a tensor on cpu"),
        ({"betas": (NAN, 0.9)}, "betas: expected numbers from 0 to below 1"),
        ({"betas": (0.9, 1.0)}, "betas: expected numbers"),
        ({"betas": (-0.1, 0.9)}, "betas: expected numbers"),
        ({"betas": 0.9}, "betas: expected two numbers"),
        ({"betas": (0.9,)}, "betas: expected two numbers"),
        ({"eps": -1e-8}, "eps: expected a number >= 0"),
        ({"eps": NAN}, "eps: expected a number >= 0"),
        ({"weight_decay": -0.1}, "weight_decay: expected a number >= 0"),
        ({"weight_decay": NAN}, "weight_decay: expected a number >= 0"),
    ],
)
def test_bad_hyper_parameters_are_refused_when_given_and_when_changed(kind, settings, message):
    with pytest.raises(ArgumentError, match=f"param group 0: {message}"):
        kind([weight()], **settings)
    with pytest.raises(ArgumentError, match=f"param group 1: {message}"):
        kind([{"params": [weight()]}, {"params": [weight()], **settings}])
    param = weight()
    optimizer = kind([param])
    optimizer.param_groups[0].update(settings)
    param.grad = torch.ones(3)
    with pytest.raises(ArgumentError, match=f"param group 0: {message}"):
        optimizer.step()
    assert torch.equal(param, torch.ones(3)) and optimizer.steps_taken.item() == 0


@pytest.mark.parametrize("kind", [AdamW8bit, SGD, Lion])
def test_optimizers_that_triton_has_not_are_refused(worlds, kind):
    def work(comm):
        param = weight()
        optimizer = kind([param], lr=0.1, comm=comm, options=AdamWOptions(kernels="triton"))
        param.grad = torch.ones(3)
        head = rf'optimizer on rank {comm.rank} of 2: {kind.__name__}: expected kernels="native", '
        remedy = r'got "triton": .* Pass AdamWOptions\(kernels="native"\)'
        with pytest.raises(UnsupportedError, match=head + remedy):
            optimizer.step()
        assert torch.equal(param, torch.ones(3))

    worlds(2).run(work)


# Cases of other classes, and the shape of the parameter.
BAD: dict[str, tuple[Any, tuple[int, ...], dict[str, Any], str]] = {
    "SGD lr": (SGD, (3,), {"lr": -1.0}, "lr: expected a number >= 0"),
    "SGD momentum": (SGD, (3,), {"momentum": -0.5}, "momentum: expected a number >= 0"),
    "dampening": (SGD, (3,), {"dampening": NAN}, "dampening: expected a number"),
    "nesterov": (SGD, (3,), {"nesterov": True}, "nesterov: expected a momentum"),
    "Lion betas": (Lion, (3,), {"betas": (0.9, 1.0)}, "betas: expected numbers from 0 to below 1"),
    "Lion decay": (Lion, (3,), {"weight_decay": -1.0}, "weight_decay: expected a number >= 0"),
    "8 bits": (AdamW8bit, (3,), {"amsgrad": True}, "amsgrad: expected False"),
    "8-bit betas": (AdamW8bit, (3,), {"betas": (0.9, 1.0)}, "betas: expected numbers from 0"),
    "vector": (Muon, (3,), {}, "expected a matrix, got shape"),
    "algorithm": (Muon, (3, 3), {"algorithm": "adam"}, "algorithm: expected one of"),
    "Muon momentum": (Muon, (3, 3), {"momentum": -1.0}, "momentum: expected a number"),
    "coefficients": (Muon, (3, 3), {"ns_coefficients": (1, 2)}, "three numbers"),
    "iterations": (Muon, (3, 3), {"ns_steps": 100}, "an integer from 1 to 99"),
    "adjustment": (Muon, (3, 3), {"adjust_lr_fn": "mine"}, "adjust_lr_fn"),
    "decay": (Adafactor, (3, 3), {"beta2_decay": 0.5}, "beta2_decay: expected a number <= 0"),
    "clip": (Adafactor, (3, 3), {"d": 0.5}, "d: expected a number >= 1"),
    "eps": (Adafactor, (3,), {"eps": 1e-3}, "eps: expected two numbers >= 0, of which the first"),
    "Adafactor lr": (Adafactor, (3,), {"lr": -1.0}, "lr: expected a number >= 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_hyper_parameters_of_other_classes_are_refused(name):
    make, shape, settings, text = BAD[name]
    with pytest.raises(ArgumentError, match=f"param group 0.*{text}"):
        make([{"params": [weight(*shape)], **settings}])


@pytest.mark.parametrize("norm_type", [3.0, 0.0, "two", None, NAN])
def test_an_unknown_norm_is_refused(norm_type):
    with pytest.raises(ArgumentError, match=r"norm_type: expected 2\.0, 1\.0 or inf"):
        AdamW([weight()]).clip_grad_norm_(1.0, norm_type)


@pytest.mark.parametrize("bound", [-1.0, NAN, "1", None])
def test_a_bad_bound_is_refused(bound):
    optimizer = AdamW([weight()])
    with pytest.raises(ArgumentError, match="max_norm: expected a number >= 0"):
        optimizer.clip_grad_norm_(bound)
    with pytest.raises(ArgumentError, match="clip_value: expected a number >= 0"):
        optimizer.clip_grad_value_(bound)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_parameters_of_other_dtypes_are_refused(dtype):
    with pytest.raises(ArgumentError, match=r"parameter 1: expected dtype float32.*got torch\."):
        AdamW([weight(), weight(dtype=dtype)])


def test_integers_are_refused():
    with pytest.raises(ArgumentError, match=r"expected dtype .* got torch\.int64"):
        AdamW([torch.ones(3, dtype=torch.int64)])


def test_parameters_elsewhere_are_refused():
    elsewhere = torch.ones(3, device="meta").requires_grad_()
    with pytest.raises(ArgumentError, match="all parameters must be on one device"):
        AdamW([weight(), elsewhere])


def test_sparse_parameters_are_refused():
    with pytest.raises(ArgumentError, match="expected a dense tensor"):
        AdamW([torch.ones(3).to_sparse().requires_grad_()])


@pytest.mark.parametrize("params", [[], [{"params": [3]}], torch.ones(3), [{"params": {1}}]])
def test_what_is_no_list_of_parameters_is_refused_as_torch_does(params):
    with pytest.raises((TypeError, ValueError)) as theirs:
        torch.optim.AdamW(params)
    with pytest.raises((TypeError, ValueError)) as mine:
        AdamW(params)
    assert str(mine.value) == str(theirs.value)


def test_what_makes_no_sense_is_unsupported():
    with pytest.raises(UnsupportedError, match="differentiable=True"):
        AdamW([weight()], differentiable=True)
    with pytest.raises(ArgumentError, match="options: expected AdamWOptions, got 3"):
        AdamW([weight()], options=3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="expected one of fused and foreach"):
        AdamW([weight()], fused=True, foreach=True)
    for kind in (lambda comm: AdamW([weight()], comm=comm), lambda comm: GradScaler(comm=comm)):
        with pytest.raises(ArgumentError, match=r"comm: expected None, .* got 'world'"):
            kind("world")
    optimizer = AdamW([weight()])
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match=r"save state_dict\(\)"):
            copied(optimizer)


def test_a_remainder_of_float16_is_refused():
    options = AdamWOptions(master="remainder")
    optimizer = AdamW([weight(dtype=torch.float16)], options=options)
    with pytest.raises(ArgumentError, match=r'parameter 0: master: .* use master="fp32"'):
        optimizer.prepare()


def test_parameters_that_share_memory_are_refused():
    memory = torch.zeros(10)
    first, second = memory[:6].requires_grad_(), memory[4:].requires_grad_()
    apart = memory[6:].requires_grad_()
    optimizer = AdamW([("a", first), ("b", second)])
    with pytest.raises(ArgumentError, match=r"parameter 0 \(a\) and parameter 1 \(b\) are two"):
        optimizer.prepare()
    AdamW([first, apart]).prepare()


def sparse_gradient(param: Tensor) -> None:
    param.grad = torch.ones(3).to_sparse()


def frozen_gradient(param: Tensor) -> None:
    param.requires_grad_(True)
    param.grad = torch.ones(3)


def wide_gradient(param: Tensor) -> None:
    param.grad = None
    param.grad_dtype = torch.float64  # torch's permission for a gradient of another dtype
    param.grad = torch.ones(3, dtype=torch.float64)


GRADIENTS: dict[str, tuple[bool, Callable[[Tensor], None], type[Exception], str]] = {
    "sparse": (True, sparse_gradient, UnsupportedError, "expected a dense gradient"),
    "dtype": (True, wide_gradient, ArgumentError, r"expected a gradient of dtype torch\.float32"),
    "frozen": (False, frozen_gradient, ArgumentError, "it required none when the buckets"),
}


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_bad_gradient_changes_nothing(name, clip):
    trainable, spoil, kind, message = GRADIENTS[name]
    good, bad = weight(), weight().detach().requires_grad_(trainable)
    optimizer = AdamW([("good", good), ("bad", bad)])
    good.grad = torch.ones(3)
    if trainable:
        bad.grad = torch.ones(3)
    optimizer.step()
    before = copy.deepcopy(optimizer.full_state_dict()), good.detach().clone()
    spoil(bad)
    with pytest.raises(kind, match=rf"parameter 1 \(bad\): .*{message}"):
        optimizer.clip_grad_norm_(1.0) if clip else optimizer.step()
    assert_same_state(optimizer.full_state_dict(), before[0])
    assert torch.equal(good, before[1])
    # The other parameter's gradient still exists.
    bad.grad = None
    optimizer.step()
    assert optimizer.steps_taken.item() == 2


def test_a_sparse_gradient_is_refused_where_sums_are_in_fp32():
    table = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = AdamW(table.parameters(), options=AdamWOptions(accumulate_dtype=torch.float32))
    with pytest.raises(RingcommError, match="expected a dense gradient"):
        table(torch.tensor([1])).sum().backward()
    assert optimizer.steps_taken.item() == 0


def sgd(**settings: Any) -> Callable[..., Any]:
    return lambda params, **rest: SGD(params, **settings, **rest)


# The classes of ranks 0 and 1, and the pattern of the error.
OTHER_CLASSES: dict[str, tuple[Any, Any, str]] = {
    "momentum": (sgd(momentum=0.5), sgd(momentum=0.75), "momentum"),
    "Lion": (partial(Lion, lr=0.1), sgd(lr=0.1), r"betas.* on rank 0 and .*momentum"),
    "8 bits": (AdamW, AdamW8bit, "AdamW8bit"),
    "Muon": (partial(Muon, ns_steps=4), Muon, "ns_steps"),
    "Adafactor": (Adafactor, partial(Adafactor, d=2.0), r"\"d\": 1\.0.* on rank 0 and"),
    "class": (
        partial(Sharded, torch.optim.SGD),
        partial(Sharded, torch.optim.Adamax),
        r"Option optimizer|Param group 0",
    ),
}


@pytest.mark.parametrize("name", OTHER_CLASSES)
def test_ranks_with_other_optimizers_are_told_so(worlds, name):
    *makers, message = OTHER_CLASSES[name]

    def work(comm):
        params = [weight(4, 4)]
        with pytest.raises(MismatchError, match=message):
            makers[comm.rank](params, comm=comm).prepare()
        assert torch.equal(params[0], torch.ones(4, 4))

    worlds(2).run(work)


DIFFERENCES: dict[str, tuple[Any, Any, str]] = {
    "shape": ([(3,), (4,)], {}, r"Parameter 1 is .*\(5,\).* on rank 0 and .*\(4,\).* on rank 1\."),
    "count": ([(3,)], {}, r"Parameter 1 is .*\(5,\).* on rank 0 and missing on rank 1"),
    "hyper": ([(3,), (5,)], {"betas": (0.5, 0.5)}, "Param group 0 is .*0.9.* on rank 0 and .*0.5"),
    "option": (
        [(3,), (5,)],
        {"options": AdamWOptions(reduce="sum")},
        'Option reduce is "avg" on rank 0 and "sum" on rank 1',
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_differ_are_both_named_on_every_rank(worlds, name):
    shapes, settings, message = DIFFERENCES[name]

    def work(comm):
        params = [weight(*shape) for shape in (shapes if comm.rank else [(3,), (5,)])]
        before = [param.data_ptr() for param in params]
        optimizer = AdamW(params, comm=comm, **(settings if comm.rank else {}))
        with pytest.raises(MismatchError, match=message):
            optimizer.prepare()
        assert [param.data_ptr() for param in params] == before
        # The communicator still works, and the parameters are unchanged.
        tensor = torch.ones(3)
        comm.all_reduce(tensor)
        return tensor[0].item()

    assert worlds(3).run(work) == [3.0] * 3


def test_a_step_that_failed_halfway_tears_the_optimizer():
    problem = Problem(shapes=((600,), (600,)))

    def work(comm):
        params = problem.params()
        optimizer = problem.ours(params, comm)
        problem.give(params, 0, comm.rank)
        optimizer.step()
        problem.give(params, 1, comm.rank)
        sharded = optimizer.sharded_step()
        update = sharded.plan.reduce_update

        def fails(bucket):
            if bucket.number == 1:
                comm.abort("the test said so")
            update(bucket)

        sharded.plan.reduce_update = fails  # type: ignore[method-assign]
        with pytest.raises(RingcommError):
            optimizer.step()
        for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
            with pytest.raises(RingcommError, match=r"failed halfway.* Load a checkpoint"):
                call()
        with pytest.raises(RingcommError, match="failed halfway"):
            optimizer.full_state_dict()

    with ringcomm.local_world(2, timeout=20.0) as world:
        world.run(work)


def test_a_fault_before_the_update_tears_nothing():
    stepped = threading.Barrier(2)

    def work(comm):
        param = weight(600)
        optimizer = AdamW([param], comm=comm, options=SMALL_BUCKETS)
        param.grad = torch.ones(600)
        optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        stepped.wait()
        comm.abort("the test said so")
        with pytest.raises(RingcommError, match="abort"):
            optimizer.step()
        assert not optimizer.sharded_step().partly_updated
        assert torch.equal(optimizer.state_dict()["state"]["step"], state["state"]["step"])

    with ringcomm.local_world(2, timeout=20.0) as world:
        world.run(work)


def test_loading_mends_a_partly_updated_optimizer():
    param = values((600,), 1).requires_grad_()
    optimizer = AdamW([param], options=SMALL_BUCKETS)
    param.grad = torch.ones(600)
    optimizer.step()
    state, kept = copy.deepcopy(optimizer.state_dict()), param.detach().clone()
    optimizer.sharded_step().partly_updated = True
    for call in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RingcommError, match="failed halfway"):
            call()
    with torch.no_grad():
        param.copy_(kept)
    optimizer.load_state_dict(state)
    optimizer.step()
    assert optimizer.steps_taken.item() == 2


@pytest.mark.parametrize("algorithm", ["ring", "one_shot"])
def test_a_ring_needs_segments_of_whole_tiles(algorithm):
    def body(comm):
        param = torch.nn.Parameter(torch.ones(600))
        param.grad = torch.ones(600)
        options = AdamWOptions(algorithm=algorithm)
        optimizer = AdamW([param], comm=comm, options=options)
        if algorithm == "one_shot":  # it stages nothing
            optimizer.step()
            return
        with pytest.raises(UnsupportedError, match="segment_bytes >= 2048, got 1024"):
            optimizer.step()

    small = ringcomm.CommOptions(segment_bytes=1024, timeout=20.0)
    with ringcomm.local_world(2, options=small) as world:
        world.run(body)
