# SPDX-License-Identifier: Apache-2.0
"""Resharded parameters, which have no values: computing with them raises.

NOTE [Resharded parameters]
A parameter of stage 3 has no values while its unit is resharded. A computation with its
placeholder, such as an average of weights, would silently give NaN, and a write to it would be
lost. So the parameter then has a class whose tensor functions raise, except functions that read
the shape, the gradient or similar facts; functions that give another tensor this shape, dtype or
device (``_MAKERS``, ``_LIKE_ANOTHER``); and conversions that change nothing (``_CONVERSIONS``).

Autograd's nodes work below Python and do not call methods of the class. So a resharded parameter
also has another version than the unsharded parameter had, and gets the old version back with its
values. If a backward reaches a saved parameter, or a view of one, before it is unsharded again,
autograd finds the version changed and raises, instead of reading freed memory.

Constructors such as ``torch.tensor(param)``, assignments such as ``other.data = param`` and code
that has a tensor under another class do not call the class either. So torch refuses to read the
placeholder's memory; see :func:`_refuse_access`. If torch's storages have another layout than
expected, the memory can be read and holds NaN, or zeros for integers.

NOTE [Updated parameters]
With ``update="in_backward"`` parameters of stage 2 change while backward runs elsewhere in the
module. Code that still computes with such a parameter, such as a checkpointed layer that is run
again, would silently use the new values instead of the old ones. So from its update to
``optimizer.step()`` the parameter raises in the same way. Its version stays advanced, as after
every write.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import GetSetDescriptorType
from typing import Any, NoReturn

import torch
from torch import nn

from ringcomm.errors import ArgumentError
from ringcomm.optim.dtensors import TORCH_CLASSES, without_torch_function

Tensor = torch.Tensor

# The attribute of a resharded parameter that holds its name.
_NAME = "_ringcomm_resharded"
# The attribute that holds the callback that may unshard the parameter.
_ASK = "_ringcomm_ask"
# The attribute of a resharded parameter's class that holds the class of the unsharded parameter.
_KIND = "_ringcomm_kind"
# Attributes that are views of the values.
_VALUES = {"data", "real", "imag", "T", "mT", "H", "mH"}
_FACTS = """
    data_ptr dim element_size get_device is_complex is_conj is_contiguous is_floating_point
    is_distributed is_inference is_neg is_pinned is_same_size is_set_to is_shared is_signed
    ndimension nelement numel dense_dim dim_order sparse_dim storage_type
    register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad size storage_offset
    stride untyped_storage _is_view _use_count __hash__ __len__
"""
# Functions, and methods of the same names, that read no values.
_FUNCTIONS = """
    get_device is_complex is_conj is_distributed is_floating_point is_inference is_neg is_same_size
    is_signed numel result_type
