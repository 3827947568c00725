# SPDX-License-Identifier: Apache-2.0
"""Compiles CUDA kernels without a GPU or driver, and parses the compilers' code and reports.

SASS is the machine code; ptxas makes it from PTX. Loops in SASS are found by backward branches.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ringcomm.cuda import units
from tests.support import nvrtc

NEEDS_TOOLS = "no NVRTC, nvdisasm or cuobjdump: pip install -e .[test]"

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_SECTION = re.compile(r"^\.text\.([\w$]+):")
_LABEL = re.compile(r"^([.$\w]+):")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_REGISTER = re.compile(r"\bR(\d+)\b")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)[^,\[]*(?:\[(\d+)\])?")
_PTX_FUNCTION = re.compile(
    r"^(?:\.visible |\.weak |\.extern )*\.(entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)[^;{]*\{(.*?)"
    r"^\}(?!\s*// end inline asm)",
    re.MULTILINE | re.DOTALL,
)


def tool(name: str) -> Path | None:
    """Returns ``nvdisasm`` or ``cuobjdump`` of NVIDIA's Python packages, else of a CUDA toolkit."""
    found = nvrtc.nvidia_files(f"*/bin/{name}")
    elsewhere = shutil.which(name)
    return found[-1] if found else Path(elsewhere) if elsewhere else None


def have_tools() -> bool:
    return nvrtc.library_path() is not None and all(map(tool, ("nvdisasm", "cuobjdump")))


def output_of(*command: object, cwd: Path | None = None) -> str:
    """Returns stdout and stderr of a command; fails if the command fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, text=True, capture_output=True)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@dataclass(frozen=True)
class Instruction:
    """A SASS instruction such as ``LDG.E.128 R4, desc[UR8][R2.64]``, without its predicate."""

    opcode: str
    operands: str

    @cached_property
    def registers(self) -> frozenset[int]:
        """The registers in the operands; of a pair or quad only the first."""
        return frozenset(int(number) for number in _REGISTER.findall(self.operands))

    @cached_property
    def target(self) -> frozenset[int]:
        """The register that is written; of a pair or quad the first."""
        match = re.match(r"R(\d+)\b", self.operands)
        return frozenset([int(match[1])] if match else [])

    @cached_property
    def sources(self) -> frozenset[int]:
        """The registers that are read; of each pair or quad the first."""
        read = self.operands.partition(",")[2] if self.target else self.operands
        return frozenset(int(number) for number in _REGISTER.findall(read))

    @cached_property
    def loaded(self) -> frozenset[int]:
        """The registers that are filled, if this is a 16-byte load from global memory."""
        if not (self.opcode.startswith("LDG.") and ".128" in self.opcode):
            return frozenset()
        return frozenset(first + offset for first in self.target for offset in range(4))


@dataclass
class Kernel:
    """The SASS of one kernel, including the functions that it calls."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def loops(self) -> list[Loop]:
        """Returns the loops: each reaches from a label to the last branch back to this label."""
        ends: dict[int, int] = {}
        for index, instruction in enumerate(self.instructions):
            target = re.search(r"`\(([^)]+)\)", instruction.operands)
            if instruction.opcode.startswith("BRA") and target:
                begin = self.labels.get(target[1], index + 1)
                if begin <= index:
                    ends[begin] = index + 1
        return [Loop(begin, end, self.instructions[begin:end]) for begin, end in ends.items()]


@dataclass(frozen=True)
class Loop:
    """Instructions ``begin`` to ``end`` (exclusive) of a kernel, which form a loop."""

    begin: int
    end: int
    code: Sequence[Instruction]

    def encloses(self, other: Loop) -> bool:
        inside = self.begin <= other.begin and other.end <= self.end
        return inside and len(self.code) > len(other.code)


@dataclass(frozen=True)
class Resources:
    """The resources of one function, as ptxas reports them; ``registers`` is None if kernels call
    it.

    ``shared_bytes`` is the static shared memory of a block.
    """

    stack_bytes: int
    spill_bytes: int
    registers: int | None
    shared_bytes: int = 0


