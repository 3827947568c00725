# SPDX-License-Identifier: Apache-2.0
"""fuse_products(): a model under DTensor's plan calls fused products with equal results."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ringcomm.comm.peer_memory import lent_to_peers
from ringcomm.errors import RingcommError, UnsupportedError
from ringcomm.extras.parallel import fuse_products
from ringcomm.functional import collectives as traced_groups
from ringcomm.functional import graph_pass, matmul
from ringcomm.functional.graph_pass import ProductPass
from tests.support.covering import in_test_all
from tests.support.meshes import mesh_of
from tests.support.rank_pool import default_group, same

Tensor = torch.Tensor
GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
OPS: Any = torch.ops.ringcomm
LENT = "ringcomm.functional.matmul.lent_to_peers"


class Layers(nn.Module):
    """A model of whole numbers, for which all sums of a forward and a backward are exact."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm = Scale()
        self.up = nn.Linear(6, 8, bias=bias)
        self.down = nn.Linear(8, 6, bias=bias)
        draw = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(2 * torch.randint(-1, 2, tuple(param.shape), generator=draw))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return out


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def divided(mesh: Any, dim: int, bias: bool) -> nn.Module:
    return parallelize_module(
        Layers(bias),
        mesh,
        {
            "norm": SequenceParallel(sequence_dim=dim),
            "up": ColwiseParallel(input_layouts=Shard(dim)),
            "down": RowwiseParallel(output_layouts=Shard(dim)),
        },
    )


