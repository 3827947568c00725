# SPDX-License-Identifier: Apache-2.0
"""Tensors without dense memory are refused by name, lazy views work, and no call is lost."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ringcomm
from ringcomm import CommOptions, UnsupportedError, _native
from ringcomm.comm.host import arguments as admission
from ringcomm.comm.host.collectives import Collectives

N = 4


def nested(layout):
    return torch.nested.nested_tensor([torch.ones(3), torch.ones(1)], layout=layout)


def freed(offset):
    tensor = torch.ones(N + offset)
    view = tensor[offset:]
    tensor.untyped_storage().resize_(0)
    return view


def fake():
    with torch._subclasses.FakeTensorMode():
        return torch.ones(N)


def functional():
    return torch._to_functional_tensor(torch.ones(N))


def batched():
    kept: list[torch.Tensor] = []

    def keep(x):
        kept.append(x)
        return x

    torch.func.vmap(keep)(torch.ones(2, N))
    return kept[0]


def packed(name):
    return torch.zeros(N, dtype=getattr(torch, name))


# By kind: how to make such a tensor, and its name in the message.
WITHOUT_MEMORY: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "nested": (lambda: nested(torch.strided), "nested tensor; pass its values"),
    "jagged": (lambda: nested(torch.jagged), r"NestedTensor; pass tensor.values\(\)"),
    "coo": (lambda: torch.eye(2).to_sparse(), r"layout torch.sparse_coo; pass tensor.to_dense"),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), "layout torch.sparse_csr"),
    "csc": (lambda: torch.eye(2).to_sparse_csc(), "layout torch.sparse_csc"),
    "bsr": (lambda: torch.eye(2).to_sparse_bsr((1, 1)), "layout torch.sparse_bsr"),
    "bsc": (lambda: torch.eye(2).to_sparse_bsc((1, 1)), "layout torch.sparse_bsc"),
    "mkldnn": (lambda: torch.ones(2, 2).to_mkldnn(), "layout torch._mkldnn"),
    "masked": (
        lambda: torch.masked.masked_tensor(torch.ones(N), torch.ones(N).bool()),
        r"MaskedTensor; pass tensor.get_data\(\)",
    ),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(N), 0.1, 0, torch.qint8),
        "quantized tensor of torch.qint8; pass tensor.dequantize",
    ),
    "meta": (lambda: torch.ones(N, device="meta"), "meta tensor"),
    "fake": (fake, "FakeTensor; pass a tensor with data"),
    "functional": (functional, "functional tensor"),
    "batched": (batched, "tensor of a transform of torch.func"),
    "uninitialized": (
        torch.nn.UninitializedParameter,
        "UninitializedParameter, which has no shape",
    ),
    "zeros": (lambda: torch._efficientzerotensor(N), "zeros without memory; pass tensor.clone"),
    "freed": (lambda: freed(0), "beyond its storage of 0"),
    "a freed view": (lambda: freed(1 << 20), "beyond its storage of 0"),
    **{
        name: (partial(packed, name), f"packed tensor of torch.{name}")
        for name in ("uint1", "uint7", "int1", "int4", "float4_e2m1fn_x2")
    },
    "bits": (lambda: torch.empty(N, dtype=torch.bits8), "packed tensor of torch.bits8"),
}


def calls(comm, odd, async_op):
    """Yields every call with ``odd`` as each of its arguments; the other arguments are dense."""
    other = 1 - comm.rank
    one, two = torch.ones(N), torch.ones(2 * N)
    how = {"async_op": async_op}
    yield lambda: comm.all_reduce(odd, **how)
    yield lambda: comm.all_reduce_coalesced([one, odd], **how)
    yield lambda: comm.reduce(odd, 0, **how)
    yield lambda: comm.broadcast(odd, 0, **how)
    yield lambda: comm.reduce_scatter_tensor(odd, two, **how)
    yield lambda: comm.reduce_scatter_tensor(one, odd, **how)
    yield lambda: comm.reduce_scatter_coalesced([odd], [two], **how)
    yield lambda: comm.reduce_scatter(one, [odd, one.clone()], **how)
    yield lambda: comm.reduce_scatter(odd, [one, one.clone()], **how)
    yield lambda: comm.all_gather_into_tensor(two, odd, **how)
    yield lambda: comm.all_gather_into_tensor(odd, one, **how)
    yield lambda: comm.all_gather_coalesced([two], [odd], **how)
    yield lambda: comm.all_gather_lists_coalesced([[one], [one.clone()]], [odd], **how)
    yield lambda: comm.all_gather([one, odd], one.clone(), **how)
    yield lambda: comm.all_gather([one, one.clone()], odd, **how)
    yield lambda: comm.gather(odd, [one, one.clone()], comm.rank, **how)
    yield lambda: comm.gather(one, [odd, one.clone()], comm.rank, **how)
    yield lambda: comm.scatter(odd, [one, one.clone()], comm.rank, **how)
    yield lambda: comm.scatter(one, [odd, one.clone()], comm.rank, **how)
    yield lambda: comm.all_to_all([odd, one], [one.clone(), one.clone()], **how)
    yield lambda: comm.all_to_all([one, one.clone()], [odd, one.clone()], **how)
    yield lambda: comm.all_to_all_single(odd, one, **how)
    yield lambda: comm.all_to_all_single(one, odd, **how)
    yield lambda: (comm.isend if async_op else comm.send)(odd, other)
    yield lambda: (comm.irecv if async_op else comm.recv)(odd, other)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_what_has_no_dense_memory_is_refused_by_name(worlds, kind):
    """One rank alone makes the calls, so each argument is refused before any peer takes part."""
    make, words = WITHOUT_MEMORY[kind]
    comm, odd = worlds(2)[0], make()
    for async_op in (False, True):
        for index, call in enumerate(calls(comm, odd, async_op)):
            with pytest.raises(UnsupportedError, match=words):
                call()
                pytest.fail(f"call {index} has taken the tensor")


LAZY = {
    "negated": lambda x: torch._neg_view(-x),
    "conjugate": lambda x: torch.complex(x, -x).conj(),
}


def lazy_calls(lazy, moved=lambda comm, tensor: tensor):
    """Makes every call with lazy inputs and outputs; returns the results."""

    def body(comm):
        kept: list[torch.Tensor] = []
        me, other = comm.rank + 1.0, 1 - comm.rank

        def make(*values):
            return lazy(moved(comm, torch.tensor(values)))

        def made(work, *tensors):
            if work is not None:
                work.wait()
            kept.extend(tensor.clone().resolve_neg().resolve_conj() for tensor in tensors)

        for async_op in (False, True):
            how = {"async_op": async_op}
            tensor = make(me, 2 * me)
            made(comm.all_reduce(tensor, **how), tensor)
            tensors = [make(me), make(3 * me)]
            made(comm.all_reduce_coalesced(tensors, **how), *tensors)
            tensor = make(me, me)
            made(comm.reduce(tensor, 1, **how))
            kept += [tensor.clone().resolve_neg().resolve_conj()] if comm.rank == 1 else []
            tensor = make(me, 5 * me)
            made(comm.broadcast(tensor, 1, **how), tensor)
            out = make(0.0)
            made(comm.reduce_scatter_tensor(out, make(me, 2 * me), **how), out)
            out = make(0.0)
            made(comm.reduce_scatter(out, [make(me), make(4 * me)], **how), out)
            out = make(0.0, 0.0)
            made(comm.all_gather_into_tensor(out, make(me), **how), out)
            out = make(0.0, 0.0)
            made(comm.all_gather_coalesced([out], [make(me)], **how), out)
            outs = [make(0.0), make(0.0)]
            made(comm.all_gather(outs, make(me), **how), *outs)
            outs = [make(0.0), make(0.0)]
            made(comm.gather(make(me), outs if comm.rank == 0 else None, 0, **how))
            kept += [each.clone().resolve_neg().resolve_conj() for each in outs]
            out = make(0.0)
            parts = [make(7.0), make(8.0)] if comm.rank == 0 else None
            made(comm.scatter(out, parts, 0, **how), out)
            outs = [make(0.0), make(0.0)]
            made(comm.all_to_all(outs, [make(me), make(6 * me)], **how), *outs)
            out = make(0.0, 0.0)
            made(comm.all_to_all_single(out, make(me, 9 * me), **how), out)
            if comm.device.type == "cpu" or comm.num_nodes == 1:
                out = make(0.0)
                if async_op:
                    sent = comm.isend(make(me), other)
                    comm.irecv(out, other).wait()
                    sent.wait()
                elif comm.rank:
                    comm.send(make(me), other)
                    comm.recv(out, other)
                else:
                    comm.recv(out, other)
                    comm.send(make(me), other)
                made(None, out)
        return kept

    return body


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.parametrize("nodes", [None, [1, 1]], ids=["one node", "two nodes"])
def test_lazy_views_are_moved_by_value(nodes, kind):
    lazy = LAZY[kind]
    sample = lazy(torch.ones(2))
    assert (sample.is_neg() or sample.is_conj()) and sample.is_contiguous()
    resolved = lambda x: lazy(x).resolve_neg().resolve_conj().contiguous()  # noqa: E731
    with ringcomm.local_world(2, nodes=nodes, options=CommOptions(timeout=60)) as world:
        found, expected = world.run(lazy_calls(lazy)), world.run(lazy_calls(resolved))
    for mine, right in zip(found, expected, strict=True):
        assert len(mine) == len(right) > 30
        for index, (a, b) in enumerate(zip(mine, right, strict=True)):
            assert torch.equal(a, b), index


# Each runs a function in a graph, transform or mode that would lose a call or miss its effect.
INTERCEPTORS = {
    "make_fx": (lambda fn: make_fx(fn)(torch.ones(N)), "ProxyTorchDispatchMode"),
    "make_fx of fakes": (
        lambda fn: make_fx(fn, tracing_mode="fake")(torch.ones(N)),
        "ProxyTorchDispatchMode|FakeTensor",
    ),
    "before dispatch": (
        lambda fn: make_fx(fn, pre_dispatch=True)(torch.ones(N)),
        "a trace for export|ProxyTorchDispatchMode",
    ),
    "jit": (lambda fn: torch.jit.trace(fn, torch.ones(N), check_trace=False), "torch.jit.trace"),
    "grad": (lambda fn: torch.func.grad(lambda x: fn(x).sum())(torch.ones(N)), "torch.func.grad"),
    "vjp": (lambda fn: torch.func.vjp(fn, torch.ones(N)), "torch.func.grad or vjp"),
    "jvp": (lambda fn: torch.func.jvp(fn, (torch.ones(N),), (torch.ones(N),)), "torch.func.jvp"),
    "vmap": (lambda fn: torch.func.vmap(fn)(torch.ones(2, N)), "torch.func.vmap"),
    "functionalize": (
        lambda fn: torch.func.functionalize(fn)(torch.ones(N)),
        "torch.func.functionalize",
    ),
    "fake mode": (lambda fn: under(torch._subclasses.FakeTensorMode(), fn), "FakeTensor"),
    "functional mode": (
        lambda fn: under(torch._subclasses.functional_tensor.FunctionalTensorMode(), fn),
        "FunctionalTensor",
    ),
}


def under(mode, fn):
    with mode:
        return fn(torch.ones(N))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", INTERCEPTORS)
@pytest.mark.parametrize("given", ["theirs", "plain"])
def test_no_call_is_lost_to_what_intercepts_operators(worlds, kind, given):
    """Each call raises, with the interceptor's own tensors and with tensors unknown to it."""
    intercept, words = INTERCEPTORS[kind]
    comm, mine, out = worlds(1)[0], torch.ones(N), torch.ones(N)

    def each(call):
        def fn(x):
            call(x if given == "theirs" else mine)
            return x * 1

        return fn

    for call in (
        lambda x: comm.all_reduce(x),
        lambda x: comm.all_reduce(x, async_op=True),
        lambda x: comm.all_gather_into_tensor(out, x),
        lambda x: comm.reduce_scatter_tensor(out, x),
        lambda x: comm.broadcast(x, 0),
        lambda x: comm.all_to_all([x], [x]),
        lambda x: comm.barrier(),
        lambda x: comm.barrier(async_op=True),
        lambda x: comm.barrier(timeout=60),
        lambda x: ringcomm.all_gather_object([None], 1, group=comm),
    ):
        with pytest.raises(UnsupportedError, match=words):
            intercept(each(call))
    assert _native.intercepting_keys() == 0 and mine.tolist() == out.tolist() == [1] * N


