# SPDX-License-Identifier: Apache-2.0
"""Every CUDA kernel compiles, and its machine code has the properties that the design requires.

No GPU is needed. ``make cuda-compile`` compiles every unit for every architecture, and with nvcc,
too, if nvcc is installed; that takes a quarter of an hour. ``make test`` compiles a subset, since
all units of a kind come from one template.
"""

import os
import re
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from pathlib import Path

import pytest

from ringcomm.cuda import units
from ringcomm.cuda.units import UNITS
from ringcomm.errors import UnsupportedError
from tests.support import ROOT, cuda_code
from tests.support import cuda_checks as checks
from tests.support import cuda_loop_measures as measures
from tests.support.cuda_code import Binary, Loop, compile_unit, kernels_of, output_of, tool
from tests.support.emulator import EmulatedRuntime
from tests.support.emulator.library import figures_of, library

pytestmark = pytest.mark.compiles

EVERYTHING = os.environ.get("RINGCOMM_CUDA_COMPILE") == "all"
MAIN_TARGET, *OTHER_TARGETS = "sm_90a", "sm_80", "sm_100a"
MULTICAST = [unit for unit in UNITS if unit.startswith("multicast_")]
# The reduction with the most registers and instructions: it is the first to show spills and narrow
# accesses, and it has the copy loops of the kernels that move data. One optimizer's update;
# test_step_loops.py compiles a step. One multicast kernel, since tests/proof/ptx executes the
# instructions of each type. The format of quantization with the most registers.
REPRESENTATIVES = (
    *("reduce_float16/min", "adamw_bfloat16/shard_bfloat16", "multicast_float16"),
    *("quantize_int4/float32", "rows"),
)
# The cheapest units show whether another architecture accepts the sources, and how it compiles
# waits and orders. The multicast unit is empty below sm_90.
CHEAPEST = ("move/ll_move", "multicast_float16")
MATRIX = [(unit, MAIN_TARGET) for unit in (UNITS if EVERYTHING else REPRESENTATIVES)]
for target in OTHER_TARGETS:
    MATRIX += [(unit, target) for unit in (UNITS if EVERYTHING else CHEAPEST)]
# The longest compilation begins first, so that it does not run alone at the end.
MATRIX.sort(key=lambda each: each[0] == "move")

needs_tools = pytest.mark.skipif(not cuda_code.have_tools(), reason=cuda_code.NEEDS_TOOLS)
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler")


@pytest.fixture(scope="module")
def compilations():
    """Starts all compilations; each test waits for its own result only.

    They run in processes, since NVRTC compiles only one program of a process at a time.
    """
    context = get_context("spawn")
    others = set(active_children())
    with ProcessPoolExecutor(os.cpu_count(), context, os.nice, (10,)) as pool:
        under_way = {each: pool.submit(compile_unit, *each) for each in MATRIX}
        processes = set(active_children()) - others

        def take(unit: str, target: str) -> Binary:
            try:
                # Removes the result, so that its memory is free for the next test.
                return under_way.pop((unit, target)).result()
            except BrokenProcessPool:
                ends = [process.exitcode for process in processes]
                pytest.fail(f"a compiling process died; they ended with {ends}, signals negative")

        yield take
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module", params=MATRIX, ids=["-".join(each) for each in MATRIX])
def binary(request, compilations):
    return compilations(*request.param)


def moves(kernel: str) -> bool:
    return kernel.endswith("_move")


def is_ll(kernel: str) -> bool:
    return "_ll_" in kernel


def quantizes(kernel: str) -> bool:
    return kernel.startswith(("rc_quantize_", "rc_dequantize_and_sum_"))


def reads_rows(kernel: str) -> bool:
    return "_rows" in kernel


def is_alone(kernel: str) -> bool:
    """True for kernels that wait for no peer."""
    alone = kernel in ("rc_adamw_prepare", "rc_grad_norm") or "_shard_" in kernel
    return alone or quantizes(kernel) or reads_rows(kernel)


def uses_shared_memory(kernel: str) -> bool:
    return kernel != "rc_adamw_prepare" and not quantizes(kernel) and not reads_rows(kernel)


