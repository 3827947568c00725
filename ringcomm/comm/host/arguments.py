# SPDX-License-Identifier: Apache-2.0
"""Checks of a call's arguments, made before anything is sent; dtypes and reduction operators."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Sequence
from operator import attrgetter
from types import FunctionType
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch.autograd import forward_ad, profiler
from torch.distributed import ReduceOp
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.weak import WeakIdKeyDictionary

from ringcomm import _native
from ringcomm.algorithms import algorithms_of
from ringcomm.errors import ArgumentError, UnsupportedError, where
from ringcomm.integers import integer, integers, real
from ringcomm.json_reader import shown

__all__ = [
    "ALGORITHMS",
    "DEVICE_ALGORITHMS",
    "DTYPE_CODES",
    "DTYPE_NAMES",
    "SUM",
    "WATCHES_KEYS",
    "CallChecks",
    "NativeOp",
    "PremulSum",
    "ReduceOp",
    "admit_gradients",
    "admit_keys",
    "intercepting_keys",
    "is_below_autograd",
    "is_contiguous",
    "is_watched",
    "only_inlined",
    "only_inlined_methods",
    "outside_of_compile",
    "overlap",
    "premul_sum",
    "put_back",
    "readable",
    "reduction_of",
    "size_bytes",
    "without_memory",
    "writable",
]


# ---- Admission to a call: parts of torch that would miss the call, tensors without dense memory --


Tensor = torch.Tensor
F = TypeVar("F", bound=Callable[..., Any])
Class = TypeVar("Class", bound="type[Any]")

# NOTE [Keys of a thread]
#
# ringcomm's calls are not operators of torch: they read and write memory, and torch's dispatcher
# does not see them. So a trace would lose the call, a transform would miss its effect, and a fake
# tensor has no memory. All of these work by keys that a thread adds to every dispatch. So each call
# first tests one word for such keys; the native module reads the word where torch keeps it. An
# operator that runs below a mode or a transform sees none of the keys, so the operators of
# ringcomm.functional and of torch's functional collectives make their calls as usual.
#
# A mode that only observes, such as FlopCounterMode, does not change the effect of a call. Calls
# under it are made with all checks.

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
    """Returns the watched keys that this thread adds to each dispatch, as torch reports them."""
    included = torch._C._dispatch_tls_local_include_set() - (
        torch._C._dispatch_tls_local_exclude_set()
    )
    return int(included.raw_repr()) & _WATCHED


def _agrees_with_torch() -> bool:
    """True if the native module reads the same word of keys as torch reports."""
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


# False if the native module does not find the word of keys: then Python checks all calls.
WATCHES_KEYS = _agrees_with_torch()
intercepting_keys: Callable[[], int] = _native.intercepting_keys if WATCHES_KEYS else _keys_of_torch


def _words_at(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(address))


def _find_keys() -> None:
    """Finds the offset of the dispatch keys within a tensor, for the native module.

    If exactly one offset agrees with torch for tensors of different keys, the native module reads
    the keys at this offset. Otherwise it calls ``Tensor.is_neg()``, which takes longer than all
    other checks and releases the interpreter's lock.
    """
    ordinary = torch.ones(2, device="cpu")
    probes = [
        ordinary,
        torch._neg_view(ordinary),
        torch.complex(ordinary, ordinary).conj(),
        torch.nn.Parameter(ordinary),
        ordinary.to_sparse(),
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
        allowed = torch._C._dispatch_keys(ordinary)
        for key in (_KEY.CUDA, _KEY.AutocastCUDA):  # a GPU tensor's keys
            allowed |= torch._C.DispatchKeySet(key)
        _native.read_keys_at(impl * _WORD_BYTES, keys * _WORD_BYTES, allowed.raw_repr())


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
    """Raises if a part of torch that must see this call would miss it: NOTE [Keys of a thread].

    Args:
        operation: the beginning of the error's message.

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
    """True if a mode is on torch's stack of modes; :func:`admit_keys` raises for some of them."""
    return bool(intercepting_keys() & _OF_MODES)


# Dynamo.


def only_inlined(function: F) -> F:
    """Lets Dynamo trace a function as part of a larger graph, but not as a frame of its own.

    After a graph break Dynamo would compile each called function as a frame of its own. With this
    decorator it skips the function and all functions that it calls.
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
        reason: shown by Dynamo where it breaks a graph, and in the error under fullgraph=True.
    """

    def mark(function: F) -> F:
        # Dynamo looks for these attributes before it traces a call.
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return only_inlined(function)

    return mark


