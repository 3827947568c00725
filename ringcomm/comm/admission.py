"""Admission to a call: what of torch has to see the call, and tensors that have no plain memory."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Sequence
from operator import attrgetter
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.weak import WeakIdKeyDictionary

from ringcomm import _native
from ringcomm.errors import UnsupportedError

__all__ = [
    "WATCHES_KEYS",
    "admit_gradients",
    "admit_keys",
    "intercepting_keys",
    "is_below_autograd",
    "is_watched",
    "only_inlined",
    "only_inlined_methods",
    "outside_of_compile",
    "without_memory",
]

Tensor = torch.Tensor
F = TypeVar("F", bound=Callable[..., Any])
Class = TypeVar("Class", bound="type[Any]")

# NOTE [Keys of a thread]
#
# A call of ringcomm is not an operator of torch: it reads and writes memory, and torch's dispatcher
# does not see it. A trace would therefore lose the call, a transform would miss its effect, and a
# fake tensor has no memory. All of them work by keys that a thread adds to every dispatch. Each
# call first tests one word for such keys. The native module reads this word where torch keeps it.
# An operator that runs below a mode or a transform has none of the keys, so the operators of
# ringcomm.functional and of torch's functional collectives make their calls as usual.
#
# A mode that only watches, such as FlopCounterMode, does not change what a call does. Calls under
# it are made with all checks.

_KEY = torch._C.DispatchKey


def _word_of(key: Any) -> int:
    return int(torch._C.DispatchKeySet(key).raw_repr())


_EVERY_KEY = 2**64 - 1
_WATCHED = _EVERY_KEY & ~(_word_of(_KEY.BackendSelect) | _word_of(_KEY.ADInplaceOrView))
_OF_MODES = _word_of(_KEY.Python)
_OF_TRANSFORMS = _word_of(_KEY.FuncTorchDynamicLayerFrontMode)
_OF_FUNCTIONALIZATION = _word_of(_KEY.Functionalize)
_OF_EXPORT = _word_of(_KEY.PreDispatch)
_OF_TRACES = _word_of(torch._C._dispatch_key_parse("Tracer"))


def _keys_of_torch() -> int:
    """Returns the watched keys that this thread adds to each dispatch, by torch's own functions."""
    included = torch._C._dispatch_tls_local_include_set() - (
        torch._C._dispatch_tls_local_exclude_set()
    )
    return int(included.raw_repr()) & _WATCHED


def _agrees_with_torch() -> bool:
    """Tests the word that the native module reads against torch's own answer."""
    if not _native.watch_keys(_WATCHED):
        return False
    for key in (_KEY.Python, _KEY.FuncTorchDynamicLayerFrontMode, _KEY.Functionalize):
        with torch._C._IncludeDispatchKeyGuard(key):
            if _native.intercepting_keys() != _keys_of_torch() or not _keys_of_torch():
                return False
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
                if _native.intercepting_keys() != _keys_of_torch():
                    return False
    return True


# False where torch keeps the word elsewhere: all calls then take the path with Python's checks.
WATCHES_KEYS = _agrees_with_torch()
intercepting_keys: Callable[[], int] = _native.intercepting_keys if WATCHES_KEYS else _keys_of_torch


def _words_at(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(address))


def _find_keys() -> None:
    """Finds where tensors have their dispatch keys, and has the native module read them there.

    ``Tensor.is_neg()`` takes longer than the rest of the check and releases the interpreter's lock.
    The place is used only if it alone agrees with torch for tensors of different keys. Otherwise
    the native module calls ``is_neg()``.
    """
    plain = torch.ones(2, device="cpu")
    probes = [
        plain,
        torch._neg_view(plain),
        torch.complex(plain, plain).conj(),
        torch.nn.Parameter(plain),
        plain.to_sparse(),
    ]
    impl_at = set(range(_WORDS_OF_OBJECT))
    keys_at = set(range(_WORDS_OF_IMPL))
    for tensor in probes:
        mine = _words_at(id(tensor), _WORDS_OF_OBJECT)
        impl_at &= {at for at, word in enumerate(mine) if word == tensor._cdata}
        keys = torch._C._dispatch_keys(tensor).raw_repr()
        its = _words_at(tensor._cdata, _WORDS_OF_IMPL)
        keys_at &= {at for at, word in enumerate(its) if word == keys}
    if len(impl_at) == len(keys_at) == 1:
        (impl,), (keys,) = impl_at, keys_at
        allowed = torch._C._dispatch_keys(plain).raw_repr()
        _native.read_keys_at(impl * _WORD_BYTES, keys * _WORD_BYTES, allowed)


_WORD_BYTES = 8
_WORDS_OF_OBJECT = Tensor.__basicsize__ // _WORD_BYTES
# torch's c10/core/TensorImpl.h asserts a size of at most 208 bytes; the keys are near the end.
_WORDS_OF_IMPL = 184 // _WORD_BYTES
if WATCHES_KEYS:
    _find_keys()

