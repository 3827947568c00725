# SPDX-License-Identifier: Apache-2.0
"""Reads files of ``torch.save()`` and pickles of data without running their code.

NOTE [Pickles without unpickling]
A pickle is a program, and Python's unpickler calls the functions that it names. This reader
interprets the instructions, and builds containers, numbers and text itself. It calls nothing that a
pickle names: tensors become views of the file, ``OrderedDict`` a dict, ``torch.Size`` a tuple. Any
other call becomes an :class:`Inert` with name and arguments; its class need not be installed.
Python's ``pickletools`` documents the format; torch's files are uncompressed zip archives of one
pickle and the bytes of its storages.

NOTE [The cost of a pickle]
Reading n bytes costs O(n) time and memory. One instruction makes one object of bounded size. Data
that an instruction copies, or makes again from the memo (the pickle's numbered values), such as
tensors, items of an ``OrderedDict`` and encoded text, are charged to a budget of 4 n units. The
memo is a list, and dict keys are text, small integers or objects, since a file can be made so that
hashes of other keys collide or take long. The result must be a tree: no deeper than ``DEEPEST``,
without cycles, and of O(n) bytes in JSON even if the memo repeats values. Members of an archive may
not share bytes, and a tensor has at most as many elements as its storage.
"""

from __future__ import annotations

import io
import mmap
import os
import pickletools
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

import torch

from ringcomm.errors import CheckpointError, printable
from ringcomm.json_reader import DAMAGE, exactly, in_words, number_below, shown
from ringcomm.zero.checkpoint.format import DTYPES, MOST_DIMS

Tensor = torch.Tensor

# Far more than the structure of any model needs, and small enough to read on any machine.
LARGEST_PICKLE_BYTES = 1 << 28
DEEPEST = 64
# Exceptions that zipfile raises for a damaged archive.
_DAMAGED = (*DAMAGE, zipfile.BadZipFile, OSError, EOFError, struct.error)
_LOCAL_HEADER = struct.Struct("<26x2H")
_LONGEST_NAME = 256
_MOST_KEY = 1 << 16
# _check_tree() counts this many bytes of JSON as one more value.
_UNIT_BYTES = 16
# Units of the budget that a tensor costs, since its Python objects take about 1 KB.
_TENSOR_COST = 64