def only_inlined_methods(cls: Class) -> Class:
    """Applies :func:`only_inlined` to all methods of a class that ringcomm's modules define.

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
    """True inside an operator of torch, below autograd: the operator provides the gradient."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(_KEY.AutogradFunctionality)


# These operators of c10d return their outputs; torch's dispatcher gives them a backward that warns.
# The outputs of other operators have no gradient, so that a program may replace this rank's entry
# in a list of gathered tensors by the rank's own tensor, which has a gradient.
_GIVES_OUTPUTS = frozenset({"all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all"})
# Leaf tensors that have the warning hook. They keep it for life, so each gets it only once.
_warned_leaves: Any = WeakIdKeyDictionary()


# Returns the base of a view, or None.
_base_of = attrgetter("_base")


class _Unregistered(torch.autograd.Function):
    """A call in autograd's graph; its backward warns and returns no gradients."""

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
    """Makes backward warn where it passes through tensors of a call, as torch's dispatcher does.

    Args:
        operation: the name of the communicator's method.
        written: the call's outputs.
        read: the call's inputs that are not outputs.

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


# Tensors without dense memory.

_TORCH_CLASSES = frozenset({Tensor, torch.nn.Parameter})
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl
# Advice by class of tensor, for classes that keep their data in other tensors.
_INSTEAD = {
    "AsyncCollectiveTensor": "its result, tensor.wait()",
    "DTensor": "its local tensor, tensor.to_local()",
    "NestedTensor": "tensor.values() and tensor.offsets(), each in a call of its own",
    "MaskedTensor": "tensor.get_data() and tensor.get_mask(), each in a call of its own",
    "FakeTensor": "a tensor with data; a fake tensor has only a shape and a dtype",
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
    """Describes a tensor without dense memory, with advice; returns "" for other tensors.

    Views with a pending negation or conjugation have memory, and calls copy them. Subclasses
    without ``__torch_dispatch__`` also have memory.
    """
    if _native.takes_fast_path(tensor):
        return ""
    kind = type(tensor)
    if kind not in _TORCH_CLASSES:
        if is_lazy(tensor):
            return f"{kind.__name__}, which has no shape yet; run its module once before"
        if kind.__torch_dispatch__ is not _NO_DISPATCH:
            known = (_INSTEAD[base.__name__] for base in kind.__mro__ if base.__name__ in _INSTEAD)
            return f"{kind.__name__}; pass {next(known, 'the tensor that it wraps')}"
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


# The native module defines the codes.
DTYPE_CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for name, code in _native.DTYPES.items() if hasattr(torch, name)
}
DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPE_CODES}
OP_CODES = _native.OPS
_TORCH_OPS = {name: getattr(ReduceOp, name) for name in OP_CODES if hasattr(ReduceOp, name)}
PREMUL_SUM = "PREMUL_SUM"


class PremulSum:
    """The op that multiplies each rank's input by ``factor``, then sums; see :func:`premul_sum`."""

    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __repr__(self) -> str:
        return f"premul_sum({self.factor})"


def premul_sum(factor: float | torch.Tensor) -> PremulSum:
    """Makes the op PREMUL_SUM, the sum of each rank's elements times its factor.

    torch.distributed makes this op only through a private function. ringcomm accepts torch's
    object, and the object that this function returns, wherever it takes an op.

    Args:
        factor: a real number, or a tensor of one element; for integers a whole number.

    Raises:
        ArgumentError: ``factor`` is neither of them.
    """
    return PremulSum(_factor_of(factor))


def _factor_of(factor: object) -> float:
    if isinstance(factor, torch.Tensor) and factor.numel() == 1 and not factor.is_complex():
        return float(factor.item())
    number = real(factor)
    if number is not None:
        return number
    raise ArgumentError(
        f"PREMUL_SUM: expected a real number or a tensor of one element as the factor, "
        f"got {factor!r}"
    )


class NativeOp:
    """An op in native form: its code, and the factor of PREMUL_SUM (else 1)."""

    __slots__ = ("code", "factor", "name")

    def __init__(self, name: str, factor: float = 1.0) -> None:
        self.name = name
        self.code = OP_CODES[name]
        self.factor = factor