def test_the_keys_are_read_where_torch_keeps_them():
    """In every thread, and equal to the values that torch itself returns."""
    assert admission.WATCHES_KEYS
    key = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
    word = torch._C.DispatchKeySet(key).raw_repr()

    def body(comm):
        assert _native.intercepting_keys() == admission._keys_of_torch() == 0
        with torch._C._IncludeDispatchKeyGuard(key):
            assert _native.intercepting_keys() == admission._keys_of_torch() == word
        assert not _native.intercepting_keys()

    with ringcomm.local_world(3) as world:
        world.run(body)


def test_no_step_of_an_optimizer_is_lost(worlds):
    parameter = torch.nn.Parameter(torch.ones(N))
    optimizer = ringcomm.optim.AdamW([parameter], lr=1.0, comm=worlds(1)[0])
    parameter.grad = torch.ones(N)
    optimizer.step()
    before = parameter.detach().clone()

    def step(x):
        optimizer.step()
        return x * 1

    with pytest.raises(UnsupportedError, match=r"step on rank 0 of 1.*ProxyTorchDispatchMode"):
        make_fx(step)(torch.ones(N))
    with pytest.raises(UnsupportedError, match=r"torch\.jit\.trace"):
        torch.jit.trace(step, torch.ones(N), check_trace=False)
    assert torch.equal(parameter, before)


