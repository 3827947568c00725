# SPDX-License-Identifier: Apache-2.0
"""Rules for the code of compiled kernels. Each rule returns the violations as texts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.support.cuda_code import Binary, Instruction, Kernel, Loop

# Resources of a multiprocessor of compute capability 9.0. A kernel does not launch if its block
# needs more registers. Each block takes 1 KiB of shared memory in addition to its own.
REGISTERS_PER_MULTIPROCESSOR = 65536
SHARED_BYTES_PER_MULTIPROCESSOR, SYSTEM_BYTES_PER_BLOCK = 228 << 10, 1 << 10
THREADS_PER_MULTIPROCESSOR, BLOCKS_PER_MULTIPROCESSOR = 2048, 32
# The most parameter bytes of a launch with lists, on every architecture, and of a launch without
# lists (kernels/cuda/args.h).
MOST_LIST_BYTES, MOST_PARAMETER_BYTES = 4096, 640
# A loop must issue this many loads before it waits for the first, to hide the latency.
LOADS_IN_FLIGHT = 4

# Functions that end a wait with a fault and report it. The protocol moves no data in them.
GIVING_UP = re.compile(r"fail|give_up|slowly|mismatch|raise_fault|fill_fault")

_PTX_MEMORY = re.compile(r"(?<![.\w])(?:ld|ldu|st|atom|red|fence|membar)\.[\w.:]+")
_NARROW_SCOPE = re.compile(r"\.(?:cta|cluster|gpu|gl)\b")
# These instructions always have a scope: the GPU's if they name none.
_SCOPED = re.compile(r"^(?:atom|red|fence|membar)\b(?!.*\.sys\b)")
_NO_SCOPE_NEEDED = re.compile(r"\.(?:shared|param|local|const)\b")
# Orders accesses to the same memory by two addresses. ptxas emits a barrier of the GPU's scope and
# a barrier of the system's scope; the driver chooses one of them.
ALIAS_FENCE = "fence.proxy.alias"
_SASS_MEMORY = re.compile(r"^(?:LDG?|LDGMC|STG?|ATOMG?|RED|MEMBAR)\b")
_SUM_OF_16_BYTES = re.compile(r"LDGMC\.E\.\w+\.(?:F32x4|BF16x8|F16x8)\.RN\.STRONG\.SYS$")
_MOVES = re.compile(r"^(?:MOV|IMAD\.MOV)\b")
_CALLED = re.compile(r"`\((\$[^)]+)\)")
# ptxas emits a subroutine for 64-bit divisions; only divisors of more than 32 bits reach it, since
# each division also has a fast path.
_LONG_DIVISION = re.compile(r"_(?:div|rem)_[us]64$")


def local_memory(binary: Binary) -> list[str]:
    """Returns tables in local memory, and local memory that innermost data-moving loops read.

    A function that moves data may save its caller's registers once, outside its loops. Keeping
    fewer vectors in flight instead made an all-reduce of 256 MiB take 1.2 times as long on an H100
    (bench/results/gpu/variants-2026-11-26.csv).
    """
    found = []
    for kernel in binary.kernels.values():
        # Saved registers are at constant offsets of the stack, unlike elements of tables.
        tables = [i for i in kernel.instructions if _is_local(i) and "[R1" not in i.operands]
        if tables:
            found.append(f"{kernel.name}: a table in local memory: {tables[0]}")
        moving = [loop for loop in kernel.loops() if any(map(_moves_vectors, loop.code))]
        for loop in moving:
            if any(loop.encloses(other) for other in moving):
                continue
            refills = [i for i in loop.code if i.opcode.startswith("LDL")]
            if refills:
                spilled = f"{len(refills)} registers in local memory in a loop: {refills[0]}"
                found.append(f"{kernel.name}: {spilled}")
    return found


def _is_local(instruction: Instruction) -> bool:
    return instruction.opcode.startswith(("LDL", "STL"))


def _moves_vectors(instruction: Instruction) -> bool:
    return ".128" in instruction.opcode and instruction.opcode.startswith(
        ("LD.", "LDG", "ST.", "STG")
    )


def launch_bounds(binary: Binary) -> list[str]:
    """Returns the kernels without a declared thread count, or with too many registers for it."""
    found = []
    for name, threads in binary.thread_bounds.items():
        registers = binary.resources[name].registers
        if threads is None or registers is None:
            found.append(f"{name}: no launch bound")
        elif blocks_per_multiprocessor(binary, name) == 0:
            found.append(f"{name}: {registers} registers for {threads} threads")
    return found


def parameters(binary: Binary) -> list[str]:
    """Kernels with too many parameter bytes: the driver copies them all. Lists may take many."""
    return [
        f"{name}: {found} bytes of parameters"
        for name, found in binary.params_bytes.items()
        if found > (MOST_LIST_BYTES if "_list_" in name else MOST_PARAMETER_BYTES)
    ]


def blocks_per_multiprocessor(binary: Binary, name: str) -> int:
    """Returns how many blocks of a kernel a multiprocessor runs at the same time."""
    threads, used = binary.thread_bounds[name], binary.resources[name]
    assert threads is not None and used.registers is not None
    shared_bytes = -(-used.shared_bytes // 128) * 128 + SYSTEM_BYTES_PER_BLOCK
    return min(
        # The hardware allocates registers to a warp in units of 8 per thread.
        REGISTERS_PER_MULTIPROCESSOR // (-(-used.registers // 8) * 8 * threads),
        SHARED_BYTES_PER_MULTIPROCESSOR // shared_bytes,
        THREADS_PER_MULTIPROCESSOR // threads,
        BLOCKS_PER_MULTIPROCESSOR,
    )


def understated(binary: Binary, figures: Mapping[str, tuple[int, int]]) -> list[str]:
    """Returns the kernels that use more registers or bytes than ``figures`` states, by name."""
    found = []
    for name, (registers, shared_bytes) in figures.items():
        used = binary.resources[name]
        assert used.registers is not None
        if used.registers > registers or used.shared_bytes > shared_bytes:
            taken = f"{used.registers} registers and {used.shared_bytes} bytes"
            found.append(f"{name}: takes {taken}, and not {registers} and {shared_bytes}")
    return found


def memory_orders(binary: Binary) -> list[str]:
    """Returns accesses not of the system's scope, and loads that may return stale values."""
    found = []
    for name, text in binary.functions.items():
        for access in _PTX_MEMORY.findall(text):
            if _NO_SCOPE_NEEDED.search(access) or access == ALIAS_FENCE:
                continue
            if _NARROW_SCOPE.search(access) or _SCOPED.search(access):
                found.append(f"{name}: {access} is not of system scope")
            if re.search(r"\.nc\b|^ldu\b", access):
                found.append(f"{name}: {access} reads past what peers write")
            if ".volatile" in access:
                found.append(f"{name}: {access} has no order")
    for kernel in binary.kernels.values():
        alias_fences = "".join(binary.reachable(kernel.name).values()).count(ALIAS_FENCE)
        for instruction in kernel.instructions:
            if instruction.opcode == "MEMBAR.SC.GPU" and alias_fences > 0:
                alias_fences -= 1
                continue
            if _SASS_MEMORY.match(instruction.opcode):
                found += _wrong_in_sass(kernel.name, instruction)
    return found


