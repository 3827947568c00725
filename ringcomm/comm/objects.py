# SPDX-License-Identifier: Apache-2.0
"""Collectives of Python objects, under the names of ``torch.distributed``.

Objects travel as data (:func:`pack`), so no code can arrive. torch pickles objects, and unpickling
runs code that the sender chose. With ``CommOptions(objects="pickle")``, which all ranks must set,
these functions also pickle objects.
"""

from __future__ import annotations

import enum
import json
import math
import pickle
import re
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.functions import Group, communicator_of, root_of
from ringcomm.errors import (
    ArgumentError,
    CorruptedError,
    RingcommError,
    UnsupportedError,
    where,
)
from ringcomm.json_reader import shown

__all__ = [
    "MAGIC",
    "Codec",
    "NotData",
    "Parcel",
    "all_gather_object",
    "broadcast_object_list",
    "check_list",
    "gather_object",
    "leaf_of",
    "leaf_tags",
    "pack",
    "scatter_object_list",
    "unpack",
    "value_of",
]


# ---- Python values as bytes and back, in a format that can name no code: JSON and raw bytes -----
# A message is ``RCP1``, the length of the JSON text (8 bytes, little endian), the text, and the
# bytes to which the text refers. None, bools, strings, integers of 64 bits and finite floats are
# written as JSON values; every other value is a list that begins with a tag::
#
#     ["l", ...] ["t", ...] ["s", ...] ["z", ...]   list, tuple, set, frozenset
#     ["d", [key, value], ...]                      dict; "o": OrderedDict, "n": Counter
#     ["D", factory, [key, value], ...]             defaultdict of a builtin type, or of None
#     ["i", "hexadecimal"] ["f", "nan"] ["c", re, im]   int, float, complex
#     ["b", offset, size] ["a", offset, size]       bytes, bytearray
#
# and the tags for torch and NumPy below.


# The tags for values of torch and NumPy::
#
#     ["T", dtype, shape, offset, size]             torch.Tensor; "G": one that requires grad
#     ["P", dtype, shape, offset, size]             torch.nn.Parameter; "Q": one that is frozen
#     ["A", dtype, shape, offset, size]             numpy.ndarray; "N": a NumPy scalar
#     ["S", ...] ["y", dtype] ["v", type, index]    torch.Size, torch.dtype, torch.device

