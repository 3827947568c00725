# SPDX-License-Identifier: Apache-2.0
"""Every reader's memory and work are proportional to the input's bytes, whatever its shape.

Each reader gets its most expensive shapes of input, at two sizes. tracemalloc measures the peak of
memory. Work is the number of Python lines that run, so the test reads no clock. docs/security.md
has the figures.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ringcomm.cli import main
from ringcomm.cli.report import find, page
from ringcomm.cli.trace import over_nodes, report
from ringcomm.comm import objects as object_codec
from ringcomm.comm.agreement import read_description
from ringcomm.comm.device import topology as model
from ringcomm.comm.recorder import reader
from ringcomm.comm.recorder.records import RankRecording, Record, Recording
from ringcomm.errors import ArgumentError, RingcommError
from ringcomm.extras.migrate.settings import from_deepspeed
from ringcomm.extras.migrate.torch_file import read_pickle
from ringcomm.json_reader import decode, read_json
from ringcomm.rendezvous.handles import HeapHandle
from ringcomm.zero.checkpoint.format import Manifest, Piece, SavedFile, SavedTensor, check_fill
from ringcomm.zero.checkpoint.pretrained import WeightFiles
from tests.proof.fuzz.mutations import SCALE

# Most bytes of memory per byte of the input, by reader, and a constant for all readers.
MOST_PER_BYTE = {
    "JSON": 100,
    "handles at a rendezvous": 100,
    "descriptions of optimizers": 100,
    "objects": 150,
    "manifests": 150,
    "safetensors": 150,
    "pickles": 300,
    "traces": 150,
    "topologies": 150,
    "files of reports": 300,
    "DeepSpeed's configurations": 150,
}
CONSTANT = 2 << 20
# Readers that other readers call do not turn the last two into a RingcommError.
REFUSALS = (RingcommError, ValueError, RecursionError)
SIZES = (100, 400) if SCALE == 1 else (400, 1600)
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "security.md"


class Case(NamedTuple):
    """One shape of input for a reader."""

    reader: str
    name: str
    made: Callable[[int], bytes]
    read: Callable[[bytes, Path], Any]


def text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


JSON: dict[str, Callable[[int], Any]] = {
    "empty lists": lambda n: [[]] * n,
    "empty objects": lambda n: [{}] * n,
    "names": lambda n: {str(at): 1 for at in range(n)},
    "numbers": lambda n: list(range(n)),
    "one text": lambda n: "x" * (8 * n),
    "texts": lambda n: [f"{at}" for at in range(n)],
    "nested": lambda n: nested(min(n, 900)),
    "an integer": lambda n: 10 ** min(n, 4000),
}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def shapes(reader: str, wrap: Callable[[Any], Any], read: Callable[..., Any]) -> list[Case]:
    """Returns all shapes of JSON at one place of a reader's input."""
    return [
        Case(reader, name, lambda n, made=made: text(wrap(made(n))), read)  # type: ignore[misc]
        for name, made in JSON.items()
    ]


# ---- objects ------------------------------------------------------------------------------------


def packed(content: Any, blob: bytes = b"") -> bytes:
    body = text(content)
    return object_codec.MAGIC + len(body).to_bytes(8, "little") + body + blob


OBJECTS: dict[str, Callable[[int], bytes]] = {
    "one place": lambda n: packed(["l", *[["a", 0, 128 * n]] * n], bytes(128 * n)),
    "places": lambda n: packed(["l", *(["a", 4 * at, 4] for at in range(n))], bytes(4 * n)),
    "empty tensors": lambda n: packed(["l", *[["T", "torch.uint8", [0], 0, 0]] * n]),
    "empty arrays": lambda n: packed(["l", *[["A", "uint8", [0], 0, 0]] * n]),
    "tensors": lambda n: packed(
        ["l", *(["T", "torch.uint8", [1], at, 1] for at in range(n))], bytes(n)
    ),
    "sizes": lambda n: packed(["l", *[["S", 1, 1]] * n]),
    "dicts": lambda n: packed(["l", *[["D", "int"]] * n]),
    "a hexadecimal number": lambda n: packed(["i", "f" * (8 * n)]),
}


# ---- checkpoints --------------------------------------------------------------------------------


