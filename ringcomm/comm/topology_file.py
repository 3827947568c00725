"""Topologies as JSON: what ``ringcomm topo --save`` writes and ``--file`` reads.

The file says what NVML said and nothing else; what NVML did not say is null or left out::

    {
      "format": "ringcomm topology 1",
      "machine": "DGX-1", "driver": "470.57.02", "absent": "", "notes": [],
      "gpus": [{"uuid": "GPU-...", "pci_bus_id": "0000:06:00.0", "name": "Tesla V100",
                "numa_node": 0, "cpus": "0-19", "pcie": [3, 16], "mig": false,
                "mig_instances": [], "switch": {"count": 0}}],
      "pairs": [{"first": "0000:06:00.0", "second": "0000:07:00.0", "level": "PIX",
                 "peer_access": true,
                 "nvlinks": {"count": 1, "version": "2.0", "link_gbps": 25.0}}]
    }

A "source" entry, for people, may say where a description comes from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from ringcomm.comm.topology import LEVELS, Gpu, NvLinks, Pair, Topology, plain_bus_id
from ringcomm.errors import ArgumentError
from ringcomm.memory.records import read_bounded

__all__ = ["from_json", "load", "save", "to_json"]

FORMAT = "ringcomm topology 1"
# Of 16 GPUs it has some 40000.
LARGEST_BYTES = 16 << 20

Object = Mapping[str, object]


def to_json(topology: Topology) -> str:
    """The description as JSON text; equal topologies give equal text."""
    values: dict[str, Any] = {"format": FORMAT, **asdict(topology)}
    public = {name: value for name, value in values.items() if not name.startswith("_")}
    return json.dumps(public, indent=1) + "\n"


def from_json(text: str, name: str = "topology") -> Topology:
    """The description that :func:`to_json` wrote.

    Args:
        text: the JSON text.
        name: the file's, for messages.

    Raises:
        ArgumentError: it is not one; the message says where and what was expected.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            f"{name}: expected a recorded topology (JSON), but it cannot be parsed: {error}. "
            "Record it again: ringcomm topo --save FILE"
        ) from error
    try:
        return _topology(_Reader(value, ""))
    except ArgumentError as error:
        raise ArgumentError(
            f"{name}: not a recorded topology: {error}. Record it again: ringcomm topo --save FILE"
        ) from error


def load(path: str | Path) -> Topology:
    """Reads a recorded description.

    Raises:
        ArgumentError: the file cannot be read, or is damaged.
    """
    try:
        raw = read_bounded(Path(path), LARGEST_BYTES)
        text = raw.decode("utf-8")
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path}: the recorded topology cannot be read: {error}") from error
    return from_json(text, str(path))


def save(topology: Topology, path: str | Path) -> None:
    """Records a description.

    Raises:
        ArgumentError: the file cannot be written.
    """
    try:
        Path(path).write_text(to_json(topology), encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path}: the topology cannot be recorded: {error}") from error


