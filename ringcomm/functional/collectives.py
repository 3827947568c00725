# SPDX-License-Identifier: Apache-2.0
"""Collectives that return new tensors: torch operators, derivatives, and public functions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.autograd.forward_ad as forward_ad
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch._library.effects import EffectType
from torch.autograd.function import _SingleLevelFunction
from torch.distributed import DebugLevel, ProcessGroup, get_debug_level
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group, _world

from ringcomm.comm.agreement import first_other, gather_bytes, unequal
from ringcomm.comm.communicator import Communicator, live_at
from ringcomm.comm.functions import (
    Group,
    communicator_behind,
    communicator_of,
    default_communicator,
    group_of_mesh,
    root_of,
)
from ringcomm.comm.host.arguments import (
    OP_CODES,
    PREMUL_SUM,
    SUM,
    CallChecks,
    PremulSum,
    ReduceOp,
    only_inlined,
    premul_sum,
    readable,
    reduction_of,
    without_memory,
)
from ringcomm.errors import ArgumentError, RingcommError, UnsupportedError, where
from ringcomm.functional.in_graph import FUNCTIONS, name_in_graph, serve
from ringcomm.integers import MOST

Tensor = torch.Tensor

# A function (arguments, results, tangents of the arguments) -> tangents of the results.
Tangent = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Any]

# The names of all operators, in the order of their registration.
registered: list[str] = []
_library = torch.library.Library("ringcomm", "DEF")  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Derivatives:
    """The functions that differentiate an operator in backward and forward mode.

    Attributes:
        backward: returns the gradients of the arguments from the context and the gradients of the
            results.
        tangent: returns the tangents of the results from the arguments, the results and the
            tangents of the arguments. Arguments and results come without tangents. None if
            ``check`` refuses forward mode.
        remember: stores in the context what ``backward`` reads, given arguments and result.
        check: called before any communication of a call that will be differentiated, with the
            arguments and whether one of them has a tangent; raises UnsupportedError if there is no
            derivative.
    """

    backward: Callable[..., tuple[Any, ...]]
    tangent: Tangent | None
    remember: Callable[[Any, Sequence[Any], Any], None]
    check: Callable[[Sequence[Any], bool], None] | None = None


@dataclass(frozen=True)
class Batching:
    """How one call handles a whole ``torch.vmap`` batch: as a dimension of the first tensor.

    Attributes:
        dim: the dimension of the batch: 0, or -1 for the last dimension.
        least_dims: the least number of dimensions of a sample that the kernel accepts.
    """

    dim: int
    least_dims: int = 0


def register(
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    derivatives: Derivatives | None,
    batching: Batching | None = None,
) -> None:
    """Makes ``kernel`` an operator, whose calls keep their order in graphs on all ranks.

    Args:
        name: name of the operator in ``torch.ops.ringcomm``.
        schema: the operator's arguments and results.
        kernel: the implementation, for tensors of any device.
        fake: returns results of the right shapes for tensors without data.
        derivatives: derivatives of the operator; None if no result depends on a tensor's values.
        batching: batching of the first argument under ``torch.vmap``; None for one call per sample.
    """
    # Kernels make their input contiguous themselves, so a compiler may change the input's strides.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
    qualified = f"ringcomm::{name}"
    _library.define(name + schema, tags=tags)  # type: ignore[no-untyped-call]
    # Under a transform of torch.func, a compiled function calls the operator while Dynamo is on,
    # and Dynamo would compile the kernel's frames.
    only_inlined(kernel)
    _library.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(qualified, fake, lib=_library)
    torch.library._register_effectful_op(qualified, EffectType.ORDERED, lib=_library)
    operator = getattr(torch.ops.ringcomm, name).default
    if derivatives is not None:
        autograd = only_inlined(_autograd_kernel(operator, derivatives))
        _library.impl(name, autograd, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
    rule = only_inlined(_batched(operator, batching))
    torch.library.register_vmap(qualified, rule, lib=_library)
    registered.append(name)


# ---- derivatives, in backward and forward mode --------------------------------------------------


# torch has a single level of dual numbers, 0; nested transforms share it.
_LEVEL = 0
_STRIDED = torch.strided
_unpack_dual: Callable[..., tuple[Tensor, Tensor | None]] = torch._VF._unpack_dual


def _transform() -> str | None:
    """Returns the name of the innermost transform of ``torch.func`` that is active."""
    if not torch._C._are_functorch_transforms_active():
        return None
    name: str = torch._C._functorch.peek_interpreter_stack().key().name
    return name


def has_tangent(*values: Any) -> bool:
    """True if one of the values is a tensor with a tangent, at the innermost level.

    Compiled graphs enter the level without calling forward_ad, so this inspects the tensors.
    """
    for value in values:  # every call runs this loop; any() would take twice as long
        if (
            isinstance(value, Tensor)
            and value.layout is _STRIDED
            and (value.is_floating_point() or value.is_complex())
            and _unpack_dual(value, level=_LEVEL)[1] is not None
        ):
            return True
    return False


@contextmanager
def _outer_levels() -> Iterator[None]:
    """Lets the transforms outside of the current one differentiate the calls in this context."""
    if _transform() is None:
        yield
        return
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        yield


def _autograd_kernel(operator: Any, derivatives: Derivatives) -> Callable[..., Any]:
    function = _function(operator, derivatives)

    def kernel(keyset: Any, *inputs: Any) -> Any:
        forward = has_tangent(*inputs)
        if not forward and not (torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)):
            return _below_autograd(operator, keyset, inputs)
        if derivatives.check is not None:
            derivatives.check(inputs, forward)
        with enable_single_level_autograd_function():
            return function.apply(*inputs, (keyset, forward))

    return kernel


def _below_autograd(operator: Any, keyset: Any, inputs: Sequence[Any]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)


def _function(operator: Any, derivatives: Derivatives) -> Any:
    """Returns the autograd function of an operator.

    Its last argument is a pair: the set of dispatch keys, and True if an input has a tangent.
    """

    def forward(ctx: Any, *arguments: Any) -> Any:
        *inputs, (keyset, in_forward_mode) = arguments
        with _outer_levels():
            result = _below_autograd(operator, keyset, inputs)
        derivatives.remember(ctx, inputs, result)
        if in_forward_mode:
            _keep_for_tangent(ctx, inputs, result if isinstance(result, tuple) else (result,))
        return result

    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        return (*derivatives.backward(ctx, *gradients), None)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        assert derivatives.tangent is not None, operator.name()
        # Arguments and results have no tangents of this level, so only outer levels differentiate.
        with forward_ad._set_fwd_grad_enabled(True):
            return derivatives.tangent(*_kept_for_tangent(ctx), tangents[:-1])

    methods = {"forward": forward, "backward": backward, "jvp": jvp}
    return type(
        operator._schema.name.replace("::", "_"),
        (_SingleLevelFunction,),
        {name: staticmethod(method) for name, method in methods.items()},
    )


def _keep_for_tangent(ctx: Any, inputs: Sequence[Any], results: Sequence[Any]) -> None:
    values = (*inputs, *results)
    ctx.save_for_forward(*(value for value in values if isinstance(value, Tensor)))
    ctx.kept = [None if isinstance(value, Tensor) else (value,) for value in values]
    ctx.num_inputs = len(inputs)


def _kept_for_tangent(ctx: Any) -> tuple[list[Any], list[Any]]:
    """Returns the arguments and results that _keep_for_tangent() stored, without tangents."""
    tensors = iter(ctx.saved_tensors)
    values = [
        _unpack_dual(next(tensors), level=_LEVEL)[0] if kept is None else kept[0]
        for kept in ctx.kept
    ]
    return values[: ctx.num_inputs], values[ctx.num_inputs :]


def refuse_transforms(operation: str, advice: str, *tensors: Any) -> None:
    """Raises if a transform of ``torch.func`` is active or a tensor has a tangent.

    Raises:
        UnsupportedError: the message names the transform or forward mode, and gives the advice.
    """
    transform = _transform()
    if transform is not None:
        raise UnsupportedError(
            f"{operation}: torch.func's transforms are not supported, and {transform} is active; "
            f"{advice}"
        )
    if has_tangent(*tensors):
        raise no_forward_mode(operation, advice)


def no_forward_mode(operation: str, advice: str) -> UnsupportedError:
    """Returns the error for a call in forward mode."""
    return UnsupportedError(
        f"{operation}: forward mode (dual numbers, torch.func.jvp, jacfwd and hessian) is not "
        f"supported, and a tensor has a tangent; {advice}"
    )


# ---- batches ------------------------------------------------------------------------------------


def _batched(operator: Any, batching: Batching | None) -> Callable[..., Any]:
    """Returns the operator's ``torch.vmap`` rule: one call for all samples, or one per sample."""

    def rule(info: Any, in_dims: Sequence[int | None], first: Tensor, *rest: Any) -> Any:
        others = any(dim is not None for dim in in_dims[1:])
        if batching is not None and not others and first.dim() - 1 >= batching.least_dims:
            assert in_dims[0] is not None
            return operator(first.movedim(in_dims[0], batching.dim), *rest), batching.dim
        samples = [
            operator(*_sample((first, *rest), in_dims, index)) for index in range(info.batch_size)
        ]
        if isinstance(samples[0], Tensor):
            return _stacked(operator, samples), 0
        results = tuple(_stacked(operator, each) for each in zip(*samples, strict=True))
        return results, (0,) * len(results)

    return rule


