# SPDX-License-Identifier: Apache-2.0
"""Junk from a store, a file or a peer raises an error of ringcomm, and no other exception."""

from __future__ import annotations

import json
import os
import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy
import pytest
import torch
from torch.distributed import HashStore

from ringcomm import Communicator, CorruptedError, RingcommError, _native
from ringcomm.cli.report import find, page
from ringcomm.comm import objects as object_codec
from ringcomm.comm.agreement import difference_in_words, read_description
from ringcomm.comm.device import topology as model
from ringcomm.errors import ArgumentError, CheckpointError, MismatchError, RendezvousError
from ringcomm.json_reader import read_record
from ringcomm.memory.device_heap import DeviceHandle
from ringcomm.memory.host_heap import process_heap
from ringcomm.rendezvous.handles import HeapHandle, machine_identity
from ringcomm.zero.checkpoint import Checkpoints, Reader
from ringcomm.zero.checkpoint.format import Manifest
from tests.proof.fuzz.mutations import SCALE, mutated, text_of
from tests.zero.checkpoint.states import FILES, MANIFEST, load_all, save_step

pytestmark = pytest.mark.compiles

HOST, BOOT, PID_NAMESPACE = machine_identity()
TOPOLOGIES = Path(__file__).resolve().parents[2] / "comm" / "topology" / "topologies"


def handle(core: _native.Comm) -> dict[str, Any]:
    heap = process_heap()
    return {
        "version": 1,
        "rank": 1,
        "world_size": 2,
        "host": HOST,
        "boot": BOOT,
        "pid_namespace": PID_NAMESPACE,
        "node_id": "",
        "pid": 1,
        "fd": heap.fd,
        "capacity_bytes": heap.capacity_bytes,
        "token": heap.token,
        "region_offset_bytes": core.region_offset_bytes,
        "region_bytes": core.region_bytes,
        "proof": core.proof,
        "layout": f"segment_bytes={core.segment_bytes}, slots={core.slots}",
        "cpus": "3",
        "cores": 2,
        "torch_threads": 2,
        "threads": 0,
        "numa_nodes": "",
    }


def refuses_only_with(
    kinds: tuple[type[Exception], ...], read: Callable[[], object], longest: int = 50_000
) -> bool:
    """Tells whether ``read`` refused the input; an exception not of ``kinds`` fails the test."""
    try:
        read()
    except kinds as error:
        assert isinstance(error, RingcommError), error
        assert len(str(error)) < longest
        return True
    return False


def test_this_finds_other_exceptions():
    with pytest.raises(KeyError):
        refuses_only_with((RendezvousError,), lambda: os.environ["NOT_A_VARIABLE"])


@pytest.fixture(scope="module")
def core():
    made = _native.Comm(process_heap(), rank=1, world=2)
    yield made
    made.close()


def test_handles_of_heaps(core):
    chance, sound = Random(11), handle(core)
    assert HeapHandle.from_json(json.dumps(sound).encode(), 1, "op").rank == 1
    refused = sum(
        refuses_only_with(
            (RendezvousError,),
            lambda: HeapHandle.from_json(text_of(sound, chance), 1, "op"),
        )
        for _ in range(800 * SCALE)
    )
    assert refused > 400


def test_handles_of_devices(core):
    chance = Random(12)
    sound = handle(core) | {"kind": "cuda", "device": 0, "uuid": "GPU-1", "pci_bus_id": "0"}
    sound |= {"device_name": "x", "ipc_handle": "00ff", "service": "", "ipc_refusal": ""}
    sound |= {"committed_bytes": sound["capacity_bytes"]}
    recorder = ("fd", "capacity_bytes", "token", "offset_bytes")
    sound |= {f"recorder_{each}": 64 for each in recorder}
    assert DeviceHandle.from_json(json.dumps(sound).encode(), 1, "op").ipc_handle == "00ff"
    for _ in range(500 * SCALE):
        text = text_of(sound, chance)
        refuses_only_with((RendezvousError,), partial(DeviceHandle.from_json, text, 1, "op"))