def test_a_negated_view_of_a_gradient_in_its_bucket_counts(worlds):
    parameter = torch.nn.Parameter(torch.zeros(N))
    optimizer = ringcomm.optim.SGD([parameter], lr=1.0, comm=worlds(1)[0])
    parameter.grad = torch.ones(N)
    optimizer.step()
    assert parameter.tolist() == [-1] * N
    parameter.grad.fill_(-2)
    parameter.grad = torch._neg_view(parameter.grad)
    optimizer.step()
    assert parameter.tolist() == [-3] * N


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_under_a_mode_that_watches_calls_are_made(worlds):
    def body(comm):
        for mode in (Watching(), FlopCounterMode(display=False)):
            with mode:
                tensor = torch.ones(N)
                comm.all_reduce(tensor)
                comm.all_reduce(tensor, async_op=True).wait()
                comm.barrier()
                assert tensor.tolist() == [4] * N

    worlds(2).run(body)


def in_place(comm, y, async_op):
    works = [
        comm.all_reduce(y, async_op=async_op),
        comm.broadcast(y, 0, async_op=async_op),
        comm.all_reduce_coalesced([y], async_op=async_op),
        comm.reduce(y, 0, async_op=async_op),
        comm.all_gather_into_tensor(y, torch.ones(N), async_op=async_op),
        comm.reduce_scatter_tensor(y, torch.ones(N), async_op=async_op),
        comm.all_gather([y], torch.ones(N), async_op=async_op),
        comm.scatter(y, [torch.ones(N)], 0, async_op=async_op),
        comm.gather(torch.ones(N), [y], 0, async_op=async_op),
        comm.all_to_all([y], [torch.ones(N)], async_op=async_op),
        comm.all_to_all_single(y, torch.ones(N), async_op=async_op),
        comm.reduce_scatter(y, [torch.ones(N)], async_op=async_op),
    ]
    for work in works:
        if work is not None:
            work.wait()