def _sample(values: Sequence[Any], dims: Sequence[int | None], index: int) -> list[Any]:
    return [
        value if dim is None else value.select(dim, index)
        for value, dim in zip(values, dims, strict=True)
    ]


def _stacked(operator: Any, samples: Sequence[Tensor]) -> Tensor:
    shapes = {tuple(sample.shape) for sample in samples}
    if len(shapes) > 1:
        raise UnsupportedError(
            f"torch.vmap of {operator.name()}: expected results of one shape for all samples, got "
            f"{sorted(shapes)}; call it for each sample, or fix the number of rows (max_rows=)"
        )
    return torch.stack(tuple(samples))


# ---- order in inductor: calls stay in the order of the program on all ranks ----------------------


@cache
def keep_order() -> bool:
    """Registers the operators' lowerings; called only when compiling, since it loads inductor."""
    from torch._inductor.lowering import lowerings

    for name in registered:
        operator = getattr(torch.ops.ringcomm, name).default
        lowerings[operator] = _in_order(operator)
    return True


def _in_order(operator: Any) -> Callable[..., Any]:
    from torch._inductor.ir import FallbackKernel
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.virtualized import V

    lower: Callable[..., Any] = fallback_handler(operator, add_to_fallback_set=False)

    def lower_in_order(*arguments: Any) -> Any:
        graph = V.graph
        before = len(graph.operations)
        result = lower(*arguments)
        # inductor's C++ code calls the operators by their names.
        native = None if graph.cpp_wrapper else name_in_graph(operator._schema.name)
        for operation in graph.operations[before:]:
            if native is not None and isinstance(operation, FallbackKernel):
                operation.python_kernel_name = native
        previous = graph.effectful_ops.get(EffectType.ORDERED)
        if previous is not None:
            for operation in graph.operations[before:]:
                name = operation.get_operation_name()
                graph.additional_buffer_deps[name].add(previous.get_name())
        if graph.current_node.target is operator:
            # A graph pass has inserted this call, so it has no effect token.
            graph.effectful_ops[EffectType.ORDERED] = graph.operations[-1]
        return result

    return lower_in_order