def manifest(n: int, **given: Any) -> bytes:
    body: dict[str, Any] = {"tensors": {}, "files": {}, "ranks": [{"data": None, "tensors": {}}]}
    body |= {"data": None, "values": {}, **given}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    head = {"format": "ringcomm checkpoint", "version": 1}
    return text({**head, "crc32": f"{zlib.crc32(canonical.encode()):08x}", **body})


def tensor(pieces: list[Any], size: list[int]) -> dict[str, Any]:
    return {"dtype": "float32", "size": size, "shape": size, "pieces": pieces}


def piece(offsets: list[int], sizes: list[int]) -> dict[str, Any]:
    return {"offsets": offsets, "sizes": sizes, "file": "rank-00000.safetensors", "key": "k"}


FILE = {"files": {"rank-00000.safetensors": {"bytes": 1 << 50, "crc32": "0"}}}
MANIFESTS: dict[str, Callable[[int], bytes]] = {
    "pieces in a row": lambda n: manifest(
        n, **FILE, tensors={"w": tensor([piece([at], [1]) for at in range(n)], [n])}
    ),
    # Along each dimension, pieces of one kind are all open at once.
    "rows and columns": lambda n: manifest(
        n,
        **FILE,
        tensors={
            "w": tensor(
                [piece([at, 0], [1, n]) for at in range(n)]
                + [piece([0, n + at], [n, 1]) for at in range(n)],
                [n, 2 * n],
            )
        },
    ),
    "pieces that overlap": lambda n: manifest(
        n, **FILE, tensors={"w": tensor([piece([0, 0], [1, n])] * n, [n, n])}
    ),
    "many dimensions": lambda n: manifest(n, tensors={"w": tensor([], [1 << 61] * n)}),
    "tensors": lambda n: manifest(n, tensors={f"{at}": tensor([], [0]) for at in range(n)}),
    "ranks": lambda n: manifest(n, ranks=[{"data": None, "tensors": {}}] * n),
    "files": lambda n: manifest(
        n, files={f"rank-{at:05}.safetensors": {"bytes": 1, "crc32": "0"} for at in range(n)}
    ),
    "tuples": lambda n: manifest(n, data=[{"$tuple": []}] * n),
    "dicts": lambda n: manifest(n, data=[{"$dict": [[1, 1]]}] * n),
}


def read_manifest(raw: bytes, folder: Path) -> None:
    Manifest.from_text(raw.decode(), "manifest")


def weights(header: Any, data_bytes: int = 0) -> bytes:
    body = text(header)
    return len(body).to_bytes(8, "little") + body + bytes(data_bytes)


def stored(shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "U8", "shape": shape, "data_offsets": [begin, end]}


WEIGHTS: dict[str, Callable[[int], bytes]] = {
    "tensors": lambda n: weights({f"{at}": stored([1], at, at + 1) for at in range(n)}, n),
    "empty tensors": lambda n: weights({f"{at}": stored([0], 0, 0) for at in range(n)}),
    "tensors at one place": lambda n: weights({f"{at}": stored([n], 0, n) for at in range(n)}, n),
    "many dimensions": lambda n: weights({"w": stored([1 << 61] * n, 0, 0)}),
}


