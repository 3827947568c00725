"""Files of ``torch.save()`` and pickles of plain data, read without running anything.

NOTE [Pickles without unpickling]
A pickle is a program, and Python's unpickler calls what it names. This reader knows the
instructions, and builds containers, numbers and text itself. What a pickle would call is not
called: tensors become views of the file, ``OrderedDict`` a dict, ``torch.Size`` a tuple, and
anything else an :class:`Inert` with the name and the arguments, whose class need not be installed.
The format is that of Python's ``pickletools``; torch's files are zip archives of one pickle and the
bytes of its storages, not compressed.
"""

from __future__ import annotations

import io
import mmap
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch

from ringcomm.errors import CheckpointError

Tensor = torch.Tensor

# Far more than the structure of any model, and little enough to be read on any machine.
LARGEST_PICKLE_BYTES = 1 << 28
# What zipfile raises of a damaged archive.
_DAMAGED = (
    *(zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, ValueError, EOFError),
    *(struct.error, zlib.error),
)
_LOCAL_HEADER = struct.Struct("<26x2H")


@dataclass(eq=False)
class Inert:
    """A stand-in for an object that a pickle would have made by calling something.

    Attributes:
        name: of what it would have called, "module.name"; of a class itself, too.
        args: arguments.
        state: what the object would have been given by ``__setstate__()``.
        items: its entries, if it is a dict of a kind of its own.
    """

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns an attribute that its state has."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype
    key: str
    elems: int


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


class _Mark:
    """Where a list of operands begins on the stack."""