_NAMES: dict[object, str] = {torch_op: name for name, torch_op in _TORCH_OPS.items()}
_WITHOUT_FACTOR = {name: NativeOp(name) for name in OP_CODES if name != PREMUL_SUM}
_BY_ID = {id(_TORCH_OPS[name]): op for name, op in _WITHOUT_FACTOR.items()}


def reduction_of(op: object) -> NativeOp:
    """Returns the native form of a ``ReduceOp``, ``RedOpType`` or :func:`premul_sum`.

    Raises:
        ArgumentError: ``op`` is not an op, or PREMUL_SUM without a factor.
    """
    quick = _BY_ID.get(id(op))
    if quick is not None:
        return quick
    if isinstance(op, PremulSum):
        return NativeOp(PREMUL_SUM, op.factor)
    if not isinstance(op, (ReduceOp, ReduceOp.RedOpType)):
        raise ArgumentError(f"op: expected a torch.distributed.ReduceOp, got {op!r}")
    kind, factor = _kind_and_factor(op)
    name = _NAMES.get(kind)
    if name is None:
        raise ArgumentError(f"op: {kind} is unknown; known are {', '.join(OP_CODES)}")
    if name != PREMUL_SUM:
        return _WITHOUT_FACTOR[name]
    if factor is None:
        raise ArgumentError(
            "op: PREMUL_SUM needs a factor; pass ringcomm.premul_sum(factor) instead of "
            "ReduceOp.PREMUL_SUM"
        )
    return NativeOp(PREMUL_SUM, _factor_of(factor))


def _kind_and_factor(op: object) -> tuple[object, object]:
    """Returns the kind of an op of torch, and its factor (None without a factor)."""
    # Check RedOpType first: torch makes isinstance(kind, ReduceOp) true for a RedOpType as well.
    if isinstance(op, ReduceOp.RedOpType):
        return op, None
    # Only the pickle state contains the factor (in torch 2.13 __reduce_ex__ aborts the process,
    # since ReduceOp is a pybind11 type without a constructor).
    state: tuple[object, object] = cast(Any, op).__getstate__()
    return state


# The native module finds the ops by identity, because hashing or comparing torch's op objects costs
# more than the rest of a small call. The objects live as long as torch. If torch's tensors lack
# DLPack's C interface, or the dispatcher's keys are not found, Python checks all calls.
if WATCHES_KEYS and hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    _native.read_tensors_with(
        torch.Tensor.__dlpack_c_exchange_api__,
        {
            "Tensor": torch.Tensor,
            "Parameter": torch.nn.Parameter,
            "ReduceOp": ReduceOp,
            "is_neg": torch.Tensor.is_neg,
            "requires_grad": torch._C.TensorBase.requires_grad,
            "forward_ad": vars(forward_ad),
            "profiler": vars(profiler),
            "increment_version": torch._C._increment_version,
            "int8": torch.int8,
            "uint8": torch.uint8,
        },
        [(op, OP_CODES[name]) for name, op in _TORCH_OPS.items() if name != PREMUL_SUM],
    )

# Keys are the names that options use; algorithms_of() returns the names for a call.
DEVICE_ALGORITHMS = _native.ALGORITHMS
ALGORITHMS = {name: DEVICE_ALGORITHMS[name] for name in ("auto", "one_shot", "ring")}
# Hints that errors add for an algorithm name that belongs to another operation.
_SHOTS = {
    "one_shot": '; an all-reduce has two phases of one hop each, so it is "two_shot"',
    "two_shot": '; only all_reduce has two phases of one hop each, so it is "one_shot"',
}
SUM = ReduceOp.SUM


def size_bytes(tensor: Tensor) -> int:
    """Returns the bytes of the tensor's elements."""
    return tensor.numel() * tensor.element_size()