def test_a_rendezvous(core):
    """Tests a whole rendezvous: the rank that reads junk raises an error at once."""
    chance, sound = Random(13), handle(core)
    for _ in range(60 * SCALE):
        store = HashStore()
        text = text_of(sound, chance)
        if b"\x00" in text:
            continue  # HashStore holds C++ strings; only a TCPStore can hold any byte
        store.set("ringcomm/world/attempt0/1/heap/1", text.decode("latin-1"))
        ready = text_of({"version": 1, "saw": ["0" * 16, "1" * 16]}, chance).decode("latin-1")
        store.set("ringcomm/world/attempt0/1/ready/1", ready)
        with pytest.raises(RingcommError) as raised:
            Communicator.from_store(store, 0, 2, timeout=20)
        assert "on rank 0 of 2" in str(raised.value) and "did not come" not in str(raised.value)


def test_records():
    for text in (b"[" * 100_000, b'{"a":' * 100_000, b"1" * 100_000, b" " * (5 << 20), b"\xff"):
        with pytest.raises(RendezvousError, match="not a version 1 record"):
            read_record(text, 1, "op")
    for said in (["x"] * 10_000, {"a": 1}, "x" * 100_000, None, 10**3000):
        with pytest.raises(RendezvousError, match="rank 1 failed") as raised:
            read_record(json.dumps({"version": 1, "error": said}).encode(), 1, "op")
        assert len(str(raised.value)) < 10_000


def test_topologies():
    chance = Random(14)
    sound = [json.loads(path.read_text()) for path in sorted(TOPOLOGIES.glob("*.json"))]
    assert sound
    for _ in range(250 * SCALE):
        text = text_of(chance.choice(sound), chance).decode("utf-8", "replace")
        refuses_only_with((ArgumentError,), partial(model.from_json, text, "file"))


def test_a_rate_too_large_for_a_float():
    sound = json.loads((TOPOLOGIES / "dgx_1v.json").read_text())
    sound["pairs"][0]["nvlinks"]["link_gbps"] = 10**400
    with pytest.raises(ArgumentError, match=r"link_gbps: expected a number"):
        model.from_json(json.dumps(sound), "file")


BENCHMARK = {
    "schema": 1,
    "provenance": {"cpu": "a", "commit": "b"},
    "rows": [
        {"collective": name, "size_bytes": size, "ranks": 2, "dtype": "float32", "system": "gloo"}
        | {"placement": "out", "time_us": 1.5, "best_us": 1.0, "p95_us": 2.0, "busbw_gbps": speed}
        | {"ratio": 1.0, "ratio_low": 0.5, "ratio_high": 2.0, "wrong": 0, "held_bytes": 5}
        for name, speed in (("all_reduce", 1.0), ("training_step", None))
        for size in (64, 128)
    ],
}
OF_RUNS: tuple[dict[str, Any], ...] = (
    BENCHMARK,
    {"passed": True, "runs": {"a": BENCHMARK}},
    {
        "options": {"stage": 2},
        "ranks": 2,
        "outcome": {"first_step": 0, "losses": [2.0, 1.0], "steps_s": [0.5, 0.25]}
        | {"held_out_before": 2.0, "held_out_after": 1.0, "tokens_per_s": 3.0}
        | {"memory": [{"before_bytes": 1, "steps_bytes": [2, 3]}]},
    },
    {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "rank 0"}},
            {"ph": "X", "name": "a", "cat": "wait", "pid": 0, "tid": 1, "ts": 1.0, "dur": 2.0},
        ]
    },
)


def test_files_of_reports(tmp_path):
    """A file that is accepted becomes a page: no number or text in it makes page() fail."""
    chance, path = Random(19), tmp_path / "run.json"

    def made() -> None:
        page("run", find([path])[0], []).encode()

    refused = 0
    for sound in OF_RUNS:
        path.write_text(json.dumps(sound))
        made()
        for _ in range(30 * SCALE):
            path.write_bytes(text_of(sound, chance))
            refused += refuses_only_with((ArgumentError,), made)
    assert 50 * SCALE < refused < len(OF_RUNS) * 30 * SCALE


