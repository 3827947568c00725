# SPDX-License-Identifier: Apache-2.0
"""Lets the ranks of a test exchange the handles of their device heaps."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

from torch.distributed import Store

from ringcomm.json_reader import FORMAT_VERSION
from ringcomm.memory.device_heap import DeviceHandle, DeviceHeap, make_handle

MIB = 1 << 20
REGION = (MIB, 4096)


def handle_of(heap: DeviceHeap, rank: int = 0, world: int = 1) -> DeviceHandle:
    return make_handle(heap, rank, world, REGION, "layout")


def text_of(handle: DeviceHandle, **changes: object) -> str:
    return json.dumps({"version": FORMAT_VERSION, **asdict(handle), **changes})


def read_handles(store: Store, world: int) -> list[DeviceHandle]:
    texts = [store.get(f"handle/{each}") for each in range(world)]
    return [DeviceHandle.from_json(text, each, "op") for each, text in enumerate(texts)]


def exchange_handles(store: Store, rank: int, world: int, heap: DeviceHeap) -> list[DeviceHandle]:
    store.set(f"handle/{rank}", text_of(handle_of(heap, rank, world)))
    return read_handles(store, world)


def await_all(store: Store, name: str, world: int) -> None:
    store.add(name, 1)
    while store.add(name, 0) < world:
        time.sleep(0.001)
