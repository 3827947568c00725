# SPDX-License-Identifier: Apache-2.0
"""The compilation units of the CUDA kernels, for every compiler that builds them.

A *unit* is one compilation of ``kernels/cuda/kernels.cu``. One unit moves bytes of any type. There
is one unit of reductions per element type, one of optimizer steps per gradient type, and one per
quantized format. CMake runs this module for the list of units (``python -m ringcomm.cuda.units``),
so the module imports only modules that every build has.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ringcomm.errors import ArgumentError, UnsupportedError

SOURCE = "kernels/cuda/kernels.cu"
# Folders in which compilers look up an #include, relative to the root of the sources. They exclude
# the including file's folder, so that each header has a single name; NVRTC knows headers by name.
INCLUDE_FOLDERS = ("", "kernels/include")

# Forbid contraction into fused multiply-adds: host and device must give the same bits.
OPTIONS = ("-std=c++20", "--fmad=false")
# NVRTC up to CUDA 13.0 treats a generic lambda in a kernel as a host function, and refuses it.
NVRTC_OPTIONS = (*OPTIONS, "-default-device")

# The loops of a unit: serial loops from kernels/cuda/serial, or batched loops from kernels/cuda
# (see loops.h there). Builds with nvcc make only units with batched loops.
LOOPS_VARIABLE = "RINGCOMM_KERNELS"
BATCHED, SERIAL = "batched", "serial"
# With SLICED, kernels with batched loops give each channel one slice of a buffer in place of tiles
# (kernels/include/ringcomm/core/tiles.h).
SLICED = "sliced"
_CHOICES = (BATCHED, SLICED, SERIAL)
_LOOP_MACROS: Mapping[str, tuple[str, ...]] = {BATCHED: (), SERIAL: ("RINGCOMM_SERIAL_LOOPS=1",)}

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_ARITHMETIC = ("sum", "product", "min", "max")
_BITWISE = ("band", "bor", "bxor")
_FLOATS = ("float32", "bfloat16", "float16")
_REDUCTIONS = ("reduce_scatter", "reduce_scatter_list", "all_reduce", "ll")


@dataclass(frozen=True)
class KernelUnit:
    """One compilation, and the kernels in its result.

    Attributes:
        name: ``move``; or ``reduce_``, ``adamw_`` or ``multicast_`` followed by torch's name of the
            (gradient's) dtype; or ``quantize_`` followed by a quantized format; or ``rows``.
        macros: macros of the compilation, as ``NAME`` or ``NAME=VALUE``.
        kernels: names of the ``__global__`` functions in it.
        since: the least compute capability with the instructions of the unit; for lower ones the
            unit is empty.
    """

    name: str
    macros: tuple[str, ...]
    kernels: tuple[str, ...]
    since: tuple[int, int] = (0, 0)


def _reduce_unit(dtype: str, cpp_type: str, bitwise: bool = False) -> KernelUnit:
    macros = (f"RINGCOMM_UNIT_TYPE={cpp_type}", *(("RINGCOMM_UNIT_BITWISE",) if bitwise else ()))
    operators = _ARITHMETIC + (_BITWISE if bitwise else ())
    kernels = tuple(f"rc_{form}_{op}" for op in operators for form in _REDUCTIONS)
    return KernelUnit(f"reduce_{dtype}", macros, kernels)


def _optimizer_unit(dtype: str, cpp_type: str) -> KernelUnit:
    forms = ("shard", "step", "many", "ring")
    kernels = tuple(f"rc_adamw_{form}_{name}" for name in _FLOATS for form in forms)
    common = ("rc_adamw_prepare", "rc_grad_norm", "rc_reduce_scatter_norm", "rc_ring_norm")
    return KernelUnit(f"adamw_{dtype}", (f"RINGCOMM_UNIT_GRADS={cpp_type}",), common + kernels)


def _multicast_unit(dtype: str, cpp_type: str) -> KernelUnit:
    macros = (f"RINGCOMM_UNIT_MULTICAST={cpp_type}",)
    return KernelUnit(f"multicast_{dtype}", macros, ("rc_multicast_sum",), since=(9, 0))


def _quantize_unit(compression: str, cpp_format: str) -> KernelUnit:
    kernels = tuple(
        f"rc_{what}_{name}" for name in _FLOATS for what in ("quantize", "dequantize_and_sum")
    )
    return KernelUnit(
        f"quantize_{compression}", (f"RINGCOMM_UNIT_QUANT_FORMAT=ringcomm::{cpp_format}",), kernels
    )


_ROW_KERNELS = tuple(f"rc_{what}_rows_{name}" for name in _FLOATS for what in ("sum", "scale"))

_ALL = (
    KernelUnit("move", ("RINGCOMM_UNIT_MOVE",), ("rc_move", "rc_list_move", "rc_ll_move")),
    _reduce_unit("float32", "float"),
    _reduce_unit("bfloat16", "ringcomm::BFloat16"),
    _reduce_unit("float16", "ringcomm::Float16"),
    _reduce_unit("float64", "double"),
    _reduce_unit("uint8", "uint8_t", bitwise=True),
    _reduce_unit("int8", "int8_t", bitwise=True),
    _reduce_unit("int16", "int16_t", bitwise=True),
    _reduce_unit("int32", "int32_t", bitwise=True),
    _reduce_unit("int64", "int64_t", bitwise=True),
    _reduce_unit("bool", "ringcomm::Bool", bitwise=True),
    _optimizer_unit("float32", "float"),
    _optimizer_unit("bfloat16", "ringcomm::BFloat16"),
    _optimizer_unit("float16", "ringcomm::Float16"),
    _multicast_unit("float32", "float"),
    _multicast_unit("bfloat16", "ringcomm::BFloat16"),
    _multicast_unit("float16", "ringcomm::Float16"),
    _quantize_unit("int8", "Int8Format"),
    _quantize_unit("fp8", "Fp8Format"),
    _quantize_unit("int4", "Int4Format"),
    KernelUnit("rows", ("RINGCOMM_UNIT_ROWS",), ("rc_copy_rows", *_ROW_KERNELS)),
)
UNITS: Mapping[str, KernelUnit] = {unit.name: unit for unit in _ALL}


def _chosen() -> str:
    chosen = os.environ.get(LOOPS_VARIABLE, "") or BATCHED
    if chosen not in _CHOICES:
        raise ArgumentError(
            f"{LOOPS_VARIABLE}: expected {', '.join(_CHOICES[:-1])} or {_CHOICES[-1]}, got "
            f"{chosen!r}. Unset it, or set it to {BATCHED} on all ranks"
        )
    return chosen


def chosen_loops() -> str:
    """Returns the kind of loops that ``RINGCOMM_KERNELS`` names, batched by default.

    Raises:
        ArgumentError: the value is unknown; the message lists the known values.
    """
    return SERIAL if _chosen() == SERIAL else BATCHED


def deals_tiles() -> bool:
    """Returns True unless ``RINGCOMM_KERNELS`` asks for kernels whose channels take slices.

    Raises:
        ArgumentError: the value is unknown; the message lists the known values.
    """
    return _chosen() == BATCHED


def unit(name: str, loops: str = BATCHED) -> KernelUnit:
    """Returns the unit of that name, with ``loops`` as :func:`chosen_loops` returns them.

    Raises:
        ArgumentError: the unit is unknown; the message lists the known ones.
    """
    if name not in UNITS:
        raise ArgumentError(f"CUDA kernels: expected a unit among {', '.join(UNITS)}, got {name!r}")
    found = UNITS[name]
    kernels = tuple(dict.fromkeys(kernel_name(kernel, loops) for kernel in found.kernels))
    return replace(found, macros=found.macros + _LOOP_MACROS[loops], kernels=kernels)


def kernel_name(name: str, loops: str) -> str:
    """Returns the kernel that does the work of ``name`` in units with these loops.

    With serial loops, one kernel per optimizer collective serves all algorithms and world sizes.
    """
    if loops == SERIAL:
        name = re.sub(r"^rc_adamw_(many|ring)_", "rc_adamw_step_", name)
        name = re.sub(r"^rc_ring_norm$", "rc_reduce_scatter_norm", name)
    return name


@dataclass(frozen=True)
class Target:
    """The target of a compilation: machine code of one architecture, or PTX for it and later ones.

    Attributes:
        major, minor: compute capability.
        ptx: True for PTX, which the driver compiles when it loads the unit.
    """

    major: int
    minor: int
    ptx: bool = False

    def __str__(self) -> str:
        if self.ptx:
            return f"compute_{self.major}{self.minor}"
        # The letter enables the features that only this architecture has.
        letter = "a" if (self.major, self.minor) in ((9, 0), (10, 0)) else ""
        return f"sm_{self.major}{self.minor}{letter}"

    @classmethod
    def parse(cls, text: str) -> Target:
        """Parses a text that ``str()`` gives for a target; raises ValueError for other text."""
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)a?", text)
        target = match and cls(int(match[2]), int(match[3]), match[1] == "compute")
        if not target or str(target) != text:
            raise ValueError(f"not a target of a CUDA compilation: {text!r}")
        return target

    def covers(self, capability: tuple[int, int]) -> bool:
        """True if a device of this compute capability can load code of this target."""
        own = (self.major, self.minor)
        if self.ptx:
            return own <= capability
        if str(self).endswith("a"):
            return own == capability
        return self.major == capability[0] and own <= capability


# The targets of a build with nvcc; the PTX serves every later architecture.
PREBUILT = (Target(8, 0), Target(9, 0), Target(10, 0), Target(10, 0, ptx=True))


def best_target(targets: Iterable[Target], capability: tuple[int, int]) -> Target | None:
    """Returns the target that a driver loads on a device of ``capability``: PTX only if it must."""
    covering = [target for target in targets if target.covers(capability)]
    return max(covering, key=lambda t: (not t.ptx, t.major, t.minor), default=None)


def targets_for(capabilities: Iterable[str]) -> list[Target]:
    """Returns the :data:`PREBUILT` targets that devices of ``capabilities`` load; all if empty."""
    devices = [tuple(map(int, text.split("."))) for text in capabilities]
    if not devices:
        return list(PREBUILT)
    chosen = {best_target(PREBUILT, (major, minor)) for major, minor in devices}
    return [target for target in PREBUILT if target in chosen]


def compiler_target(known: Sequence[int], capability: tuple[int, int]) -> Target | None:
    """Returns a device's target for a compiler that supports ``known`` (80, 90, ...).

    It is machine code of exactly the device's architecture, or PTX of the latest earlier
    architecture, or None.
    """
    exact = Target(*capability)
    if exact.major * 10 + exact.minor in known:
        return exact
    return best_target((Target(*divmod(number, 10), ptx=True) for number in known), capability)


@dataclass(frozen=True)
class UnitSource:
    """Everything that one compilation reads.

    Attributes:
        unit: the unit to compile.
        text: text of ``kernels.cu``.
        headers: text of every header, by the name that ``#include`` gives it.
    """

    unit: KernelUnit
    text: str
    headers: Mapping[str, str]

    def fingerprint(self) -> str:
        """Returns a hex digest of all texts, their names, the macros and the options."""
        digest = hashlib.sha256()
        parts = [*OPTIONS, *self.unit.macros, SOURCE, self.text]
        for name in sorted(self.headers):
            parts += [name, self.headers[name]]
        for part in parts:
            data = part.encode()
            # Includes the lengths, so that different lists of parts give different bytes.
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()


def source_root() -> Path:
    """Returns the folder that holds ``kernels/``: in the installed package, or the source tree.

    Raises:
        UnsupportedError: neither has ``kernels/``.
    """
    package = Path(__file__).resolve().parent.parent
    # Look in the package first: next to it there may be an unrelated folder "kernels".
    candidates = (package / "_kernels" / "src", package.parent)
    for root in candidates:
        if (root / SOURCE).is_file():
            return root
    raise UnsupportedError(
        f"CUDA kernels: expected {SOURCE} in {' or '.join(map(str, candidates))}, found it in "
        "neither: install ringcomm again"
    )


def _find_header(root: Path, name: str) -> Path | None:
    found = [root / folder / name for folder in INCLUDE_FOLDERS]
    return next((path for path in found if path.is_file()), None)


def read_source(root: Path, unit: KernelUnit) -> UnitSource:
    """Reads the files below ``root`` that a compilation of ``unit`` would read.

    Preprocessor conditions are not evaluated: a header counts if any line includes it. Headers in
    angle brackets come with the compiler and are not read.

    Raises:
        UnsupportedError: a header is missing, or is included by two names.
    """
    text = (root / SOURCE).read_text()
    headers: dict[str, str] = {}
    names: dict[Path, str] = {}
    waiting = [text]
    while waiting:
        for name in _INCLUDE.findall(waiting.pop()):
            path = _find_header(root, name)
            if path is None:
                raise UnsupportedError(
                    f"CUDA kernels: the header {name!r} is missing below {root}: install "
                    "ringcomm again"
                )
            if names.setdefault(path.resolve(), name) != name:
                # NVRTC identifies a header by its name, and would read this file twice.
                raise UnsupportedError(
                    f"CUDA kernels: {path} is included as {name!r} and as "
                    f"{names[path.resolve()]!r}; include it by one name"
                )
            if name not in headers:
                headers[name] = path.read_text()
                waiting.append(headers[name])
    return UnitSource(unit, text, headers)


def manifest(root: Path, compiler: str, targets: Sequence[Target]) -> str:
    """Returns the JSON that a build stores with its binaries: compiler, targets, and sources."""
    sources = {unit.name: read_source(root, unit).fingerprint() for unit in UNITS.values()}
    record = {"compiler": compiler, "targets": [str(t) for t in targets], "sources": sources}
    return json.dumps(record, indent=2) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Prints ``options``, ``units`` or ``targets [CAPABILITY...]``, one per line.

    With the arguments ``manifest ROOT COMPILER TARGET...`` it prints the manifest.
    """
    what, *rest = arguments
    if what == "options":
        print("\n".join(OPTIONS))
    elif what == "targets":
        print("\n".join(map(str, targets_for(rest))))
    elif what == "units":
        for unit in UNITS.values():
            print(unit.name, *(f"-D{macro}" for macro in unit.macros))
    elif what == "manifest":
        root, compiler, *targets = rest
        print(manifest(Path(root), compiler, [Target.parse(t) for t in targets]), end="")
    else:
        raise SystemExit(f"kernel_units: expected options, targets, units or manifest, got {what}")


if __name__ == "__main__":
    main(sys.argv[1:])
