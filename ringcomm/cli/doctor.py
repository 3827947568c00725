# SPDX-License-Identifier: Apache-2.0
"""``ringcomm doctor``: checks the machine, tests two ranks, and reports problems."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ringcomm import cuda
from ringcomm.cli import table_lines
from ringcomm.cuda.build import describe_source
from ringcomm.cuda.runtime import CONNECTIONS_VARIABLE, DEFAULT_CONNECTIONS, DeviceRuntime
from ringcomm.errors import RingcommError
from ringcomm.launch import RankCommand, describe_exit, end_with, started
from ringcomm.memory import numa
from ringcomm.memory.device_heap import HEAP_BYTES_VARIABLE, why_heap_is_fixed
from ringcomm.process import available_cores, memory_limit_bytes

# The checks of ``ringcomm doctor``: each reads one fact and reports its effect on collectives.

OK, NOTE, FAIL = "ok", "note", "FAIL"
SCHEMA = 1
SELF_TEST_S = 60.0
SELF_TEST_ELEMS = 100_003  # several segments, the last one shorter
RANK_TIMEOUT_S = 30.0
# Memory for torch, staging and tensors of a small run; with less, the run is likely killed.
LITTLE_MEMORY_BYTES = 2 << 30
LARGE_TENSOR_BYTES = 32 << 20


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``advice`` says what to do about a note or a failure."""

    name: str
    verdict: str
    value: str
    advice: str = ""


def gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


def check_versions() -> list[Finding]:
    found = [
        Finding("python", OK, f"{platform.python_version()} ({platform.machine()})"),
        Finding("torch", OK, torch.__version__),
    ]
    try:
        found.append(Finding("ringcomm", OK, importlib.metadata.version("ringcomm")))
    except importlib.metadata.PackageNotFoundError:
        found.append(Finding("ringcomm", NOTE, "source tree", "not installed: pip install ."))
    backends = importlib.metadata.entry_points(group="torch.backends")
    if any(entry.name == "ringcomm" for entry in backends):
        found.append(Finding("backend", OK, 'init_process_group("ringcomm") finds it'))
    else:
        advice = "import ringcomm.c10d first, or install the package"
        found.append(Finding("backend", NOTE, "no entry point in torch.backends", advice))
    return found


def check_native() -> Finding:
    try:
        from ringcomm import _native
    except ImportError as error:
        return Finding("native module", FAIL, "cannot be imported", str(error))
    return Finding("native module", OK, f"instruction set {_native.isa()}")


def check_cores() -> Finding:
    usable, online = available_cores(), os.cpu_count() or 1
    text = f"{usable} usable of {online}"
    if usable < 2:
        return Finding("cores", NOTE, text, "two ranks will take turns on one core")
    return Finding("cores", OK, text)


def check_threads() -> Finding:
    """Reports the threads of a process that is the only rank on its cores."""
    from ringcomm import _native
    from ringcomm.comm.host.options import CommOptions
    from ringcomm.comm.host.threads import COUNTS_TORCHS_THREADS, THREADS_VARIABLE, named_threads
    from ringcomm.errors import ArgumentError

    try:
        named = named_threads(CommOptions())
    except ArgumentError as error:
        return Finding("threads", FAIL, "no communicator can be made", str(error))
    if named:
        return Finding("threads", OK, f"large calls use {named}, by {THREADS_VARIABLE}")
    if os.environ.get("OMP_NUM_THREADS") == "1" and available_cores() > 1:
        advice = (
            "torchrun sets it so for several ranks: set OMP_NUM_THREADS to the cores of a rank, or "
            f"{THREADS_VARIABLE} for ringcomm alone"
        )
        return Finding("threads", NOTE, "large calls use 1, as OMP_NUM_THREADS=1 says", advice)
    count = _native.threads()
    alone = f"a process alone uses {count} thread{'s' * (count != 1)} in large calls"
    text = f"{alone}; ranks that share cores divide them"
    if not COUNTS_TORCHS_THREADS:
        remedy = "torch.set_num_threads has no effect on them: set RINGCOMM_THREADS"
        return Finding("threads", NOTE, f"{text}; torch does not say how many it uses", remedy)
    return Finding("threads", OK, text)