class Inert:
    """A stand-in for an object that a pickle would have made by a call.

    Attributes:
        name: name of the function or class, "module.name".
        args: arguments of the call.
        state: argument of ``__setstate__()``.
    """

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] = ()) -> None:
        if len(name) > _LONGEST_NAME:
            raise ValueError(f"it has a name of {len(name)} characters")
        self.name = name
        self.args: tuple[Any, ...] = exactly(args, tuple)
        self.state: Any = None

    def __repr__(self) -> str:
        return f"Inert({self.name!r})"

    def get(self, name: str, default: Any = None) -> Any:
        """Returns an attribute from the object's state."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype
    key: str
    elems: int


_DTYPES = {str(dtype): dtype for dtype in DTYPES}
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
_TENSORS = tuple(f"torch._utils._rebuild_tensor_{end}" for end in ("v2", "v3"))
_PARAMETERS = tuple(f"torch._utils._rebuild_parameter{end}" for end in ("", "_with_state"))


_MakeTensor = Callable[[_Storage, int, Any, Any], Tensor]


class _Machine:
    """Interprets the instructions of a pickle."""

    def __init__(self, tensor: _MakeTensor | None) -> None:
        self._tensor = tensor
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._most = self._left = 0

    def run(self, pickled: bytes) -> Any:
        """Returns the value that the pickle describes.

        Raises:
            DAMAGE: the pickle is damaged, has an unknown instruction, or costs more than its size
                allows.
        """
        self._most, self._left = len(pickled), 4 * len(pickled)
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name == "STOP":
                (result,) = self._stack
                _check_tree(result, 1000 + 4 * len(pickled))
                return result
            action = _ACTIONS.get(opcode.name)
            if action is None:
                raise ValueError(f"it has {opcode.name}, an instruction that data do not need")
            action(self, argument)
        raise ValueError("it has no end")

    def charge(self, units: int) -> None:
        """Subtracts ``units`` from the budget; see NOTE [The cost of a pickle]."""
        self._left -= units
        if self._left < 0:
            raise ValueError("it copies more than its size allows")

    # ---- stack and memo -------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def mark(self, _: Any = None) -> None:
        self._marks.append(len(self._stack))

    def pop(self, _: Any = None) -> None:
        """Drops the stack's last value, or its last mark if no value is above the mark."""
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self.last(1)

    def last(self, count: int) -> tuple[Any, ...]:
        """Removes and returns the last ``count`` values, which must be above the last mark."""
        begin = len(self._stack) - count
        if begin < (self._marks[-1] if self._marks else 0):
            raise ValueError("its stack is empty")
        found = tuple(self._stack[begin:])
        del self._stack[begin:]
        return found

    def recall(self, index: int) -> None:
        self._stack.append(self._memo[int(index)])

    def operands(self, _: Any = None) -> list[Any]:
        """Removes the last mark and all values above it; returns these values."""
        at = self._marks.pop()
        found = self._stack[at:]
        del self._stack[at:]
        return found

    def remember(self, index: int | None = None) -> None:
        """Stores the stack's last value in the memo, at ``index``, or at the end if None."""
        at = len(self._memo) if index is None else int(index)
        if not 0 <= at < self._most:
            raise ValueError(f"it stores a value at {shown(at)}, outside its memo")
        self._memo += [None] * (at + 1 - len(self._memo))
        self._memo[at] = self._stack[-1]

    # ---- changes to the container at the top of the stack ---------------------------------------

    def extend(self, values: Sequence[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif not isinstance(target, Inert):
            raise TypeError("it appends to something that is not a list")

    def update(self, pairs: Sequence[Any]) -> None:
        """Sets items of the stack's last dict; ``pairs`` is key, value, key, value, and so on."""
        target = self._stack[-1]
        if not isinstance(target, (dict, Inert)) or len(pairs) % 2:
            raise TypeError("it sets items of something that is not a dict")
        entries = zip(map(self.key, pairs[::2]), pairs[1::2], strict=True)
        if isinstance(target, dict):
            target.update(entries)

    def key(self, key: Any) -> Any:
        """Returns a key for a dict; keys whose hashes a file can make collide become text."""
        kind = type(key)
        if key is None or kind in (str, bool, Inert) or (kind is int and 0 <= key < _MOST_KEY):
            return key
        flat = key if kind is tuple else (key,)
        if len(flat) > 8 or any(
            type(each) not in (int, float, bool) and len(exactly(each, str, bytes)) > _LONGEST_NAME
            for each in flat
        ):
            raise TypeError(f"it has a {kind.__name__} as a key, which data do not need")
        text = str(key)
        self.charge(len(text))
        return text

    def make_dict(self, _: Any = None) -> None:
        pairs = self.operands()
        self.push({})
        self.update(pairs)

    # ---- calls that Python's unpickler would make ---------------------------------------------

    def stack_global(self, _: Any = None) -> None:
        module, name = self.last(2)
        if len(module) + len(name) > _LONGEST_NAME:
            raise ValueError("it has a name of too many characters")
        self.push(Inert(f"{module}.{name}"))

    def call(self, _: Any = None) -> None:
        called, args = self.last(2)
        name, args = called.name, exactly(args, tuple)
        if name == "torch._tensor._rebuild_from_type_v2":
            # A tensor with attributes, or of a subclass.
            name, args = args[0].name, exactly(args[2], tuple)
        self.push(self._made(name, args))

    def new(self, count: int) -> None:
        """Pushes an Inert; the first two of the last ``count`` values are class and arguments."""
        kind, args = self.last(count)[:2]
        self.push(Inert(kind.name, args))

    def build(self, _: Any = None) -> None:
        """Sets the state of the last Inert; ignores the state of a dict such as OrderedDict."""
        (state,) = self.last(1)
        if isinstance(self._stack[-1], Inert):
            self._stack[-1].state = state

    def persistent(self, _: Any = None) -> None:
        """Pushes a storage that torch's pickle names."""
        ((kind, storage, key, _, elems),) = self.last(1)
        dtype = _STORAGES.get(storage.name.rpartition(".")[2])
        known = type(key) is str and len(key) <= _LONGEST_NAME and type(elems) is int
        if kind != "storage" or dtype is None or not known:
            raise ValueError(f"it has a storage of an unknown kind, {storage.name}")
        self.push(_Storage(dtype, key, elems))

    def _made(self, name: str, args: tuple[Any, ...]) -> Any:
        """Returns the value that represents the result of calling ``name``."""
        if name == "collections.OrderedDict":
            return self._ordered(*args)
        if name == "_codecs.encode" and args[1] == "latin1":
            self.charge(len(exactly(args[0], str)))
            return args[0].encode("latin1")  # bytes, in old protocols
        if name == "torch.Size":
            self.charge(len(exactly(args[0], tuple, list)))
            return tuple(args[0])
        if name in _PARAMETERS:
            return args[0]
        if name in ("builtins.set", "__builtin__.set", "builtins.frozenset"):
            return exactly(args[0], list, tuple) if args else []
        if name in ("copyreg._reconstructor", "copy_reg._reconstructor"):
            return Inert(args[0].name)
        if name in _TENSORS and self._tensor is not None:
            self.charge(_TENSOR_COST)
            stored = args[0]
            if name == _TENSORS[1]:  # a dtype without a storage class
                dtype = _DTYPES[args[6].name]
                elems = stored.elems * stored.dtype.itemsize // dtype.itemsize
                stored = _Storage(dtype, stored.key, elems)
            return self._tensor(stored, *args[1:4])
        return Inert(name, args)

    def _ordered(self, pairs: Any = ()) -> dict[Any, Any]:
        self.charge(4 * len(exactly(pairs, list, tuple)))
        return {self.key(key): value for key, value in pairs}


def _check_tree(value: Any, most: int) -> None:
    """Raises ValueError unless ``value`` is a tree of limited depth and at most ``most`` units."""
    stack = [iter((value,))]
    while stack:
        for each in stack[-1]:
            most -= 1 + _json_bytes(each) // _UNIT_BYTES
            inner = _inside(each)
            if most < 0 or len(stack) > DEEPEST:
                raise ValueError(f"it is nested deeper than {DEEPEST}, or repeats too much")
            if inner is not None:
                stack.append(iter(inner))
                break
        else:
            stack.pop()


def _json_bytes(value: Any) -> int:
    """Returns the approximate bytes of an integer, bytes or text in JSON; few for other values."""
    if type(value) is int:
        return value.bit_length() // 3
    if type(value) is bytes:
        return len(value)
    text = value.name if type(value) is Inert else value if type(value) is str else ""
    # JSON writes a character that is not printable ASCII as at most two 6-byte escapes.
    return len(text) * (1 if text.isascii() and text.isprintable() else 12)


def _inside(value: Any) -> Iterable[Any] | None:
    if type(value) in (list, tuple):
        return value  # type: ignore[no-any-return]
    if type(value) is dict:
        return chain.from_iterable(value.items())
    if type(value) is Inert:
        return (value.args, value.state)
    return None


_Action = Callable[[_Machine, Any], Any]
_CONSTANTS = (
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
)
# Maps an instruction to the function that performs it, which takes the instruction's argument.
_ACTIONS: dict[str, _Action] = {
    **dict.fromkeys(_CONSTANTS, _Machine.push),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.remember),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.recall),
    **dict.fromkeys(("PROTO", "FRAME"), lambda *_: None),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_SET"), lambda machine, _: machine.push([])),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "GLOBAL": lambda machine, name: machine.push(Inert(name.replace(" ", "."))),
    "MARK": _Machine.mark,
    "TUPLE": lambda machine, _: machine.push(tuple(machine.operands())),
    "TUPLE1": lambda machine, _: machine.push(machine.last(1)),
    "TUPLE2": lambda machine, _: machine.push(machine.last(2)),
    "TUPLE3": lambda machine, _: machine.push(machine.last(3)),
    **dict.fromkeys(("LIST", "FROZENSET"), lambda machine, _: machine.push(machine.operands())),
    "DICT": _Machine.make_dict,
    "APPEND": lambda machine, _: machine.extend(machine.last(1)),
    **dict.fromkeys(("APPENDS", "ADDITEMS"), lambda machine, _: machine.extend(machine.operands())),
    "SETITEM": lambda machine, _: machine.update(machine.last(2)),
    "SETITEMS": lambda machine, _: machine.update(machine.operands()),
    "POP": _Machine.pop,
    "POP_MARK": _Machine.operands,
    "STACK_GLOBAL": _Machine.stack_global,
    "REDUCE": _Machine.call,
    "NEWOBJ": lambda machine, _: machine.new(2),
    "NEWOBJ_EX": lambda machine, _: machine.new(3),
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent,
}