# ---- The collectives: groups in graphs, operators, gradients, and public functions ---------------

# ---- Finding a communicator by the key that represents it in a traced graph ---------------------
# NOTE [Group keys]
# The constants in a graph must be equal in all processes that may share a compile cache. So a
# communicator's key consists of its name, rank and world size. If several living communicators have
# the same name, rank and size, each later communicator also gets a number. The number is free again
# once its communicator is gone, closed or aborted, so that a graph then uses the communicator that
# replaced the old communicator.
#
# NOTE [The default group in a graph]
# dynamo does not guard values from a ``threading.local``: a graph traced in one thread of a
# LocalWorld would use that thread's communicator in the other threads. So ``group=None`` stays the
# empty key, which means the default group of the thread that runs the operator. The operator
# compares this group's world size with the world size that the group had at tracing.
#
# NOTE [Groups of the backend in a graph]
# DTensor's collectives use the name that torch gave a process group. The operators that replace
# them in a graph keep this name, after a prefix that no communicator's key has. So a graph from
# torch's cache finds the group of this name in a process that has not traced the graph.

DEFAULT = ""
_OF_TORCH = "torch.distributed "

F = TypeVar("F", bound=Callable[..., Any])
# Key, rank and world size: a tuple, which every version of dynamo takes as a constant.
GroupSpec = tuple[str, int, int]

_holders: WeakValueDictionary[str, Communicator] = WeakValueDictionary()
_keys: WeakKeyDictionary[Communicator, str] = WeakKeyDictionary()
_guard = threading.Lock()