def check_backend() -> Finding:
    """Reports the C++ backend of ``torch.distributed``, and which groups use it."""
    from ringcomm.c10d.backend import describe
    from ringcomm.errors import RingcommError

    try:
        return Finding("C++ backend", OK, describe())
    except RingcommError as error:
        return Finding("C++ backend", FAIL, "no group can be made", str(error))


def check_graphs() -> Finding:
    """Reports how compiled graphs make the collectives of ``ringcomm.functional``."""
    from ringcomm.functional.in_graph import describe

    value, advice = describe()
    return Finding("compiled graphs", NOTE if advice else OK, value, advice)


def check_memory(meminfo: str, limit_bytes: int | None) -> Finding:
    """Checks free memory, by the text of /proc/meminfo and the control group's limit."""
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    total, available = (int(fields[key].split()[0]) << 10 for key in ("MemTotal", "MemAvailable"))
    limit = "none" if limit_bytes is None else gib(limit_bytes)
    text = f"{gib(available)} available of {gib(total)}, control group limit {limit}"
    if min(available, limit_bytes or available) < LITTLE_MEMORY_BYTES:
        return Finding("memory", NOTE, text, "little: set RINGCOMM_HEAP_BYTES low, or free memory")
    return Finding("memory", OK, text)


def check_shm(directory: str) -> Finding:
    status = os.statvfs(directory)
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    text = f"{gib(free)} free of {gib(total)}"
    return Finding(directory, OK, text + " (the heap does not use it unless told to)")


def check_heap(shmem_setting: str) -> Finding:
    """Tests the heap. ``shmem_setting`` is the text of transparent_hugepage/shmem_enabled."""
    import ringcomm
    from ringcomm.memory.host_heap import HEAP_DIR_VARIABLE

    directory = os.environ.get(HEAP_DIR_VARIABLE, "")
    kind = f"unnamed file in {directory}" if directory else "memfd"
    try:
        tried = ringcomm.empty(LARGE_TENSOR_BYTES, dtype=torch.uint8)
    except RingcommError as error:
        return Finding("heap", FAIL, kind, str(error))
    stats = ringcomm.heap_stats()
    del tried
    text = f"{kind}, up to {gib(stats['capacity_bytes'])}"
    if stats["huge_bytes"]:
        return Finding("heap", OK, f"{text}, huge pages for large tensors")
    advice = f"large tensors are slower: shmem_enabled is {shmem_setting.strip() or 'missing'}"
    return Finding("heap", NOTE, f"{text}, 4 KiB pages only", advice)


def check_numa(folder: Path = numa.SYSTEM_FOLDER) -> Iterator[Finding]:
    """Reports the NUMA nodes of the machine and of this process's CPUs, and how sums span nodes."""
    try:
        machine = numa.read_topology(folder)
    except (OSError, ValueError) as error:
        advice = "the heap lies where it is first touched: bind ranks by numactl --membind"
        yield Finding("numa", NOTE, f"the nodes cannot be read: {error}", advice)
        return
    if len(machine.cpus) == 1:
        yield Finding("numa", OK, "1 node: all memory is equally near")
        return
    yield _check_nodes(machine)
    if len(machine.with_cpus) > 1:
        advice = (
            "CommOptions(sum_group_size=L), L the ranks of each node, has large sums made in two "
            "levels where ranks are numbered node by node and that reads less from other nodes; it "
            "changes the order of additions"
        )
        yield Finding("sums over nodes", NOTE, "in one level and in rank order, by default", advice)


def _check_nodes(machine: numa.NodeTopology) -> Finding:
    own = machine.nodes_of(os.sched_getaffinity(0))
    farthest = max(max(row.values()) for row in machine.distances.values())
    text = (
        f"{len(machine.cpus)} nodes, distance up to {farthest} (10: the own node); this process "
        f"may use CPUs of {_named_nodes(own)}"
    )
    if own != machine.with_cpus:
        return Finding("numa", OK, text)
    advice = (
        "bind each rank to the CPUs of one node (mpirun --bind-to numa, srun --cpu-bind=ldoms, "
        "numactl --cpunodebind): its heap then lies there, and its threads stay beside it"
    )
    return Finding("numa", NOTE, text, advice)