class _Reader:
    """One JSON object, read name by name; every complaint says where."""

    def __init__(self, value: object, where: str) -> None:
        self.where = where
        if not isinstance(value, dict):
            raise self.wrong("an object", value)
        self._left = dict(value)

    def wrong(self, expected: str, got: object, name: str = "") -> ArgumentError:
        at = f"{self.where}.{name}".strip(".")
        return ArgumentError(f"{at or 'the whole'}: expected {expected}, got {got!r:.80}")

    def text(self, name: str, default: str | None = None) -> str:
        return cast(str, self._checked(name, "a string", str, default))

    def optional_text(self, name: str) -> str | None:
        return None if self._missing(name) else self.text(name)

    def optional_flag(self, name: str) -> bool | None:
        return cast("bool | None", self._optional(name, "true, false or null", bool))

    def optional_count(self, name: str) -> int | None:
        value = cast("int | None", self._optional(name, "a number >= 0", int))
        if value is not None and (isinstance(value, bool) or value < 0):
            raise self.wrong("a number >= 0", value, name)
        return value

    def optional_rate(self, name: str) -> float | None:
        value = cast("float | None", self._optional(name, "a number > 0", (int, float)))
        if value is not None and not (not isinstance(value, bool) and 0 < value < math.inf):
            raise self.wrong("a number > 0", value, name)
        try:
            return None if value is None else float(value)
        except OverflowError:  # an integer of some hundred digits
            raise self.wrong("a number > 0", "one that is too large", name) from None

    def list(self, name: str) -> list[object]:
        return cast("list[object]", self._checked(name, "a list", list, []))

    def texts(self, name: str) -> tuple[str, ...]:
        values = self.list(name)
        for value in values:
            if not isinstance(value, str):
                raise self.wrong("strings", value, name)
        return tuple(cast("list[str]", values))

    def optional_counts(self, name: str) -> tuple[int, int] | None:
        values = None if self._missing(name) else self.list(name)
        if values is None:
            return None
        if len(values) != 2 or any(type(value) is not int for value in values):
            raise self.wrong("two numbers or null", values, name)
        return cast("tuple[int, int]", tuple(values))

    def part(self, name: str) -> _Reader:
        return _Reader(self._checked(name, "an object", dict, {}), f"{self.where}.{name}")

    def end(self) -> None:
        """Raises for what nobody asked for: a misspelt name must not read as "unknown"."""
        if self._left:
            name = next(iter(self._left))
            raise self.wrong("no such entry", self._left[name], name)

    def _missing(self, name: str) -> bool:
        if self._left.get(name) is None:
            self._left.pop(name, None)
            return True
        return False

    def _optional(self, name: str, expected: str, kind: Any) -> object:
        return None if self._missing(name) else self._checked(name, expected, kind)

    def _checked(self, name: str, expected: str, kind: Any, default: object = None) -> object:
        value = self._left.pop(name, default)
        if not isinstance(value, kind):
            raise self.wrong(expected, value, name)
        return value


def _topology(reader: _Reader) -> Topology:
    written = reader.text("format", "no format")
    if written != FORMAT:
        raise reader.wrong(f"{FORMAT!r}", written, "format")
    reader.optional_text("source")
    gpus = reader.list("gpus")
    pairs = reader.list("pairs")
    topology = Topology(
        machine=reader.text("machine", ""),
        gpus=tuple(_gpu(_Reader(gpu, f"gpus[{index}]")) for index, gpu in enumerate(gpus)),
        pairs=tuple(_pair(_Reader(pair, f"pairs[{index}]")) for index, pair in enumerate(pairs)),
        driver=reader.optional_text("driver"),
        absent=reader.text("absent", ""),
        notes=reader.texts("notes"),
    )
    reader.end()
    return topology


def _gpu(reader: _Reader) -> Gpu:
    gpu = Gpu(
        uuid=reader.text("uuid"),
        pci_bus_id=plain_bus_id(reader.text("pci_bus_id")),
        name=reader.text("name", ""),
        numa_node=reader.optional_count("numa_node"),
        cpus=reader.optional_text("cpus"),
        pcie=reader.optional_counts("pcie"),
        switch=_nvlinks(reader.part("switch")),
        mig=reader.optional_flag("mig"),
        mig_instances=reader.texts("mig_instances"),
    )
    reader.end()
    return gpu


def _pair(reader: _Reader) -> Pair:
    level = reader.optional_text("level")
    if level is not None and level not in LEVELS:
        raise reader.wrong(f"one of {', '.join(LEVELS)}", level, "level")
    pair = Pair(
        first=plain_bus_id(reader.text("first")),
        second=plain_bus_id(reader.text("second")),
        nvlinks=_nvlinks(reader.part("nvlinks")),
        level=level,
        peer_access=reader.optional_flag("peer_access"),
    )
    reader.end()
    return pair


def _nvlinks(reader: _Reader) -> NvLinks:
    links = NvLinks(
        count=reader.optional_count("count") or 0,
        version=reader.optional_text("version"),
        link_gbps=reader.optional_rate("link_gbps"),
    )
    reader.end()
    return links
