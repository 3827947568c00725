# SPDX-License-Identifier: Apache-2.0
"""A pass over compiled graphs that fuses DTensor's collectives with adjacent products.

Under ``parallelize_module`` a column-parallel layer gathers its input, and then multiplies; a
row-parallel layer multiplies, and then reduce-scatters. In a graph of AOTAutograd a column-parallel
layer is ``wait_tensor(all_gather_into_tensor(x))``, then a split by rank and a ``cat`` if the input
is gathered along dimension 1, then ``mm`` or ``addmm`` of rows. A row-parallel layer has reverse
order. The pass replaces both patterns by the operators of :mod:`ringcomm.functional.matmul`.

NOTE [The joint graph] The pass runs while forward and backward are still one graph. Once torch has
split the graph, the weights' gradient, in the backward graph, also uses each gathered input; the
pass could not replace this second user.

NOTE [Gathered once or read again] Each operator reads the peers' rows itself. If a gathered tensor
has several users, their reads are less work than one gathering only if rows are read in place and
there are at most as many users as ranks: a rank copies its own rows for each user, but gathering
copies the rows of all ranks. All ranks have equal sizes, so they make the same choice.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from ringcomm.errors import UnsupportedError
from ringcomm.functional import matmul
from ringcomm.functional.collectives import (
    communicator_named,
    groups_of_the_backend,
    keep_order,
    key_of_group,
)

__all__ = ["ProductPass", "fuse_products"]

Tensor = torch.Tensor
# Key and world size, as the operators take them.
_Group = tuple[str, int]

_aten: Any = torch.ops.aten
_c10d: Any = torch.ops._c10d_functional
_ops: Any = torch.ops.ringcomm
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_HOOK = "joint_custom_post_pass"


def fuse_products() -> dict[str, Any]:
    """Returns ``torch.compile`` options that fuse DTensor's collectives with adjacent products.

    Use ``torch.compile(model, options=fuse_products())`` for a model under ``parallelize_module``
    with a mesh of the backend "ringcomm". Other groups and device tensors are not supported.

    Raises:
        UnsupportedError: this version of torch has no hook for passes over the joint graph.
    """
    from torch._inductor import config

    if not hasattr(config, _HOOK):
        raise UnsupportedError(
            f"fuse_products: expected torch._inductor.config to have {_HOOK!r}, as in torch 2.13, "
            f"got torch {torch.__version__}; compile without it, or use "
            "ringcomm.extras.parallel.parallelize, which needs no such hook"
        )
    keep_order()
    return {_HOOK: ProductPass()}


class ProductPass(CustomGraphPass):  # type: ignore[misc]
    """The graph pass that the top of this file describes.

    Attributes:
        fused: number of fused collectives by graph, in the order of compilation.
    """

    def __init__(self) -> None:
        self.fused: list[int] = []

    def __call__(self, graph: Graph) -> None:
        """Changes the graph in place."""
        count = 0
        for node in list(graph.nodes):
            if node.target is _c10d.all_gather_into_tensor.default:
                count += _fuse_gather(node)
            elif node.target is _c10d.reduce_scatter_tensor.default:
                count += _fuse_scatter(node)
        self.fused.append(count)

    def uuid(self) -> Any:
        """Returns the pass's part of torch's cache key: all values that change its results."""
        code = get_hash_for_files((__file__, matmul.__file__))
        return code, groups_of_the_backend(), matmul.READ_FROM_BYTES


# ---- reading a graph ------------------------------------------------------------------------


def _value(node: Any) -> Any:
    return node.meta["val"]


def _same(size: Any, other: Any) -> bool:
    """True if two sizes are numbers, not symbols, and equal."""
    return isinstance(size, int) and isinstance(other, int) and size == other


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _group_of(collective: Node, tensor: Node, world_size: int, name: str) -> _Group | None:
    """Returns a collective's group if the backend runs it on floating-point host tensors."""
    value = _value(tensor)
    if collective.kwargs or value.device.type != "cpu" or not value.dtype.is_floating_point:
        return None
    return None if communicator_named(name) is None else (key_of_group(name), world_size)


def _waits(collective: Node) -> Node | None:
    """Returns the node that waits for a collective, if nothing else uses the collective."""
    wait = _only_user(collective)
    return wait if wait is not None and wait.target is _c10d.wait_tensor.default else None


def _split_of(joined: Node) -> Node | None:
    """Returns the split if only this ``cat`` uses its pieces, and joins all in order; else None."""
    if joined.target is not _aten.cat.default:
        return None
    pieces: Any = joined.args[0]
    split = pieces[0].args[0] if pieces[0].target is operator.getitem else None
    whole = (
        split is not None
        and split.target is _aten.split.Tensor
        and len(split.users) == len(pieces)
        and all(
            piece.args == (split, index) and _only_user(piece) is joined
            for index, piece in enumerate(pieces)
        )
    )
    return split if whole else None


