# SPDX-License-Identifier: Apache-2.0
"""Random changes of JSON that respect its structure, as anybody may make to a store or file."""

from __future__ import annotations

import copy
import json
import os
from random import Random
from typing import Any

# Multiplies the number of cases; ``make fuzz`` sets it.
SCALE = int(os.environ.get("RINGCOMM_FUZZ", "1"))

DEEP = "[" * 5000
ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**53 + 1,
    2**63,
    2**64,
    -(2**63),
    10**400,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "0",
    "x" * 10_000,
    "\x00",
    "\ud800",
    "\u202e\U0001f4a3",
    "../../etc/passwd",
    "%s%n{0}",
    [],
    [[]],
    {},
    {"": {}},
    [0] * 1000,
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(value, dict):
        for key in value:
            found += _paths(value[key], (*path, key))
    if isinstance(value, list):
        for index, each in enumerate(value):
            found += _paths(each, (*path, index))
    return found


def mutated(value: Any, chance: Random) -> Any:
    """Returns a copy of the data with one to three values replaced, removed, copied or renamed."""
    result = copy.deepcopy(value)
    for _ in range(chance.randint(1, 3)):
        path = chance.choice(_paths(result))
        if not path:
            if chance.random() < 0.1:
                return copy.deepcopy(chance.choice(ODD))
            continue
        holder = result
        for key in path[:-1]:
            holder = holder[key]
        kind = chance.randrange(6)
        if kind == 0:
            del holder[path[-1]]
        elif kind == 1 and isinstance(holder, dict):
            holder[chance.choice(("", "x", "error", "version", path[-1] + "_"))] = holder.pop(
                path[-1]
            )
        elif kind == 2:
            holder[path[-1]] = copy.deepcopy(chance.choice([value, *ODD]))
        else:
            holder[path[-1]] = copy.deepcopy(chance.choice(ODD))
    return result


def text_of(value: Any, chance: Random) -> bytes:
    """Returns the JSON text of a mutated value; sometimes the text itself is damaged, too."""
    text = json.dumps(mutated(value, chance))
    kind = chance.randrange(12)
    if kind == 0:
        text = text[: chance.randrange(len(text) + 1)]
    elif kind == 1:
        text = text.replace(":", ":" + DEEP, 1)
    elif kind == 2 and text.startswith("{") and len(text) > 2:
        text = text[:-1] + "," + text[1:]  # every key twice
    elif kind == 3:
        text = text.replace("1", "1" * 5000, 1)
    raw = text.encode()
    if kind == 4:
        at = chance.randrange(len(raw) + 1)
        raw = raw[:at] + bytes([chance.randrange(256)]) + raw[at + 1 :]
    if kind == 5:
        raw = bytes(chance.randrange(256) for _ in range(chance.randrange(200)))
    return raw
