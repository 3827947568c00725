# SPDX-License-Identifier: Apache-2.0
"""Resharded parameters, aliases of their memory, and graphs of gradients, at stage 3."""

from __future__ import annotations

import ctypes
import io
import pickle
import struct
from copy import copy, deepcopy
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from ringcomm import zero
from ringcomm.errors import ArgumentError
from ringcomm.optim import AdamW
from tests.zero.models import assert_same_bits

Tensor = torch.Tensor
ALONE = zero.ZeroOptions(bucket_elems=512, prefetch=0)

# Uses of a parameter besides reads of it or of a detached copy (see READS).
USES: dict[str, Any] = {
    "average": lambda p: torch.ones(8, 8).lerp_(p, 0.1),
    "averages": lambda p: torch._foreach_lerp_([torch.ones(8, 8)], [p], 0.1),
    "write to data": lambda p: p.data.zero_(),
    "set data": lambda p: setattr(p, "data", torch.ones(8, 8)),
    "write": lambda p: p.add_(1.0),
    "product": lambda p: torch.ones(8, 8) @ p,
}


# Calls that take only properties of a parameter. Listed by torch's names, to find new ones.
LIKES = [name for name in dir(torch) if name.endswith("_like") and not name.startswith("_")]
NEWS = [name for name in dir(Tensor) if name.startswith("new")]
LIKE_ANOTHER = ("expand_as", "reshape_as", "type_as", "view_as", "to", "is_same_size")
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "full_like": (2.0,),
    "randint_like": (5,),
    "new_empty": ((2, 3),),
    "new_empty_strided": ((2, 3), (3, 1)),
    "new_full": ((2, 3), 4.0),
    "new_ones": ((2, 3),),
    "new_tensor": ([1.0, 2.0],),
    "new_zeros": ((2, 3),),
}
FACTS: dict[str, Any] = {
    **{name: lambda p, n=name: getattr(torch, n)(p, *ARGUMENTS.get(n, ())) for name in LIKES},
    **{name: lambda p, n=name: getattr(p, n)(*ARGUMENTS.get(n, ())) for name in NEWS},
    **{name: lambda p, n=name: getattr(torch.ones(p.shape), n)(p) for name in LIKE_ANOTHER},
    "by keyword": lambda p: torch.full_like(input=p, fill_value=3.0),
    "on meta": lambda p: torch.empty_like(p, device="meta"),
    "of another dtype": lambda p: torch.zeros_like(p, dtype=torch.float64),
    "in another format": lambda p: torch.zeros_like(p, memory_format=torch.contiguous_format),
    "to meta": lambda p: p.to("meta"),
    "to meta by keyword": lambda p: p.to(device="meta", dtype=torch.float16),
    "type": lambda p: p.type(),
    "typename": torch.typename,
    "result_type": lambda p: (torch.result_type(p, 1), torch.result_type(torch.ones(2).int(), p)),
    "like a detached one": lambda p: torch.zeros_like(p.detach()),
    "finfo": lambda p: torch.finfo(p.dtype).max,
    "facts": lambda p: (
        *(p.numel(), p.nelement(), p.size(), p.size(0), p.shape, p.stride(), p.dim(), p.ndim),
        *(p.is_contiguous(), p.element_size(), p.nbytes, p.itemsize, p.layout, p.device, len(p)),
        *(p.is_floating_point(), p.is_complex(), p.is_signed(), p.is_leaf, p.requires_grad),
        *(p.is_sparse, p.is_quantized, p.dense_dim(), p.storage_type(), p.get_device()),
        *(torch.numel(p), torch.is_floating_point(p), torch.is_complex(p), torch.is_tensor(p)),
        *(p.dim_order(), torch.is_same_size(p, p), torch.get_device(p)),
        *(p.is_pinned(), p.is_shared(), p.is_set_to(p), p.is_inference(), p.storage_offset()),
    ),
    "hooks": lambda p: p.register_hook(lambda grad: None).remove(),
    "initial bounds": lambda p: p.dim() > 1 and nn.init._calculate_fan_in_and_fan_out(p),
}
# Conversions that change nothing return the parameter itself.
SAME: dict[str, Any] = {
    "to()": lambda p: p.to(),
    "to device": lambda p: p.to("cpu"),
    "to device by keyword": lambda p: p.to(device=torch.device("cpu")),
    "to dtype": lambda p: p.to(torch.float32),
    "to both": lambda p: p.to("cpu", torch.float32, non_blocking=True),
    "to another": lambda p: p.to(torch.ones(1)),
    "cpu": lambda p: p.cpu(),
    "float": lambda p: p.float(),
    "type": lambda p: p.type(torch.float32),
    "type by name": lambda p: p.type("torch.FloatTensor"),
}
# Calls that resemble the calls above, but need values.
VALUES: dict[str, Any] = {
    "new of its own values": lambda p: p.new_tensor(p),
    "another of its size": lambda p: p.expand_as(torch.ones(8, 8)),
    "copy": lambda p: p.to("cpu", copy=True),
    "copy by torch's rule": lambda p: p.to("cpu:0"),
    "another dtype": lambda p: p.to(torch.float64),
    "another dtype on meta's side": lambda p: p.type("torch.DoubleTensor"),
    "double": lambda p: p.double(),
    "half": lambda p: p.half(),
    "format": lambda p: p.to("cpu", memory_format=torch.contiguous_format),
}