class _Machine:
    """Follows the instructions of a pickle.

    Args:
        tensor: makes a tensor of a storage, its offset, size and stride.
    """

    def __init__(self, tensor: Callable[[_Storage, int, Any, Any], Tensor] | None) -> None:
        self._tensor = tensor
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, pickled: bytes) -> Any:
        """Returns what the pickle describes.

        Raises:
            ValueError, TypeError, LookupError, AttributeError: it is damaged, or has an unknown
                instruction.
        """
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name == "STOP":
                (result,) = self._stack
                return result
            self._take(opcode.name, argument)
        raise ValueError("it has no end")

    def _take(self, name: str, argument: Any) -> None:
        if name in _CONSTANTS:
            self.push(argument)
        elif name in _MADE:
            self.push(_MADE[name]())
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self._memo[int(argument)] = self._stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self.push(self._memo[int(argument)])
        elif name == "GLOBAL":
            self.push(Inert(argument.replace(" ", ".")))
        elif name in _ACTIONS:
            _ACTIONS[name](self)
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"it has the instruction {name}, which plain data have not")

    # ---- the stack ------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        """Puts a value on the stack."""
        self._stack.append(value)

    def last(self, count: int) -> tuple[Any, ...]:
        """Takes the last ``count`` values from the stack."""
        found = tuple(self._stack[-count:])
        if len(found) < count:
            raise ValueError("its stack is empty")
        del self._stack[-count:]
        return found

    def operands(self) -> list[Any]:
        """Takes everything down to the last mark from the stack."""
        at = max(place for place, each in enumerate(self._stack) if isinstance(each, _Mark))
        found = self._stack[at + 1 :]
        del self._stack[at:]
        return found

    # ---- containers, which are the last on the stack --------------------------------------------

    def extend(self, values: Sequence[Any]) -> None:
        """Appends to a list or set."""
        target = self._stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif not isinstance(target, Inert):
            raise TypeError("it appends to what is no list")

    def update(self, pairs: Sequence[Any]) -> None:
        """Sets items of a dict: key, value, key, value."""
        target = self._stack[-1]
        items = target.items if isinstance(target, Inert) else target
        if not isinstance(items, dict) or len(pairs) % 2:
            raise TypeError("it sets items of what is no dict")
        items.update(zip(pairs[::2], pairs[1::2], strict=True))

    def make_dict(self) -> None:
        """Puts a dict of the operands on the stack."""
        pairs = self.operands()
        self.push({})
        self.update(pairs)

    # ---- what the unpickler would call ----------------------------------------------------------

    def stack_global(self) -> None:
        """Names what is to be called."""
        self.push(Inert(".".join(self.last(2))))

    def call(self) -> None:
        """Puts what a call stands for on the stack."""
        called, args = self.last(2)
        self.push(self._made(called.name, tuple(args)))

    def new(self, count: int) -> None:
        """Puts an object on the stack, of a class and its arguments among ``count`` values."""
        kind, args = self.last(count)[:2]
        self.push(Inert(kind.name, tuple(args)))

    def build(self) -> None:
        """Gives an object its state; a dict of a kind of its own needs none."""
        (state,) = self.last(1)
        if isinstance(self._stack[-1], Inert):
            self._stack[-1].state = state

    def persistent(self) -> None:
        """Puts a storage on the stack, which torch's pickles name."""
        ((kind, storage, key, _, elems),) = self.last(1)
        dtype = _STORAGES.get(storage.name.rpartition(".")[2])
        if kind != "storage" or dtype is None or type(key) is not str or type(elems) is not int:
            raise ValueError(f"it has a storage of an unknown kind, {storage.name}")
        self.push(_Storage(dtype, key, elems))

    def _made(self, name: str, args: tuple[Any, ...]) -> Any:
        """Returns what a call of ``name`` stands for."""
        if name == "collections.OrderedDict":
            return dict(args[0]) if args else {}
        if name == "_codecs.encode" and args[1] == "latin1":
            return args[0].encode("latin1")  # bytes, in old protocols
        if name == "torch.Size":
            return tuple(args[0])
        if name in (
            "torch._utils._rebuild_parameter",
            "torch._utils._rebuild_parameter_with_state",
        ):
            return args[0]
        if name == "torch._tensor._rebuild_from_type_v2":
            # A tensor with attributes, or of a class of its own.
            return self._made(args[0].name, args[2])
        if name in ("builtins.set", "__builtin__.set", "builtins.frozenset"):
            return list(args[0]) if args else []
        if name in ("copyreg._reconstructor", "copy_reg._reconstructor"):
            return Inert(args[0].name)
        if name == "torch._utils._rebuild_tensor_v2" and self._tensor is not None:
            return self._tensor(*args[:4])
        if name == "torch._utils._rebuild_tensor_v3" and self._tensor is not None:
            dtype = getattr(torch, args[6].name.removeprefix("torch."))
            stored = args[0]
            elems = stored.elems * stored.dtype.itemsize // dtype.itemsize
            return self._tensor(_Storage(dtype, stored.key, elems), *args[1:4])
        return Inert(name, args)


_CONSTANTS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_MADE: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
    "EMPTY_SET": list,
    "MARK": _Mark,
}
_ACTIONS: dict[str, Callable[[_Machine], Any]] = {
    "TUPLE": lambda machine: machine.push(tuple(machine.operands())),
    "TUPLE1": lambda machine: machine.push(machine.last(1)),
    "TUPLE2": lambda machine: machine.push(machine.last(2)),
    "TUPLE3": lambda machine: machine.push(machine.last(3)),
    "LIST": lambda machine: machine.push(machine.operands()),
    "FROZENSET": lambda machine: machine.push(machine.operands()),
    "DICT": _Machine.make_dict,
    "APPEND": lambda machine: machine.extend(machine.last(1)),
    "APPENDS": lambda machine: machine.extend(machine.operands()),
    "ADDITEMS": lambda machine: machine.extend(machine.operands()),
    "SETITEM": lambda machine: machine.update(machine.last(2)),
    "SETITEMS": lambda machine: machine.update(machine.operands()),
    "POP": lambda machine: machine.last(1),
    "POP_MARK": _Machine.operands,
    "STACK_GLOBAL": _Machine.stack_global,
    "REDUCE": _Machine.call,
    "NEWOBJ": lambda machine: machine.new(2),
    "NEWOBJ_EX": lambda machine: machine.new(3),
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent,
}