def evaluated_while_tracing(fn: F) -> F:
    """Makes dynamo call the function while tracing, and treat its result as a constant.

    ``torch.compiler.assume_constant_result`` does the same, but loads all of dynamo.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def not_traced(reason: str) -> Callable[[F], F]:
    """Makes dynamo break the graph at a call; under fullgraph=True its error names the reason.

    ``torch.compiler.disable`` does the same, but loads all of dynamo.
    """

    def mark(fn: F) -> F:
        fn._torchdynamo_disable = True  # type: ignore[attr-defined]
        fn._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return fn

    return mark


def group_spec_of(group: Any, operation: str) -> GroupSpec:
    """Returns the key, rank and world size of ``group`` for a graph; traceable.

    Raises:
        ArgumentError: this rank is not in the group, or ``group`` is not a group of ringcomm.
        RingcommError: there is no default group.
    """
    if not torch.compiler.is_compiling():
        return _spec(communicator_of(group, operation))
    if group is None:
        return _default_spec(operation)
    if isinstance(group, DeviceMesh):
        group = group_of_mesh(group, operation)
    if isinstance(group, ProcessGroup):
        # Dynamo guards the group's name, and treats the rest of the group as opaque.
        return _spec_of_group(group.group_name, operation)
    # Only id() makes dynamo guard the communicator's identity, and in torch 2.11 the functions that
    # dynamo evaluates while tracing take only constants.
    return _spec_at(id(communicator_of(group, operation)), operation)


def _spec(communicator: Communicator) -> GroupSpec:
    return key_of(communicator), communicator.rank, communicator.world_size


@evaluated_while_tracing
def _default_spec(operation: str) -> GroupSpec:
    communicator = default_communicator(operation)
    return DEFAULT, communicator.rank, communicator.world_size


@evaluated_while_tracing
def _spec_at(identity: int, operation: str) -> GroupSpec:
    communicator = live_at(identity)
    if communicator is None:
        raise RingcommError(
            f"{operation}: expected a communicator of this process as the group, got one that was "
            "forked from another process; build a new one"
        )
    return _spec(communicator)


@evaluated_while_tracing
def _spec_of_group(name: str, operation: str) -> GroupSpec:
    return _spec(communicator_of(_resolve_process_group(GroupName(name)), operation))


def key_of(communicator: Communicator) -> str:
    """Returns the key with which :func:`find` finds the communicator; see NOTE [Group keys]."""
    key = _keys.get(communicator)
    if key is not None and _holders.get(key) is communicator:
        return key
    stem = f"{communicator.name}:{communicator.rank}/{communicator.world_size}"
    with _guard:
        key = next(each for each in _numbered(stem) if _is_free(each, communicator))
        _holders[key] = communicator
        _keys[communicator] = key
    return key


def _numbered(stem: str) -> Iterator[str]:
    yield stem
    yield from (f"{stem}#{number}" for number in count(1))


def _is_free(key: str, communicator: Communicator) -> bool:
    holder = _holders.get(key)
    return holder is None or holder is communicator or holder.aborted


def key_of_group(name: str) -> str:
    """Returns the key of the backend's group; see NOTE [Groups of the backend in a graph]."""
    return _OF_TORCH + name


def communicator_named(name: str) -> Communicator | None:
    """Returns the host communicator of the named process group; None if it is not the backend's."""
    return communicator_behind(_resolve_process_group(GroupName(name)))


def groups_of_the_backend() -> tuple[str, ...]:
    """Returns the names of this process's groups that belong to the backend."""
    names = sorted(_world.pg_names.values())
    return tuple(name for name in names if communicator_named(name) is not None)


def find(key: str, world_size: int, operation: str) -> Communicator:
    """Returns the communicator of a key; the key DEFAULT means this thread's default group.

    Raises:
        RingcommError: the communicator is gone, or there is no default group.
        ArgumentError: the default group has another world size than when the graph was traced.
    """
    if key.startswith(_OF_TORCH):
        name = key.removeprefix(_OF_TORCH)
        member = communicator_named(name)
        if member is None:
            raise RingcommError(
                f"{operation}: expected the process group {name!r} to be of the backend "
                '"ringcomm", as when this function was compiled; compile it again'
            )
        return member
    if key != DEFAULT:
        found = _holders.get(key)
        if found is None:
            raise RingcommError(
                f"{operation}: the communicator {key!r} is gone, or this process has not called "
                "ringcomm.functional with it yet; keep it alive for as long as its graphs run"
            )
        return found
    communicator = default_communicator(operation)
    if communicator.world_size != world_size:
        raise ArgumentError(
            f"{where(operation, communicator.rank, communicator.world_size)}: expected the default "
            f"group to have {world_size} ranks as when this function was compiled, got "
            f"{communicator.world_size}; call torch.compiler.reset(), or pass group="
        )
    return communicator


# This part has the schemas, kernels and shape functions of the operators ``torch.ops.ringcomm.*``.
#
# All operators take ``group``, a key from :mod:`ringcomm.functional.collectives`, and its world
# size; ``op`` is the name of a ``ReduceOp``; ``factor`` is the factor of PREMUL_SUM, else 1;
# ``src`` and ``dst`` are global ranks. Outputs are contiguous and share no memory with the input.

Splits = Sequence[int] | None

_REDUCING = "(Tensor input, str op, float factor, str group, int world_size) -> Tensor"
_SCHEMAS = {
    "all_gather": "(Tensor input, str group, int world_size) -> Tensor",
    "all_reduce": _REDUCING,
    "all_to_all": "(Tensor input, SymInt[]? output_splits, SymInt[]? input_splits, str group, "
    "int world_size) -> Tensor",
    "broadcast": "(Tensor input, int src, str group, int world_size) -> Tensor",
    "reduce": "(Tensor input, int dst, str group, int world_size) -> Tensor",
    "reduce_scatter": _REDUCING,
}
OPERATORS = tuple(_SCHEMAS)