def check_heap_nodes(folder: Path = numa.SYSTEM_FOLDER) -> Finding:
    """Reports the heap's NUMA nodes, or why it is bound to none, and where its pages are."""
    from ringcomm.memory.host_heap import process_heap

    heap = process_heap()
    touched = _touched_nodes(heap.base_ptr, folder)
    if not heap.nodes:
        reason = numa.own_binding(folder).reason
        return Finding("heap's nodes", OK, f"any, as {reason}{touched}")
    if heap.placement_error == 0:
        return Finding("heap's nodes", OK, f"bound to {_named_nodes(heap.nodes)}{touched}")
    refusal = os.strerror(heap.placement_error)
    advice = (
        "each page lies on the node of the thread that touches it first, and a peer may be that: "
        "allow mbind (Docker: --cap-add SYS_NICE), or bind ranks by numactl --membind"
    )
    text = f"any, as mbind to {_named_nodes(heap.nodes)} is refused: {refusal}{touched}"
    return Finding("heap's nodes", NOTE, text, advice)


def _touched_nodes(base_ptr: int, folder: Path) -> str:
    """Returns "; touched so far: ..." with the nodes of the heap's pages, or "" for one node."""
    try:
        if len(numa.read_topology(folder).cpus) == 1:
            return ""
    except (OSError, ValueError):  # the nodes cannot be read, as check_numa() reports
        pass
    found = numa.bytes_by_node(base_ptr)
    lies = ", ".join(f"{size >> 10} KiB on node {node}" for node, size in sorted(found.items()))
    return f"; touched so far: {lies or 'unknown, as there is no /proc/self/numa_maps'}"