_TRANSFORMS = {
    "Grad": "torch.func.grad or vjp",
    "Jvp": "torch.func.jvp",
    "Vmap": "torch.func.vmap",
    "Functionalize": "torch.func.functionalize",
}
_MODES: dict[Any, str] = {
    torch._C._TorchDispatchModeKey.FAKE: "has tensors without memory",
    torch._C._TorchDispatchModeKey.PROXY: "records a graph (make_fx), from which the call would be "
    "missing",
    torch._C._TorchDispatchModeKey.FUNCTIONAL: "replaces changes in place, of which the call makes "
    "some",
}


def _interceptor(keys: int) -> str:
    """Returns the trace, transform or mode that would miss a call; empty if there is none."""
    if keys & _OF_TRANSFORMS:
        level = torch._C._functorch.peek_interpreter_stack()
        kind = "" if level is None else level.key().name
        return f"{_TRANSFORMS.get(kind, 'a transform of torch.func')}, which would miss the call"
    if keys & _OF_TRACES:
        return "torch.jit.trace, whose graph would not have the call"
    if keys & _OF_EXPORT:
        return "a trace for export (make_fx), whose graph would not have the call"
    if keys & _OF_MODES:
        for mode in reversed(_get_current_dispatch_mode_stack()):
            effect = _MODES.get(getattr(mode, "_mode_key", None))
            if effect:
                return f"{type(mode).__name__}, which {effect}"
    if keys & _OF_FUNCTIONALIZATION:
        return "functionalization, which replaces changes in place"
    return ""


def admit_keys(operation: object) -> None:
    """Checks that nothing of torch has to see a call that it cannot see: NOTE [Keys of a thread].

    Args:
        operation: starts the error's message.

    Raises:
        UnsupportedError: a trace, a transform, or a mode of fake or functional tensors is active.
    """
    keys = intercepting_keys()
    if keys and (by := _interceptor(keys)):
        raise UnsupportedError(
            f"{operation}: expected a call that torch executes, got one under {by}. Use "
            "ringcomm.functional or torch.distributed._functional_collectives there, which are "
            "operators of torch, or make the call outside"
        )


def is_watched() -> bool:
    """True under a mode on torch's stack; see :func:`admit_keys` for those that are refused."""
    return bool(intercepting_keys() & _OF_MODES)


# Dynamo.


def only_inlined(function: F) -> F:
    """Has Dynamo trace a function inside a larger graph, and never as a frame of its own.

    After a graph break Dynamo would compile each function that is called as a frame of its own.
    It skips this frame and all that it calls.
    """
    eval_frame: Any = torch._C._dynamo.eval_frame
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def outside_of_compile(reason: str) -> Callable[[F], F]:
    """Keeps Dynamo from tracing a function, as ``torch.compiler.disable`` does.

    It does not import Dynamo, which would add 1.2 s (Zen 4) to the import of ringcomm.

    Args:
        reason: Dynamo shows it where it breaks a graph, and in the error under fullgraph=True.
    """

    def mark(function: F) -> F:
        # Dynamo looks for these attributes before it traces a call.
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return only_inlined(function)

    return mark


def only_inlined_methods(cls: Class) -> Class:
    """Does :func:`only_inlined` for all methods of a class that ringcomm defines.

    Dynamo cannot read the attributes of a process group, since torch declares groups opaque to it.
    """
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] == "ringcomm":
            for member in vars(base).values():
                method = member.fget if isinstance(member, property) else member
                if isinstance(method, FunctionType):
                    only_inlined(method)
    return cls


# Gradients.