def _dim_of(node: Node, position: int) -> Any:
    """Returns the dimension of a ``cat`` or a split."""
    return node.args[position] if len(node.args) > position else 0


def _joined(wait: Node) -> tuple[Node, int]:
    """Returns the gathered tensor, and the dimension along which the ranks' parts are joined."""
    split = _only_user(wait)
    if split is not None and split.target is _aten.split.Tensor and not _dim_of(split, 2):
        joined = _only_user(next(iter(split.users)))
        if joined is not None and _split_of(joined) is split:
            return joined, _dim_of(joined, 1)
    return wait, 0


def _divided(tensor: Node) -> tuple[Node, int]:
    """Returns the tensor that a reduce-scatter divides by rank, and the dimension it divides."""
    split = None if _dim_of(tensor, 1) else _split_of(tensor)
    return (tensor, 0) if split is None else (split.all_input_nodes[0], _dim_of(split, 2))


def _has_rows(shape: Sequence[Any], dim: int) -> bool:
    """True if the operators accept a dimension as the dimension of rows."""
    return len(shape) > 1 and (dim == 0 or (dim == 1 and len(shape) == 3))


def _is_rows_of(view: Node, node: Node) -> bool:
    return view.target in _VIEWS and _same(_value(view).shape[-1], _value(node).shape[-1])


def _transposes(node: Node) -> bool:
    return node.target is _aten.t.default or (
        node.target is _aten.permute.default and node.args[1] == [1, 0]
    )


def _product_of(node: Node) -> tuple[Any, Any, Any] | None:
    """Returns left factor, right factor and bias of a product of matrices, or None."""
    if node.target is _aten.mm.default and not node.kwargs:
        return node.args[0], node.args[1], None
    if node.target is _aten.addmm.default and not node.kwargs:
        bias, left, right = node.args
        shape = _value(bias).shape
        if len(shape) == 1 and _same(shape[0], _value(node).shape[1]):
            return left, right, bias
    return None


# ---- writing a graph ------------------------------------------------------------------------


def _call(target: Any, *args: Any, like: Node) -> Node:
    """Inserts a call before the node ``like``; the call will replace ``like`` or be its input."""
    with like.graph.inserting_before(like):
        made: Node = like.graph.call_function(target, args)
    kept = {key: of for key, of in like.meta.items() if key != "tensor_meta"}
    values = [_value(each) if isinstance(each, Node) else each for each in args]
    made.meta = {**kept, "val": target(*values)}
    return made


def _sizes(shape: Sequence[Any]) -> list[int] | None:
    """Returns a shape for ``reshape``; None if more than one size is a symbol."""
    sizes = [size if isinstance(size, int) else -1 for size in shape]
    return sizes if sizes.count(-1) <= 1 else None


def _reshape(node: Node, shape: Sequence[Any], like: Node) -> Node:
    have = _value(node).shape
    if len(have) == len(shape) and all(map(_same, have, shape)):
        return node
    return _call(_aten.reshape.default, node, _sizes(shape), like=like)


def _put(old: Node, new: Node) -> None:
    """Replaces ``old`` by ``new``; erases ``old``, and all inputs that only ``old`` used."""
    old.replace_all_uses_with(_reshape(new, _value(old).shape, old))
    _erase(old)


def _erase(node: Node) -> None:
    if node.users or node.op != "call_function":
        return
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for each in inputs:
        _erase(each)


# ---- all-gather and products ----------------------------------------------------------------


