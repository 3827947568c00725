# SPDX-License-Identifier: Apache-2.0
"""Reads JSON and other text from files and peers into checked values."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import reprlib
import stat
import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from ringcomm.errors import RendezvousError, UnsupportedError, printable

__all__ = [
    "DAMAGE",
    "FORMAT_VERSION",
    "LONGEST_FILE_TEXT",
    "decode",
    "digest_of",
    "encode",
    "exactly",
    "in_words",
    "number_below",
    "read_bounded",
    "read_fields",
    "read_json",
    "read_object",
    "read_record",
    "shown",
    "text_of",
]

# Records that ranks post in a store. They are untrusted, since torch's TCPStore authenticates
# nobody. So every field of a record is checked, and the memory that a record describes is checked
# as well (``_native.Comm.connect``).

T = TypeVar("T")

# The exceptions that code may raise when it reads damaged data (RingcommError is a RuntimeError).
DAMAGE = (
    *(LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError),
    MemoryError,
)
FORMAT_VERSION = 1
# A record has a few hundred bytes; a topology of many GPUs a few hundred thousand.
LARGEST_RECORD_BYTES = 4 << 20
LONGEST_TEXT = 4096
# The largest signed 64-bit integer. _LARGEST: the fields with other limits, which C++ stores in an
# int or in an unsigned integer.
LARGEST_NUMBER = 2**63 - 1
_LARGEST = dict.fromkeys(("rank", "world_size", "pid", "fd", "device", "recorder_fd"), 2**31 - 1)
_LARGEST |= dict.fromkeys(("token", "proof", "recorder_token"), 2**64 - 1)


def shown(value: Any) -> str:
    """Returns a value of unknown size and depth, shortened for a message."""
    try:
        return reprlib.repr(value)
    except (RecursionError, ValueError):  # ValueError: an integer with too many digits
        return f"a {type(value).__name__} that is too large to show"


def in_words(error: BaseException) -> str:
    """Describes an exception that damaged data have caused, for a message."""
    return printable(repr(error)[:300])


def reason(error: OSError | ValueError) -> str:
    """Returns why a file cannot be read or written, for a message that has the path already."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Reads a regular file; never waits for a writer of a pipe.

    Raises:
        OSError: the file cannot be opened or read.
        ValueError: the file is not regular, or larger than ``most_bytes``; the message says which.
    """
    # Without O_NONBLOCK, opening a pipe without a writer would block.
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("no regular file (a pipe must be written to a file first)")
        # read(n) allocates n bytes at once, so n is at most the size of the file plus one.
        content = b"" if status.st_size > most_bytes else file.read(status.st_size + 1)
    if status.st_size > most_bytes:
        raise ValueError(f"more than {most_bytes} bytes")
    if len(content) > status.st_size:
        raise ValueError("more bytes than its size says; it is being written, or not on a disk")
    return content


def read_json(text: bytes) -> Any:
    """Parses strict JSON: no repeated names, no NaN, no comments.

    Raises:
        ValueError: the text is not strict JSON; the message says what was found, and where.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        rest = error.doc[error.pos : error.pos + 2]
        hint = "; JSON has no comments" if rest.startswith(("#", "//", "/*")) else ""
        raise ValueError(f"no JSON: {error}{hint}") from error
    except RecursionError as error:
        raise ValueError("no JSON: nested too deep") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{shown(name)} occurs twice in one object")
        found[name] = value
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number in JSON")


def read_record(text: bytes, rank: int, operation: str) -> dict[str, Any]:
    """Returns the fields that ``rank`` posted.

    Raises:
        RendezvousError: the text is not a record of this version, or says that the rank failed.
    """
    record: Any = None
    if len(text) <= LARGEST_RECORD_BYTES:
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            record = None
    version = record.get("version") if isinstance(record, dict) else None
    if type(version) is not int or version != FORMAT_VERSION:
        raise RendezvousError(
            f"{operation}: rank {rank} posted something that is not a version {FORMAT_VERSION} "
            f"record: {text[:80]!r}. Do all ranks run the same ringcomm?"
        )
    if "error" in record:
        said = record["error"]
        told = said if type(said) is str else shown(said)
        told = printable(told[:LONGEST_TEXT])
        error = RendezvousError(f"{operation}: rank {rank} failed: {told}")
        error.repeats = True
        raise error
    return dict(record)


