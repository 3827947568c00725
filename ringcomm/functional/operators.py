"""Registers the operators ``torch.ops.ringcomm.*``: kernels, order, derivatives and batches.

NOTE [Ranks stay in step] To a compiler these operators look like functions: an unused result may
be dropped, two equal calls merged, a cheap one computed again in the backward graph. Where the
ranks' graphs differ (one of them logs a result, another does not), that happens on some ranks
only, and they hang or exchange wrong data. So the operators are registered as ordered effects:
AOTAutograd threads a token through all of them, which keeps each call, once, in the order of the
program, on every rank. Inductor needs NOTE [Order in inductor] besides.

NOTE [Order in inductor] inductor turns the tokens of NOTE [Ranks stay in step] into dependencies
between kernels. It files them under the name of a buffer, where its scheduler looks for the name
of an operation, so they are lost (torch 2.11 to 2.14, pytorch/pytorch#189209), and the scheduler,
which reorders to save memory, may exchange two collectives on one rank only. So the operators get
lowerings that file them under the right name; as dependencies that order, and do not keep the
earlier result in memory.

NOTE [Forward mode] ``torch.library.register_autograd`` registers gradients only: an operator drops
the tangents of its inputs, and ``torch.func.grad`` refuses the generated function. So each operator
has an autograd kernel of its own. torch calls the kernel for plain tensors, and once for each
nested transform of ``torch.func`` that differentiates, with the tensors of that level. The kernel
therefore applies a function of one level, as torch does for ``torch.autograd.Function``.

NOTE [Tangents on all ranks] A tangent of a collective is a collective. The ranks make the same
calls if the same call has a tangent on every rank. Which of its tensors has one does not matter: a
missing tangent counts as zeros, so a product of two tensors always makes both calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch._library.effects import EffectType
from torch.autograd.function import _SingleLevelFunction

from ringcomm.comm.host.arguments import only_inlined
from ringcomm.errors import UnsupportedError

Tensor = torch.Tensor

# Takes the arguments, the results and the tangents of the arguments; returns those of the results.
Tangent = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Any]

# The names of all operators, in the order of their registration.
registered: list[str] = []
_library = torch.library.Library("ringcomm", "DEF")  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Derivatives:
    """How an operator is differentiated.

    Attributes:
        backward: returns the gradients of the arguments from the context and the gradients of the
            results.
        tangent: returns the tangents of the results from the arguments, the results and the
            tangents of the arguments. Arguments and results come without tangents. None if
            ``check`` refuses forward mode.
        remember: stores in the context what ``backward`` reads, given arguments and result.
        check: called before any communication with the arguments of a call that is to be
            differentiated, and whether one of them has a tangent; raises UnsupportedError where
            there is no derivative.
    """

    backward: Callable[..., tuple[Any, ...]]
    tangent: Tangent | None
    remember: Callable[[Any, Sequence[Any], Any], None]
    check: Callable[[Sequence[Any], bool], None] | None = None


@dataclass(frozen=True)
class Batching:
    """Where ``torch.vmap`` may put the batch of the first tensor so that one call serves it all.

    Attributes:
        dim: the dimension of the batch: 0, or -1 for the last.
        least_dims: of a sample; the kernel refuses samples with fewer.
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
    """Makes ``kernel`` an operator whose calls keep their order; see NOTE [Ranks stay in step].

    Args:
        name: of the operator in ``torch.ops.ringcomm``.
        schema: its arguments and results.
        kernel: for tensors of any device.
        fake: gives results of the right shapes from tensors without data.
        derivatives: of the operator; None if no result depends on a tensor's values.
        batching: of the first argument under ``torch.vmap``; None to call it once per sample.
    """
    # Kernels bring their input into order themselves, so a compiler need not keep its strides.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
    qualified = f"ringcomm::{name}"
    _library.define(name + schema, tags=tags)  # type: ignore[no-untyped-call]
    # Under a transform, a compiled function calls the operator with Dynamo on, which would compile
    # the kernel's frames.
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


# ---- derivatives; see NOTE [Forward mode] -------------------------------------------------------


# torch has one level of dual numbers, which nested transforms share.
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
    """Whether one of the values is a tensor with a tangent, at the innermost level.

    Compiled graphs enter the level without forward_ad's knowledge, so only the tensors can tell.
    """
    for value in values:  # of every call, so not by any(), which takes twice as long
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
    """Lets the transforms outside of the current one differentiate what is called here."""
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

    Its last argument is the set of dispatch keys, and whether an input has a tangent.
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
        # The tangents of this level are unpacked, so that only outer levels differentiate.
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
    """Returns arguments and results without their tangents."""
    tensors = iter(ctx.saved_tensors)
    values = [
        _unpack_dual(next(tensors), level=_LEVEL)[0] if kept is None else kept[0]
        for kept in ctx.kept
    ]
    return values[: ctx.num_inputs], values[ctx.num_inputs :]


def refuse_transforms(operation: str, advice: str, *tensors: Any) -> None:
    """Raises if a transform of ``torch.func`` is active or a tensor has a tangent.

    Raises:
        UnsupportedError: names the transform or forward mode, and gives the advice.
    """
    transform = _transform()
    if transform is not None:
        raise UnsupportedError(
            f"{operation}: torch.func's transforms do not go through it, and {transform} is "
            f"active; {advice}"
        )
    if has_tangent(*tensors):
        raise no_forward_mode(operation, advice)


def no_forward_mode(operation: str, advice: str) -> UnsupportedError:
    """Returns the error for a call of which torch wants tangents."""
    return UnsupportedError(
        f"{operation}: forward mode (dual numbers, torch.func.jvp, jacfwd and hessian) is not "
        f"supported, and a tensor has a tangent; {advice}"
    )


# ---- batches ------------------------------------------------------------------------------------


def _batched(operator: Any, batching: Batching | None) -> Callable[..., Any]:
    """Returns the rule for ``torch.vmap``: one call, or one for each sample in their order."""

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


# ---- order in inductor; see the NOTE ------------------------------------------------------------


@cache
def keep_order() -> bool:
    """Gives the operators their lowerings; loads inductor, so only once something is compiled."""
    from torch._inductor.lowering import lowerings

    for name in registered:
        operator = getattr(torch.ops.ringcomm, name).default
        lowerings[operator] = _in_order(operator)
    return True


def _in_order(operator: Any) -> Callable[..., Any]:
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.virtualized import V

    lower: Callable[..., Any] = fallback_handler(operator, add_to_fallback_set=False)

    def lower_in_order(*arguments: Any) -> Any:
        graph = V.graph
        before = len(graph.operations)
        result = lower(*arguments)
        previous = graph.effectful_ops.get(EffectType.ORDERED)
        if previous is not None:
            for operation in graph.operations[before:]:
                name = operation.get_operation_name()
                graph.additional_buffer_deps[name].add(previous.get_name())
        if graph.current_node.target is operator:
            # A pass over the graph has put it there, without a token.
            graph.effectful_ops[EffectType.ORDERED] = graph.operations[-1]
        return result

    return lower_in_order