@dataclass
class _Gathered:
    """A gathered tensor, whose rows come from all ranks, and the nodes that use it.

    Attributes:
        own: this rank's rows, [n, k] or [batch, n, k].
        group: the key and the size of the operators' group.
        users: maps each user to a function that makes the node which replaces the user.
        holders: the nodes that hold the gathered rows, in some shape.
        known: True if there is an operator for every user.
    """

    own: Node
    group: _Group
    users: dict[Node, Callable[[Node], Node]] = field(default_factory=dict)
    holders: set[Node] = field(default_factory=set)
    known: bool = True

    def read(self, holder: Node) -> None:
        """Adds the users of ``holder`` to ``users``, and follows nodes that only reshape it."""
        self.holders.add(holder)
        for user in holder.users:
            made = self._made_of(user, holder)
            if _is_rows_of(user, holder) or (_value(holder).dim() == 2 and _transposes(user)):
                self.read(user)
            elif made is None:
                self.known = False
            else:
                self.users[user] = made

    def _made_of(self, user: Node, holder: Node) -> Callable[[Node], Node] | None:
        turned = _transposes(holder)
        if user.target is _aten.sum.dim_IntList:
            rows = list(range(_value(holder).dim() - 1))
            return self._sum if not (turned or user.kwargs) and user.args[1] == rows else None
        left, right, bias = _product_of(user) or (None, None, None)
        if left is right:
            return None
        if left is holder:
            if not turned:
                return self._product
            return self._gradient if bias is None else None
        return self._turned_gradient if bias is None and not turned and right is holder else None

    # These methods read a product's factors late: an earlier replacement may have changed them.

    def _product(self, user: Node) -> Node:
        found = _product_of(user)
        assert found is not None
        operands = (self.own, found[1], *self.group, found[2])
        return _call(_ops.all_gather_matmul.default, *operands, like=user)

    def _gradient(self, user: Node) -> Node:
        return self._gradient_by(user.args[1], user)

    def _turned_gradient(self, user: Node) -> Node:
        rows = _call(_aten.permute.default, user.args[0], [1, 0], like=user)
        return _call(_aten.permute.default, self._gradient_by(rows, user), [1, 0], like=user)

    def _gradient_by(self, grad: Any, user: Node) -> Node:
        *batch, rows, _ = _value(self.own).shape
        shape = (*batch, rows * self.group[1], _value(grad).shape[-1])
        operands = (self.own, _reshape(grad, shape, user), *self.group)
        return _call(_ops.weight_gradient.default, *operands, like=user)

    def _sum(self, user: Node) -> Node:
        """Makes the sum of all ranks' rows; a 16-bit sum is rounded once, at the end."""
        dtype = _value(self.own).dtype
        wide = torch.promote_types(dtype, torch.float32)
        dims = list(range(_value(self.own).dim() - 1))
        own = self._converted(self.own, wide, user)
        sums = _call(_aten.sum.dim_IntList, own, dims, like=user)
        total = _call(_ops.all_reduce.default, sums, "SUM", 1.0, *self.group, like=user)
        return self._converted(total, dtype, user)

    def _converted(self, node: Node, dtype: torch.dtype, user: Node) -> Node:
        if _value(node).dtype is dtype:
            return node
        return _call(torch.ops.prims.convert_element_type.default, node, dtype, like=user)

    def is_less_work(self) -> bool:
        """True if fused operators are less work; see NOTE [Gathered once or read again]."""
        made = list(self.users.values())
        products = len(made) - made.count(self._sum)
        value = _value(self.own)
        size_bytes = math.prod(value.shape) * value.element_size()
        return products == len(made) == 1 or (
            1 <= products <= self.group[1]
            and isinstance(size_bytes, int)
            and size_bytes >= matmul.READ_FROM_BYTES
        )


def _fuse_gather(gather: Node) -> int:
    tensor: Any
    tensor, world_size, name = gather.args
    wait, group = _waits(gather), _group_of(gather, tensor, world_size, name)
    if wait is None or group is None:
        return 0
    whole, dim = _joined(wait)
    shape = _value(tensor).shape
    if not _has_rows(shape, dim) or _sizes(shape) is None:
        return 0
    found = _Gathered(tensor, group)
    found.read(whole)
    if not found.known or not found.is_less_work():
        return 0
    if not dim and len(shape) > 2:
        found.own = _call(_aten.reshape.default, tensor, [-1, shape[-1]], like=gather)
    for user, made in found.users.items():
        _put(user, made(user))
    return 1


# ---- products and reduce-scatter ------------------------------------------------------------


def _fuse_scatter(scatter: Node) -> int:
    tensor: Any
    tensor, op, world_size, name = scatter.args
    wait, group = _waits(scatter), _group_of(scatter, tensor, world_size, name)
    if wait is None or group is None or op != "sum":
        return 0
    whole, dim = _divided(tensor)
    shape = _value(whole).shape
    node = whole
    while node.target in _VIEWS and _only_user(node) and _is_rows_of(node, node.all_input_nodes[0]):
        node = node.all_input_nodes[0]
    product = _product_of(node)
    if product is None or not _has_rows(shape, dim) or _sizes(shape) is None:
        return 0
    if not all(map(_only_user, (tensor, whole, node))):
        return 0
    left, right, bias = product
    if dim:
        left = _reshape(left, (*shape[:-1], _value(left).shape[-1]), scatter)
    operands = (left, right, *group, bias)
    _put(wait, _call(_ops.matmul_reduce_scatter.default, *operands, like=scatter))
    return 1
