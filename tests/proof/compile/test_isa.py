# SPDX-License-Identifier: Apache-2.0
"""Every instruction set gives the same bits; the sources compile for machines that CI lacks."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import ringcomm
from ringcomm import _native
from tests.support import ROOT, together
from tests.support.compiler import LOW_PRIORITY

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# Not the Python module, whose headers the cross compiler lacks, nor x86-64 instruction sets.
ARM_SOURCES = sorted(
    path
    for path in (ROOT / "kernels/host").glob("*.cpp")
    if path.name not in ("isa_avx2.cpp", "isa_avx512.cpp")
)
NAMES = ["avx512", "avx2", "baseline"]


@pytest.fixture
def restore_isa():
    yield
    assert _native.force_isa("")


def inputs(dtype: torch.dtype, world: int) -> list[torch.Tensor]:
    """Returns all exponents, subnormals, signed zeros, infinities and NaN; has a partial vector."""
    generator = torch.Generator().manual_seed(7)
    elems = 70_001
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    limits = torch.iinfo(bits)
    raw = [
        torch.randint(limits.min, limits.max, (elems,), dtype=bits, generator=generator)
        for _ in range(world)
    ]
    return [tensor.view(dtype) for tensor in raw]


def reduced(tensors: list[torch.Tensor], op: torch.distributed.ReduceOp.RedOpType) -> torch.Tensor:
    def rank(comm: ringcomm.Communicator) -> torch.Tensor:
        tensor = tensors[comm.rank].clone()
        comm.all_reduce(tensor, op)
        return tensor

    with ringcomm.local_world(len(tensors)) as world:
        return world.run(rank)[0]


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compares bits, but all NaN are equal: CPUs differ in the operand whose payload survives."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    differs = a.view(bits) != b.view(bits)
    return bool((~differs | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_same_bits(dtype, world, restore_isa):
    tensors = inputs(dtype, world)
    available = [name for name in NAMES if _native.force_isa(name)]
    assert "baseline" in available
    for op in (torch.distributed.ReduceOp.SUM, torch.distributed.ReduceOp.AVG):
        results = {}
        for name in available:
            assert _native.force_isa(name)
            assert _native.isa() == name
            results[name] = reduced(tensors, op)
        for name in available:
            assert same_values(results[name], results["baseline"]), (name, op)
        # The reference: sums in rank order, in FP32 (or FP64), rounded once.
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        total = tensors[0].to(wide)
        for tensor in tensors[1:]:
            total = total + tensor.to(wide)
        if op == torch.distributed.ReduceOp.AVG:
            total = total / world
        assert same_values(results["baseline"], total.to(dtype)), op


def test_unknown_isa(restore_isa):
    assert not _native.force_isa("sse9")


def test_large_results_past_the_caches():
    """Outputs of 16 MiB and more use streaming stores; tests unaligned and ragged ends, too."""
    elems = (20 << 20) // 4 + 13

    def rank(comm: ringcomm.Communicator) -> None:
        whole = torch.full((elems + 1,), float(comm.rank + 1))
        comm.all_reduce(whole[1:])
        assert whole[0] == comm.rank + 1
        assert bool((whole[1:] == 3).all())
        heap = ringcomm.zeros(2 * elems)
        heap += comm.rank + 1
        out = ringcomm.zeros(elems)
        comm.reduce_scatter_tensor(out, heap)
        assert bool((out == 3).all())
        comm.all_gather_into_tensor(heap, out)
        assert bool((heap == 3).all())

    with ringcomm.local_world(2) as world:
        world.run(rank)


@pytest.mark.skipif(
    shutil.which("aarch64-linux-gnu-g++") is None, reason="no cross compiler for 64-bit Arm"
)
@pytest.mark.parametrize("kind", ["loops", "assembly", "neither"])
def test_compiles_for_arm(kind, tmp_path):
    """Compiles the loops as a unit of their own, since their namespace is their instruction set's.

    Only the loops and the sources with assembly are compiled to machine code. For all other sources
    it suffices to instantiate the templates.
    """
    of_kind: dict[str, list[Path]] = {"loops": [], "assembly": [], "neither": []}
    for path in ARM_SOURCES:
        has_assembly = "asm" in re.findall(r"\w+", path.read_text())
        is_loop = path.name.startswith("isa_")
        of_kind["loops" if is_loop else "assembly" if has_assembly else "neither"].append(path)
    unit = together(tmp_path / "unit.cpp", of_kind[kind])
    command = [*LOW_PRIORITY, "aarch64-linux-gnu-g++", "-std=c++20", "-O0"]
    command += ["-Wall", "-Wextra", "-Werror", f"-I{ROOT}", f"-I{ROOT}/kernels/include", str(unit)]
    if kind == "neither":
        command += ["-fsyntax-only"]
    else:
        command += ["-c", "-o", str(tmp_path / "out.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