def assigned(p: Tensor) -> Tensor:
    other = torch.ones(8, 8)
    other.data = p
    return other


def saved(p: Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(p, file)
    return file.getvalue()


# Ways to read values that go through the tensor class.
READS: dict[str, Any] = {
    **{name: lambda p, n=name: getattr(p, n)() for name in ("tolist", "item", "numpy", "clone")},
    **{each.__name__: each for each in (list, float, int, bool, complex, bytes, max, sum, abs)},
    **{each.__name__: each for each in (pickle.dumps, deepcopy, copy, np.asarray, np.sqrt, saved)},
    "format": lambda p: f"{p:.2f}",
    "struct": lambda p: struct.pack("f", p.sum()),
    "address": lambda p: ctypes.string_at(p.data_ptr(), p.nbytes),
    "file": lambda p: safetensors.torch.save({"p": p}),
    "elements": lambda p: torch.tensor([p[0, 0], 1.0]),
    "copy_": lambda p: torch.ones(8, 8).copy_(p),
    "foreach": lambda p: torch._foreach_copy_([torch.ones(8, 8)], [p]),
    "item assignment": lambda p: torch.ones(8, 8).__setitem__(0, p[0]),
    "out": lambda p: torch.add(torch.ones(8, 8), 1.0, out=p),
    "dlpack": torch.from_dlpack,
    "operator": lambda p: torch.ops.aten.clone.default(p),
    "trace": lambda p: torch.jit.trace(lambda q: q * 2, (p,)),
    "shared memory": lambda p: p.share_memory_(),
}
# Constructors and assignments, which do not go through the tensor class.
TAKES: dict[str, Any] = {
    "tensor": torch.tensor,
    "tensor of another dtype": lambda p: torch.tensor(p, dtype=torch.float64),
    "new_tensor": lambda p: torch.ones(1).new_tensor(p),
    "Tensor": Tensor,
    "FloatTensor": torch.FloatTensor,
    "set_": lambda p: torch.empty(0).set_(p),
    "assigned": assigned,
    "as_subclass": lambda p: p.as_subclass(Tensor),
    "_make_subclass": lambda p: Tensor._make_subclass(Tensor, p),
    "vmap": lambda p: torch.vmap(lambda row: row * 2)(p),
    "nested": lambda p: torch.nested.nested_tensor([p]),
    "data of a parameter": lambda p: nn.Parameter(assigned(p)),
}
# Uses of the tensors that TAKES returns.
TAKEN: dict[str, Any] = {
    "sum": torch.sum,
    "item": lambda t: t[0, 0].item(),
    "list": Tensor.tolist,
    "array": lambda t: t.detach().numpy(),
    "text": str,
    "memory": lambda t: t.untyped_storage().tolist(),
    "typed memory": lambda t: t._typed_storage().tolist(),
    "address": Tensor.data_ptr,
    "product": lambda t: torch.ones(8, 8) @ t,
    "layer": lambda t: nn.functional.linear(torch.ones(2, 8), t),
    "convolution": lambda t: nn.functional.conv1d(torch.ones(1, 8, 4), t[:, :, None]),
    "row": lambda t: nn.functional.embedding(torch.tensor([1]), t),
    "copy": lambda t: torch.ones(8, 8).copy_(t),
    "join": lambda t: torch.cat([t, t]),
    "comparison": lambda t: torch.equal(t, t),
    "fill": lambda t: t.detach()[0, 0].fill_(1.0),
    "pickle": pickle.dumps,
}


def new(kind: str = "linear") -> Any:
    torch.manual_seed(6)
    if kind == "conv":
        return nn.Sequential(nn.Conv1d(8, 8, 1), nn.Tanh(), nn.Conv1d(8, 8, 1), nn.Tanh())
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())