def moves_data(kernel: str) -> bool:
    """True for kernels whose loads may use all of a multiprocessor's registers."""
    if kernel.startswith(("rc_reduce_scatter_", "rc_all_reduce_")):
        return not kernel.endswith("_norm")
    return kernel in ("rc_move", "rc_list_move")


def updates(kernel: str) -> bool:
    return kernel.startswith("rc_adamw_") and kernel != "rc_adamw_prepare"


def takes_sources_at_once(kernel: str) -> bool:
    """True for the optimizer's collectives except rings; test_step_loops.py measures them."""
    return kernel == "rc_reduce_scatter_norm" or kernel.startswith(
        ("rc_adamw_step_", "rc_adamw_many_")
    )


def copying_loop(binary: Binary, kernel: str) -> measures.Turn:
    """Returns the steady loop of a kernel that only copies: it stores as much as it loads."""

    def copies(loop: Loop) -> bool:
        seen = checks.traffic(loop)
        return not seen.computes and seen.stores == sum(map(measures.is_load, loop.code))

    return measures.turn(binary, kernel, measures.steady_loop(binary, kernel, copies))


@needs_tools
@pytest.mark.timeout(600)  # a compilation may take minutes on a busy machine
class TestUnits:
    def test_kernels(self, binary, request):
        (unit, target), found = request.node.callspec.params["binary"], set(binary.kernels)
        wanted = kernels_of(unit) if target != "sm_80" or unit not in MULTICAST else set()
        assert found == set(binary.thread_bounds) == wanted

    def test_no_loop_that_moves_data_uses_local_memory(self, binary):
        assert checks.local_memory(binary) == []

    def test_the_launch_bounds_hold(self, binary):
        assert checks.launch_bounds(binary) == []

    def test_a_launch_is_small(self, binary, request):
        assert checks.parameters(binary) == []
        # The emulator takes as many parameter bytes from the host as the kernel.
        unit = request.node.callspec.params["binary"][0].partition("/")[0]
        runtime = EmulatedRuntime(ptx=None)
        for name, found in binary.params_bytes.items():
            try:
                emulated = runtime.find_kernel(0, unit, name)
            except UnsupportedError:  # it has not all operations of all dtypes
                continue
            assert library().emulated_params_bytes(emulated.handle) == found, name

    def test_the_emulator_runs_no_more_of_them_at_once_than_a_gpu(self, binary, request):
        unit, target = request.node.callspec.params["binary"]
        if target != MAIN_TARGET:
            return
        runtime, unit = EmulatedRuntime(ptx=None), unit.partition("/")[0]
        figures = {}
        for name in binary.thread_bounds:
            try:
                emulated = runtime.find_kernel(0, unit, name)
            except UnsupportedError:  # it has not all operations of all dtypes
                continue
            registers, shared_bytes, threads = figures_of(emulated.handle)
            figures[name] = registers, shared_bytes
            assert threads == binary.thread_bounds[name], name
            real = checks.blocks_per_multiprocessor(binary, name)
            assert emulated.blocks_per_multiprocessor <= real, name
        assert checks.understated(binary, figures) == []
        # A figure that is one byte too small is reported for each kernel that uses shared memory,
        # since all of them have the same variable there.
        less = {name: (registers, size - 1) for name, (registers, size) in figures.items()}
        shared = list(filter(uses_shared_memory, figures))
        assert len(checks.understated(binary, less)) == len(shared)
        name = next(iter(binary.thread_bounds))
        used = binary.resources[name]
        assert checks.understated(binary, {name: ((used.registers or 0) - 1, used.shared_bytes)})

    def test_orders_are_of_system_scope(self, binary):
        assert checks.memory_orders(binary) == []

    def test_no_loop_divides_by_64_bits(self, binary):
        for kernel in binary.kernels.values():
            assert checks.long_divisions(kernel) == []

    def test_items_are_acquired_and_released(self, binary):
        for name in binary.kernels:
            if not is_ll(name) and not is_alone(name):
                assert checks.protocol(binary, name) == []

    def test_a_packet_is_one_access(self, binary):
        for name in binary.kernels:
            if is_ll(name):
                assert checks.ll_protocol(binary, name) == []

    def test_copies_keep_memory_busy(self, binary, request):
        if request.node.callspec.params["binary"][1] != MAIN_TARGET:
            return
        for name in binary.kernels:
            if not moves_data(name):
                continue
            turn = copying_loop(binary, name)
            assert measures.loads_left_at_waits(turn) >= 4, name
            assert measures.kib_in_flight(binary, name, turn) >= 96, name
            assert len(turn.steps) <= 6 * turn.loads, name

    def test_data_move_16_bytes_at_a_time(self, binary):
        for name, kernel in binary.kernels.items():
            if name.startswith("rc_multicast_"):
                assert checks.multicast_loop(kernel) == checks.copy_loop(kernel) == []
                continue
            if updates(name):
                assert checks.update_loop(kernel) == []
            if name == "rc_copy_rows":
                assert checks.copy_loop(kernel) == []
            elif reads_rows(name):
                assert checks.quantization_loop(kernel, stores=False) == []
                assert "scale" in name or checks.quantization_loop(kernel, stores=True) == []
            if name.endswith("_float32") and quantizes(name):
                stores = name.startswith("rc_dequantize_and_sum_")
                assert checks.quantization_loop(kernel, stores) == []
            if is_ll(name) or is_alone(name) or takes_sources_at_once(name):
                continue
            # The norm kernel is a reduce-scatter only, so it has no copy loop.
            assert name.endswith("_norm") or checks.copy_loop(kernel) == []
            assert moves(name) or checks.reduce_loop(kernel) == []