"""
# Functions that make a tensor with the first argument's shape, dtype and device.
_LIKES = "empty_like full_like ones_like rand_like randint_like randn_like zeros_like"
_NEWS = "new new_empty new_empty_strided new_full new_ones new_tensor new_zeros"
# Functions that give the first argument the shape or the dtype of the second.
_LIKE_ANOTHER_NAMES = "expand_as reshape_as type_as view_as"
# Functions that return the tensor itself if it already has the dtype and the device.
_DTYPE_OF = {
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
    "float": torch.float32,
    "half": torch.float16,
}


def _allowed() -> Iterator[Callable[..., Any]]:
    """Yields the functions that neither read nor write values."""
    for kind in (torch._C.TensorBase, torch.Tensor):
        for name, attribute in vars(kind).items():
            if isinstance(attribute, (GetSetDescriptorType, property)) and name not in _VALUES:
                for way in ("__get__", "__set__", "__delete__"):
                    yield getattr(attribute, way)
    for name in _FACTS.split():
        yield getattr(torch.Tensor, name)
    for name in _FUNCTIONS.split():
        yield getattr(torch, name)
    # These functions unshard the parameters that they need.
    yield from (torch.autograd.grad, torch.autograd.backward)


#: Functions of tensors that neither read nor write values.
FACTS = frozenset(_allowed())
# Functions whose results depend on the layout in memory. They would be wrong for a placeholder,
# since all its elements share one memory location.
_LAYOUT = frozenset((Tensor.dim_order, Tensor.is_contiguous, Tensor.is_pinned, Tensor.stride))
# Functions that read values of all arguments but the first: only the first may be resharded.
_MAKERS = frozenset(
    [
        *(getattr(torch, name) for name in _LIKES.split()),
        *(getattr(Tensor, name) for name in _NEWS.split()),
    ]
)
# Functions that read values of the first argument: only the second may be resharded.
_LIKE_ANOTHER = frozenset(getattr(Tensor, name) for name in _LIKE_ANOTHER_NAMES.split())
_CONVERSIONS: dict[Callable[..., Any], str] = {
    getattr(Tensor, name): name for name in ("cpu", "cuda", "to", "type", *_DTYPE_OF)
}


def _asks_for_facts(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """True if a call needs no values of the resharded parameters among its arguments."""
    if func in _MAKERS:
        others = {name: value for name, value in kwargs.items() if args or name != "input"}
        return next(_resharded_in((args[1:], others)), None) is None  # bool() of it raises
    if func in _LIKE_ANOTHER:
        return not isinstance(args[0], Resharded)
    name = _CONVERSIONS.get(func)
    if name is None:
        return False
    return not isinstance(args[0], Resharded) or _changes_nothing(name, args, kwargs)


def _changes_nothing(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if a conversion returns the parameter itself, or a tensor on the device "meta"."""
    with without_torch_function():
        tensor, *rest = args
        if kwargs.get("copy") or kwargs.get("memory_format") is not None:
            return False
        if name == "type":
            wanted = rest[0] if rest else kwargs.get("dtype")
            return wanted is None or wanted in (tensor.dtype, tensor.type())
        if name in _DTYPE_OF:
            return bool(tensor.dtype is _DTYPE_OF[name])
        if name in ("cpu", "cuda"):
            device = _device_of(torch.device(name)) if name == tensor.device.type else None
            return bool(not rest and not kwargs and tensor.device == device)
        device, dtype, *_ = torch._C._nn._parse_to(*rest, **kwargs)
        if device is not None and device.type == "meta":
            return True
        same_dtype = dtype is None or dtype is tensor.dtype
        return same_dtype and (device is None or bool(tensor.device == _device_of(device)))


def _device_of(device: torch.device) -> torch.device:
    """Returns the device that ``to()`` compares with; "cuda" means the current CUDA device."""
    index: int | None = device.index
    current = device.type != "cpu" and index is None
    return torch.empty(0, device=device).device if current else device


# A storage has three flags in successive bytes: whether accesses are checked, whether writes are
# refused, and whether reads are also refused. Python can set only the first two.
_FLAGS = b"\x01\x01\x01"
# The number of bytes of a storage that are searched for the flags; no storage is smaller.
_SOUGHT_BYTES = 80


@cache
def _flags_at() -> int | None:
    """Returns the offset of the flags in a storage; None if they are not as expected."""
    tensor = torch.zeros(1, device="cpu")
    storage = tensor.untyped_storage()
    before = ctypes.string_at(storage._cdata, _SOUGHT_BYTES)
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    after = ctypes.string_at(storage._cdata, _SOUGHT_BYTES)
    at = after.find(_FLAGS[:2] + b"\x00")
    if at < 0 or after != before[:at] + _FLAGS[:2] + before[at + 2 :]:
        return None
    if before[at : at + 3] != bytes(3):
        return None
    ctypes.memmove(storage._cdata + at, _FLAGS, 3)
    try:
        tensor.clone()
    except RuntimeError:
        return at
    return None


def _refuse_access(tensor: Tensor) -> None:
    """Makes torch raise RuntimeError when code reads or writes the tensor's memory.

    ``data_ptr()`` of the storage, by which the bucket and frameworks recognize it, and
    ``is_shared()`` still work: otherwise torch would end the process at these calls.
    """
    at = _flags_at()
    if at is None:
        return
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    vars(storage).update(data_ptr=lambda: address, is_shared=lambda: False)
    ctypes.memmove(storage._cdata + at, _FLAGS, 3)


