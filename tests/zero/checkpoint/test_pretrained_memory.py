# SPDX-License-Identifier: Apache-2.0
"""The peak memory of loading, as the kernel counts it, matches the formula in the docs."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from ringcomm import Communicator, zero
from ringcomm.memory.host_heap import give_back_freed
from ringcomm.zero.checkpoint.format import SLICE_BYTES
from tests.support.covering import covering
from tests.support.ranks import run_ranks

WIDTH, LAYERS, WORLD = 1024, 16, 2
ELEMS = WIDTH * WIDTH * LAYERS


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))


def resident_bytes(kind: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(kind)


def peak_of_loading(store, rank, world_size, path, precision, way):
    """Returns how far the resident memory rises while the module is loaded or saved."""
    torch.set_num_threads(1)
    with Communicator.from_store(store, rank, world_size) as comm:
        # Load a small module first, so that one-time costs are not counted.
        small = zero.shard(nn.Linear(8, 8), 3, comm=comm)
        save_file({"weight": torch.ones(8, 8), "bias": torch.ones(8)}, f"{path}.{rank}")
        zero.load_pretrained(small, f"{path}.{rank}")
        with torch.device("meta"):
            module = Deep()
        options = zero.ZeroOptions(precision=precision)
        if way != "pretrained":
            zero.shard(module, 3, comm=comm, options=options)
        comm.barrier()
        # Otherwise loading would reuse freed memory, and would seem to need less than it does.
        gc.collect()
        give_back_freed()
        before, of_files = resident_bytes("VmRSS"), resident_bytes("RssFile")
        # Resets the kernel's count of the peak (see proc_pid_clear_refs(5)).
        Path("/proc/self/clear_refs").write_text("5")
        if way == "load_pretrained":
            zero.load_pretrained(module, path)
        elif way == "save_pretrained":
            zero.save_pretrained(module, path.parent / "out")
        else:
            zero.shard(module, 3, comm=comm, options=options, init=zero.pretrained(path))
        comm.barrier()
        # Subtract code pages: code that runs for the first time is mapped from its file.
        return resident_bytes("VmHWM") - before - (resident_bytes("RssFile") - of_files)


BYTES_EACH = {"fp32": 4, "bf16-mixed": 2 + 4}  # of a parameter and its master, in bytes per element


@covering(strength=1, way=["pretrained", "load_pretrained", "save_pretrained"], kind=[*BYTES_EACH])
def test_a_rank_holds_its_shard_and_a_slice(tmp_path, way, kind):
    path = tmp_path / "model.safetensors"
    layer = torch.randn(WIDTH, WIDTH)
    save_file({f"layers.{n}.weight": layer + n for n in range(LAYERS)}, path)
    precision = zero.Precision.preset(kind)
    shard_bytes = BYTES_EACH[kind] * ELEMS // WORLD
    for peak in run_ranks(peak_of_loading, WORLD, path, precision, way):
        if way == "pretrained":
            assert shard_bytes <= peak <= 1.05 * (shard_bytes + SLICE_BYTES)
        else:
            # The shards were allocated before the measurement.
            assert peak <= SLICE_BYTES + 0.05 * shard_bytes
