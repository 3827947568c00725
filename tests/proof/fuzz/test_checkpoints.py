# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with changed structure are either refused or loaded as a whole.

Manifests are changed as trees and pickles as programs, both with right checksums. Only a
CheckpointError or an UnsupportedError may be raised, and a refused load must not change anything.
"""

from __future__ import annotations

import io
import itertools
import json
import pickle
import pickletools
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ringcomm
from ringcomm import zero
from ringcomm.errors import CheckpointError, UnsupportedError
from ringcomm.optim import SGD, AdamW, AdamW8bit, LossScaler, Muon, Sharded
from ringcomm.zero.checkpoint import format as manifest
from tests.proof.fuzz.mutations import SCALE, mutated

DEEPSPEED = Path(__file__).resolve().parents[2] / "extras" / "migrate" / "deepspeed_checkpoints.zip"


class Extra(nn.Linear):
    """A layer whose extra state consists of JSON data and a tensor."""

    def get_extra_state(self) -> Any:
        return {"seen": [1, 2], "history": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        pass


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda params: AdamW(params, lr=1e-3, loss_scaler=LossScaler()),
    "amsgrad": lambda params: AdamW(params, lr=torch.tensor(1e-3), amsgrad=True),
    "sgd": lambda params: SGD(params, lr=1e-3, momentum=0.9),
    "eight bits": lambda params: AdamW8bit(params, lr=1e-3),
    "muon": lambda params: Muon(
        [{"params": [p], "algorithm": "muon" if p.dim() == 2 else "adamw"} for p in params]
    ),
    "nadam": lambda params: Sharded(torch.optim.NAdam, params, lr=1e-3),
}


def trained(comm: Any, stage: int, make: Callable[[Any], Any]) -> tuple[nn.Module, Any]:
    torch.manual_seed(7)
    module = nn.Sequential(Extra(8, 4), nn.BatchNorm1d(4))
    zero.shard(module, stage, comm=comm)
    optimizer = make(list(module.parameters()))
    loss = module(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


def state_of(module: nn.Module, optimizer: Any) -> list[Any]:
    """Returns everything that a load may change, as values that can be compared."""
    weights = str(zero.full_state_dict(module))
    told = optimizer.full_state_dict()
    groups = [
        {k: str(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups
    ]
    return [
        weights,
        str(told["state"]),
        groups,
        optimizer.steps_taken,
        torch.get_rng_state().tolist(),
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_manifests_of_training(tmp_path, name):
    chance = Random(name)
    with ringcomm.local_world(1) as world:
        module, optimizer = trained(world[0], chance.choice((1, 2, 3)), OPTIMIZERS[name])
        path = zero.save(tmp_path, 1, module, optimizer, data={"epoch": 1}) / manifest.MANIFEST_NAME
        sound = json.loads(path.read_text())
        head = {key: sound.pop(key) for key in ("format", "version", "crc32")}
        refused = 0
        for _ in range(15 * SCALE):
            changed = dict(sound)
            where = chance.choice(("data", "data", "ranks", "tensors"))
            changed[where] = mutated(sound[where], chance)
            crc32 = manifest._crc32(changed)
            path.write_text(json.dumps({**head, "crc32": crc32, **changed}))
            before = state_of(module, optimizer)
            try:
                zero.load(tmp_path, module, optimizer)
            except CheckpointError as error:
                refused += 1
                assert len(str(error)) < 50_000
                assert state_of(module, optimizer) == before, changed[where]
        assert refused > 4 * SCALE


def pieces_of(raw: bytes) -> list[bytes]:
    """The instructions of a pickle."""
    offsets = [*(at for _, _, at in pickletools.genops(raw)), len(raw)]
    return [raw[a:b] for a, b in itertools.pairwise(offsets)]


ODD = (
    *(
        b"N",
        b"(",
        b"]",
        b"}",
        b")",
        b"0",
        b"1",
        b"2",
        b"t",
        b"l",
        b"d",
        b"e",
        b"u",
        b"s",
        b"a",
        b"R",
    ),
    *(b"b", b"Q", b"\x81", b"\x85", b"\x86", b"\x87", b"\x88", b"\x89", b"\x8f", b"\x90", b"\x94"),
    *(
        b"K\x00",
        b"K\xff",
        b"J\xff\xff\xff\xff",
        b"\x8a\x08" + b"\xff" * 7 + b"\x7f",
        b"h\x00",
        b"h\x05",
    ),
    *(
        b"Gp\x7f\xf0\x00\x00\x00\x00\x00",
        b"X\x01\x00\x00\x00x",
        b"q\x00",
        b"q\xff",
        b"ctorch\nSize\n",
    ),
    *(
        b"ccollections\nOrderedDict\n)R",
        b"cbuiltins\nset\n",
        b"ctorch\nqint8\n",
        b"\x95" + b"\xff" * 8,
    ),
    *(b"I99999999999999999999\n", b"p7\n", b"g7\n", b"\x8b\xff\xff\xff\x7f", b"C\x02ab", b"."),
)


def changed_program(raw: bytes, chance: Random) -> bytes:
    """Returns a pickle with 1 to 4 instructions removed, doubled, swapped, replaced or added."""
    program = pieces_of(raw)
    for _ in range(chance.randint(1, 4)):
        at, other = chance.randrange(len(program)), chance.randrange(len(program))
        kind = chance.randrange(6)
        if kind == 0 and len(program) > 1:
            del program[at]
        elif kind == 1:
            program[at:at] = program[at : at + chance.randint(1, 8)]
        elif kind == 2:
            program[at], program[other] = program[other], program[at]
        elif kind == 3:
            program[at] = chance.choice(ODD)
        elif kind == 4:
            program.insert(at, chance.choice(ODD) * chance.choice((1, 1, 2, 1000)))
        elif program[at][:1] in b"KMJ":
            number = chance.choice((0, 1, 255, 2**31 - 1, -1, chance.randrange(1 << 16)))
            program[at] = b"J" + number.to_bytes(4, "little", signed=True)
    return b"".join(program)


def changed_archive(raw: bytes, chance: Random) -> bytes:
    """Returns an archive with another pickle or another directory."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as old, zipfile.ZipFile(out, "w") as new:
        for member in old.infolist():
            content = old.read(member)
            if member.filename.endswith("data.pkl") and chance.random() < 0.9:
                content = changed_program(content, chance)
            if chance.random() < 0.98:
                new.writestr(member.filename, content)
    packed = bytearray(out.getvalue())
    if chance.random() < 0.2:
        begin = (
            packed.rindex(b"PK\x05\x06") if chance.random() < 0.3 else packed.index(b"PK\x01\x02")
        )
        for _ in range(chance.randint(1, 3)):
            packed[chance.randrange(begin, len(packed))] = chance.choice((0, 1, 0x7F, 0xFF))
    return bytes(packed)


