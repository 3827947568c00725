# SPDX-License-Identifier: Apache-2.0
"""DTensor parameters: their local tensors, gradients, checks, and mesh.

Under tensor parallelism a parameter is a ``DTensor``, and a rank has one shard of it, the *local
tensor*. The buckets hold local tensors. All data-parallel ranks have the same local tensor, and
share its optimizer state. The DTensor stays the module's parameter, and ``p.grad`` is a DTensor as
well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ringcomm.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Tensor = torch.Tensor


#: A context in which torch does not call ``__torch_function__`` of the classes of sharded and
#: resharded parameters. Such a call takes 0.1 us for each attribute that is read.
without_torch_function = torch._C.DisableTorchFunctionSubclass

#: Classes known not to be DTensors. The set spares slow look-ups of an absent attribute.
TORCH_CLASSES: set[type] = {Tensor, torch.nn.Parameter}


def is_distributed(tensor: Tensor) -> bool:
    """True if a tensor is a DTensor."""
    return type(tensor) not in TORCH_CLASSES and getattr(tensor, "device_mesh", None) is not None


def local_of(tensor: Tensor) -> Tensor:
    """Returns the local tensor of a DTensor, or any other tensor itself."""
    if not is_distributed(tensor):
        return tensor
    local: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local


def set_local(param: Tensor, local: Tensor) -> None:
    """Replaces a parameter's memory by ``local``, perhaps of another dtype; keeps the object.

    If ``local`` is a view, pass it through :func:`apart` first.
    """
    if not is_distributed(param):
        param.data = local
        return
    there: Any = param
    if local.dtype is not param.dtype:
        spec = _spec_of_dtype(there, local.dtype)
        param.data = _dtensor(local, spec)
        there._spec = spec
    there._local_tensor = local


def apart(param: Tensor, view: Tensor) -> Tensor:
    """Returns ``view``, with a storage of its own in the same memory if ``param`` is a DTensor.

    Dynamo cannot trace two DTensors whose local tensors share a storage.
    """
    return with_own_storage(view) if is_distributed(param) else view


def with_own_storage(view: Tensor) -> Tensor:
    """Returns a tensor in the memory of ``view``, with a storage that covers only this memory."""
    return torch.from_dlpack(view) if view.numel() else view


def distributed_as(param: Tensor, local: Tensor) -> Tensor:
    """Returns ``local`` as a DTensor with the placements of ``param`` if ``param`` is a DTensor."""
    if not is_distributed(param):
        return local
    there: Any = param
    return _dtensor(local, _spec_of_dtype(there, local.dtype))


def _spec_of_dtype(param: Any, dtype: torch.dtype) -> Any:
    return replace(param._spec, tensor_meta=param._spec.tensor_meta._replace(dtype=dtype))


def _dtensor(local: Tensor, spec: Any) -> Tensor:
    # Import here: the import is slow, but programs that have a DTensor have already done it.
    from torch.distributed.tensor import DTensor

    made: Tensor = DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return made


def lies_alike(one: Tensor, other: Tensor) -> bool:
    """True if neither tensor is a DTensor, or both are, with equal meshes and placements."""
    if is_distributed(one) != is_distributed(other):
        return False
    if not is_distributed(one):
        return True
    same_mesh: bool = one.device_mesh == other.device_mesh  # type: ignore[attr-defined]
    return same_mesh and _placements(one) == _placements(other)


@dataclass(frozen=True)
class Sharding:
    """The position of a rank's local tensor in a sharded parameter.

    Attributes:
        shape: shape of the whole parameter.
        offsets: the first index that this rank has, for each dimension.
        mesh_dims: the dimensions of the mesh along which the parameter is sharded.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    mesh_dims: tuple[int, ...]

    @classmethod
    def of(cls, param: Tensor) -> Sharding | None:
        """Returns the sharding of a parameter; None if this rank has all of it."""
        if not is_distributed(param):
            return None
        mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
        dims = tuple(d for d, each in enumerate(placements) if each.is_shard() and mesh.size(d) > 1)
        if not dims:
            return None
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, offsets = compute_local_shape_and_global_offset(param.shape, mesh, placements)
        return cls(tuple(param.shape), tuple(offsets), dims)

    def describe(self) -> dict[str, Any]:
        """Returns the sharding as JSON types."""
        return {name: list(value) for name, value in vars(self).items()}

    @classmethod
    def from_description(cls, described: Mapping[str, Any]) -> Sharding:
        """Inverse of :meth:`describe`; raises ValueError if the description is malformed."""
        shape, offsets, dims = (tuple(described[n]) for n in ("shape", "offsets", "mesh_dims"))
        if len(shape) != len(offsets) or not all(type(n) is int for n in (*shape, *offsets, *dims)):
            raise ValueError(f"sharding {described}")
        return cls(shape, offsets, dims)

    def local_tensor_of(self, whole: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns this rank's shard, which has ``shape``, of a tensor of the parameter's shape."""
        if not prod(shape):
            return whole.new_empty(tuple(shape))
        begins = zip(self.offsets, shape, strict=True)
        return whole[tuple(slice(begin, begin + size) for begin, size in begins)]


# ---- checks of parameters -------------------------------------------------------------------


def _placements(tensor: Tensor) -> tuple[Any, ...]:
    placements: tuple[Any, ...] = tensor.placements  # type: ignore[attr-defined]
    return placements


def of_fully_shard() -> Iterator[Tensor]:
    """Yields the parameters that ``fully_shard()`` (FSDP2) has sharded in this process."""
    states = sys.modules.get("torch.distributed._composable_state")
    # If FSDP2 was never imported, it has sharded no parameter.
    if states is None or "torch.distributed.fsdp" not in sys.modules:
        return
    for reference in list(states._module_state_mapping.values()):
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # older torch: at most one group per module
            groups = filter(None, [getattr(state, "_fsdp_param_group", None)])
        for group in groups:
            for each in group.fsdp_params:
                yield each.sharded_param


def check_placements(param: Tensor, called: str) -> None:
    """Checks that a parameter can be trained: if it is a DTensor, it must be tensor-parallel.

    Raises:
        ArgumentError: the DTensor belongs to FSDP2, has a partial placement, or is on a mesh
            without this rank.
        UnsupportedError: the DTensor's shards are not in the default order of its placements.
    """
    if not is_distributed(param):
        return
    if any(each is param for each in of_fully_shard()):
        raise ArgumentError(
            f"{called}: expected a tensor that is not divided among the ranks of comm=, got a "
            f"{type(param).__name__} of fully_shard(), which shards it over the same ranks; use "
            "torch.optim for it, or ringcomm.zero.shard() in place of fully_shard()"
        )
    mesh, placements = param.device_mesh, _placements(param)  # type: ignore[attr-defined]
    if mesh.get_coordinate() is None:
        raise ArgumentError(
            f"{called}: expected a DTensor on a mesh with this rank, got one on the ranks "
            f"{mesh.mesh.tolist()}"
        )
    if any(each.is_partial() for each in placements):
        raise ArgumentError(
            f"{called}: expected a DTensor that is sharded or replicated, got {placements}; "
            "redistribute() it before it becomes a parameter"
        )
    there: Any = param
    usual = all(type(each).__name__ in ("Shard", "Replicate") for each in placements)
    order = there._spec.shard_order
    if not usual or order != there._spec.compute_default_shard_order(placements):
        raise UnsupportedError(
            f"{called}: expected a DTensor with the placements Shard and Replicate, in the mesh's "
            f"order, got {placements} in the order {order}; use torch.optim for it"
        )
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, _ = compute_local_shape_and_global_offset(param.shape, mesh, placements)
    if tuple(shape) != tuple(local_of(param).shape):
        raise ArgumentError(
            f"{called}: expected a local tensor of shape {tuple(shape)}, since {placements} on "
            f"{mesh} divide the shape {tuple(param.shape)}, got {tuple(local_of(param).shape)}; "
            "pass shape= to DTensor.from_local()"
        )


# ---- gradients ------------------------------------------------------------------------------

_GRAD: Any = torch._C.TensorBase.grad
#: Returns the gradient that autograd accumulated on this rank, even if ``p.grad`` is overridden.
grad_of: Callable[[Tensor], Tensor | None] = _GRAD.__get__
#: Sets the gradient that :func:`grad_of` returns.
set_grad: Callable[[Tensor, Tensor | None], None] = _GRAD.__set__


def check_gradient(grad: Tensor, param: Tensor, called: str) -> None:
    """Checks that a gradient fits its parameter.

    Raises:
        UnsupportedError: the gradient is sparse.
        ArgumentError: its shape, dtype, device or mesh is not the parameter's.
    """
    if grad.layout is not torch.strided:
        raise UnsupportedError(
            f"{called}: expected a dense gradient, got layout {grad.layout}; use "
            "torch.optim.SparseAdam for it, or an embedding with sparse=False"
        )
    for kind in ("shape", "dtype", "device"):
        wanted, got = getattr(param, kind), getattr(grad, kind)
        if wanted != got:
            raise ArgumentError(f"{called}: expected a gradient of {kind} {wanted}, got {got}")
    if not (is_distributed(param) or is_distributed(grad)):
        return
    wanted, got = (getattr(each, "device_mesh", None) for each in (param, grad))
    if wanted != got:
        raise ArgumentError(f"{called}: expected a gradient on mesh {wanted}, got one on {got}")


def other_shape(called: str, wanted: Tensor, got: Tensor) -> ArgumentError:
    """Returns the error for a gradient whose shape is not the shape of its segment in the bucket.

    Args:
        called: names the parameter.
        wanted: the parameter's segment in the bucket.
        got: the gradient.
    """
    return ArgumentError(
        f"{called}: expected a gradient of shape {tuple(wanted.shape)}, the parameter's shape at "
        f"shard(), got {tuple(got.shape)}: the parameter's memory was replaced since (by .data =, "
        "resize_token_embeddings() or the like). Replace it before shard(), or call "
        "remove_sharding() first, and build a new optimizer"
    )


def align_gradient(param: Tensor) -> None:
    """Redistributes ``p.grad`` to the parameter's placements; collective if placements differ.

    For instance, the gradient of a replicated weight with a sharded input is a partial sum.
    """
    grad = grad_of(param)
    if grad is not None and is_distributed(param) and is_distributed(grad):
        wanted = _placements(param)
        if _placements(grad) != wanted:
            with torch.no_grad():
                set_grad(param, grad.redistribute(placements=wanted))  # type: ignore[attr-defined]


def local_gradient(param: Tensor, called: str) -> Tensor:
    """Returns the local tensor of ``p.grad``, which must exist; see :func:`align_gradient`.

    Raises:
        ArgumentError, UnsupportedError: see :func:`check_gradient`.
    """
    grad = grad_of(param)
    assert grad is not None
    check_gradient(grad, param, called)
    if not is_distributed(param):
        return grad.detach()
    align_gradient(param)
    aligned = grad_of(param)
    assert aligned is not None
    local = local_of(aligned.detach())
    wait = getattr(local, "wait", None)  # the result of a functional collective may not be ready
    return local if wait is None else wait()


# ---- the mesh -------------------------------------------------------------------------------


class MeshView:
    """A device mesh, seen from one of its ranks."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.coordinate: list[int] = list(mesh.get_coordinate() or ())

    @property
    def dims(self) -> list[int]:
        """The dimensions of the mesh that have several ranks."""
        return [dim for dim in range(self.mesh.ndim) if self.mesh.size(dim) > 1]

    @property
    def sizes(self) -> list[int]:
        """The number of ranks along each dimension."""
        return list(self.mesh.shape)

    @property
    def number(self) -> int:
        """The number of this rank on the mesh, in the order of :meth:`all_gather`."""
        number = 0
        for dim in range(self.mesh.ndim):
            number = number * self.mesh.size(dim) + self.coordinate[dim]
        return number

    def describe(self) -> dict[str, Any]:
        """Returns the mesh and this rank's position on it, as JSON types."""
        return {
            "names": list(self.mesh.mesh_dim_names or ()),
            "sizes": self.sizes,
            "coordinate": self.coordinate,
        }

    def counts(self, mesh_dims: Sequence[int]) -> bool:
        """True if this rank is the first rank with its shard; sums over the mesh skip the others.

        Args:
            mesh_dims: the dimensions of the mesh along which the summed tensor is sharded.
        """
        return not any(self.coordinate[dim] for dim in self.dims if dim not in mesh_dims)

    def all_gather(self, text: bytes, device: torch.device) -> list[bytes]:
        """Returns the text of every rank of the mesh; collective on it.

        Args:
            text: text of this rank; the results may end with blanks.
            device: device of the tensors that are gathered.
        """
        texts = [text]
        for dim in reversed(self.dims):
            longest = torch.tensor([max(map(len, texts))], device=device)
            group, count = self.mesh.get_group(dim), self.mesh.size(dim)
            dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
            padded = b"".join(each.ljust(int(longest)) for each in texts)
            mine = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(device)
            rows = [torch.empty_like(mine) for _ in range(count)]
            dist.all_gather(rows, mine, group=group)
            joined = [bytes(row.tolist()) for row in rows]
            size = int(longest)
            texts = [each[at : at + size] for each in joined for at in range(0, len(each), size)]
        return texts

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        """Reduces a tensor over all ranks of the mesh by a ``ReduceOp``; collective on it."""
        for dim in self.dims:
            dist.all_reduce(tensor, op, group=self.mesh.get_group(dim))


def find_mesh(params: Iterable[Tensor], operation: str) -> MeshView | None:
    """Returns the mesh of the DTensors among parameters; None if no mesh has several ranks.

    Raises:
        UnsupportedError: the DTensors are on different meshes.
    """
    found: list[DeviceMesh] = []
    for param in params:
        if is_distributed(param):
            mesh = param.device_mesh  # type: ignore[attr-defined]
            if mesh.size() > 1 and mesh not in found:
                found.append(mesh)
    if len(found) > 1:
        raise UnsupportedError(
            f"{operation}: expected DTensor parameters on one DeviceMesh, got {found[0]} and "
            f"{found[1]}: a norm cannot be summed over two meshes; use an optimizer for each mesh"
        )
    return MeshView(found[0]) if found else None