def read_pickle(pickled: bytes, called: str, tensor: _MakeTensor | None = None) -> Any:
    """Returns the data that a pickle describes.

    Args:
        pickled: bytes of the pickle.
        called: name of the pickle, for errors.
        tensor: function that makes a tensor from a storage, an offset, sizes and strides; None if
            the pickle must not have tensors.

    Raises:
        CheckpointError: the pickle is damaged.
    """
    try:
        return _Machine(tensor).run(pickled)
    except DAMAGE as error:
        raise CheckpointError(f"{called}: its pickle cannot be read: {in_words(error)}") from error


def sizes_of(values: Any) -> tuple[int, ...]:
    """Returns sizes, offsets or strides from a checkpoint, checked.

    Raises:
        ValueError: there are too many values, or a value is not an integer from 0 to 2^62 - 1.
    """
    found = tuple(values)
    if len(found) > MOST_DIMS or not all(number_below(each, 1 << 62) for each in found):
        raise ValueError(f"expected sizes, got {shown(found)}")
    return found


class MappedFile:
    """A regular file, mapped into memory.

    Raises:
        CheckpointError: the file cannot be opened, is not a regular file, or is empty.
    """

    def __init__(self, path: Path) -> None:
        self.called = str(path)
        try:
            # Without O_NONBLOCK, opening a pipe without a writer would wait.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise ValueError("not a regular file")
                # Private pages, so that writing to a tensor changes no file.
                self.bytes = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error


