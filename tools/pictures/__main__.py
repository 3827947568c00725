"""Writes docs/pictures: `python -m tools.pictures`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tools.pictures import measured, memory, network, overview, sharding, wires
from tools.pictures.svg import Sheet

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
PICTURES: dict[str, Callable[[], Sheet]] = {
    "overview": overview.overview,
    "heap": memory.heap,
    "all-reduce": memory.all_reduce,
    "stages": sharding.stages,
    "one-pass": sharding.one_pass,
    "rails": network.rails,
    "scaling": network.scaling,
    "networks": network.networks,
    "wires": wires.wires,
    "bandwidth": measured.bandwidth,
    "bandwidth-h100": measured.bandwidth_gpu,
    "training": measured.training,
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())