def _wrong_in_sass(kernel: str, instruction: Instruction) -> Iterator[str]:
    opcode = instruction.opcode
    if ".CONSTANT" in opcode:
        yield f"{kernel}: {opcode} reads past what peers write"
    strong = re.search(r"\.STRONG\.(\w+)", opcode)
    if (strong and strong[1] != "SYS") or (
        opcode.startswith("MEMBAR") and not opcode.endswith(".SYS")
    ):
        yield f"{kernel}: {opcode} is not of system scope"


def long_divisions(kernel: Kernel) -> list[str]:
    """Returns loops that divide 64-bit integers, directly or in a function that they call."""
    functions = sorted((at, name) for name, at in kernel.labels.items() if name.startswith("$"))
    ends = [*functions[1:], (len(kernel.instructions), "")]
    bodies = {
        name: called_by(kernel.instructions[at:end])
        for (at, name), (end, _) in zip(functions, ends, strict=False)
    }
    divide = {name for name in bodies if _LONG_DIVISION.search(name)}
    while more := {name for name, called in bodies.items() if called & divide} - divide:
        divide |= more
    loops = [called_by(loop.code) & divide for loop in kernel.loops()]
    return [f"{kernel.name}: a loop calls {', '.join(sorted(each))}" for each in loops if each]