class TorchFile:
    """An archive of ``torch.save()``: a file, or a part of a file.

    Args:
        file: the file that has the archive.
        begin: first byte of the archive.
        size_bytes: bytes of the archive; None means up to the end of the file.

    Raises:
        CheckpointError: the bytes are not an archive of ``torch.save()``, or are damaged.
    """

    def __init__(self, file: MappedFile, begin: int = 0, size_bytes: int | None = None) -> None:
        self._called, self._map = file.called, file.bytes
        self._begin = begin
        end = len(self._map) if size_bytes is None else begin + size_bytes
        if not 0 <= begin <= end <= len(self._map):
            self._fail(f"expected bytes {begin} to {end}, it has {len(self._map)}")
        self._left_bytes = 4 * (end - begin)
        try:
            self._zip = zipfile.ZipFile(cast(BinaryIO, _FileRange(self._map, begin, end)))
        except _DAMAGED as error:
            self._fail(f"is no file of torch.save(): {error}")
        members = sorted(self._zip.infolist(), key=lambda each: each.header_offset)
        ends = [*(each.header_offset for each in members[1:]), end - begin]
        # Maps a member's name to the member and the position in the file before which it must end.
        self._members = {
            each.filename.partition("/")[2]: (each, begin + stop)
            for each, stop in zip(members, ends, strict=True)
        }
        if len(self._members) < len(members):
            self._fail("has two members of one name")

    def _fail(self, text: str) -> NoReturn:
        raise CheckpointError(f"{self._called}: {text}")

    def read(self) -> Any:
        """Returns the saved value; its tensors are views of the mapped file.

        Raises:
            CheckpointError: the archive is damaged.
        """
        if "byteorder" in self._members and bytes(self._content("byteorder", 6)) != b"little":
            self._fail("its tensors are not little-endian")
        pickled = bytes(self._content("data.pkl", LARGEST_PICKLE_BYTES))
        if zlib.crc32(pickled) != self._members["data.pkl"][0].CRC:
            self._fail("data.pkl has another checksum than was saved")
        return read_pickle(pickled, self._called, self._view)

    def _content(self, name: str, most_bytes: int) -> memoryview:
        try:
            at, size_bytes = self._range_of(name)
        except ValueError as error:
            self._fail(str(error))
        if size_bytes > most_bytes:
            self._fail(f"expected a {name} of at most {most_bytes} bytes, got {size_bytes}")
        return memoryview(self._map)[at : at + size_bytes]

    def _range_of(self, name: str) -> tuple[int, int]:
        """Returns the first byte and the size of a member that is not compressed."""
        member, end = self._members.get(name, (None, 0))
        if (
            member is None
            or member.compress_type != zipfile.ZIP_STORED
            or member.flag_bits & 1
            or member.header_offset < 0
        ):
            raise ValueError(f"{name} is not there, or compressed")
        at = self._begin + member.header_offset
        head = self._map[at : at + _LOCAL_HEADER.size].ljust(_LOCAL_HEADER.size)
        at += _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(head))
        if at + member.file_size > end:
            raise ValueError(f"{name} ends outside of its bytes in the file")
        return at, member.file_size

    def _view(self, storage: _Storage, offset: int, size: Any, stride: Any) -> Tensor:
        at, size_bytes = self._range_of(f"data/{storage.key}")
        if size_bytes != storage.elems * storage.dtype.itemsize:
            raise ValueError(f"storage {shown(storage.key)} has {size_bytes} bytes")
        size, stride = sizes_of(size), sizes_of(stride)
        elems, (last,) = prod(size), sizes_of((offset,))
        if not elems and prod(n or 1 for n in size) < 1 << 62:
            return torch.empty(size, dtype=storage.dtype, device="cpu")
        for n, step in zip(size, stride, strict=True):
            last += (n - 1) * step
        if not 0 < elems <= storage.elems or last >= storage.elems:
            raise ValueError("a tensor has elements outside its storage")
        self._left_bytes -= elems * storage.dtype.itemsize
        if self._left_bytes < 0:
            raise ValueError("its tensors repeat the same bytes more than a few times")
        flat = torch.frombuffer(self._map, dtype=storage.dtype, count=storage.elems, offset=at)
        # A dimension of 1 may have any stride, even one that does not fit an integer.
        stride = [step if n > 1 else 1 for n, step in zip(size, stride, strict=True)]
        return flat.as_strided(size, stride, offset)