def test_what_needs_values_that_are_not_here_says_unsharded(worlds):
    def work(comm):
        module = zero.shard(deepcopy(base), 3, comm=comm, options=ALONE)
        param = next(iter(module.parameters()))
        for name, use in USES.items():
            said = "data needs its values.*" if name.endswith(" data") else ""
            match = rf"0\.weight.*{said}unsharded"
            with pytest.raises(ArgumentError, match=match), torch.no_grad():
                use(param)
                pytest.fail(name)
        assert "0.weight, resharded" in repr(param)
        with zero.unsharded(module):
            assert torch.equal(param, base[0].weight)
        assert type(next(iter(zero.remove_sharding(module).parameters()))) is nn.Parameter

    base = new()
    worlds(1).run(work)


@pytest.mark.filterwarnings("ignore:To copy construct", "ignore:TypedStorage")
def test_no_way_to_read_resharded_values_gives_any(worlds):
    def work(comm):
        module: Any = zero.shard(deepcopy(base), 3, comm=comm, options=ALONE)
        param = next(module.parameters())
        for kept in (
            param,
            param.detach(),
            param.detach().detach(),
            module[0].state_dict()["weight"],
        ):
            for name, read in READS.items():
                with pytest.raises(ArgumentError, match=r"0\.weight.*unsharded"), torch.no_grad():
                    read(kept)
                    pytest.fail(name)
            for name, take in TAKES.items():
                # For detached tensors, one use is enough to show that they are resharded.
                uses = TAKEN if kept is param else {"sum": torch.sum}
                for use, read in uses.items():
                    with pytest.raises(RuntimeError, match="Cannot access data"), torch.no_grad():
                        read(take(kept))
                        pytest.fail(f"{name}, {use}")
        with pytest.raises(ArgumentError, match=r"0\.weight.*unsharded"):
            nn.Parameter(param)
        assert len({p.untyped_storage().data_ptr() for p in module.parameters()}) == 4
        module(torch.ones(2, 8)).sum().backward()
        with zero.unsharded(module):
            assert torch.equal(module[0].weight, base[0].weight)

    base = new()
    worlds(1).run(work)


def facts_of(value: Any) -> Any:
    """Returns the result of a call; of a tensor, everything but its values."""
    if not isinstance(value, Tensor):
        return value
    return type(value), value.shape, value.stride(), value.dtype, value.device, value.requires_grad


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_what_needs_shape_and_dtype_alone_works(worlds, kind):
    def work(comm):
        module: Any = zero.shard(deepcopy(base), 3, comm=comm, options=ALONE)
        for (name, param), like in zip(module.named_parameters(), base.parameters(), strict=True):
            for use, call in FACTS.items():
                assert facts_of(call(param)) == facts_of(call(like)), (name, use)
            for use, call in SAME.items():
                assert call(param) is param and call(like) is like, (name, use)
            assert f"{param}" == repr(param) and f"{name}, resharded" in repr(param)
        for use, call in VALUES.items():
            with pytest.raises(ArgumentError, match=r"0\.weight.*unsharded"), torch.no_grad():
                call(next(module.parameters()))
                pytest.fail(use)
        filled = torch.full_like(next(module.parameters()), 2.0)
        assert torch.equal(filled, torch.full(base[0].weight.shape, 2.0))
        module.register_buffer("average", torch.zeros_like(next(module.parameters())))
        module(torch.ones(2, 8) if kind == "linear" else torch.ones(2, 8, 4)).sum().backward()
        with zero.unsharded(module):
            assert torch.equal(module[0].weight, base[0].weight)

    base = new(kind)
    worlds(2).run(work)