def called_by(code: Sequence[Instruction]) -> set[str]:
    calls = [_CALLED.search(i.operands) for i in code if i.opcode.startswith("CALL")]
    return {match[1] for match in calls if match}


def protocol(binary: Binary, kernel: str) -> list[str]:
    """Returns the accesses missing from a kernel that publishes and awaits items."""
    texts = binary.reachable(kernel)
    text = "\n".join(body for name, body in texts.items() if not GIVING_UP.search(name))
    wanted = ("ld.acquire.sys.global.u32", "st.release.sys.global.u32")
    return [f"{kernel}: no {access}" for access in wanted if access not in text]


def ll_protocol(binary: Binary, kernel: str) -> list[str]:
    """Returns the accesses missing from an LL kernel: data and flags must be one access."""
    text = "\n".join(binary.reachable(kernel).values())
    wanted = ("ld.relaxed.sys.global.v2.u64", "st.relaxed.sys.global.v2.u64")
    found = [f"{kernel}: no {access}" for access in wanted if access not in text]
    inside = [i.opcode for loop in binary.kernels[kernel].loops() for i in loop.code]
    for access in ("LDG.E.128.STRONG.SYS", "STG.E.128.STRONG.SYS"):
        if access not in inside:
            found.append(f"{kernel}: no {access} in a loop")
    return found


@dataclass(frozen=True)
class Traffic:
    """The data accesses of a loop, without those to LL packets."""

    in_flight: int  # 16-byte loads issued before the first use of their data
    stores: int  # of 16 bytes
    narrow: tuple[str, ...]  # global memory accesses of less than 16 bytes
    computes: bool  # an instruction other than a move or store uses loaded data

    @property
    def fast(self) -> bool:
        return self.in_flight >= LOADS_IN_FLIGHT and not self.narrow


def traffic(loop: Loop) -> Traffic:
    """Reads a loop from beginning to end, as if it took no branch."""
    code = [instruction for instruction in loop.code if ".STRONG" not in instruction.opcode]
    pending: set[int] = set()
    under_way = most = stores = 0
    narrow = []
    for instruction in code:
        used = instruction.registers
        if pending & used:  # the loop waits here
            pending, under_way = set(), 0
        if instruction.loaded:
            pending |= instruction.loaded
            under_way += 1
            most = max(most, under_way)
            continue
        wide = ".128" in instruction.opcode
        if instruction.opcode.startswith(("LDG.", "STG.")) and not wide:
            narrow.append(instruction.opcode)
        stores += wide and instruction.opcode.startswith("STG.")
    return Traffic(most, stores, tuple(narrow), _computes(code))


def _computes(code: Sequence[Instruction]) -> bool:
    """True when an instruction other than a move or a store uses data that the loop loads."""
    data: set[int] = set()
    for instruction in [*code, *code]:  # One turn's loads may be used in the next.
        target = instruction.target
        if instruction.loaded:
            data |= instruction.loaded
        elif _MOVES.match(instruction.opcode):
            moved = bool(data & instruction.sources)
            data = data | target if moved else data - target
        elif instruction.opcode.startswith("STG."):
            continue
        elif data & instruction.sources:
            return True
        else:
            data -= target
    return False