class _FileRange:
    """Bytes [begin, end) of a mapped file, with the file methods that zipfile calls."""

    def __init__(self, mapped: mmap.mmap, begin: int, end: int) -> None:
        self._mapped, self._begin, self._end, self._at = mapped, begin, end, 0

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._end - self._begin}
        self._at = max(0, base[whence] + offset)
        return self._at

    def read(self, size: int = -1) -> bytes:
        first = self._begin + self._at
        # Allocate at most the bytes that exist, whatever size the archive claims.
        found: bytes = self._mapped[first : self._end if size < 0 else min(self._end, first + size)]
        self._at += len(found)
        return found


# ---- Parts of a file's contents; errors say what was expected, and what was found ---------------

_ARTICLES = {dict: "a dict", list: "a list", object: "a value"}


def entry(value: Any, name: str, called: object, kind: type = object) -> Any:
    """Returns an entry of a dict.

    Args:
        value: expected to be a dict that has the entry.
        name: name of the entry.
        called: name of the file or folder, for errors.
        kind: the expected kind of the entry: dict, list or object.

    Raises:
        CheckpointError: the value is not a dict, or the entry is missing or of another kind.
    """
    if not isinstance(value, dict) or name not in value:
        _fail(called, f"expected a dict with {name!r}", value)
    return of_kind(value[name], kind, f"{called}: {name}")


def attribute(value: Any, name: str, called: object, kind: type) -> Any:
    """Returns an attribute of a pickled object.

    Raises:
        CheckpointError: the value is not an object, or the attribute is missing or of another
            kind.
    """
    if not isinstance(value, Inert) or not isinstance(value.state, dict) or name not in value.state:
        _fail(called, f"expected an object with {name!r}", value)
    return of_kind(value.state[name], kind, f"{called}: {name}")


def of_kind(value: Any, kind: type, called: object) -> Any:
    """Returns a value, if it is of a kind: dict, list or object.

    Raises:
        CheckpointError: the value is of another kind.
    """
    if not isinstance(value, kind):
        _fail(called, f"expected {_ARTICLES[kind]}", value)
    return value


def _fail(called: object, expected: str, value: Any) -> NoReturn:
    raise CheckpointError(f"{called}: {expected}, got {described(value)}")


def described(value: Any) -> str:
    """Describes a value of unknown size, for a message."""
    if isinstance(value, Inert):
        return f"an object of {printable(value.name)}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, dict):
        return f"a dict with {printable(shown(list(value)))}"
    return f"{type(value).__name__} {printable(shown(value))}"