OPTIMIZERS = [
    each
    for each in vars(torch.optim).values()
    if isinstance(each, type)
    and issubclass(each, torch.optim.Optimizer)
    and each is not torch.optim.Optimizer
]


def test_optimizers_of_torch_are_built_of_resharded_parameters(worlds):
    def made(kind: Any, params: Any, options: dict[str, Any]) -> str:
        try:
            kind(params, lr=0.1, **options)
        except (TypeError, RuntimeError) as error:
            return str(error)
        return ""

    def work(comm):
        module = zero.shard(deepcopy(base), 3, comm=comm, options=ALONE)
        for kind in OPTIMIZERS:
            for options in ({}, {"foreach": True}, {"fused": True}):
                found = made(kind, module.parameters(), options)
                assert found == made(kind, base.parameters(), options), kind

    base = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    worlds(1).run(work)


@pytest.mark.parametrize("where", ["unsharded", "hook"])
def test_arrays_of_numpy_keep_their_values_and_training_goes_on(worlds, where):
    base = new()

    def work(comm, stage, logs):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=ALONE)
        optimizer = AdamW(module.parameters(), lr=1e-2)
        arrays: list[Any] = []

        def log(*_: Any) -> None:
            arrays.append(module[0].weight.detach().cpu().numpy())

        if logs and where == "hook":
            module[0].register_forward_hook(log)
        for turn in range(3):
            if logs and where == "unsharded":
                with zero.unsharded(module):
                    log()
            generator = torch.Generator().manual_seed(turn)
            module(torch.randn(2, 8, generator=generator)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if logs:
            assert torch.equal(torch.from_numpy(arrays[0]), base[0].weight)
            assert not torch.equal(torch.from_numpy(arrays[1]), base[0].weight)
        return zero.full_state_dict(module)

    wanted = worlds(2).run(work, 2, False)[0]
    for found in worlds(2).run(work, 3, True):
        assert_same_bits(found, wanted)


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_products_with_a_hessian_come_again_and_again(worlds, kind):
    base = new(kind)

    def work(comm, stage):
        module: Any = zero.shard(deepcopy(base), stage, comm=comm, options=ALONE)
        params = list(module.parameters())
        x = torch.ones(2, 8, 8)
        found: list[Tensor] = []
        for _ in range(2):
            grads = torch.autograd.grad(module(x).square().sum(), params, create_graph=True)
            for turn in range(3):
                vectors = [torch.full(param.shape, turn + 1.0) for param in params]
                found += torch.autograd.grad(grads, params, vectors, retain_graph=turn < 2)
        for _ in range(2):
            one = torch.ones(1, 8, 8)
            hessian = torch.autograd.functional.hessian(lambda x: module(x).square().sum(), one)
            found.append(hessian)
        return {str(number): tensor.detach().clone() for number, tensor in enumerate(found)}

    wanted = worlds(1).run(work, 2)[0]
    assert_same_bits(worlds(1).run(work, 3)[0], wanted)


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_a_backward_through_a_hidden_tensor_raises(worlds, kind):
    """The backward neither reads freed memory nor gives NaN."""
    base = new(kind)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = deepcopy(base)[0]
            self.kept: tuple[Any, ...] = ()

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.inner(x.requires_grad_())
            self.kept = (hidden * 2.0,)
            return hidden.detach() * x

    def work(comm):
        module: Any = zero.shard(nn.Sequential(Layer()), 3, comm=comm, options=ALONE)
        module(torch.ones(1, 8, 8))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            module[0].kept[0].sum().backward()

    worlds(1).run(work)