@dataclass(frozen=True)
class Binary:
    """One unit compiled for one architecture."""

    cubin: bytes
    ptx: str
    log: str

    @cached_property
    def resources(self) -> Mapping[str, Resources]:
        """Resources by function, from the log of ``ptxas -v`` or ``cuobjdump -res-usage``."""
        return _resources(self.log)

    @cached_property
    def functions(self) -> Mapping[str, str]:
        """PTX texts of all functions, including kernels, by name."""
        return {match[2]: match[3] for match in _PTX_FUNCTION.finditer(self.ptx)}

    @cached_property
    def thread_bounds(self) -> Mapping[str, int | None]:
        """Threads per block that each kernel is compiled for; None if it declares none."""
        bounds = {}
        for entry in re.finditer(r"\.entry\s+([\w$]+)\((.*?)\{", self.ptx, re.DOTALL):
            bound = re.search(r"\.maxntid\s+(\d+)", entry[2])
            bounds[entry[1]] = int(bound[1]) if bound else None
        return bounds

    @cached_property
    def params_bytes(self) -> Mapping[str, int]:
        """Bytes of parameters by kernel, without padding."""
        return {
            entry[1]: sum(
                int(param[2] or int(param[1]) // 8) for param in _PARAMETER.finditer(entry[2])
            )
            for entry in re.finditer(r"\.entry\s+([\w$]+)\(([^)]*)\)", self.ptx)
        }

    @cached_property
    def kernels(self) -> Mapping[str, Kernel]:
        """SASS by kernel."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            return _kernels(output_of(tool("nvdisasm"), "-c", file.name))

    def reachable(self, kernel: str) -> Mapping[str, str]:
        """Returns the PTX texts of a kernel and of all functions that it may call, by name."""
        found: dict[str, str] = {}
        waiting = [kernel]
        while waiting:
            name = waiting.pop()
            found[name] = self.functions[name]
            called = set(re.findall(r"[\w$]+", found[name])) & self.functions.keys()
            waiting += called - found.keys()
        return found


def _resources(log: str) -> dict[str, Resources]:
    found: dict[str, Resources] = {}
    for name, registers, stack, shared, local in _USAGE.findall(log):
        found[name] = Resources(int(stack) + int(local), 0, int(registers), int(shared))
    entry = function = ""
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry = match[1]
        elif match := _PROPERTIES.search(line):
            function = match[1]
        elif match := _FRAME.search(line):
            stack, stores, loads = map(int, match.groups())
            found[function] = Resources(stack, stores + loads, None)
        elif match := _REGISTERS.search(line):
            known = found[entry]
            used = int(match[1]), int(match[2] or 0)
            found[entry] = Resources(known.stack_bytes, known.spill_bytes, *used)
    return found


def _kernels(sass: str) -> dict[str, Kernel]:
    found: dict[str, Kernel] = {}
    kernel: Kernel | None = None
    for line in sass.splitlines():
        if match := _SECTION.match(line):
            kernel = found[match[1]] = Kernel(match[1])
        elif kernel is None:
            continue
        elif match := _LABEL.match(line):
            kernel.labels[match[1]] = len(kernel.instructions)
        elif match := _INSTRUCTION.match(line):
            kernel.instructions.append(Instruction(sys.intern(match[1]), match[2]))
    return found


def compile_text(
    text: str, target: str, headers: Mapping[str, str] | None = None, options: Sequence[str] = ()
) -> Binary:
    """Compiles a source with NVRTC for ``target``, such as ``sm_90a``."""
    headers = headers or {}
    names = [name.encode() for name in headers]
    texts = [header.encode() for header in headers.values()]
    program = nvrtc.createProgram(text, units.SOURCE, texts, names)
    all_options = (*units.NVRTC_OPTIONS, f"-arch={target}", "-Xptxas=-v", *options)
    try:
        try:
            nvrtc.compileProgram(program, all_options)
        except nvrtc.NVRTCError:
            raise AssertionError(nvrtc.getProgramLog(program)[:4000]) from None
        ptx = nvrtc.getPTX(program).decode()
        return Binary(nvrtc.getCUBIN(program), ptx, nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)


# The lines of kernels.cu that define the kernels of one operator or of one parameter dtype, or one
# kernel that moves data.
_SUBUNIT = re.compile(
    r"^RC_(?:(?:REDUCE|ADAMW|NORM|QUANT)_KERNELS\(|(?:LIST_|DATA_)?KERNEL\(rc_(?=\w*move,))"
    r"(\w+),.*\n",
    re.MULTILINE,
)


# "adamw_float16/step_float32" names the optimizer's kernels of one form only.
_FORM = re.compile(r"/(shard|step|many|ring)_")


def _only(form: str, text: str) -> str:
    """Returns the text of a unit without the optimizer's kernels of other forms."""
    other = rf" *\\\n *RC_KERNEL\w*\([^\n]*rc_adamw_(?!{form}_)\w+_##name,[^\\\n]*"
    return re.sub(other, "", text)


def kernels_of(name: str) -> set[str]:
    """Returns the names of the kernels that ``compile_unit(name)`` makes."""
    if form := _FORM.search(name):
        all_forms = kernels_of(_FORM.sub("/", name))
        return {k for k in all_forms if f"_{form[1]}_" in k or k == "rc_adamw_prepare"}
    unit, _, subunit = name.partition("/")
    subunits = set(_SUBUNIT.findall(units.read_source(units.source_root(), units.UNITS[unit]).text))
    kernels = units.UNITS[unit].kernels
    if not subunit:
        return set(kernels)
    # The longest suffix decides: rc_ll_move belongs to the subunit ll_move, not to move.
    of = {
        k: max((p for p in subunits if k.endswith(f"_{p}")), key=len, default=subunit)
        for k in kernels
    }
    return {kernel for kernel, its in of.items() if its == subunit}


def unit_source(name: str, loops: str = units.BATCHED) -> tuple[str, dict[str, str], list[str]]:
    """Returns the text of a unit, its headers by name, and the compiler options of the unit.

    Args:
        name: of a unit, or of a part of one: ``reduce_float16/min`` (one operator),
            ``adamw_float16/float32`` (one dtype of parameters), ``adamw_float16/shard_float32``
            (this dtype in one form), ``adamw_float16/norm``, ``move/ll_move``, or
            ``quantize_int8/float32`` (one dtype of numbers).
        loops: as :func:`ringcomm.cuda.units.chosen_loops` returns it.
    """
    if form := _FORM.search(name):
        text, headers, macros = unit_source(_FORM.sub("/", name), loops)
        return _only(form[1], text), headers, macros
    name, _, subunit = name.partition("/")
    unit = units.unit(name, loops)
    source = units.read_source(units.source_root(), unit)
    text = _SUBUNIT.sub(lambda line: line[0] if line[1] == subunit else "", source.text)
    macros = [f"-D{macro}" for macro in unit.macros]
    return text if subunit else source.text, dict(source.headers), macros


def packets_source(name: str, loops: str = units.BATCHED) -> tuple[str, dict[str, str], list[str]]:
    """Returns :func:`unit_source` reduced to the kernels of LL packets."""
    text, headers, macros = unit_source(name, loops)
    others = r"^  RC_(?:LIST_|DATA_)?KERNEL\(rc_(?!ll_).*\n"
    return re.sub(others, "", text, flags=re.MULTILINE), headers, macros


def compile_unit(name: str, target: str, loops: str = units.BATCHED) -> Binary:
    """Compiles one unit or subunit of the kernels with NVRTC.

    Args:
        name, loops: as in :func:`unit_source`.
        target: ``sm_90a``, for example.
    """
    text, headers, macros = unit_source(name, loops)
    return compile_text(text, target, headers, macros)