def is_contiguous(tensor: Tensor) -> bool:
    """True when the bytes at ``data_ptr()`` are the elements in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def readable(tensor: Tensor) -> Tensor:
    """Returns ``tensor`` if contiguous, else a contiguous copy with the elements in order."""
    if is_contiguous(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def writable(tensor: Tensor) -> Tensor:
    """Returns ``tensor`` if contiguous, else scratch memory; :func:`put_back` copies it back."""
    if is_contiguous(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def put_back(tensor: Tensor, scratch: Tensor) -> None:
    """Copies ``scratch`` (of :func:`writable` or :func:`readable`) to ``tensor``, if different."""
    if scratch is not tensor:
        tensor.detach().copy_(scratch)


def overlap(a: Tensor, b: Tensor) -> bool:
    """True if two tensors share memory and are both contiguous; calls copy other tensors first."""
    if not (a.is_contiguous() and b.is_contiguous()):
        return False
    a_ptr, b_ptr = a.data_ptr(), b.data_ptr()
    return a_ptr < b_ptr + size_bytes(b) and b_ptr < a_ptr + size_bytes(a)


class CallChecks:
    """Checks the arguments of one call; errors name the operation, the rank and the world."""

    __slots__ = ("op", "rank", "world_size")
    algorithms = frozenset(ALGORITHMS.values())

    def __init__(self, op: str, rank: int, world_size: int) -> None:
        self.op = op
        self.rank = rank
        self.world_size = world_size

    def __str__(self) -> str:
        return where(self.op, self.rank, self.world_size)

    def fail(self, text: str) -> NoReturn:
        raise ArgumentError(f"{self}: {text}")

    def tensor(self, name: str, tensor: Any) -> int:
        """Checks for a dense tensor on this device, of a known dtype; returns the dtype's code."""
        if not isinstance(tensor, Tensor):
            self.fail(f"{name}: expected a tensor, got {type(tensor).__name__}")
        if found := without_memory(tensor):
            raise UnsupportedError(
                f"{self}: {name}: expected a dense tensor with memory, got a {found}"
            )
        self.check_device(name, tensor)
        code = DTYPE_CODES.get(tensor.dtype)
        if code is None:
            known = ", ".join(str(dtype) for dtype in DTYPE_CODES)
            raise UnsupportedError(
                f"{self}: {name}: dtype {tensor.dtype} is not supported; known are {known}"
            )
        return code

    def check_device(self, name: str, tensor: Tensor) -> None:
        """Checks that the tensor is on this communicator's device."""
        if not tensor.is_cpu:
            self.fail(
                f"{name}: expected a CPU tensor, got one on {tensor.device}. Build a communicator "
                "with device= for tensors of a GPU, or copy it with .cpu()"
            )

    def output(self, name: str, tensor: Any) -> int:
        """Checks a tensor that is written to; returns the dtype's code like :meth:`tensor`."""
        code = self.tensor(name, tensor)
        if not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == 1:
            self.fail(
                f"{name}: expected each element to have memory of its own, got an expanded "
                f"tensor (shape {tuple(tensor.shape)}, stride {tensor.stride()}); call .clone()"
            )
        return code

    def contiguous(self, name: str, tensor: Tensor) -> None:
        """Checks the strides; :func:`readable` resolves a pending negation or conjugation."""
        if not tensor.is_contiguous():
            self.fail(
                f"{name}: expected a contiguous tensor, got shape {tuple(tensor.shape)} with "
                f"stride {tensor.stride()}; call .contiguous()"
            )

    def tensors(self, name: str, tensors: Any, count: int, *, write: bool = False) -> list[Tensor]:
        """Checks a list of ``count`` tensors."""
        if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
            self.fail(f"{name}: expected a list of tensors, got {type(tensors).__name__}")
        if len(tensors) != count:
            self.fail(f"{name}: expected {count} tensors, one per rank, got {len(tensors)}")
        for index, tensor in enumerate(tensors):
            (self.output if write else self.tensor)(f"{name}[{index}]", tensor)
        return list(tensors)

    def same_dtype(self, name: str, tensor: Tensor, of: str, other: Tensor) -> None:
        if tensor.dtype is not other.dtype:
            self.fail(f"{name}: expected the dtype of {of}, {other.dtype}, got {tensor.dtype}")

    def same_count(self, name: str, tensor: Tensor, of: str, count_elems: int) -> None:
        if tensor.numel() != count_elems:
            self.fail(
                f"{name}: expected {count_elems} elements ({of}), got {tensor.numel()} "
                f"(shape {tuple(tensor.shape)})"
            )

    def apart(self, name: str, tensor: Tensor, other_name: str, other: Tensor, hint: str) -> None:
        """Checks that two tensors share no memory."""
        if overlap(tensor, other):
            self.fail(
                f"{name} and {other_name}: expected separate memory, but they overlap; {hint}"
            )

    def all_apart(
        self, name: str, written: list[Tensor], read_name: str = "", read: Sequence[Tensor] = ()
    ) -> None:
        """Checks that no written tensor shares memory with another tensor, written or read."""
        spans = sorted(
            (tensor.data_ptr(), size_bytes(tensor), is_written, f"{of}[{index}]")
            for is_written, of, tensors in ((True, name, written), (False, read_name, read))
            for index, tensor in enumerate(tensors)
            if tensor.numel() and tensor.is_contiguous()
        )
        # The largest end address so far: of written spans (True), and of all spans (False).
        ends = {True: (0, ""), False: (0, "")}
        for ptr, length, is_written, label in spans:
            end, earlier = ends[not is_written]
            if ptr < end:
                self.fail(
                    f"{earlier} and {label}: expected separate memory, but they overlap; "
                    "received data need memory of their own"
                )
            for kind in (True, False) if is_written else (False,):
                ends[kind] = max(ends[kind], (ptr + length, label))

    def peer(self, name: str, rank: Any) -> int:
        """Checks a rank of this communicator; returns it as an int."""
        number = integer(rank, bools=True)
        if number is None or not 0 <= number < self.world_size:
            self.fail(f"{name}: expected a rank from 0 to {self.world_size - 1}, got {shown(rank)}")
        return number

    def integer(self, name: str, value: Any) -> int:
        """Checks an integer of 64 bits; returns it as an int."""
        number = integer(value, bools=True)
        if number is None:
            self.fail(f"{name}: expected an integer from -2^63 to 2^63 - 1, got {shown(value)}")
        return number

    def ranks(self, name: str, ranks: Any) -> list[int]:
        """Checks distinct ranks of this communicator, at least one; returns them as ints."""
        found = integers(ranks, bools=True)
        if found is None:
            self.fail(f"{name}: expected a list of ranks, which are integers, got {shown(ranks)}")
        members = [self.peer(name, rank) for rank in found]
        if len(set(members)) != len(members) or not members:
            self.fail(f"{name}: expected distinct ranks and at least one, got {members}")
        return members

    def splits(self, name: str, splits: Any) -> list[int] | None:
        """Checks a list of integers; returns them as ints, or None for None."""
        if splits is None:
            return None
        found = integers(splits, bools=True)
        if found is None:
            self.fail(
                f"{name}: expected a list of integers below 2^63, one per rank, or None, got "
                f"{shown(splits)}"
            )
        return found

    def algorithm(self, algorithm: Any) -> int:
        named = algorithms_of(self.op)
        code = named.get(algorithm) if isinstance(algorithm, str) else None
        if code is None or code not in self.algorithms:
            known = [name for name, each in named.items() if each in self.algorithms]
            if algorithm == "multicast":
                raise UnsupportedError(
                    f'{self}: algorithm: "multicast" is for GPUs under an NVSwitch, and this '
                    f"communicator works on the host. Use one of {', '.join(known)}"
                )
            hint = _SHOTS.get(algorithm, "") if isinstance(algorithm, str) else ""
            self.fail(f"algorithm: expected one of {', '.join(known)}, got {algorithm!r}{hint}")
        return code

    def reduction(self, op: Any, name: str, tensor: Tensor) -> NativeOp:
        """Checks the op, and that it makes sense for the tensor's dtype."""
        try:
            reduction = reduction_of(op)
        except ArgumentError as error:
            self.fail(str(error))
        if not _native.supports(DTYPE_CODES[tensor.dtype], reduction.code):
            self.fail(f"{name}: op {reduction.name} is not defined for dtype {tensor.dtype}")
        integral = not (tensor.is_floating_point() or tensor.is_complex())
        if integral and not reduction.factor.is_integer():
            self.fail(
                f"op: expected a whole number as PREMUL_SUM's factor for dtype {tensor.dtype}, "
                f"got {reduction.factor}"
            )
        if integral and tensor.dtype != torch.bool:
            limits = torch.iinfo(tensor.dtype)
            if not limits.min <= reduction.factor <= limits.max:
                self.fail(
                    f"op: expected a PREMUL_SUM factor between {limits.min} and {limits.max} for "
                    f"dtype {tensor.dtype}, got {reduction.factor:g}"
                )
        return reduction