def stand_in(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor without values: one element, expanded to ``shape``.

    Reading or writing it raises RuntimeError; see NOTE [Resharded parameters].
    """
    one = torch.empty((), dtype=dtype, device=device)
    _fill(one)
    _refuse_access(one)
    return one.expand(shape)


def void(stand_in: Tensor) -> None:
    """Discards values written to a :func:`stand_in`, if torch could not refuse the write."""
    if _flags_at() is None:
        _fill(stand_in)


def _fill(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    else:
        tensor.zero_()


class Resharded:
    """A mixin that a parameter's class has while the parameter is resharded."""

    # True if detach() returns a ReshardedValue.
    _detaches = True
    # Functions that raise although they read no values: code calls them before it reads memory.
    _hidden: frozenset[Callable[..., Any]] = frozenset([Tensor.data_ptr])

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LAYOUT:
            with without_torch_function():
                return func(args[0]._in_layout(), *args[1:], **kwargs)
        if (func in FACTS and func not in cls._hidden) or _asks_for_facts(func, args, kwargs):
            with without_torch_function():
                return func(*args, **kwargs)
        resharded = list(_resharded_in((args, kwargs)))
        # state_dict() calls detach(); perhaps its caller needs only names or shapes.
        if func is Tensor.detach and args[0]._detaches and vars(args[0])[_ASK]() is False:
            return value_of(vars(args[0])[_NAME], args[0])
        if resharded and all(
            not isinstance(each, Resharded) or vars(each)[_ASK]() for each in resharded
        ):
            return func(*args, **kwargs)
        if not resharded:
            raise _needs_values("?", _called(func))
        resharded[0]._refuse(_called(func))

    def _in_layout(self: Any) -> Tensor:
        """Returns a tensor with the strides of the unsharded parameter, which is contiguous."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def __format__(self, spec: str) -> str:
        if spec:
            self._refuse("__format__")
        return repr(self)

    def _refuse(self, called: str) -> NoReturn:
        if vars(self)[_ASK]() is None:
            raise _is_gone(vars(self)[_NAME], called)
        raise _needs_values(vars(self)[_NAME], called)

    def __repr__(self: Any) -> str:
        with without_torch_function():
            facts = f"shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}"
        return f"<parameter {vars(self)[_NAME]}, resharded, {facts}>"


class ReshardedValue(Resharded, Tensor):  # type: ignore[misc]
    """The value of a resharded parameter in ``state_dict()`` of a part of a sharded module.

    It has the parameter's shape, dtype and device, and raises where values are needed. It also
    hides its storage, since code that writes files looks for storages.
    """

    _hidden: frozenset[Callable[..., Any]] = frozenset([Tensor.data_ptr, Tensor.untyped_storage])


def value_of(name: str, param: Tensor) -> Tensor:
    """Returns the ReshardedValue of a parameter.

    Args:
        name: name of the parameter.
        param: a tensor with the parameter's shape, dtype and device.
    """
    with without_torch_function():
        memory = stand_in(param.shape, param.dtype, param.device)
        made: Tensor = torch.Tensor._make_subclass(ReshardedValue, memory)
        vars(made)[_NAME], vars(made)[_ASK] = name, bool
        return made


class Updated(Resharded):
    """Mixed into a parameter's class after an update in backward; see NOTE [Updated parameters]."""

    _detaches = False
    _hidden = frozenset()

    def _in_layout(self: Any) -> Tensor:
        updated: Tensor = self
        return updated

    def _refuse(self, called: str) -> NoReturn:
        raise ArgumentError(
            f"zero: parameter {vars(self)[_NAME]}: {called} needs its values, and a backward has "
            'updated it already (update="in_backward"). Call optimizer.step() before the parameter '
            "is used again. If backward itself uses it again, as a checkpointed layer does with a "
            'detached parameter, build the optimizer with update="in_step"'
        )

    def __repr__(self: Any) -> str:
        with without_torch_function():
            facts = f"shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}"
        return f"<parameter {vars(self)[_NAME]}, updated by a backward, {facts}>"


class ReshardedDTensor(Resharded):
    """A :class:`Resharded` mixin for DTensors, which have methods that are not tensor functions."""

    _detaches = False

    def _in_layout(self: Any) -> Tensor:
        whole: Tensor = self  # a DTensor's strides do not depend on its local tensor
        return whole

    def to_local(self, **_: Any) -> NoReturn:
        """Raises ArgumentError: a resharded DTensor has no local values."""
        self._refuse("to_local")

    def redistribute(self, *_: Any, **__: Any) -> NoReturn:
        """Raises ArgumentError: a resharded DTensor has no values."""
        self._refuse("redistribute")

    def full_tensor(self, **_: Any) -> NoReturn:
        """Raises ArgumentError: a resharded DTensor has no values."""
        self._refuse("full_tensor")


def _needs_values(name: str, called: str) -> ArgumentError:
    return ArgumentError(
        f"zero: parameter {name}: {called} needs its values, and at "
        "stage 3 a parameter has them only while its module runs and in "
        "ringcomm.zero.unsharded(module). Read it in there, and change it in "
        "ringcomm.zero.unsharded(module, write_from=0)"
    )


def _is_gone(name: str, called: str) -> ArgumentError:
    return ArgumentError(
        f"zero: parameter {name}: {called} needs its values, and the module that shard() returned, "
        "of which each rank has a shard, is gone on this rank. Keep that module for as long as its "
        "parameters are used, or call remove_sharding() before it goes"
    )


def _called(func: Callable[..., Any]) -> str:
    """Returns a function's name, or the name of the attribute that it gets or sets."""
    attribute = getattr(func, "__self__", None)
    of_attribute = isinstance(attribute, (GetSetDescriptorType, property))
    named = attribute if of_attribute else func
    return str(getattr(named, "__name__", func))


def _resharded_in(value: Any) -> Iterator[Any]:
    """Yields the resharded parameters in a function's arguments."""
    if isinstance(value, Resharded):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _resharded_in(each)
    elif isinstance(value, dict):
        yield from _resharded_in(list(value.values()))


class UpdatedDTensor(Updated, ReshardedDTensor):
    """An :class:`Updated` mixin for DTensors."""


@cache
def _resharded_kind(kind: type) -> type:
    mixed_in = ReshardedDTensor if hasattr(kind, "to_local") else Resharded
    made = type(f"Resharded{kind.__name__}", (mixed_in, kind), {_KIND: kind})
    if kind in TORCH_CLASSES:
        TORCH_CLASSES.add(made)
    return made


@cache
def _updated_kind(kind: type) -> type:
    mixed_in = UpdatedDTensor if hasattr(kind, "to_local") else Updated
    return type(f"Updated{kind.__name__}", (mixed_in, kind), {_KIND: kind})


def make_resharded(
    params: Sequence[nn.Parameter], names: Sequence[str], ask: Callable[[], bool | None]
) -> list[int]:
    """Makes parameters raise when they are used; see NOTE [Resharded parameters].

    Args:
        params: the parameters.
        names: their names, for the errors.
        ask: called before a parameter raises; returns True if it has unsharded all of them instead,
            or None if they can no longer be unsharded.

    Returns:
        The versions that the parameters have now.
    """
    with without_torch_function():
        versions = []
        for param, name in zip(params, names, strict=True):
            advances = not isinstance(param, Resharded)
            if advances:
                vars(param)[_NAME], vars(param)[_ASK] = name, ask
                param.__class__ = _resharded_kind(type(param))
            versions.append(param._version + advances)
        if params:
            torch._C._autograd._unsafe_set_version_counter(tuple(params), tuple(versions))
        return versions


def make_updated(params: Sequence[nn.Parameter], names: Sequence[str]) -> None:
    """Makes every later use of parameters raise; called before backward updates them.

    The parameters' versions advance; see NOTE [Updated parameters].
    """
    with without_torch_function():
        for param, name in zip(params, names, strict=True):
            vars(param)[_NAME], vars(param)[_ASK] = name, bool
            param.__class__ = _updated_kind(type(param))
        versions = tuple(param._version + 1 for param in params)
        if params:
            torch._C._autograd._unsafe_set_version_counter(tuple(params), versions)


def end_update(params: Sequence[nn.Parameter]) -> None:
    """Undoes :func:`make_updated`, except for the versions."""
    with without_torch_function():
        for param in params:
            if isinstance(param, Updated):
                param.__class__ = getattr(type(param), _KIND)
                del vars(param)[_NAME], vars(param)[_ASK]


def make_unsharded(params: Sequence[nn.Parameter]) -> list[int]:
    """Undoes :func:`make_resharded`; returns the versions that the parameters have now."""
    with without_torch_function():
        versions = []
        for param in params:
            was_resharded = isinstance(param, Resharded)
            if was_resharded:
                param.__class__ = getattr(type(param), _KIND)
                del vars(param)[_NAME], vars(param)[_ASK]
            versions.append(param._version - was_resharded)
        if params:
            torch._C._autograd._unsafe_set_version_counter(tuple(params), tuple(versions))
        return versions


def advance_versions(tensors: Sequence[Tensor], by: int) -> None:
    """Changes the versions of DTensors' local tensors, which autograd may have saved.

    Args:
        tensors: local tensors of unsharded memory, or of placeholders.
        by: 1 when they are resharded, -1 when they are unsharded again.
    """
    if tensors:
        versions = tuple(each._version + by for each in tensors)
        torch._C._autograd._unsafe_set_version_counter(tuple(tensors), versions)