class Recorder:
    """A compiler that runs the pass at the same point as inductor, without a C++ compiler."""

    def __init__(self) -> None:
        self.calls: Counter[Any] = Counter()

    def change(self, module: torch.fx.GraphModule) -> None:
        # imported here because only ranks need it: it takes as long to import as torch
        from torch._inductor.fx_passes.post_grad import stable_topological_sort

        ProductPass()(module.graph)
        stable_topological_sort(module.graph)
        module.graph.lint()
        module.recompile()

    def partition(self, joint: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        self.change(joint)
        return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)

    def count(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.calls.update(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    def without_gradients(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.change(graph)
        return self.count(graph, inputs)

    def compile(self, call: Any) -> Any:
        backend = aot_autograd(
            inference_compiler=self.without_gradients,
            fw_compiler=self.count,
            bw_compiler=self.count,
            partition_fn=self.partition,
            decompositions=select_decomp_table(),
        )
        return torch.compile(call, backend=backend, fullgraph=True)


def rows(dim: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    draw = torch.Generator().manual_seed(rank)
    shape = {0: (4, 6), 1: (2, 4, 6)}[dim]
    return torch.randint(-1, 2, shape, generator=draw).to(dtype).requires_grad_()


def results(call: Any, model: nn.Module, x: Tensor) -> list[Any]:
    out = call(x)
    (out * (1 + torch.arange(out.numel()).view(out.shape) % 3)).sum().backward()
    grads = [param.grad for param in model.parameters()]
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in grads]
    return [out.detach(), x.grad, whole]


def both_ways(rank: int, dim: int, bias: bool, dtype: torch.dtype) -> Counter[Any]:
    """Compares the compiled model with the eager one; returns the calls of the compiled graphs."""
    torch._dynamo.reset()
    mesh = mesh_of(1, dist.get_world_size())["tp"]
    eager, model = (divided(mesh, dim, bias).to(dtype) for _ in range(2))
    recorder = Recorder()
    want = results(eager, eager, rows(dim, rank, dtype))
    same(results(recorder.compile(model), model, rows(dim, rank, dtype)), want)
    return recorder.calls


def is_fused(rank: int, world_size: int, dim: int, bias: bool, dtype: torch.dtype) -> None:
    with mock.patch.object(matmul, "READ_FROM_BYTES", 0):
        calls = both_ways(rank, dim, bias, dtype)
    # Forward and backward.
    assert calls[OPS.all_gather_matmul.default] == 2
    assert calls[OPS.matmul_reduce_scatter.default] == 2
    # One weight gradient for each of the two layers.
    assert calls[OPS.weight_gradient.default] == 2
    # The gradient of the second layer's bias.
    assert calls[OPS.all_reduce.default] == bias
    assert not calls[GATHER] and not calls[SCATTER]


@pytest.mark.parametrize(
    ("dim", "bias", "dtype"),
    [(1, True, torch.bfloat16), *in_test_all((0, False, torch.float32))],
)
def test_it_fuses_forward_and_backward(compiling_ranks, dim, bias, dtype):
    compiling_ranks.run(partial(is_fused, dim=dim, bias=bias, dtype=dtype))


# ---- what is left alone ---------------------------------------------------------------------


def is_left_alone(rank: int, world_size: int) -> None:
    """Calls of another backend are not fused, nor small gathers, which would then run twice."""
    ours = dist.get_backend() == "ringcomm"
    with mock.patch.object(matmul, "READ_FROM_BYTES", matmul.READ_FROM_BYTES if ours else 0):
        calls = both_ways(rank, 1, False, torch.float32)
    assert calls[GATHER] == 2
    assert calls[SCATTER] == (0 if ours else 2)
    assert calls[OPS.matmul_reduce_scatter.default] == (2 if ours else 0)
    assert not calls[OPS.all_gather_matmul.default] and not calls[OPS.weight_gradient.default]


def test_what_is_gathered_once_stays_so_where_it_is_small(compiling_ranks):
    compiling_ranks.run(is_left_alone)


def test_groups_of_other_backends_are_left_alone(compiling_ranks):
    compiling_ranks.run(is_left_alone, "gloo")


def products_with_other_users(rank: int, world_size: int) -> None:
    """Returns functions, each with the number of its collectives that are fused.

    Without fusion the compiled function makes the calls of the eager one, so one rank compiles.
    """
    group = default_group()
    gather, scatter = collectives.all_gather_tensor, collectives.reduce_scatter_tensor
    x, weight = torch.eye(4, 6) + rank, torch.ones(6, 4)
    rows, right = torch.eye(4, 6) - rank, torch.ones(6, 4) + rank

    def gathered() -> Tensor:
        return gather(x, 0, group)

    def scattered(tensor: Tensor, op: str = "sum") -> Tensor:
        return scatter(tensor, op, 0, group)

    def joined_elsewhere() -> Tensor:
        return gather(x, 1, group) @ torch.ones(12, 2)

    cases: list[tuple[Any, int]] = [
        (lambda: gathered() @ weight, 1),
        (lambda: (lambda whole: (whole @ weight, whole + 1))(gathered()), 0),
        (lambda: (lambda whole: (whole @ weight, whole.sum(1)))(gathered()), 0),
        (lambda: (lambda whole: [whole @ weight for _ in range(3)])(gathered()), 0),
        (lambda: torch.addmm(weight[:1], gathered(), weight), 0),
        (lambda: torch.addmm(weight[0], gathered(), weight, beta=2), 0),
        (joined_elsewhere, 0),
        (lambda: scattered(rows @ right), 1),
        (lambda: (lambda product: (scattered(product), product + 1))(rows @ right), 0),
        (lambda: scattered(rows @ right, "max"), 0),
        (lambda: scattered((rows @ right).view(8, 2)), 0),
        (lambda: scattered(rows.long() @ right.long()), 0),
    ]
    for number, (call, fused) in enumerate(cases):
        torch._dynamo.reset()
        recorder = Recorder()
        with mock.patch.object(matmul, "READ_FROM_BYTES", 0):
            compiles = fused or rank == 0
            same(recorder.compile(call)() if compiles else call(), call())
        left = recorder.calls[GATHER] + recorder.calls[SCATTER]
        assert left == (not fused if compiles else 0), f"case {number}: {recorder.calls}"


def test_what_has_other_users_is_left_alone(compiling_ranks):
    compiling_ranks.run(products_with_other_users)


# ---- inductor -------------------------------------------------------------------------------


class Products(nn.Module):
    """Uses only products, for which inductor calls no C++ compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8, bias=False)
        self.down = nn.Linear(8, 6, bias=False)
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):
                param.copy_(torch.arange(param.numel()).view(param.shape) % (3 + number) - 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x))
        return out


def by_inductor(rank: int, world_size: int) -> None:
    mesh = mesh_of(1, world_size)["tp"]
    plan = {
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0)),
    }
    eager = parallelize_module(Products(), mesh, plan)
    want = results(eager, eager, rows(0, rank))
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}),
        mock.patch.object(matmul, "READ_FROM_BYTES", 0),
    ):
        for hits in (0, 1):
            torch._dynamo.reset()
            counters.clear()
            model = parallelize_module(Products(), mesh, plan)
            options = fuse_products()
            compiled = torch.compile(model, fullgraph=True, options=options)
            with mock.patch(LENT, wraps=lent_to_peers) as lent:
                same(results(compiled, model, rows(0, rank)), want)
            # Two products and two weight gradients read the peers' rows.
            assert lent.call_count == 4
            # The pass has a name, so torch's cache can serve the graph without the pass.
            assert counters["aot_autograd"]["autograd_cache_hit"] == hits
            assert options["joint_custom_post_pass"].fused == ([] if hits else [4])


def test_inductor_runs_it_and_caches_what_comes(compiling_ranks):
    compiling_ranks.run(by_inductor)


def knows_whose_groups_are(rank: int, world_size: int) -> None:
    key = ProductPass().uuid()
    with mock.patch.object(matmul, "READ_FROM_BYTES", 1):
        assert ProductPass().uuid() != key
    name = default_group().group_name
    assert (name in key[1]) == (dist.get_backend() == "ringcomm")
    call = torch.ops.ringcomm.all_gather_matmul
    operands = (torch.ones(1, 1), torch.ones(1, 1), traced_groups.key_of_group(name), world_size)
    if dist.get_backend() == "gloo":
        with pytest.raises(RingcommError, match=f"process group '{name}' to be of the backend"):
            call(*operands, None)


@pytest.mark.parametrize("backend", ["ringcomm", "gloo"])
def test_a_cached_graph_is_of_its_groups(compiling_ranks, backend):
    compiling_ranks.run(knows_whose_groups_are, backend)


def test_a_torch_without_the_hook_is_refused(monkeypatch):
    monkeypatch.setattr(graph_pass, "_HOOK", "no_such_pass")
    with pytest.raises(UnsupportedError, match=r"expected torch\._inductor\.config to have"):
        fuse_products()