@needs_tools
def test_serial_loops_are_those_of_their_folder():
    """Serial loops wait for all of their loads; batched loops keep half of theirs in flight."""
    left = {}
    for loops in (units.BATCHED, units.SERIAL):
        text, headers, macros = cuda_code.unit_source("multicast_float16", loops)
        binary = cuda_code.compile_text(text, MAIN_TARGET, headers, [*macros, "-lineinfo"])
        files = set(re.findall(r"kernels/cuda/(?:serial/)?ops\.h", binary.ptx))
        assert files == {f"kernels/cuda/{'serial/' if loops == units.SERIAL else ''}ops.h"}
        left[loops] = measures.loads_left_at_waits(copying_loop(binary, "rc_multicast_sum"))
    assert left[units.BATCHED] >= 4
    assert left[units.SERIAL] == 0


# The parts of a multicast kernel that pass data through slots, and the replacements.
THROUGH_SLOTS = {
    "if (reduces && pieces > 0 && !args.bound) fill_slot(0);": "",
    "RC_RETURN_IF_FAILED(move_through_slots(reduces && published == Published::kSome));": ";",
}


@needs_tools
def test_multicast_in_place_copies_nothing_locally():
    """Checks the kernel without its path through slots, which copies; TestUnits checks both."""
    text, headers, macros = cuda_code.unit_source("multicast_float16", units.BATCHED)
    for slots, instead in THROUGH_SLOTS.items():
        assert headers["kernels/cuda/multicast.h"].count(slots) == 1
        headers["kernels/cuda/multicast.h"] = headers["kernels/cuda/multicast.h"].replace(
            slots, instead
        )
    binary = cuda_code.compile_text(text, MAIN_TARGET, headers, [*macros, "-lineinfo"])
    kernel = binary.kernels["rc_multicast_sum"]
    assert checks.multicast_loop(kernel) == []
    assert checks.copy_loop(kernel) != []
    assert "copy_lanes" not in binary.ptx  # which MoveOps copies by


