# SPDX-License-Identifier: Apache-2.0
"""The control codes of machine code: which instructions wait for which others.

Since Volta an instruction has 16 bytes. ptxas schedules it at compile time, and encodes in bits 105
to 121: after how many cycles the next instruction may follow, which of six *scoreboards* it raises
until it has written its results (or read its operands), and which must be down before it begins. A
scoreboard is a counter: who waits for it waits for all instructions that raised it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tests.support.cuda_code import Binary

INSTRUCTION_BYTES = 16
SCOREBOARDS = 6
_NO_SCOREBOARD = 7
# Bit positions in the upper half of an instruction.
_STALL, _YIELD, _WRITE, _READ, _WAITS = 41, 45, 46, 49, 52
# Offsets of the section table's address and length in a 64-bit ELF header, and an entry's format.
_TABLE_AT, _COUNT_AT = 40, 58
_SECTION = struct.Struct("<IIQQQQIIQQ")


@dataclass(frozen=True)
class Control:
    """The control code of an instruction.

    Attributes:
        stall: cycles until the warp's next instruction.
        yields: the bit that says whether another warp may go first.
        write_scoreboard: stays up until the results are in their registers; None: no scoreboard.
        read_scoreboard: stays up until the operands have been read; None: no scoreboard.
        waits: the scoreboards that must be down before the instruction begins.
    """

    stall: int
    yields: bool
    write_scoreboard: int | None
    read_scoreboard: int | None
    waits: frozenset[int]


def decode(upper: int) -> Control:
    """Decodes the control code in the upper 8 bytes of an instruction."""
    waits = frozenset(bar for bar in range(SCOREBOARDS) if upper >> (_WAITS + bar) & 1)
    return Control(
        upper >> _STALL & 15,
        bool(upper >> _YIELD & 1),
        _scoreboard(upper >> _WRITE & 7),
        _scoreboard(upper >> _READ & 7),
        waits,
    )


def _scoreboard(number: int) -> int | None:
    return None if number == _NO_SCOREBOARD else number


def controls(binary: Binary, kernel: str) -> list[Control]:
    """Returns the control codes of a kernel, in the order of its instructions."""
    code = _section(binary.cubin, f".text.{kernel}")
    found = [decode(upper) for _, upper in struct.iter_unpack("<QQ", code)]
    listed = len(binary.kernels[kernel].instructions)
    assert len(found) == listed, f"{kernel}: {len(found)} instructions, and {listed} in the text"
    return found


def _section(elf: bytes, name: str) -> bytes:
    """Returns the contents of a section of an ELF file."""
    (table,) = struct.unpack_from("<Q", elf, _TABLE_AT)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", elf, _COUNT_AT)
    sections = [_SECTION.unpack_from(elf, table + i * entry_bytes) for i in range(count)]
    names_at = sections[names_index][4]
    for name_at, _, _, _, begin, size, *_ in sections:
        at = names_at + name_at
        if elf[at : elf.index(b"\0", at)] == name.encode():
            return elf[begin : begin + size]
    raise AssertionError(f"no section {name}")