def named(operation: str) -> str:
    """Returns an operation's name in errors; the prefix marks the out-of-place version.

    Functions of other packages already have the package's name, and keep their names.
    """
    return operation if "." in operation else f"functional.{operation}"


def _expect(holds: bool | torch.SymBool, otherwise: str) -> None:
    """Raises unless ``holds``, which may depend on symbolic sizes; kernels' checks may not."""
    torch._check(holds, lambda: otherwise)  # type: ignore[no-untyped-call]


def _op_of(name: str, factor: float) -> Any:
    # Pass an unknown name on: the communicator refuses it with the error for all bad ops.
    return premul_sum(factor) if name == PREMUL_SUM else getattr(ReduceOp, name, name)


def _check_rows(checks: CallChecks, input: Tensor) -> None:
    checks.tensor("tensor", input)
    if not input.dim():
        checks.fail("tensor: expected at least one dimension, got a scalar; pass tensor.view(1)")


def _all_gather(input: Tensor, group: str, world_size: int) -> Tensor:
    communicator = find(group, world_size, named("all_gather"))
    _check_rows(communicator.engine.checks(named("all_gather")), input)
    output = _gathered(input, group, world_size)
    communicator.all_gather_into_tensor(output, readable(input))
    return output


def _gathered(input: Tensor, group: str, world_size: int) -> Tensor:
    _expect(input.dim() > 0, "functional.all_gather: got a scalar")
    return input.new_empty((input.size(0) * world_size, *input.shape[1:]))


def _reduce_scatter(input: Tensor, op: str, factor: float, group: str, world_size: int) -> Tensor:
    communicator = find(group, world_size, named("reduce_scatter"))
    checks = communicator.engine.checks(named("reduce_scatter"))
    _check_rows(checks, input)
    if input.size(0) % world_size:
        checks.fail(
            f"tensor: expected dimension 0 divisible by world_size {world_size}, got shape "
            f"{tuple(input.shape)}; pad it"
        )
    output = _scattered(input, op, factor, group, world_size)
    communicator.reduce_scatter_tensor(output, readable(input), _op_of(op, factor))
    return output