def plain_pickle(pickled: bytes, called: str) -> Any:
    """Returns what a pickle without tensors describes.

    Args:
        pickled: bytes of the pickle.
        called: name of it, for errors.

    Raises:
        CheckpointError: it is damaged.
    """
    return _run(_Machine(None), pickled, called)


def _run(machine: _Machine, pickled: bytes, called: str) -> Any:
    try:
        return machine.run(pickled)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{called}: its pickle cannot be read: {error}") from error


class TorchFile:
    """A file of ``torch.save()``, or one inside of a file.

    Args:
        path: of the file.
        begin: first byte of the archive.
        size_bytes: of the archive; None: to the end of the file.

    Raises:
        CheckpointError: it is none, or damaged.
    """

    def __init__(self, path: Path, begin: int = 0, size_bytes: int | None = None) -> None:
        self._called = str(path)
        try:
            with path.open("rb") as file:
                # Private pages: whoever writes to a tensor changes no file.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        self._begin = begin
        end = len(self._map) if size_bytes is None else begin + size_bytes
        if not 0 <= begin <= end <= len(self._map):
            self._fail(f"expected bytes {begin} to {end}, it has {len(self._map)}")
        try:
            self._zip = zipfile.ZipFile(_FilePart(self._map, begin, end))
        except _DAMAGED as error:
            self._fail(f"is no file of torch.save(): {error}")
        self._entries = {each.filename.partition("/")[2]: each for each in self._zip.infolist()}

    def _fail(self, text: str) -> NoReturn:
        raise CheckpointError(f"{self._called}: {text}")

    def read(self) -> Any:
        """Returns what was saved; tensors are views of the file, which is not in memory.

        Raises:
            CheckpointError: it is damaged.
        """
        entry = self._entries.get("data.pkl")
        if entry is None or entry.file_size > LARGEST_PICKLE_BYTES:
            self._fail("expected a data.pkl of at most 256 MiB")
        order = self._entries.get("byteorder")
        if order is not None and self._bytes(order) != b"little":
            self._fail("its tensors are not little-endian")
        return _run(_Machine(self._view), self._bytes(entry), self._called)

    def _bytes(self, entry: zipfile.ZipInfo) -> bytes:
        try:
            return self._zip.read(entry)
        except _DAMAGED as error:
            self._fail(f"{entry.filename}: cannot be read: {error}")

    def _view(self, storage: _Storage, offset: int, size: Any, stride: Any) -> Tensor:
        entry = self._entries.get(f"data/{storage.key}")
        itemsize = storage.dtype.itemsize
        if entry is None or entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"storage {storage.key!r} is not there, or compressed")
        if entry.file_size != storage.elems * itemsize:
            raise ValueError(f"storage {storage.key!r} has {entry.file_size} bytes")
        numbers = (offset, *size, *stride)
        if len(size) != len(stride) or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"a tensor has size {size} and stride {stride}")
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if 0 in size:
            return torch.empty(size, dtype=storage.dtype, device="cpu")
        if last >= storage.elems:
            raise ValueError(f"a tensor of size {size} ends outside of its storage")
        at = self._begin + entry.header_offset
        head = self._map[at : at + _LOCAL_HEADER.size].ljust(_LOCAL_HEADER.size)
        at += _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(head))
        if at + entry.file_size > len(self._map):
            raise ValueError(f"storage {storage.key!r} ends outside of the file")
        flat = torch.frombuffer(self._map, dtype=storage.dtype, count=storage.elems, offset=at)
        # A dimension of 1 may have any stride, and one that no number holds.
        stride = [step if n > 1 else 1 for n, step in zip(size, stride, strict=True)]
        return flat.as_strided(size, stride, offset)


class _FilePart(io.RawIOBase, BinaryIO):
    """Bytes [begin, end) of a mapped file, as a file."""

    def __init__(self, mapped: mmap.mmap, begin: int, end: int) -> None:
        super().__init__()
        self._mapped, self._begin, self._end, self._at = mapped, begin, end, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._end - self._begin}
        self._at = max(0, base[whence] + offset)
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        first = self._begin + self._at
        found = self._mapped[first : min(self._end, first + len(buffer))]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)