def read_weights(raw: bytes, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(raw)
    WeightFiles(path).close()


def read_index(raw: bytes, folder: Path) -> None:
    (folder / "model.safetensors").unlink(missing_ok=True)
    (folder / "model.safetensors.index.json").write_bytes(raw)
    WeightFiles(folder).close()


# ---- traces and reports -------------------------------------------------------------------------


def record(number: int, rank: int, track: str = "collectives") -> Record:
    return Record(
        *(
            track,
            number,
            "all_reduce",
            "float32",
            "sum",
            -1,
            "two_shot",
            "native",
            4,
            4,
            "done",
            "",
        ),
        *(-1, number, number + 1, f"{rank}.py:{number}"),
    )


def trace(ranks: list[RankRecording], world: int, of_node: Any = None) -> bytes:
    recording = Recording("world", world, 1, 10, tuple(ranks))
    return reader.text_of(reader.Trace(recording, 0, 1.0, "", of_node)).encode()


def bare(rank: int, waits: int = -1) -> RankRecording:
    return RankRecording(rank, 1, waits, (), ())


def node_of(n: int) -> reader.OfNode:
    return reader.OfNode(1, 0, (tuple(range(n)), *((at,) for at in range(n, 2 * n))))


TRACES: dict[str, Callable[[int], bytes]] = {
    "ranks without calls": lambda n: trace([bare(at) for at in range(n)], n),
    "ranks that are missing": lambda n: trace([bare(at) for at in range(n)], 2 * n),
    "calls of one rank": lambda n: trace(
        [replace(bare(0), collectives=tuple(record(at + 1, 0) for at in range(n)))], 2
    ),
    "a call of each rank": lambda n: trace(
        [replace(bare(at), collectives=(record(at + 1, at),)) for at in range(n)], n
    ),
    "equal calls at other lines": lambda n: trace(
        [
            replace(bare(at), collectives=tuple(record(each, at) for each in (1, 2, 3)))
            for at in range(n)
        ],
        n,
    ),
    "a chain of ranks that wait": lambda n: trace(
        [bare(at, at + 1) for at in range(n)], 2 * n, node_of(n)
    ),
    "a circle of ranks that wait": lambda n: trace(
        [bare(at, (at + 1) % n) for at in range(n)], 2 * n, node_of(n)
    ),
}


def read_trace(raw: bytes, folder: Path) -> None:
    path = folder / "trace.json"
    path.write_bytes(raw)
    found = reader.read(path)
    report(found.recording, 0, level=found.level)
    if found.of_node is not None:
        over_nodes([found])


def events(n: int, **given: Callable[[int], Any]) -> bytes:
    span = {"ph": "X", "name": "a", "cat": "wait", "pid": 0, "tid": 0, "ts": 1.0, "dur": 2.0}
    return text(
        {"traceEvents": [{**span, **{k: f(at) for k, f in given.items()}} for at in range(n)]}
    )


def whole(at: int) -> int:
    return at


ROW = {"collective": "a", "ranks": 1, "dtype": "x", "system": "y", "placement": "z", "time_us": 1.0}
REPORTS: dict[str, Callable[[int], bytes]] = {
    "threads of one process": lambda n: events(n, tid=whole),
    "processes": lambda n: events(n, pid=whole),
    "names": lambda n: events(n, name=str),
    "spans at one time": lambda n: events(n),
    "ranks without calls": TRACES["ranks without calls"],
    "a circle of ranks that wait": TRACES["a circle of ranks that wait"],
    "rows of benchmarks": lambda n: text(
        {"schema": 1, "provenance": {}, "rows": [ROW | {"size_bytes": at + 1} for at in range(n)]}
    ),
    "losses": lambda n: text(
        {
            "options": {},
            "ranks": 1,
            "outcome": {"first_step": 0, "losses": [1.0] * n, "tokens_per_s": 1.0, "memory": []}
            | {"held_out_before": 1.0, "held_out_after": 1.0},
        }
    ),
}


def read_report(raw: bytes, folder: Path) -> None:
    path = folder / "run.json"
    path.write_bytes(raw)
    page("run", find([path])[0], []).encode()


# ---- others -------------------------------------------------------------------------------------


def gpu(at: int) -> dict[str, Any]:
    return {"uuid": f"GPU-{at}", "pci_bus_id": f"0000:{at // 32:02x}:{at % 32:02x}.0"}


def topology(**given: Any) -> bytes:
    return text({"format": model.FORMAT, **given})


TOPOLOGIES: dict[str, Callable[[int], bytes]] = {
    "GPUs": lambda n: topology(gpus=[gpu(at) for at in range(n)]),
    "pairs": lambda n: topology(pairs=[{"first": f"{at}", "second": "x"} for at in range(n)]),
    "notes": lambda n: topology(notes=["x"] * n),
}


def read_topology(raw: bytes, folder: Path) -> None:
    (folder / "topology.json").write_bytes(raw)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(["topo", "--file", str(folder / "topology.json")])


def read_config(raw: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(raw)
    from_deepspeed(folder / "config.json")


PICKLES = (b"]", b"}", b")\x85", b"]\x94", b"c a\nb\n".replace(b" ", b""), b"K\x01", b"(", b"N(t0")
CASES: list[Case] = [
    *shapes("JSON", lambda value: value, lambda raw, _: decode(read_json(raw))),
    *shapes(
        "handles at a rendezvous",
        lambda value: {"version": 1, "rank": value},
        lambda raw, _: HeapHandle.from_json(raw, 1, "op"),
    ),
    *shapes(
        "descriptions of optimizers",
        lambda value: value,
        lambda raw, _: read_description(raw, 1, "op"),
    ),
    *(
        Case("objects", name, made, lambda raw, _: object_codec.unpack(memoryview(raw), "op", 1))
        for name, made in OBJECTS.items()
    ),
    *(Case("manifests", name, made, read_manifest) for name, made in MANIFESTS.items()),
    *(Case("safetensors", name, made, read_weights) for name, made in WEIGHTS.items()),
    Case(
        "safetensors",
        "an index of names",
        lambda n: text({"weight_map": {f"{at}": "a.safetensors" for at in range(n)}}),
        read_index,
    ),
    *(
        Case(
            "pickles",
            repr(body),
            lambda n, body=body: b"\x80\x04" + body * n + b".",  # type: ignore[misc]
            lambda raw, _: read_pickle(raw, "pickle"),
        )
        for body in PICKLES
    ),
    # A third of the items, since each item has many bytes and takes many lines to read.
    *(
        Case(reader, name, lambda n, made=made: made(n // 3), read)  # type: ignore[misc]
        for reader, read, some in (
            ("traces", read_trace, TRACES),
            ("files of reports", read_report, REPORTS),
        )
        for name, made in some.items()
    ),
    *(Case("topologies", name, made, read_topology) for name, made in TOPOLOGIES.items()),
    *(
        Case("DeepSpeed's configurations", name, made, read_config)
        for name, made in {
            "unknown keys": lambda n: text({f"zero_{at}": 1 for at in range(n)}),
            "an unknown key": lambda n: text({"zero" * n: 1}),
            "unknown keys of a section": lambda n: text(
                {"zero_optimization": {f"stage_{at}": 1 for at in range(n)}}
            ),
        }.items()
    ),
]


@contextlib.contextmanager
def lines_counted() -> Iterator[list[int]]:
    """Inside, counts the lines of Python that run."""
    counted = [0]

    def local(frame: Any, event: str, arg: Any) -> Any:
        counted[0] += event == "line"
        return local

    before = sys.gettrace()
    sys.settrace(local)
    try:
        yield counted
    finally:
        sys.settrace(before)


def cost(case: Case, size: int, folder: Path) -> tuple[int, int, int]:
    """Returns the bytes of an input, the memory and the number of lines that reading it takes."""
    raw = case.made(size)
    with contextlib.suppress(*REFUSALS):  # imports, and fills caches
        case.read(raw, folder)
    tracemalloc.start()
    try:
        with contextlib.suppress(*REFUSALS):
            case.read(raw, folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    with lines_counted() as lines, contextlib.suppress(*REFUSALS):
        case.read(raw, folder)
    return len(raw), peak, lines[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.reader}: {case.name}")
def test_inputs_cost_in_proportion_to_their_bytes(case, tmp_path):
    (small, _, few), (large, peak, many) = (cost(case, size, tmp_path) for size in SIZES)
    assert peak < CONSTANT + MOST_PER_BYTE[case.reader] * large
    # A factor of 2 beyond proportional work allows logarithms, but no squares.
    assert many < 5000 + 2 * few * max(1.0, large / small)


def test_this_finds_squares(tmp_path):
    def squares(raw: bytes, folder: Path) -> None:
        found = [a for a in raw for b in raw if a != b]
        assert not found

    case = Case("JSON", "squares", lambda n: b"x" * (n // 2), squares)
    with pytest.raises(AssertionError):
        test_inputs_cost_in_proportion_to_their_bytes(case, tmp_path)


def test_the_document_has_the_figures():
    told = DOCUMENT.read_text()
    for name, most in MOST_PER_BYTE.items():
        assert f"| {name} | {most} |" in told, name


def test_an_honest_topology_has_no_more_gpus_than_a_machine():
    with pytest.raises(ArgumentError, match="at most 256 GPUs"):
        model.from_json(topology(gpus=[gpu(at) for at in range(257)]).decode())


def test_saved_pieces_of_any_order_are_checked_alike():
    pieces = [Piece((at,), (1,), "f", "k") for at in (2, 0, 1)]
    check_fill((3,), pieces)
    SavedTensor("float32", (3,), (3,), tuple(pieces)).check({"f": SavedFile(12, "0")})