def folders(root: Path) -> Iterator[Path]:
    """Yields sound checkpoints of all kinds that ``convert()`` reads."""
    with zipfile.ZipFile(DEEPSPEED) as packed:
        packed.extractall(root)
    yield from (each / "global_step3" for each in sorted(root.iterdir()) if each.is_dir())
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": module.state_dict(),
        "optim": {
            "state": {n: optimizer.state[p] for n, p in module.named_parameters()},
            "param_groups": [
                {
                    "lr": 1e-3,
                    "betas": (0.9, 0.99),
                    "params": [n for n, _ in module.named_parameters()],
                }
            ],
        },
        "step": 5,
    }
    dcp.save(state, checkpoint_id=root / "dcp", no_dist=True)
    yield root / "dcp"


def change_one(folder: Path, chance: Random) -> dict[Path, bytes]:
    """Changes one file of a folder; returns the new contents of changed files by path."""
    path = chance.choice([path for path in folder.iterdir() if path.name != "latest"])
    raw = path.read_bytes()
    if path.name == ".metadata":
        return {path: changed_program(raw, chance)}
    if path.suffix == ".pt":
        return {path: changed_archive(raw, chance)}
    # Appends a changed archive for one chunk to the file, and updates the metadata.
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    info = chance.choice(list(metadata.storage_data.values()))
    part = changed_archive(raw[info.offset : info.offset + info.length], chance)
    info.offset, info.length = len(raw), len(part)
    return {path: raw + part, folder / ".metadata": pickle.dumps(metadata)}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_to_convert(tmp_path):
    chance, refused, count = Random(23), 0, 0
    for number, folder in enumerate(folders(tmp_path / "sound")):
        zero.convert(folder, tmp_path / f"control{number}")
        sound = {path: path.read_bytes() for path in folder.iterdir()}
        size_bytes = sum(map(len, sound.values()))
        for _ in range(10 * SCALE):
            for path, raw in change_one(folder, chance).items():
                path.write_bytes(raw)
            count += 1
            tracemalloc.start()
            try:
                made = zero.convert(folder, tmp_path / f"out{count}")
                assert sum(each.stat().st_size for each in made.iterdir()) < 16 * size_bytes
            except (CheckpointError, UnsupportedError) as error:
                refused += 1
                assert len(str(error)) < 5000
            finally:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
            assert peak < (4 << 20) + 300 * size_bytes
            for path, raw in sound.items():
                path.write_bytes(raw)
            shutil.rmtree(tmp_path / f"out{count}", ignore_errors=True)
    assert refused > count // 3