def data_loops(kernel: Kernel) -> list[Loop]:
    """Returns the loops that load 16 bytes at a time, except loops over LL packets."""

    def loads_data(loop: Loop) -> bool:
        return any(i.loaded and ".STRONG" not in i.opcode for i in loop.code)

    return [loop for loop in kernel.loops() if loads_data(loop)]


def innermost(loops: Sequence[Loop]) -> list[Loop]:
    return [loop for loop in loops if not any(loop.encloses(other) for other in loops)]


def copy_loop(kernel: Kernel) -> list[str]:
    """Returns the defects of the copying loop."""
    found = [traffic(loop) for loop in innermost(data_loops(kernel))]
    if any(each.fast and each.stores >= LOADS_IN_FLIGHT for each in found):
        return []
    return [f"{kernel.name}: no loop copies 16 bytes at a time, {LOADS_IN_FLIGHT} at once: {found}"]


def reduce_loop(kernel: Kernel) -> list[str]:
    """Returns the defects of the loop that reduces.

    The loop adds all sources at once, or one batch per turn inside a loop that stores the results.
    """
    loops = data_loops(kernel)
    found = [(loop, traffic(loop)) for loop in innermost(loops)]
    computing = [(loop, each) for loop, each in found if each.fast and each.computes]
    if not computing:
        wanted = f"adds up 16 bytes at a time, {LOADS_IN_FLIGHT} at once"
        return [f"{kernel.name}: no loop {wanted}: {[each for _, each in found]}"]
    around = [loop for loop in loops if any(loop.encloses(inner) for inner, _ in computing)]
    results = [each for _, each in computing] + [traffic(loop) for loop in innermost(around)]
    if any(each.stores >= min(LOADS_IN_FLIGHT, 2) and not each.narrow for each in results):
        return []
    return [f"{kernel.name}: no loop stores its results 16 bytes at a time: {results}"]


def multicast_loop(kernel: Kernel) -> list[str]:
    """Returns the defects of the loop that loads sums over all ranks and stores to all ranks."""
    for loop in kernel.loops():
        stores = [i for i in loop.code if i.opcode == "STG.E.128.STRONG.SYS"]
        pending: set[int] = set()
        in_flight = 0
        for instruction in loop.code:
            if pending & instruction.registers:  # the loop waits here
                break
            if _SUM_OF_16_BYTES.match(instruction.opcode):
                pending |= {first + offset for first in instruction.target for offset in range(4)}
                in_flight += 1
        if min(in_flight, len(stores)) >= LOADS_IN_FLIGHT:
            return []
    wanted = f"loads sums of 16 bytes with system scope, {LOADS_IN_FLIGHT} at once, and stores them"
    return [f"{kernel.name}: no loop {wanted}"]


def update_loop(kernel: Kernel) -> list[str]:
    """Returns the defects of the loop that updates the optimizer's state (three arrays)."""
    found = [traffic(loop) for loop in data_loops(kernel)]
    if any(each.in_flight >= 7 and each.stores >= 6 and not each.narrow for each in found):
        return []
    return [f"{kernel.name}: no loop updates the state 16 bytes at a time: {found}"]


def quantization_loop(kernel: Kernel, stores: bool) -> list[str]:
    """Returns the defects of the loop that quantizes FP32 numbers or stores dequantized ones."""
    if stores:
        most = max((_wide_stores(loop) for loop in kernel.loops()), default=0)
    else:
        most = max((traffic(loop).in_flight for loop in data_loops(kernel)), default=0)
    if most >= LOADS_IN_FLIGHT:
        return []
    what = "stores" if stores else "loads"
    return [f"{kernel.name}: no loop {what} 16 bytes at a time, {LOADS_IN_FLIGHT} at once: {most}"]


def _wide_stores(loop: Loop) -> int:
    return sum(i.opcode.startswith("STG.") and ".128" in i.opcode for i in loop.code)