def _named_nodes(nodes: Sequence[int]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"


def _refusal(reader: str, *arguments: str) -> str:
    """Returns why ``reader``, run in another process, does not print "found"; "" if it does."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", reader, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.stdout.strip() == "found":
        return ""
    return next(iter(done.stderr.strip().splitlines()[-1:]), "wrong content")


_OPENER = "import sys; f = open(sys.argv[1], 'r+b'); f.seek(0); print(f.read().decode())"


def check_descriptor_paths() -> Finding:
    """Checks that a process can map another process's memory by /proc/<pid>/fd, as ranks do."""
    descriptor = os.memfd_create("ringcomm-doctor")
    try:
        os.write(descriptor, b"found")
        reason = _refusal(_OPENER, f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)
    if not reason:
        return Finding("peer memory", OK, "/proc/<pid>/fd opens from another process")
    advice = "run all ranks as one user, in one PID namespace, with /proc mounted without hidepid"
    return Finding("peer memory", FAIL, f"/proc/<pid>/fd does not open: {reason}", advice)


_COPIER = """
import ctypes, os, sys
pid, address = map(int, sys.argv[1:])
class IoVector(ctypes.Structure):
    _fields_ = [("ptr", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]
to = ctypes.create_string_buffer(5)
mine, theirs = IoVector(ctypes.addressof(to), 5), IoVector(address, 5)
copy = ctypes.CDLL(None, use_errno=True).process_vm_readv
copy.argtypes = [ctypes.c_int, *2 * (ctypes.c_void_p, ctypes.c_ulong), ctypes.c_ulong]
copy(pid, ctypes.addressof(mine), 1, ctypes.addressof(theirs), 1, 0)
if to.raw != b"found":
    sys.exit(os.strerror(ctypes.get_errno()))
print("found")
"""


def check_single_copy() -> Finding:
    """Checks whether a process can copy another process's memory (process_vm_readv) quickly."""
    from ringcomm import _native

    found = ctypes.create_string_buffer(b"found")
    reason = _refusal(_COPIER, str(os.getpid()), str(ctypes.addressof(found)))
    if not reason:
        is_used = any(_native.single_copy_gain())
        speed = "faster than two copies" if is_used else "slower than two copies, so it is not used"
        return Finding("single copy", OK, f"process_vm_readv works, {speed}")
    advice = (
        "plain tensors are copied twice, heap tensors as ever: see kernel.yama.ptrace_scope, the "
        "container's seccomp profile and its capabilities"
    )
    return Finding("single copy", NOTE, f"process_vm_readv is refused: {reason}", advice)


def _run_rank(store_path: str, rank: int) -> None:
    """Runs one rank of the self-test: ``python -m ringcomm.cli.doctor STORE RANK``.

    Raises:
        RuntimeError: a result is wrong.
        RingcommError: a call failed.
    """
    from torch.distributed import FileStore

    import ringcomm

    world, count = 2, SELF_TEST_ELEMS
    store = FileStore(store_path, world)
    with ringcomm.Communicator.from_store(store, rank, world, timeout=RANK_TIMEOUT_S) as comm:
        for allocate in (torch.empty, ringcomm.empty):
            data = allocate(count * world, dtype=torch.float32)
            shard = allocate(count, dtype=torch.float32)
            index = torch.arange(count * world).remainder(97).float()
            data.copy_(index + rank)
            comm.reduce_scatter_tensor(shard, data)
            comm.all_reduce(data)
            expected = world * index + world * (world - 1) // 2
            if not torch.equal(data, expected):
                raise RuntimeError("all_reduce returned a wrong result")
            if not torch.equal(shard, expected[rank * count : (rank + 1) * count]):
                raise RuntimeError("reduce_scatter_tensor returned a wrong result")
        comm.barrier()


def check_self_test(timeout_s: float = SELF_TEST_S) -> Finding:
    """Runs two ranks: an all-reduce and a reduce-scatter, each on plain and on heap tensors."""
    with tempfile.TemporaryDirectory(prefix="ringcomm-doctor-") as directory:
        words = [sys.executable, "-m", "ringcomm.cli.doctor", f"{directory}/store"]
        commands = [RankCommand(f"rank {rank}", [*words, str(rank)]) for rank in range(2)]
        how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        with started(commands, **how) as ranks:
            try:
                errors = [rank.communicate(timeout=timeout_s)[1] for rank in ranks]
            except subprocess.TimeoutExpired:
                hang = f"2 ranks hang for {timeout_s:.0f} s"
                return Finding("self-test", FAIL, hang, "see above")
    for number, (rank, error) in enumerate(zip(ranks, errors, strict=True)):
        if rank.returncode != 0:
            reason = error.strip().splitlines()[-1:] or [f"it {describe_exit(rank.returncode)}"]
            return Finding("self-test", FAIL, f"rank {number}: {reason[0]}", "see above")
    return Finding("self-test", OK, "2 ranks exchanged and summed what they should")


# The checks of GPUs. A machine without a GPU has no fault.

DRIVER_LIBRARY = "libcuda.so.1"
LOADING_VARIABLE = "CUDA_MODULE_LOADING"


def check_devices() -> Iterator[Finding]:
    """Reports the devices that collectives can use, or why there are none."""
    try:
        runtime = cuda.current()
        count = runtime.device_count()
    except RingcommError as error:
        if _has_driver():
            yield Finding("gpu", NOTE, "none that ringcomm can use", str(error))
        else:
            # The error may advise to install CuPy, which is of no use here.
            yield Finding("gpu", NOTE, "no NVIDIA driver on this machine")
        return
    for device in range(count):
        yield _check_device(runtime, device)
        yield _check_device_heap(runtime, device)
    yield _check_connections(os.environ.get(CONNECTIONS_VARIABLE, ""))
    yield _check_loading(os.environ.get(LOADING_VARIABLE, ""))


def _has_driver(folder: Path = Path("/dev"), library: str = DRIVER_LIBRARY) -> bool:
    """True if this machine has a part of NVIDIA's driver: a device file, or its library."""
    if any(folder.glob("nvidia*")):
        return True
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return "No such file" not in str(error)  # else the library exists, but does not load
    return True


def _check_device(runtime: DeviceRuntime, device: int) -> Finding:
    name = f"gpu {device}"
    try:
        identity = runtime.identity(device)
        free_bytes, total_bytes = runtime.memory_info(device)
        major, minor = identity.capability
        text = (
            f"{identity.name} (sm_{major}{minor}, {identity.multiprocessors} multiprocessors), "
            f"{gib(free_bytes)} free of {gib(total_bytes)}"
        )
    except (RingcommError, RuntimeError) as error:
        return Finding(name, NOTE, "does not answer", str(error))
    try:
        return Finding(name, OK, f"{text}; kernels: {describe_source(identity.capability)}")
    except RingcommError as error:
        return Finding(name, NOTE, f"{text}; no kernels for it", str(error))


def _check_device_heap(runtime: DeviceRuntime, device: int) -> Finding:
    """Reports whether the heap on a device grows, or why it does not."""
    name = f"heap on gpu {device}"
    try:
        why_fixed = why_heap_is_fixed(runtime, device)
    except RingcommError as error:
        return Finding(name, FAIL, "not usable", str(error))
    if not why_fixed:
        return Finding(name, OK, "grows by chunks as it fills")
    advice = f"{why_fixed}; {HEAP_BYTES_VARIABLE} sets its size"
    return Finding(name, NOTE, "one allocation, which does not grow", advice)


def _check_loading(setting: str) -> Finding:
    if setting == "EAGER":
        return Finding("kernel loading", OK, "eager")
    advice = (
        "the first launch of a kernel, of torch or anybody, may load it and wait for all kernels "
        "that run, one of which may wait for a message of this very rank: set "
        f"{LOADING_VARIABLE}=EAGER where messages and collectives are under way during first calls"
    )
    text = setting.lower() if setting else "lazy (the default)"
    return Finding("kernel loading", NOTE, text, advice)


def _check_connections(setting: str) -> Finding:
    count = int(setting) if setting.isdecimal() else DEFAULT_CONNECTIONS
    text = f"{count} ({'set' if setting else 'the default'})"
    if count < DEFAULT_CONNECTIONS:
        advice = (
            "streams that share a queue wait for each other, and communicators on several streams "
            f"can then block each other: leave {CONNECTIONS_VARIABLE} at 8, or raise it to 32"
        )
        return Finding("hardware queues", NOTE, text, advice)
    return Finding("hardware queues", OK, text)


_SHMEM_SETTING = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-self-test", action="store_true", help="look only; do not start two ranks"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the findings; returns 1 when collectives cannot work here."""
    findings = list(examine())
    if any(finding.verdict == FAIL for finding in findings):
        findings.append(Finding("self-test", FAIL, "not tried", "first fix the failures above"))
    elif not args.no_self_test:
        findings.append(check_self_test())
    failed = [finding.name for finding in findings if finding.verdict == FAIL]
    if args.json:
        print(json_text(findings))
        return 1 if failed else 0
    print("\n".join(lines(findings)))
    if failed:
        print(f"\ncollectives cannot work here: {', '.join(failed)}")
        return 1
    print("\ncollectives can work here")
    return 0


def examine() -> Iterable[Finding]:
    """Yields all checks except the self-test; some only if the native module loads."""
    yield from check_versions()
    native = check_native()
    yield native
    yield check_cores()
    yield check_threads()
    yield check_backend()
    yield check_graphs()
    yield check_memory(Path("/proc/meminfo").read_text(), memory_limit_bytes())
    yield from check_numa()
    if Path("/dev/shm").exists():
        yield check_shm("/dev/shm")
    yield check_descriptor_paths()
    if native.verdict != FAIL:
        yield check_single_copy()
        setting = _SHMEM_SETTING.read_text() if _SHMEM_SETTING.exists() else ""
        heap = check_heap(setting)
        yield heap
        if heap.verdict != FAIL:
            yield check_heap_nodes()
        yield from check_devices()


def json_text(findings: Sequence[Finding]) -> str:
    """Returns the findings as JSON."""
    works = all(finding.verdict != FAIL for finding in findings)
    told = {"schema": SCHEMA, "works": works, "findings": [asdict(each) for each in findings]}
    return json.dumps(told, indent=1)


def lines(findings: Sequence[Finding]) -> list[str]:
    """Returns the lines of the report, with aligned columns; advice is below its finding."""
    rows = []
    for finding in findings:
        rows.append((finding.verdict, finding.name, finding.value))
        if finding.advice:
            rows.append(("", "", f"-> {finding.advice}"))
    return table_lines(rows)


if __name__ == "__main__":
    end_with(os.getppid())
    _run_rank(sys.argv[1], int(sys.argv[2]))
