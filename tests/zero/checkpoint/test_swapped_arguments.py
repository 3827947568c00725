# SPDX-License-Identifier: Apache-2.0
"""Swapped arguments: the error shows how the function is called, and no file is written."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ringcomm
from ringcomm import ArgumentError, optim, zero
from ringcomm.extras import moe

# Typed Any, because a type checker would refuse the wrong calls as well.
NET: Any = nn.Linear(2, 2)
OTHER: Any = optim.AdamWOptions()  # neither a module, a path nor a number
STEP: Any = 1
CALLS: dict[str, list[Callable[[Any], object]]] = {
    "save(root, step, module, optimizer)": [
        lambda path: zero.save(NET, path, STEP),
        lambda path: zero.save(NET, STEP, path),
        lambda path: zero.save(path, NET, STEP),
        lambda path: zero.save(path, True, NET),
        lambda path: zero.save(path, STEP, OTHER, NET),
        lambda path: zero.save(STEP, path, NET),
    ],
    "load(root, module, optimizer)": [
        lambda path: zero.load(NET, path),
        lambda path: zero.load(path, OTHER, NET),
        lambda path: zero.load(path, path),
    ],
    "full_state_dict(module)": [lambda path: zero.full_state_dict(path)],
    "export_safetensors(folder, path), where folder is a checkpoint's; "
    "save_pretrained(module, path) writes the weights of a module": [
        lambda path: zero.export_safetensors(NET, path),
        lambda path: zero.export_safetensors(path, NET),
    ],
    "save_pretrained(module, path)": [
        lambda path: zero.save_pretrained(path, NET),
        lambda path: zero.save_pretrained(path, path),
    ],
    "load_pretrained(module, source)": [lambda path: zero.load_pretrained(path, NET)],
    "pretrained(source)": [lambda path: zero.pretrained(NET)],
    "TrainState(module, optimizer)": [lambda path: zero.TrainState(path)],
    "moe.save(root, step, module, optimizer)": [
        lambda path: moe.save(NET, path, STEP),
        lambda path: moe.save(path, NET, STEP),
        lambda path: moe.save(path, STEP, path),
    ],
    "moe.load(root, module, optimizer)": [
        lambda path: moe.load(NET, path),
        lambda path: moe.load(path, path),
    ],
}


@pytest.mark.parametrize("call", CALLS)
def test_arguments_in_another_order_are_recognised(call, tmp_path):
    for swapped in CALLS[call]:
        with pytest.raises(ArgumentError, match=re.escape(f"Call {call}") + "$"):
            swapped(str(tmp_path / "folder"))
    assert list(tmp_path.iterdir()) == []


def test_a_sharded_module_is_recognised_where_a_folder_belongs(tmp_path):
    with ringcomm.local_world(1) as world:
        net = zero.shard(nn.Linear(2, 2), stage=2, comm=world[0])
        with pytest.raises(ArgumentError, match=r"got a Linear.* save_pretrained\(module, path\)"):
            zero.export_safetensors(net, tmp_path / "out")  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match=r"path: expected a path, got a Tensor"):
            zero.save_pretrained(net, torch.ones(1))  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match=r"source: expected a path, got a Tensor"):
            zero.load_pretrained(net, torch.ones(1))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