def number_below(value: Any, limit: int) -> bool:
    """True if ``value`` is an integer, and not a bool, in [0, limit)."""
    return type(value) is int and 0 <= value < limit


def exactly(value: Any, *kinds: type[T]) -> T:
    """Returns a value whose type is one of ``kinds``; subclasses do not count.

    Raises:
        ValueError: the value has another type.
    """
    if type(value) not in kinds:
        raise ValueError(f"expected {kinds[0].__name__}, got {shown(value)}")
    return value  # type: ignore[no-any-return]


def read_fields(
    cls: Any, text: bytes, rank: int, operation: str, hexadecimal: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Returns the fields of a dataclass of integers >= 0 and strings, as ``rank`` posted them.

    Args:
        cls: the dataclass.
        text: the posted text.
        rank: the rank that should have posted it.
        operation: the name of the operation, for errors.
        hexadecimal: the fields that hold bytes in hexadecimal digits.

    Raises:
        RendezvousError: anything else was posted; the message names the field.
    """
    record = read_record(text, rank, operation)
    values: dict[str, Any] = {}
    for field in fields(cls):
        value = values[field.name] = record.get(field.name)
        if field.type == "int":
            largest = _LARGEST.get(field.name, LARGEST_NUMBER)
            wanted = "an integer >= 0"
            fits = number_below(value, largest + 1)
            if not fits and type(value) is int and value > largest:
                wanted += f" and <= {largest}"
        elif field.name in hexadecimal:
            wanted, fits = "hexadecimal digits", type(value) is str and _is_hex(value)
        else:
            wanted = "a string"
            fits = type(value) is str and len(value) <= LONGEST_TEXT and value.isprintable()
            if type(value) is str:
                wanted += f" of at most {LONGEST_TEXT} printable characters"
        if not fits:
            raise RendezvousError(
                f"{operation}: expected {field.name} of rank {rank} to be {wanted}, "
                f"got {shown(value)}"
            )
    return values


def _is_hex(text: str) -> bool:
    try:
        return bytes.fromhex(text).hex() == text
    except ValueError:
        return False


# JSON of files and peers, read into frozen dataclasses according to their annotations.

LONGEST_FILE_TEXT = 1 << 16
_EXPECTED = {bool: "true or false", int: "a number", float: "a number", str: "a string"}


def read_object(kind: type[T], data: Any, where: str = "") -> T:
    """Makes a dataclass from an object that ``json`` has parsed.

    Its fields are bools, ints from -1 to 2^64 - 1, floats, strings of printable characters, any of
    these or None, tuples of them, and dataclasses of all these. A field with a default may be
    missing; if the default is a number, null is accepted as well.

    Args:
        kind: the dataclass.
        data: the object.
        where: the name of ``data`` in errors; "" for the whole file.

    Raises:
        ValueError: a value has the wrong type; the message says where, and what was expected.
    """
    if type(data) is not dict:
        raise _wrong(where, "an object", data)
    known = {field.name: field for field in fields(kind) if field.init}  # type: ignore[arg-type]
    for name, value in data.items():
        if name not in known:
            raise _wrong(f"{where}.{name[:80]}", f"only entries of a {kind.__name__}", value)
    hints = typing.get_type_hints(kind)
    return kind(
        **{
            name: _read(hints[name], data.get(name), f"{where}.{name}")
            for name, field in known.items()
            if not _is_left_out(field, name in data, data.get(name))
        }
    )


def _is_left_out(field: dataclasses.Field[Any], is_there: bool, value: Any) -> bool:
    if field.default is dataclasses.MISSING:
        return False
    return not is_there or (value is None and type(field.default) is int)


def _read(kind: Any, data: Any, where: str) -> Any:
    if isinstance(kind, types.UnionType):
        (kind,) = set(typing.get_args(kind)) - {types.NoneType}
        return None if data is None else _read(kind, data, where)
    if isinstance(kind, types.GenericAlias):
        of, *more = typing.get_args(kind)
        if type(data) is not list:
            raise _wrong(where, "a list", data)
        if more != [...] and len(data) != len(more) + 1:
            raise _wrong(where, f"a list of {len(more) + 1}", data)
        return tuple(_read(of, each, f"{where}[{index}]") for index, each in enumerate(data))
    if dataclasses.is_dataclass(kind):
        return read_object(typing.cast("type[Any]", kind), data, where)
    if kind is float and type(data) is int and abs(data) < 1 << 64:
        data = float(data)
    if type(data) is not kind:
        raise _wrong(where, _EXPECTED[kind], data)
    if kind is int and not -1 <= data < 1 << 64:
        raise _wrong(where, "a number from -1 to 2^64 - 1", data)
    if kind is str and not _is_printable(data):
        raise _wrong(where, f"at most {LONGEST_FILE_TEXT} printable characters", data)
    return data


def _is_printable(text: str) -> bool:
    allowed = all(char.isprintable() or char in "\n\t" for char in text)
    return allowed and len(text) <= LONGEST_FILE_TEXT


def _wrong(where: str, expected: str, got: Any) -> ValueError:
    return ValueError(f"{where.strip('.') or 'the whole'}: expected {expected}, got {shown(got)}")


def digest_of(values: Mapping[str, Any]) -> str:
    """Returns 16 hexadecimal digits (64 bits of SHA-256) that identify the values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


# Python values as JSON and back, equal in value and type.
#
# JSON has no tuples, and its keys are strings. So tuples and other dicts are written as objects
# with one member, ``{"$tuple": [...]}`` and ``{"$dict": [[key, value], ...]}``. NaN and infinities
# are written as Python's ``json`` writes them.

_SCALARS = (type(None), bool, int, float, str)
_TUPLE, _DICT = "$tuple", "$dict"


def encode(value: object, what: str) -> Any:
    """Converts ``value`` to data that ``json`` can write without loss.

    Args:
        value: None, bools, ints, floats, strings, and lists, tuples and dicts of them.
        what: the name of the value in the error.

    Raises:
        UnsupportedError: ``value`` holds another type, or a subclass of these types.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if isinstance(value, list) and kind is list:
        return [encode(each, f"{what}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, tuple) and kind is tuple:
        return {_TUPLE: encode(list(value), what)}
    if isinstance(value, dict) and kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encode(each, f"{what}[{key!r}]") for key, each in value.items()}
        pairs = [[key, each] for key, each in value.items()]
        return {_DICT: encode(pairs, what)}
    raise UnsupportedError(
        f"{what}: expected None, a bool, int, float or string, or lists, tuples and dicts of them, "
        f"got {kind.__module__}.{kind.__qualname__}. Checkpoints are JSON and tensors, and no "
        "pickle is written: convert it, or save it as a tensor"
    )


def decode(data: Any) -> Any:
    """Inverse of :func:`encode`.

    Raises:
        ValueError, TypeError: :func:`encode` does not write such data.
    """
    if isinstance(data, list):
        return [decode(each) for each in data]
    if not isinstance(data, dict):
        return data
    if not any(key.startswith("$") for key in data):
        return {key: decode(each) for key, each in data.items()}
    ((tag, content),) = data.items()
    items = decode(content)
    if tag == _TUPLE and isinstance(items, list):
        return tuple(items)
    if tag == _DICT and isinstance(items, list):
        return dict(items)
    raise ValueError(f"unknown object {tag}")


def text_of(data: Any) -> str:
    """Returns JSON without blanks; equal data in equal order have equal texts."""
    return json.dumps(data, separators=(",", ":"))