@needs_tools
@pytest.mark.skipif(not EVERYTHING, reason="half a minute: make cuda-compile")
@pytest.mark.parametrize(("unit", "cheap"), [("reduce_float32/sum", 8), ("reduce_bfloat16/sum", 2)])
def test_sums_keep_memory_busy(unit, cheap):
    """Checks all FP32 sums, but of BF16 only sums of two, since the others widen each element."""
    binary, name = compile_unit(unit, MAIN_TARGET), "rc_reduce_scatter_sum"
    found: dict[int, list[tuple[float, int, measures.Turn]]] = {}
    for loop in measures.steady_loops(binary, name):
        seen = checks.traffic(loop)
        if not seen.stores or not seen.computes:
            continue
        turn = measures.turn(binary, name, loop)
        found.setdefault(turn.loads // seen.stores, []).append(
            (len(turn.steps) / turn.loads, -measures.loads_left_at_waits(turn), turn)
        )
    for sources in (2, 4, 8):
        instructions, minus_left, turn = min(found[sources], key=lambda each: each[:2])
        assert measures.kib_in_flight(binary, name, turn) >= 96, sources
        assert measures.generic_accesses(Loop(0, 0, [i for i, _ in turn.steps])) == []
        assert instructions <= (8 if sources <= cheap else 20), sources
        assert -minus_left >= (4 if sources <= cheap else 1), sources


# The serial loops of these units are the loops that they had before there were two kinds.
SERIAL_UNITS = ("reduce_bfloat16/sum", "adamw_bfloat16/shard_bfloat16", "rows")


@needs_tools
@pytest.mark.skipif(not EVERYTHING, reason="minutes: make cuda-compile")
@pytest.mark.parametrize("unit", SERIAL_UNITS)
def test_serial_loops_compile(unit):
    binary = compile_unit(unit, MAIN_TARGET, units.SERIAL)
    assert set(binary.kernels) == kernels_of(unit)
    assert checks.local_memory(binary) == checks.launch_bounds(binary) == []
    assert checks.memory_orders(binary) == []


def test_every_header_is_compiled():
    source = units.read_source(units.source_root(), UNITS["move"])
    folder = ROOT / "kernels/include"
    headers = {str(path.relative_to(folder)) for path in folder.rglob("*.h")}
    assert headers <= source.headers.keys()


def configure(folder: Path, *options: str) -> str:
    """Makes a build folder of the CUDA part alone, and returns CMake's output."""
    tools = Path(sys.executable).parent
    names = [f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", f"-DPython_EXECUTABLE={sys.executable}"]
    what = ["-DRINGCOMM_PYTHON=OFF", *options]
    return output_of(tools / "cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", *names, *what)


def nvcc_units():
    return list(UNITS) if EVERYTHING else ["multicast_float16"]


def nvcc_targets():
    """Machine code for one architecture, and the PTX, show that nvcc accepts the sources."""
    return [t for t in units.PREBUILT if EVERYTHING or t.ptx or str(t) == MAIN_TARGET]


@needs_nvcc
@needs_tools
@pytest.mark.timeout(600)
@pytest.mark.parametrize("unit", nvcc_units())
def test_nvcc_makes_what_a_wheel_carries(tmp_path, unit):
    folder = tmp_path / "build"
    configure(folder, f"-DRINGCOMM_CUDA={';'.join(map(str, nvcc_targets()))}")
    fatbin = folder / "kernels" / "cuda" / f"{unit}.fatbin"
    output_of(Path(sys.executable).parent / "cmake", "--build", folder, "--target", fatbin)
    output_of(tool("cuobjdump"), "-xelf", "all", fatbin, cwd=tmp_path)
    output_of(tool("cuobjdump"), "-xptx", "all", fatbin, cwd=tmp_path)
    made = {str(path).split(".")[-2]: path for path in tmp_path.glob("*.*.cubin")}
    assert set(made) == {str(target) for target in nvcc_targets() if not target.ptx}
    (ptx,) = tmp_path.glob("*.ptx")
    assert ".target sm_100\n" in ptx.read_text()
    for path in made.values():
        usage = output_of(tool("cuobjdump"), "-res-usage", path)
        binary = cuda_code.Binary(path.read_bytes(), ptx.read_text(), usage)
        empty = unit in MULTICAST and ".sm_80." in path.name
        assert set(binary.kernels) == (set() if empty else kernels_of(unit))
        assert checks.local_memory(binary) == []
        # Alias fences are counted in the PTX of the machine code, which is not this PTX.
        assert unit in MULTICAST or checks.memory_orders(binary) == []