OBJECT = {
    "a": [1, 2.5, None, True, "x", 2**70, 1 + 2j],
    "b": (b"raw", {1, 2}),
    "t": torch.arange(6).view(2, 3),
    "p": torch.nn.Parameter(torch.ones(2)),
    "o": OrderedDict(mask=torch.ones(3, dtype=torch.bool)),
    "d": defaultdict(list, {1: [torch.bfloat16, torch.device("cuda", 1), torch.Size([2, 3])]}),
    "n": [Counter("aab"), numpy.arange(4), numpy.float32(1)],
}


def _junk_object(chance: Random) -> bytes:
    raw = bytes(object_codec.pack(OBJECT, "op"))
    size = int.from_bytes(raw[4:12], "little")
    blob = raw[12 + size :]
    kind = chance.randrange(4)
    if kind == 0:
        at = chance.randrange(len(raw))
        return raw[:at] + bytes([chance.randrange(256)]) + raw[at + 1 :]
    if kind == 1:
        return raw[: chance.randrange(len(raw))]
    text = text_of(json.loads(raw[12 : 12 + size]), chance)
    return object_codec.MAGIC + len(text).to_bytes(8, "little") + text + blob


def test_objects():
    chance = Random(15)
    for _ in range(800 * SCALE):
        raw = memoryview(bytearray(_junk_object(chance)))
        refuses_only_with((CorruptedError,), partial(object_codec.unpack, raw, "op", 1), 700)


DESCRIBED = {
    "layout": {
        "params": [
            {
                "name": "w",
                "shape": [2, 3],
                "dtype": "float32",
                "trainable": True,
                "tied_to": None,
                "stride": None,
                "group": 0,
            }
        ],
        "buckets": [{"elems": 8}],
    },
    "options": {"amsgrad": False},
    "groups": [{"lr": 0.1}],
}


def test_descriptions_of_optimizers():
    chance = Random(16)
    for _ in range(600 * SCALE):
        text = text_of(DESCRIBED, chance)

        def compare(text=text):
            theirs = read_description(text, 1, "op")
            difference_in_words(DESCRIBED, theirs, ("rank 0", "rank 1"), "op")

        refuses_only_with((CorruptedError, MismatchError), compare)


def _with_checksum(text: Any) -> str:
    if not isinstance(text, dict):
        return json.dumps(text)
    body = {key: text[key] for key in text if key not in ("format", "version", "crc32")}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({**text, "crc32": f"{zlib.crc32(canonical.encode()):08x}"})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_step(Checkpoints(tmp_path_factory.mktemp("fuzz") / "root"), 1)


def test_manifests(checkpoint):
    """The checksum is right, so only the manifest's contents can be refused."""
    chance = Random(17)
    path = checkpoint / MANIFEST
    sound = json.loads(path.read_text())
    Manifest.from_text(path.read_text(), "x")
    try:
        for _ in range(150 * SCALE):
            path.write_text(_with_checksum(mutated(sound, chance)))
            refuses_only_with((CheckpointError,), lambda: load_all(checkpoint, verify=False))
    finally:
        path.write_text(json.dumps(sound))
    Reader(checkpoint).verify()


def test_headers_of_tensor_files(checkpoint):
    chance = Random(18)
    path, manifest = checkpoint / FILES[0], checkpoint / MANIFEST
    whole, told = path.read_bytes(), manifest.read_text()
    size = int.from_bytes(whole[:8], "little")
    sound = json.loads(whole[8 : 8 + size])
    try:
        for _ in range(150 * SCALE):
            text = text_of(sound, chance)
            raw = len(text).to_bytes(8, "little") + text + whole[8 + size :]
            path.write_bytes(raw)
            entry = {"bytes": len(raw), "crc32": f"{zlib.crc32(raw):08x}"}
            changed = json.loads(told)
            changed["files"][FILES[0]] = entry
            manifest.write_text(_with_checksum(changed))
            refuses_only_with((CheckpointError,), lambda: load_all(checkpoint, verify=True))
    finally:
        path.write_bytes(whole)
        manifest.write_text(told)
    Reader(checkpoint).verify()


def test_asdict_is_what_is_posted(core):
    fields = set(handle(core)) - {"version"}
    assert (
        set(asdict(HeapHandle(**{k: v for k, v in handle(core).items() if k in fields}))) == fields
    )