def _scattered(input: Tensor, op: str, factor: float, group: str, world_size: int) -> Tensor:
    _expect(input.dim() > 0, "functional.reduce_scatter: got a scalar")
    _expect(
        input.size(0) % world_size == 0,
        f"functional.reduce_scatter: dimension 0 is not divisible by world_size {world_size}",
    )
    return input.new_empty((input.size(0) // world_size, *input.shape[1:]))


def _all_reduce(input: Tensor, op: str, factor: float, group: str, world_size: int) -> Tensor:
    communicator = find(group, world_size, named("all_reduce"))
    communicator.engine.checks(named("all_reduce")).tensor("tensor", input)
    output = _like(input).copy_(input)
    communicator.all_reduce(output, _op_of(op, factor))
    return output


def _like(input: Tensor, *_: object) -> Tensor:
    return input.new_empty(input.shape)


def _all_to_all(
    input: Tensor, output_splits: Splits, input_splits: Splits, group: str, world_size: int
) -> Tensor:
    communicator = find(group, world_size, named("all_to_all"))
    checks = communicator.engine.checks(named("all_to_all"))
    _check_rows(checks, input)
    if output_splits is None and input_splits is not None:
        checks.fail("output_splits: expected a list where input_splits is one, got None")
    _check_splits(checks, "input_splits", input_splits, input.size(0))
    if output_splits is not None:
        _check_splits(checks, "output_splits", output_splits, sum(output_splits))
    output = _exchanged(input, output_splits, input_splits, group, world_size)
    communicator.all_to_all_single(output, readable(input), output_splits, input_splits)
    return output


def _check_splits(checks: CallChecks, name: str, splits: Splits, rows: int) -> None:
    world_size = checks.world_size
    if splits is None:
        if rows % world_size:
            checks.fail(
                f"tensor: expected dimension 0 divisible by world_size {world_size}, got {rows} "
                f"rows; pass {name}"
            )
    elif len(splits) != world_size or sum(splits) != rows or min(splits) < 0:
        checks.fail(
            f"{name}: expected {world_size} numbers >= 0, one per rank, with the sum of the rows "
            f"({rows}), got {list(splits)}"
        )


def _exchanged(
    input: Tensor, output_splits: Splits, input_splits: Splits, group: str, world_size: int
) -> Tensor:
    _expect(input.dim() > 0, "functional.all_to_all: got a scalar")
    if output_splits is None:
        return input.new_empty(input.shape)
    return input.new_empty((sum(output_splits), *input.shape[1:]))


def _broadcast(input: Tensor, src: int, group: str, world_size: int) -> Tensor:
    communicator = find(group, world_size, named("broadcast"))
    communicator.engine.checks(named("broadcast")).tensor("tensor", input)
    root = root_of(communicator, named("broadcast"), "src", src, None)
    output = _like(input)
    if communicator.rank == root:
        output.copy_(input)
    communicator.broadcast(output, root)
    return output


def _reduce(input: Tensor, dst: int, group: str, world_size: int) -> Tensor:
    """Returns the sum on ``dst``, zeros elsewhere: the gradient of :func:`_broadcast`."""
    communicator = find(group, world_size, named("reduce"))
    communicator.engine.checks(named("reduce")).tensor("tensor", input)
    root = root_of(communicator, named("reduce"), "dst", dst, None)
    if communicator.rank != root:
        communicator.reduce(readable(input), root)  # changes the tensor only on the root
        return input.new_zeros(input.shape)
    output = _like(input).copy_(input)
    communicator.reduce(output, root)
    return output


_KERNELS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "all_gather": (_all_gather, _gathered),
    "all_reduce": (_all_reduce, _like),
    "all_to_all": (_all_to_all, _exchanged),
    "broadcast": (_broadcast, _like),
    "reduce": (_reduce, _like),
    "reduce_scatter": (_reduce_scatter, _scattered),
}


# An operator's gradient is the collective that moves data in the opposite direction.
#
# NOTE [What the gradient is of] Every rank calls ``backward`` on its own scalar, and gets the
# gradient of the sum of all ranks' scalars, as in ``torch.distributed.nn.functional``. So a loss
# that all ranks compute equally from collected values counts world_size times; divide it (``loss /
# world_size``), or collect with AVG.
#
# NOTE [Every rank in the backward] A collective's gradient is a collective. All ranks must take
# part, as often and in the same order as in the forward: on each rank the input must require grad,
# and the scalar must depend on the result, even if only by ``+ 0 * result.sum()``.
#
# PREMUL_SUM factors are real, so an operator's transpose equals its conjugate transpose: complex
# gradients need no special case. Each rank multiplies the gradient it receives by its own factor.
#
# The operators are linear. So in forward mode the tangents of the ranks' inputs pass through the
# collective of the values, with the same op and factor; all ranks must then have tangents.

LINEAR = ("SUM", "AVG", PREMUL_SUM)
# The operators, for calls in backward.
_duals = torch.ops.ringcomm


def no_gradient(where: str, op: str, has_tangent: bool = False) -> UnsupportedError:
    """Returns the error for an op that has no gradient."""
    what = "has a tangent (forward mode)" if has_tangent else "requires grad"
    return UnsupportedError(
        f"{where}: expected one of the ops {', '.join(LINEAR)} for a tensor that {what}, got {op}, "
        "which has no gradient here; call .detach() first"
        f"{'' if has_tangent else ', or use torch.no_grad()'}"
    )


def _check_op(operation: str) -> Callable[[Sequence[Any], bool], None]:
    def check(inputs: Sequence[Any], has_tangent: bool) -> None:
        _, op, _, group, world_size = inputs
        if op not in LINEAR:
            rank = find(group, world_size, named(operation)).rank
            raise no_gradient(where(named(operation), rank, world_size), op, has_tangent)

    return check


def linear_tangent(name: str) -> Tangent:
    """Returns the tangent of an operator that is linear in its first argument."""

    def tangent(inputs: Sequence[Any], results: Sequence[Any], tangents: Sequence[Any]) -> Any:
        return getattr(_duals, name)(tangents[0], *inputs[1:])

    return tangent


def _remember(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    ctx.arguments = inputs[1:]


def _all_gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    group, world_size = ctx.arguments
    return _duals.reduce_scatter(grad, "SUM", 1.0, group, world_size), None, None


def _reduce_scatter_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    op, factor, group, world_size = ctx.arguments
    gathered = _duals.all_gather(grad / world_size if op == "AVG" else grad, group, world_size)
    return gathered * factor if op == PREMUL_SUM else gathered, None, None, None, None


def _all_reduce_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    op, factor, group, world_size = ctx.arguments
    reduced = _duals.all_reduce(grad, "AVG" if op == "AVG" else "SUM", 1.0, group, world_size)
    return reduced * factor if op == PREMUL_SUM else reduced, None, None, None, None


def _all_to_all_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    output_splits, input_splits, group, world_size = ctx.arguments
    back = _duals.all_to_all(grad, input_splits, output_splits, group, world_size)
    return back, None, None, None, None


def _broadcast_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return _duals.reduce(grad, *ctx.arguments), None, None, None


def _reduce_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return _duals.broadcast(grad, *ctx.arguments), None, None, None


_BACKWARDS: dict[str, Callable[..., Any]] = {
    "all_gather": _all_gather_backward,
    "all_reduce": _all_reduce_backward,
    "all_to_all": _all_to_all_backward,
    "broadcast": _broadcast_backward,
    "reduce": _reduce_backward,
    "reduce_scatter": _reduce_scatter_backward,
}
# Collectives that may change the size of dimension 0; the other collectives keep the shape.
_BY_ROWS = ("all_gather", "all_to_all", "reduce_scatter")
for _name in OPERATORS:
    register(
        _name,
        _SCHEMAS[_name],
        *_KERNELS[_name],
        derivatives=Derivatives(
            _BACKWARDS[_name],
            linear_tangent(_name),
            _remember,
            check=_check_op(_name) if _SCHEMAS[_name] == _REDUCING else None,
        ),
        batching=Batching(-1, least_dims=1) if _name in _BY_ROWS else Batching(0),
    )


serve(
    cast(Any, _holders).data,
    {name: getattr(torch.ops.ringcomm, name).default for name in OPERATORS},
)
_ops = torch.ops.ringcomm
_NAME_AT = {id(getattr(ReduceOp, name)): name for name in OP_CODES if name != PREMUL_SUM}


def all_gather(tensor: Tensor, group: Group = None) -> Tensor:
    """Returns the tensors of all ranks, one after the other along dimension 0.

    Its gradient is :func:`reduce_scatter` with SUM.

    Args:
        tensor: [n, ...], of one shape and dtype on all ranks; any strides.
        group: a Communicator, process group of the backend or mesh; None means the default group.

    Returns:
        [world_size * n, ...], contiguous.

    Raises:
        ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    key, world_size = enter("all_gather", tensor, group)
    return cast(Tensor, _callee("all_gather", tensor)(tensor, key, world_size))


def reduce_scatter(tensor: Tensor, op: Any = SUM, group: Group = None) -> Tensor:
    """Combines the tensors of all ranks; rank r gets the r-th of world_size equal chunks.

    Its gradient is :func:`all_gather`. For AVG the gradient is divided by world_size, for
    PREMUL_SUM it is multiplied by this rank's factor.

    Args:
        tensor: [world_size * n, ...], of one shape and dtype on all ranks; any strides.
        op: a ``ReduceOp`` or ``premul_sum(factor)``.
        group: a Communicator, process group of the backend or mesh; None means the default group.

    Returns:
        [n, ...], contiguous.

    Raises:
        ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
        UnsupportedError: ``tensor`` requires grad and ``op`` is not SUM, AVG or PREMUL_SUM.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    name, factor = _name_and_factor(op, "reduce_scatter", group)
    key, world_size = enter("reduce_scatter", tensor, group, name)
    return cast(Tensor, _callee("reduce_scatter", tensor)(tensor, name, factor, key, world_size))


def all_reduce(tensor: Tensor, op: Any = SUM, group: Group = None) -> Tensor:
    """Combines the tensors of all ranks element by element.

    Its gradient is :func:`all_reduce` with the same op; for PREMUL_SUM, with SUM, multiplied by
    this rank's factor.

    Args:
        tensor: of one shape and dtype on all ranks; any strides.
        op: a ``ReduceOp`` or ``premul_sum(factor)``.
        group: a Communicator, process group of the backend or mesh; None means the default group.

    Returns:
        A contiguous tensor of the shape of ``tensor``.

    Raises:
        ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
        UnsupportedError: ``tensor`` requires grad and ``op`` is not SUM, AVG or PREMUL_SUM.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    name, factor = _name_and_factor(op, "all_reduce", group)
    key, world_size = enter("all_reduce", tensor, group, name)
    return cast(Tensor, _callee("all_reduce", tensor)(tensor, name, factor, key, world_size))


def all_to_all(
    tensor: Tensor,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    group: Group = None,
) -> Tensor:
    """Splits the tensor along dimension 0, sends split r to rank r, and joins received splits.

    Its gradient is :func:`all_to_all` with the splits swapped.

    Args:
        tensor: [n, ...], of one dtype and row shape on all ranks; any strides.
        output_splits: the number of rows from each rank; None means equal numbers, and needs
            ``input_splits=None``, since sent rows do not determine received rows.
        input_splits: the number of rows to each rank, with the sum n; None means equal numbers.
        group: a Communicator, process group of the backend or mesh; None means the default group.

    Returns:
        [sum(output_splits), ...], contiguous.

    Raises:
        ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    key, world_size = enter("all_to_all", tensor, group)
    if not (torch.compiler.is_compiling() or (output_splits is None and input_splits is None)):
        # Do not use the communicator's checks: they refuse transforms, which the operator supports.
        communicator = communicator_of(group, named("all_to_all"))
        checks = CallChecks(named("all_to_all"), communicator.rank, communicator.world_size)
        output_splits = checks.splits("output_splits", output_splits)
        input_splits = checks.splits("input_splits", input_splits)
    return cast(
        Tensor, _callee("all_to_all", tensor)(tensor, output_splits, input_splits, key, world_size)
    )


def broadcast(tensor: Tensor, src: int, group: Group = None) -> Tensor:
    """Returns the ``tensor`` of rank ``src`` on every rank.

    The gradient is the sum of all ranks' gradients on rank ``src``, and zeros on the other ranks.

    Args:
        tensor: of one shape and dtype on all ranks; any strides. Only the values of ``src``
            matter, but for a gradient it must require grad on all ranks.
        src: the global rank that has the data.
        group: a Communicator, process group of the backend or mesh; None means the default group.

    Returns:
        A contiguous tensor of the shape of ``tensor``.

    Raises:
        ArgumentError: bad argument; nothing was sent, and peers wait for this rank.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    key, world_size = enter("broadcast", tensor, group)
    if not torch.compiler.is_compiling() and (type(src) is not int or not 0 <= src <= MOST):
        communicator = communicator_of(group, named("broadcast"))
        src = communicator.ranks[root_of(communicator, named("broadcast"), "src", src, None)]
    return cast(Tensor, _callee("broadcast", tensor)(tensor, src, key, world_size))


def enter(function: str, tensor: Any, group: Group, op: str = "SUM") -> tuple[str, int]:
    """Makes the checks of a call that need no shape; returns the group's key and world size.

    Args:
        function: the public function that is called.
        tensor: the tensor that was passed to it.
        group: the group that was passed to it.
        op: name of the reduction.
    """
    operation = named(function)
    key, rank, world_size = group_spec_of(group, operation)
    if torch.compiler.is_compiling():
        _prepare_to_compile()
    if not isinstance(tensor, Tensor):
        raise ArgumentError(
            f"{where(operation, rank, world_size)}: tensor: expected a tensor, got "
            f"{type(tensor).__name__}"
        )
    if tensor.is_nested:  # an operator cannot read its shape
        raise UnsupportedError(
            f"{where(operation, rank, world_size)}: tensor: expected a dense tensor with memory, "
            f"got a {without_memory(tensor)}"
        )
    differentiable = tensor.requires_grad and torch.is_grad_enabled()
    if differentiable and op not in LINEAR:
        raise no_gradient(where(operation, rank, world_size), op)
    if not torch.compiler.is_compiling() and get_debug_level() == DebugLevel.DETAIL:
        _check_agreement(operation, differentiable, has_tangent(tensor), group)
    return key, world_size


def _callee(name: str, tensor: Tensor) -> Callable[..., Any]:
    """Returns the operator, or its native function if torch need not record the call; traceable."""
    seen = (
        torch.compiler.is_compiling()
        or (tensor.requires_grad and torch.is_grad_enabled())
        or torch._C._len_torch_function_stack()
    )
    operator: Callable[..., Any] = getattr(_ops, name)
    return operator if seen else FUNCTIONS[name]


def _name_and_factor(op: Any, function: str, group: Group) -> tuple[str, float]:
    """Returns the name and the factor of an op; traceable."""
    if not torch.compiler.is_compiling():
        try:
            reduction = reduction_of(op)
        except ArgumentError as error:
            raise _bad_op(function, group, str(error)) from None
        return reduction.name, reduction.factor
    if isinstance(op, PremulSum):
        return PREMUL_SUM, op.factor
    # Dynamo cannot read torch's ops, but it guards their id().
    name = _name_at(id(op))
    if not name:
        raise _bad_op(
            function, group, "op: torch.compile takes ReduceOp.SUM and the like, and premul_sum"
        )
    return name, 1.0


@evaluated_while_tracing
def _prepare_to_compile() -> bool:
    return keep_order()


@evaluated_while_tracing
def _name_at(identity: int) -> str:
    return _NAME_AT.get(identity, "")


def _bad_op(function: str, group: Group, text: str) -> ArgumentError:
    operation = named(function)
    _, rank, world_size = group_spec_of(group, operation)
    return ArgumentError(f"{where(operation, rank, world_size)}: {text}")


def _check_agreement(operation: str, differentiable: bool, has_tangent: bool, group: Group) -> None:
    """Raises on every rank if only some ranks will call the collectives of the derivatives.

    The check costs a collective, so it runs only with TORCH_DISTRIBUTED_DEBUG=DETAIL.
    """
    communicator = communicator_of(group, operation)
    with torch._C._DisableFuncTorch():
        by_rank = gather_bytes(communicator, bytes([differentiable, has_tangent]), 2)
    for number, what in enumerate(("requires grad", "has a tangent")):
        rows = [(bool(flags[number]),) for flags in by_rank]
        if other := first_other(rows):
            here = [rank for rank, (does,) in enumerate(rows) if does]
            raise unequal(
                where(operation, communicator.rank, communicator.world_size),
                (f"whether the tensor {what}",),
                rows,
                other,
                f"It is true on ranks {here} of the group. Make it so on all ranks or on none, "
                f"since the {('gradient', 'tangent')[number]} is a collective",
            )