def warned(backward):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        backward()
    return sorted({str(each.message).partition(":")[0] for each in seen})


NAMES = sorted(
    [
        *("all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "gather", "scatter"),
        *("all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single"),
        *("reduce_scatter", "reduce_scatter_tensor"),
    ]
)


def test_all_calls_that_change_tensors_are_tried():
    """Coalesced calls are left out: they change the tensors of the calls inside them."""
    calls = inspect.getmembers(Collectives, inspect.isfunction)
    asynchronous = {
        name
        for name, call in calls
        if "async_op" in call.__annotations__ and not name.startswith("_")
    }
    coalesced = {name for name in asynchronous - set(NAMES) if name.endswith("_coalesced")}
    assert asynchronous == {*NAMES, "barrier", *coalesced}


@pytest.mark.parametrize("async_op", [False, True])
def test_backward_through_a_changed_tensor_warns(worlds, async_op):
    comm = worlds(1)[0]
    y = torch.ones(N, requires_grad=True) * 1
    assert warned(lambda: in_place(comm, y, async_op)) == []
    assert warned(y.sum().backward) == NAMES
    whole = torch.ones(2 * N, requires_grad=True) * 1
    in_place(comm, whole[:N], async_op)
    assert warned(whole.sum().backward) == NAMES  # a view's base has changed as well


@pytest.mark.parametrize("name", ["all_gather_into_tensor", "reduce_scatter_tensor"])
def test_outputs_of_inputs_with_a_gradient_warn(worlds, name):
    comm, out = worlds(1)[0], torch.zeros(N)
    y = torch.ones(N, requires_grad=True) * 2
    getattr(comm, name)(out, y)
    assert out.tolist() == [2] * N and out.requires_grad
    assert warned(out.sum().backward) == [name]


def test_what_has_no_gradient_does_not_warn(worlds):
    """A changed leaf warns only once, however often calls change it."""
    comm = worlds(1)[0]
    p = torch.nn.Parameter(torch.ones(N))
    with torch.no_grad():
        in_place(comm, p, False)
        in_place(comm, p, True)
    in_place(comm, p.detach(), False)
    p.sum().backward()
    in_place(comm, p.grad, False)
    with torch.inference_mode():
        comm.all_reduce(torch.ones(N))
    assert warned(p.sum().backward) == []
    for _ in range(3):
        comm.all_reduce(p)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        p.sum().backward()
    assert len(seen) == 1
    mode = torch._C._get_autograd_fallback_mode()
    torch._C._set_autograd_fallback_mode("nothing")
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(torch._C._set_autograd_fallback_mode, mode)
        y = torch.ones(N, requires_grad=True) * 1
        comm.all_reduce(y)
        assert warned(y.sum().backward) == []


def test_a_list_of_gathered_tensors_stays_without_a_gradient(worlds):
    """Programs put their own tensor, which has a gradient, back into the list."""
    comm, out = worlds(1)[0], torch.zeros(N)
    y = torch.ones(N, requires_grad=True) * 2
    comm.all_gather([out], y)
    assert not out.requires_grad
    assert warned((out + y).sum().backward) == []


def test_tangents_of_forward_mode_are_refused(worlds):
    comm = worlds(1)[0]
    with forward_ad.dual_level():
        dual, out = forward_ad.make_dual(torch.ones(N), torch.ones(N)), torch.ones(N)
        for call in (
            lambda: comm.all_reduce(dual),
            lambda: comm.all_gather_into_tensor(out, dual),
            lambda: comm.all_gather([out], dual, async_op=True),
            lambda: comm.all_to_all_single(out, dual),
        ):
            with pytest.raises(UnsupportedError, match=r"dual tensor of torch\.autograd"):
                call()
        comm.all_reduce(torch.ones(N))
        comm.all_reduce(dual.detach().clone())