_DTYPES = {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
_TENSORS: dict[str, tuple[type, bool]] = {
    "T": (torch.Tensor, False),
    "G": (torch.Tensor, True),
    "P": (torch.nn.Parameter, True),
    "Q": (torch.nn.Parameter, False),
}
_TENSOR_TAGS = {kind: tag for tag, kind in _TENSORS.items()}
leaf_tags = frozenset([*_TENSORS, *"ANSyv"])
_NUMPY_KINDS = frozenset(
    ["bool", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
_END = 2**63
# NumPy and torch's operators allow at most this many dimensions.
_MOST_DIMS = 64

Keep = Callable[[bytes | bytearray], list[int]]


class NotData(Exception):
    """Raised for a value that cannot be sent as data.

    ``path`` leads to the value: each container on the way appends its key, the innermost first.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.path: list[str] = []


def leaf_of(value: Any, keep: Keep) -> list[Any] | None:
    """Returns the list that encodes a value of torch or NumPy; None for any other value.

    Raises:
        NotData: ``value`` is of torch or NumPy but cannot be sent; the error says what to send.
    """
    kind = type(value)
    if kind is torch.Size:
        return ["S", *value]
    if kind is torch.dtype:
        return ["y", str(value)]
    if kind is torch.device:
        return ["v", value.type, value.index]
    if isinstance(value, torch.Tensor):
        return _tensor_leaf(value, keep)
    # If NumPy was never imported, no value can be NumPy's.
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    name = value.dtype.name
    if kind.__module__ != "numpy" or (
        isinstance(value, numpy.ndarray) and kind.__name__ != "ndarray"
    ):
        raise NotData(
            f"{kind.__qualname__} would arrive as NumPy's own type: send numpy.asarray(value)"
        )
    if name not in _NUMPY_KINDS or not value.dtype.isnative:
        raise NotData(
            f"NumPy's {shown(value.dtype.str)} cannot be sent: convert it with astype() to a "
            "bool, integer, float or complex dtype of this machine's byte order"
        )
    tag = "A" if isinstance(value, numpy.ndarray) else "N"
    raw = (value.view("uint8") != 0 if name == "bool" else value).tobytes()
    return [tag, name, list(value.shape), *keep(raw)]


def _tensor_leaf(value: torch.Tensor, keep: Keep) -> list[Any]:
    tag = _TENSOR_TAGS.get((type(value), value.requires_grad))
    try:
        why_not = _why_not(value)
        if why_not:
            raise NotData(f"expected a dense tensor on the CPU, got one that {why_not}")
        if tag is None:
            raise NotData(
                f"{type(value).__qualname__} would arrive as torch.Tensor: send "
                "value.as_subclass(torch.Tensor), or for a DTensor value.to_local()"
            )
        raw = bytearray(value.numel() * value.element_size())
        if raw:
            dense = value.detach().resolve_conj().resolve_neg().contiguous()
            if dense.dtype is torch.bool:  # uninitialized memory may have bytes other than 0 and 1
                dense = dense.view(torch.uint8).ne(0)
            torch.frombuffer(raw, dtype=torch.uint8).copy_(dense.view(-1).view(torch.uint8))
    except RecursionError:
        raise
    except RuntimeError as error:  # a tensor of torch.func, or a dtype that has no view as bytes
        told = str(error).partition("\n")[0]
        raise NotData(f"torch cannot read the bytes of this {value.dtype} tensor: {told}") from None
    return [tag, str(value.dtype), list(value.shape), *keep(raw)]


def _why_not(value: torch.Tensor) -> str:
    """Returns why the tensor's bytes cannot be sent, and what to do; "" if they can be sent."""
    if value.is_nested:
        return "is nested: send value.unbind()"
    if value.is_quantized:
        return "is quantised: send value.dequantize(), or value.int_repr() and its scale"
    if value.layout is not torch.strided:
        return f"has the layout {value.layout}: send value.to_dense()"
    if value.device.type == "meta":
        return "has no data (meta device): send its shape and dtype"
    if value.device.type != "cpu":
        return f"is on {value.device}: send value.cpu(), or use a tensor's collective"
    if value.dim() > _MOST_DIMS:
        return f"has more than {_MOST_DIMS} dimensions: send value.flatten() and its shape"
    if value.numel() and type(value) in (torch.Tensor, torch.nn.Parameter) and not value.data_ptr():
        return "has no memory: its storage was freed"
    return ""


def value_of(tag: str, rest: list[Any], raw: Callable[[Any, Any], memoryview]) -> Any:
    """Returns the value that :func:`leaf_of` encoded as ``[tag, *rest]``.

    Raises:
        ValueError: :func:`leaf_of` makes no such list.
        UnsupportedError: the value needs NumPy, which is not installed.
    """
    if tag == "S":
        if any(type(size) is not int or not -_END <= size < _END for size in rest):
            raise ValueError("expected sizes of 64 bits")
        return torch.Size(rest)
    if tag == "v":
        return _device(*_exactly(rest, 2))
    if tag == "y":
        return _dtype(*_exactly(rest, 1))
    name, dims, at, size = _exactly(rest, 4)
    data = bytearray(raw(at, size))
    if tag in ("A", "N"):
        return _from_numpy(tag, name, dims, data)
    dtype, (kind, requires_grad) = _dtype(name), _TENSORS[tag]
    if requires_grad and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"no tensor of {dtype} requires grad")
    shape = _shape(dims, dtype.itemsize)
    _check_bytes(data, math.prod(shape) * dtype.itemsize, dtype is torch.bool)
    tensor = (
        torch.frombuffer(data, dtype=dtype).view(shape)
        if data
        else torch.empty(shape, dtype=dtype, device="cpu")
    )
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def _exactly(rest: list[Any], count: int) -> list[Any]:
    if len(rest) != count:
        raise ValueError(f"expected {count} entries, got {len(rest)}")
    return rest


def _shape(dims: Any, itemsize: int) -> list[int]:
    """Checks a shape: all sizes that torch or NumPy compute from it must fit into 64 bits."""
    if type(dims) is not list or len(dims) > _MOST_DIMS:
        raise ValueError(f"expected a shape of at most {_MOST_DIMS} sizes")
    if any(type(dim) is not int or not 0 <= dim < _END for dim in dims):
        raise ValueError(f"expected a shape of integers >= 0, got {shown(dims)}")
    if math.prod(max(dim, 1) for dim in dims) * itemsize >= _END:
        raise ValueError("expected a shape of less than 2**63 bytes")
    return dims


def _dtype(name: Any) -> torch.dtype:
    dtype = _DTYPES.get(name) if type(name) is str else None
    if dtype is None:
        raise ValueError(f"unknown dtype {shown(name)}")
    return dtype


def _device(kind: Any, index: Any) -> torch.device:
    if type(kind) is not str or not (index is None or (type(index) is int and 0 <= index < 128)):
        raise ValueError(f"unknown device {shown([kind, index])}")
    try:
        return torch.device(kind) if index is None else torch.device(kind, index)
    except RuntimeError:
        raise ValueError(f"unknown device {shown([kind, index])}") from None


def _check_bytes(data: bytearray, size_bytes: int, is_bool: bool) -> None:
    if len(data) != size_bytes:
        raise ValueError(f"expected {size_bytes} bytes for that shape, got {len(data)}")
    # A bool with any other byte would be neither true nor false.
    if is_bool and data.count(0) + data.count(1) != len(data):
        raise ValueError("expected bools of 0 and 1")


def _from_numpy(tag: str, name: Any, dims: Any, data: bytearray) -> Any:
    if type(name) is not str or name not in _NUMPY_KINDS:
        raise ValueError(f"unknown NumPy dtype {shown(name)}")
    try:
        import numpy
    except ImportError:
        raise UnsupportedError(
            "it holds an array of NumPy, which is not installed here: install it, or send tensors"
        ) from None
    dtype = numpy.dtype(name)
    shape = _shape(dims, dtype.itemsize)
    _check_bytes(data, math.prod(shape) * dtype.itemsize, name == "bool")
    if tag == "N" and shape:
        raise ValueError("expected a scalar without a shape")
    flat = numpy.frombuffer(data, dtype) if data else numpy.empty(0, dtype)
    return flat[0] if tag == "N" else flat.reshape(shape)


MAGIC = b"RCP1"
_LENGTH_BYTES = 8
DEEPEST = 100
# In the text, a dict adds two levels of lists, and a leaf at most three.
_DEEPEST_TEXT = 2 * (DEEPEST + 1) + 3
_LONGEST_PATH = 200
_LONGEST_REASON = 300
_SMALL_INT = 2**63
_LISTS: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "z"}
_DICTS: dict[type, str] = {dict: "d", OrderedDict: "o", Counter: "n", defaultdict: "D"}
_MAKERS: dict[str, Callable[..., Any]] = {
    tag: kind for kind, tag in (_LISTS | _DICTS).items() if tag != "D"
}
_FACTORIES = {each.__name__: each for each in (bool, dict, float, int, list, set, str, tuple)}
_BUILTINS = (int, float, complex, str, bytes, bytearray, *_LISTS, dict, OrderedDict, Counter)


class _Packer:
    def __init__(self) -> None:
        self.blob = bytearray()

    def _keep(self, raw: bytes | bytearray) -> list[int]:
        at = len(self.blob)
        self.blob += raw
        return [at, len(raw)]

    def _number(self, value: Any) -> Any:
        if type(value) is int:
            return value if -_SMALL_INT <= value < _SMALL_INT else ["i", hex(value)]
        if type(value) is float:
            return value if math.isfinite(value) else ["f", repr(value)]
        return ["c", self._number(value.real), self._number(value.imag)]

    def node(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind in (int, float, complex):
            return self._number(value)
        if kind in (bytes, bytearray):
            return ["b" if kind is bytes else "a", *self._keep(value)]
        if kind in _LISTS or kind in _DICTS:
            if depth > DEEPEST:
                raise NotData(f"nested deeper than {DEEPEST} (or holds itself)")
            return self._list(value, depth) if kind in _LISTS else self._dict(value, depth)
        leaf = leaf_of(value, self._keep)
        return _refuse(value) if leaf is None else leaf

    def _list(self, value: Iterable[Any], depth: int) -> list[Any]:
        parts: list[Any] = [_LISTS[type(value)]]
        try:
            for each in value:
                kind = type(each)
                # Inline, since a list may have millions of these values.
                if (
                    kind is str
                    or (kind is int and -_SMALL_INT <= each < _SMALL_INT)
                    or (kind is float and math.isfinite(each))
                ):
                    parts.append(each)
                else:
                    parts.append(self.node(each, depth + 1))
        except NotData as refused:
            refused.path.append(f"[{len(parts) - 1}]")
            raise
        return parts

    def _dict(self, value: dict[Any, Any], depth: int) -> list[Any]:
        parts: list[Any] = [_DICTS[type(value)]]
        if isinstance(value, defaultdict):
            parts.append(_factory_name(value.default_factory))
        key: Any = None
        at = ""
        try:
            for key, each in value.items():
                at = ", in a key"
                first = key if type(key) is str else self.node(key, depth + 1)
                at = ""
                parts.append([first, self.node(each, depth + 1)])
        except NotData as refused:
            name = shown(key) if type(key) in (str, int) else f"a {type(key).__name__}"
            refused.path.append(at or f"[{name}]")
            raise
        return parts


def _factory_name(factory: Any) -> str | None:
    if factory is None:
        return None
    if factory not in _FACTORIES.values():
        raise NotData(
            f"a defaultdict's factory is code; expected None or one of {', '.join(_FACTORIES)}, "
            "got another: send dict(value)"
        )
    name: str = factory.__name__
    return name


def _refuse(value: Any) -> NoReturn:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"[:_LONGEST_REASON]
    if isinstance(value, enum.Enum):
        raise NotData(f"the enum {name} would lose its type: send value.value")
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        raise NotData(f"{name} would lose its names: send tuple(value), or value._asdict()")
    for builtin in reversed(_BUILTINS):
        if isinstance(value, builtin):
            base = builtin.__name__
            raise NotData(f"{name} would arrive as {base}: send {base}(value) if this is enough")
    raise NotData(
        "objects travel as data: None, bool, int, float, complex, str, bytes, lists, tuples, "
        "sets and dicts, tensors, parameters, and arrays of NumPy; got "
        f"{name}. Convert it, or build the communicator with "
        'CommOptions(objects="pickle"), which lets every rank run code on the others'
    )


def pack(value: Any, operation: str) -> bytearray:
    """Returns the bytes of ``value``.

    Raises:
        UnsupportedError: ``value`` contains an object that is not data; the error says where.
        RingcommError: this rank has no memory or stack left to pack it.
    """
    packer = _Packer()
    try:
        text = json.dumps(packer.node(value, 0), allow_nan=False, check_circular=False).encode()
        return bytearray(MAGIC + len(text).to_bytes(_LENGTH_BYTES, "little") + text) + packer.blob
    except NotData as refused:
        path = "".join(reversed(refused.path))
        if len(path) > _LONGEST_PATH:
            path = f"{path[: _LONGEST_PATH // 2]}...{path[-_LONGEST_PATH // 2 :]}"
        raise UnsupportedError(f"{operation}: the object{path}: {refused}") from None
    except (MemoryError, RecursionError) as error:
        raise _no_room(operation, "pack the object", error) from error


def _no_room(operation: str, what: str, error: BaseException) -> RingcommError:
    if isinstance(error, MemoryError):
        return RingcommError(
            f"{operation}: this rank has no memory to {what}. Send it in parts, or as tensors"
        )
    return RingcommError(
        f"{operation}: expected room on the stack to {what}, but Python's recursion limit was "
        "reached. Call this from a function that is nested less, or raise sys.setrecursionlimit()"
    )


class _Unpacker:
    def __init__(self, blob: memoryview) -> None:
        self._blob = blob
        self._read = 0  # bytes of the blob read so far

    def _raw(self, at: Any, size: Any) -> memoryview:
        if type(at) is not int or type(size) is not int or not 0 <= at <= at + size:
            raise ValueError("expected an entry of two sizes")
        # Entries are contiguous and in order, as pack() writes them, so none is copied twice.
        if at != self._read or at + size > len(self._blob):
            raise ValueError("an entry is past the end, or not directly after the previous entry")
        self._read = at + size
        return self._blob[at : at + size]

    def value(self, data: Any, depth: int = 0) -> Any:
        """Returns the value of a part of the text; :meth:`_node` decodes lists, which have tags."""
        return self._node(data, depth) if type(data) is list else data

    def _node(self, data: list[Any], depth: int) -> Any:
        tag, rest = data[0] if data else None, data[1:]
        if type(tag) is not str:
            raise ValueError("expected a list that begins with a tag")
        if tag in _MAKERS or tag == "D":
            if depth > DEEPEST:
                raise ValueError(f"nested deeper than {DEEPEST}")
            if tag in _LISTS.values():
                below = depth + 1
                return _MAKERS[tag](
                    [self._node(each, below) if type(each) is list else each for each in rest]
                )
            return self._dict(tag, rest, depth + 1)
        if tag in leaf_tags:
            return value_of(tag, rest, self._raw)
        if tag in ("b", "a") and len(rest) == 2:
            return (bytes if tag == "b" else bytearray)(self._raw(*rest))
        if tag == "c" and len(rest) == 2:
            return complex(_float(rest[0]), _float(rest[1]))
        if tag == "i" and len(rest) == 1 and type(rest[0]) is str:
            return int(rest[0], 16)
        if tag == "f":
            return _float(data)
        raise ValueError(f"unknown tag, or the wrong number of entries: {shown(data)}")

    def _dict(self, tag: str, rest: list[Any], depth: int) -> Any:
        factory = None
        if tag == "D":
            name, *rest = rest
            factory = None if name is None else _FACTORIES.get(name)
            if name is not None and factory is None:
                raise ValueError(f"unknown factory {shown(name)}")
        if any(type(pair) is not list or len(pair) != 2 for pair in rest):
            raise ValueError("a dict has pairs")
        items = [(self.value(key, depth), self.value(each, depth)) for key, each in rest]
        return defaultdict(factory, items) if tag == "D" else _MAKERS[tag](dict(items))


def _float(data: Any) -> float:
    if type(data) is float:
        return data
    if data not in (["f", "nan"], ["f", "inf"], ["f", "-inf"]):
        raise ValueError(f"expected a float, got {shown(data)}")
    return float(data[1])


def _junk(found: Any) -> float:
    raise ValueError(f"{shown(found)} is not allowed in the text")


def _too_deep(text: str) -> bool:
    """True when the text is nested deeper than any text that :func:`pack` writes."""
    depth = 0
    for mark in re.finditer(r'"(?:[^"\\]|\\.)*"|\[|\]', text):
        depth += {"[": 1, "]": -1}.get(mark.group(), 0)
        if depth > _DEEPEST_TEXT:
            return True
    return False


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_junk, object_pairs_hook=_junk)
    except RecursionError:
        # The sender is at fault only if the text is too deep; else this rank's stack was full.
        if _too_deep(text):
            raise ValueError(f"nested deeper than {DEEPEST}") from None
        raise


def unpack(raw: memoryview, operation: str, sender: int) -> Any:
    """Returns the value that :func:`pack` encoded as ``raw``.

    Raises:
        CorruptedError: :func:`pack` does not write such bytes; the error names the sender.
        UnsupportedError: the value needs NumPy, which is not installed here.
        RingcommError: this rank has no memory or stack left to unpack it.
    """
    head = len(MAGIC) + _LENGTH_BYTES
    try:
        if bytes(raw[: len(MAGIC)]) != MAGIC or len(raw) < head:
            raise ValueError("it does not begin with RCP1")
        end = head + int.from_bytes(raw[len(MAGIC) : head], "little")
        if end > len(raw):
            raise ValueError("it is cut off")
        return _Unpacker(raw[end:]).value(_parsed(str(raw[head:end], "ascii")))
    except (MemoryError, RecursionError) as error:
        raise _no_room(operation, f"unpack the object of rank {sender}", error) from error
    except UnsupportedError as error:
        raise UnsupportedError(f"{operation}: the object of rank {sender}: {error}") from None
    except (ValueError, TypeError, KeyError, OverflowError, RuntimeError) as error:
        raise CorruptedError(
            f"{operation}: the bytes of rank {sender} are not an object in the form of data: "
            f"{str(error)[:_LONGEST_REASON]}. Do all "
            "ranks run the same ringcomm, with the same CommOptions.objects?"
        ) from error


# If a rank's object cannot be sent, the rank announces a negative size. Then every rank receives
# the reason and raises as well.

PICKLE_MAGIC = b"RCK1"
LONGEST_REFUSAL = 2000


class Parcel:
    """The bytes of an object, and a tensor over them that does not need NumPy.

    With a ``refusal`` the bytes are the text of the reason why the object cannot be sent.
    """

    __slots__ = ("raw", "refusal", "tensor")

    def __init__(self, raw: bytearray, refusal: RingcommError | None = None) -> None:
        self.raw = raw
        self.refusal = refusal
        self.tensor = (
            torch.frombuffer(raw, dtype=torch.uint8)
            if raw
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )

    @property
    def told_size(self) -> int:
        """The size that this rank announces to the others; negative for a refusal."""
        return -len(self.raw) if self.refusal else len(self.raw)


NOTHING = Parcel(bytearray())


def check_list(called: str, name: str, target: Any, count: int, each: str = "one per rank") -> None:
    """Checks that ``target`` is a list of ``count`` entries."""
    if not isinstance(target, list) or len(target) != count:
        raise ArgumentError(
            f"{called}: {name}: expected a list of {count} entries, {each}, got "
            f"{len(target) if isinstance(target, list) else type(target).__name__}"
        )


class Codec:
    """Converts and exchanges the objects of one call.

    ``where`` names the call and the rank in errors.
    """

    def __init__(self, communicator: Communicator, operation: str) -> None:
        self.where = where(operation, communicator.rank, communicator.world_size)
        # Admits the call now, before it makes the tensors that hold the bytes.
        communicator.engine.admit(operation, ())
        self._communicator = communicator
        self._pickles = communicator.options.objects == "pickle"
        self._largest = communicator.options.largest_object_bytes

    @contextmanager
    def moving(self) -> Iterator[None]:
        """A context for collectives that move the objects: their errors name the user's call."""
        try:
            yield
        except RingcommError as error:
            error.args = (f"{self.where}: {error}",)
            raise

    def pack(self, obj: Any) -> Parcel:
        """Returns the object as bytes, or the refusal, which every rank will receive."""
        try:
            raw = self._pickled(obj) if self._pickles else pack(obj, self.where)
            if len(raw) > self._largest:
                raise UnsupportedError(
                    f"{self.where}: expected an object of at most {self._largest} bytes, got one "
                    f"of {len(raw)}. Raise CommOptions.largest_object_bytes on all ranks, or send "
                    "tensors"
                )
        except RingcommError as error:
            told = str(error).encode("utf-8", "replace")[:LONGEST_REFUSAL]
            return Parcel(bytearray(told), error)
        return Parcel(raw)

    def _pickled(self, obj: Any) -> bytearray:
        try:
            return bytearray(PICKLE_MAGIC + pickle.dumps(obj))
        except Exception as error:  # anything that the object's own methods raise
            raise UnsupportedError(
                f"{self.where}: a {type(obj).__qualname__} cannot be pickled: "
                f"{type(error).__name__}: {error}"
            ) from error

    def unpack(self, parcel: Parcel, sender: int) -> Any:
        raw = memoryview(parcel.raw)
        pickled = bytes(raw[: len(PICKLE_MAGIC)]) == PICKLE_MAGIC
        if pickled != self._pickles:
            came, wanted = ("a pickle", "data")[:: 1 if pickled else -1]
            raise UnsupportedError(
                f"{self.where}: expected {wanted}, got {came} from rank {sender}. Give all ranks "
                "the same CommOptions.objects"
            )
        if pickled:
            return pickle.loads(raw[len(PICKLE_MAGIC) :])
        return unpack(raw, self.where, sender)

    def check_size(self, told_size: int, sender: int) -> None:
        if not -LONGEST_REFUSAL <= told_size <= self._largest or not told_size:
            raise CorruptedError(
                f"{self.where}: rank {sender} announced an object of {told_size} bytes; expected "
                f"1 to {self._largest}. Give all ranks the same CommOptions.largest_object_bytes"
            )

    def room(self, size_bytes: int, sender: int) -> Parcel:
        try:
            return Parcel(bytearray(size_bytes))
        except MemoryError:
            error = RingcommError(
                f"{self.where}: no memory for the object of {size_bytes} bytes that rank {sender} "
                "announced. Send less at a time, or lower CommOptions.largest_object_bytes"
            )
        # The other ranks continue to exchange objects, and must not wait for this rank.
        self._communicator.abort(str(error))
        raise error

    def sizes_of_all(self, parcel: Parcel) -> list[int]:
        """Returns the size of each rank's parcel; raises on all ranks if one is a refusal."""
        communicator = self._communicator
        told = torch.empty(communicator.world_size, dtype=torch.int64, device="cpu")
        mine = torch.tensor([parcel.told_size], dtype=torch.int64, device="cpu")
        with self.moving():
            communicator.all_gather_into_tensor(told, mine)
        sizes: list[int] = told.tolist()
        for rank, size in enumerate(sizes):
            self.check_size(size, rank)
        if min(sizes) < 0:
            rooms = [self.room(max(0, -size), rank) for rank, size in enumerate(sizes)]
            sent = parcel if parcel.refusal else NOTHING
            with self.moving():
                communicator.all_gather([room.tensor for room in rooms], sent.tensor)
            first = next(rank for rank, size in enumerate(sizes) if size < 0)
            self._refuse(parcel, rooms[first], first)
        return sizes

    def sizes_of_root(self, parcels: list[Parcel], count: int, root: int) -> list[int]:
        """Returns the sizes of ``root``'s parcels; raises on all ranks if one is a refusal."""
        refused = next((each for each in parcels if each.refusal), None)
        told = [refused.told_size] * count if refused else [each.told_size for each in parcels]
        sizes = torch.tensor(told or [0] * count, dtype=torch.int64, device="cpu")
        with self.moving():
            self._communicator.broadcast(sizes, root)
        found: list[int] = sizes.tolist()
        for size in found:
            self.check_size(size, root)
        if min(found) < 0:
            room = refused or self.room(-min(found), root)
            with self.moving():
                self._communicator.broadcast(room.tensor, root)
            self._refuse(refused or NOTHING, room, root)
        return found

    def _refuse(self, mine: Parcel, first: Parcel, rank: int) -> None:
        if mine.refusal:
            raise mine.refusal
        error = UnsupportedError(
            f"{self.where}: rank {rank} has an object that cannot be sent, so none was. The "
            f"reason: {first.raw.decode('utf-8', 'replace')}"
        )
        error.repeats = True
        raise error

    def exchange(self, sent: list[Parcel], sizes: list[int]) -> list[Parcel]:
        """Sends ``sent[r]`` to rank r, and receives a parcel of ``sizes[r]`` bytes from rank r."""
        rooms = [self.room(size, rank) for rank, size in enumerate(sizes)]
        with self.moving():
            self._communicator.all_to_all(
                [room.tensor for room in rooms], [parcel.tensor for parcel in sent]
            )
        return rooms


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Fills ``object_list[r]`` with the ``obj`` of rank r, on every rank.

    Raises:
        ArgumentError: ``object_list`` is not a list of world_size entries.
        UnsupportedError: ``obj`` is not data; see ``CommOptions.objects``.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    communicator = communicator_of(group, "all_gather_object")
    codec = Codec(communicator, "all_gather_object")
    check_list(codec.where, "object_list", object_list, communicator.world_size)
    parcel = codec.pack(obj)
    sizes = codec.sizes_of_all(parcel)
    rooms = [
        parcel if rank == communicator.rank else codec.room(size, rank)
        for rank, size in enumerate(sizes)
    ]
    with codec.moving():
        communicator.all_gather([room.tensor for room in rooms], parcel.tensor)
    object_list[:] = [codec.unpack(room, rank) for rank, room in enumerate(rooms)]


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
) -> None:
    """Fills ``object_gather_list[r]`` with the ``obj`` of rank r, on ``dst`` (default 0) only.

    Raises:
        ArgumentError: on ``dst``, ``object_gather_list`` is not a list of world_size entries.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    communicator = communicator_of(group, "gather_object")
    if dst is None and group_dst is None:
        dst = 0
    root = root_of(communicator, "gather_object", "dst", dst, group_dst)
    is_root = communicator.rank == root
    codec = Codec(communicator, "gather_object")
    if is_root:
        check_list(codec.where, "object_gather_list", object_gather_list, communicator.world_size)
    parcel = codec.pack(obj)
    sizes = codec.sizes_of_all(parcel)
    # An all-to-all instead of a gather, since the objects differ in size.
    sent = _to_one(communicator, root, parcel)
    arriving = [size if is_root and rank != root else 0 for rank, size in enumerate(sizes)]
    rooms = codec.exchange(sent, arriving)
    if object_gather_list is not None and is_root:
        rooms[root] = parcel
        object_gather_list[:] = [codec.unpack(room, rank) for rank, room in enumerate(rooms)]


def _to_one(communicator: Communicator, root: int, parcel: Parcel) -> list[Parcel]:
    """Returns the parcels to send, by rank: ``parcel`` for ``root``, nothing for the others."""
    return [
        parcel if rank == root != communicator.rank else NOTHING
        for rank in range(communicator.world_size)
    ]


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
) -> None:
    """Replaces the entries of ``object_list`` by the entries of ``src``'s list (default 0).

    Args:
        object_list: on all ranks a list of the same length.
        src: global rank of the sender.
        group: the group; None: the default group.
        device: None or a CPU device.
        group_src: rank of the sender in ``group``, instead of ``src``.

    Raises:
        ArgumentError: the list's length differs from the length on ``src``.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    communicator = communicator_of(group, "broadcast_object_list")
    if src is None and group_src is None:
        src = 0
    root = root_of(communicator, "broadcast_object_list", "src", src, group_src)
    is_root = communicator.rank == root
    codec = Codec(communicator, "broadcast_object_list")
    if is_root and not isinstance(object_list, list):
        raise ArgumentError(
            f"{codec.where}: object_list: expected a list, got {type(object_list).__name__}"
        )
    packed = [codec.pack(object_list)] if is_root else []
    (size,) = codec.sizes_of_root(packed, 1, root)
    room = packed[0] if is_root else codec.room(size, root)
    with codec.moving():
        communicator.broadcast(room.tensor, root)
    if not is_root:
        values = codec.unpack(room, root)
        if not isinstance(values, list):
            raise CorruptedError(
                f"{codec.where}: expected a list from rank {root}, got {type(values).__name__}. "
                "Do all ranks run the same ringcomm?"
            )
        check_list(codec.where, "object_list", object_list, len(values), f"as on rank {root}")
        object_list[:] = values


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
) -> None:
    """Sends entry r of ``scatter_object_input_list`` of ``src`` (default 0) to rank r.

    Args:
        scatter_object_output_list: a non-empty list; its first entry is replaced.
        scatter_object_input_list: on ``src`` a list of world_size objects; elsewhere ignored.
        src: global rank of the sender.
        group: the group; None: the default group.
        group_src: rank of the sender in ``group``, instead of ``src``.

    Raises:
        ArgumentError: a list has the wrong length.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    communicator = communicator_of(group, "scatter_object_list")
    if src is None and group_src is None:
        src = 0
    root = root_of(communicator, "scatter_object_list", "src", src, group_src)
    is_root = communicator.rank == root
    codec = Codec(communicator, "scatter_object_list")
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ArgumentError(
            f"{codec.where}: scatter_object_output_list: expected a list of at least one entry"
        )
    packed: list[Parcel] = []
    if is_root:
        check_list(
            codec.where,
            "scatter_object_input_list",
            scatter_object_input_list,
            communicator.world_size,
        )
        packed = [codec.pack(obj) for obj in scatter_object_input_list or []]
    sizes = codec.sizes_of_root(packed, communicator.world_size, root)
    # An all-to-all instead of a scatter, since the objects differ in size.
    mine = [0] * communicator.world_size
    sent = [each if rank != root else NOTHING for rank, each in enumerate(packed)]
    if not is_root:
        mine[root] = sizes[communicator.rank]
        sent = [NOTHING] * communicator.world_size
    rooms = codec.exchange(sent, mine)
    scatter_object_output_list[0] = codec.unpack(packed[root] if is_root else rooms[root], root)