def is_below_autograd() -> bool:
    """True in a kernel of an operator, whose gradient is the operator's matter."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(_KEY.AutogradFunctionality)


# Torch's dispatcher gives these operators of c10d, which return their outputs, a backward that
# warns. Other outputs stay without a gradient, so that a list of gathered tensors may be combined
# with the rank's own one, which has a gradient.
_GIVES_OUTPUTS = frozenset({"all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all"})
# A hook of a leaf lasts as long as the leaf.
_warned_leaves: Any = WeakIdKeyDictionary()


# Returns the base of a view, or None.
_base_of = attrgetter("_base")


class _Unregistered(torch.autograd.Function):
    """A call in the graph of autograd, whose backward warns and has no gradients."""

    @staticmethod
    def forward(ctx: Any, warn: Callable[..., None], count: int, *tensors: Tensor) -> Any:
        ctx.warn = warn
        ctx.count = len(tensors)
        ctx.mark_dirty(*tensors[:count])
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.warn()
        return (None,) * (ctx.count + 2)


def admit_gradients(operation: str, written: Sequence[Tensor], read: Sequence[Tensor] = ()) -> None:
    """Has backward warn where it passes through tensors of a call, as torch's dispatcher does.

    Args:
        operation: the name of the communicator's method.
        written: the call's outputs.
        read: its other inputs.

    Raises:
        UnsupportedError: a tensor has a tangent of forward-mode differentiation.
    """
    if forward_ad._current_level >= 0:
        _refuse_tangents(operation, [*written, *read])
    if not torch.is_grad_enabled():
        return
    changed = [tensor for tensor in written if tensor.requires_grad]
    given = operation in _GIVES_OUTPUTS and any(tensor.requires_grad for tensor in read)
    if not (changed or given) or is_below_autograd():
        return
    if torch._C._get_autograd_fallback_mode() == "nothing":
        return

    def warn(*_: Any) -> None:
        warnings.warn(
            f"{operation}: an autograd kernel was not registered for this call of ringcomm, but "
            "backward passes through a tensor of it. The gradient is that of the tensor before "
            "the call, which may be silently incorrect. Use ringcomm.functional, which has "
            "gradients, or call it under torch.no_grad() or on tensor.detach()",
            stacklevel=2,
        )

    for tensor in changed:
        _hook(tensor, warn)
        base = _base_of(tensor)
        if base is not None and base.requires_grad:
            _hook(base, warn)
    others = [tensor for tensor in written if not tensor.requires_grad]
    if given and others:
        _Unregistered.apply(warn, len(others), *others, *read)  # type: ignore[no-untyped-call]


def _hook(tensor: Tensor, warn: Callable[..., None]) -> None:
    if tensor.is_leaf:
        if tensor in _warned_leaves:
            return
        _warned_leaves[tensor] = True
    tensor.register_hook(warn)  # type: ignore[no-untyped-call]


def _refuse_tangents(operation: str, tensors: Sequence[Tensor]) -> None:
    if not torch._C._is_fwd_grad_enabled() or is_below_autograd():
        return
    unpack: Callable[[Tensor], Any] = forward_ad.unpack_dual
    if any(unpack(tensor).tangent is not None for tensor in tensors):
        raise UnsupportedError(
            f"{operation}: expected tensors without tangents, got a dual tensor of "
            "torch.autograd.forward_ad, whose tangent the call would not see. Use "
            "ringcomm.functional, or pass tensor.detach()"
        )


# Tensors without plain memory.

_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl
# Advice by class, for classes whose data are in other tensors.
_INSTEAD = {
    "AsyncCollectiveTensor": "its result, tensor.wait()",
    "DTensor": "its local part, tensor.to_local()",
    "NestedTensor": "tensor.values() and tensor.offsets(), each in a call of its own",
    "MaskedTensor": "tensor.get_data() and tensor.get_mask(), each in a call of its own",
    "FakeTensor": "a tensor with data; a fake one has its shape and dtype alone",
    "FunctionalTensor": "the tensor outside of functionalization",
}
_PACKED = frozenset(
    getattr(torch, name)
    for name in (
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
        *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "float4_e2m1fn_x2"),
    )
    if hasattr(torch, name)
)


def without_memory(tensor: Tensor) -> str:
    """Returns the kind of a tensor without plain memory, with advice; empty for other tensors.

    Views with a pending negation or conjugation have memory, and calls copy them. Subclasses
    without ``__torch_dispatch__`` have memory, too.
    """
    if _native.is_plain(tensor):
        return ""
    kind = type(tensor)
    if kind not in _PLAIN:
        if is_lazy(tensor):
            return f"{kind.__name__}, which has no shape yet; run its module once before"
        if kind.__torch_dispatch__ is not _NO_DISPATCH:
            known = (_INSTEAD[base.__name__] for base in kind.__mro__ if base.__name__ in _INSTEAD)
            return f"{kind.__name__}; pass {next(known, 'the plain tensor that it wraps')}"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "tensor of a transform of torch.func; pass the one outside of the transform"
    if torch._is_functional_tensor(tensor):
        return f"functional tensor; pass {_INSTEAD['FunctionalTensor']}"
    return _kind_without_memory(tensor) or _lost_memory(tensor)


def _kind_without_memory(tensor: Tensor) -> str:
    if tensor.is_nested:
        return "nested tensor; pass its values() and sizes apart, or a padded tensor"
    if tensor.is_quantized:
        return (
            f"quantized tensor of {tensor.dtype}; pass tensor.dequantize(), or tensor.int_repr() "
            "where all ranks have one scale and zero point"
        )
    if tensor.is_meta:
        return "meta tensor, which has a shape and no data; pass torch.empty_like(tensor, device=)"
    if tensor.layout is not torch.strided:
        return f"tensor of layout {tensor.layout}; pass tensor.to_dense()"
    if tensor.dtype in _PACKED:
        return f"packed tensor of {tensor.dtype}; to move it, pass tensor.view(torch.uint8)"
    if tensor._is_zerotensor():
        return "tensor of zeros without memory; pass tensor.clone()"
    return ""


def _lost_memory(tensor: Tensor) -> str:
    if not tensor.numel():
        return ""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    found = tensor.untyped_storage().nbytes()
    if found >= needed and tensor.data_ptr():
        return ""
    return (
        f"{type(tensor).__name__} without memory: {needed} bytes reach beyond its storage of "
        f"{found}, which was freed or resized; pass a copy made before"
    )
