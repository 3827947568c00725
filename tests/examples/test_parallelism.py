# SPDX-License-Identifier: Apache-2.0
"""The examples in docs/ run, learn, and print the losses of a reference."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import runpy
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn import functional as F

import ringcomm
from tests.support import ROOT
from tests.support.covering import EVERY_CASE, in_test_all

Tensor = torch.Tensor
EXAMPLES = ROOT / "docs" / "examples"
# Sums are added in another order, so losses differ by a relative error of about 2^-23, and printed
# losses by 1e-6. A parameter whose gradient is only rounding error may move in another direction,
# since Adam's step does not depend on the gradient's size; but the loss hardly depends on it.
CLOSE = 2e-5
# ``make test`` runs the first 8 steps of an example. Some losses fall only later.
FIRST_STEPS = 1000 if EVERY_CASE else 8


def losses(name: str) -> list[float]:
    """Returns the losses that an example prints on this rank, run in the present group."""
    printed = io.StringIO()
    _clear_sharding_prop_cache()  # the cache knows equal meshes, whose groups are gone
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.dict(os.environ, {"HF_HUB_OFFLINE": "1"}),
        contextlib.redirect_stdout(printed),
        contextlib.ExitStack() as stack,
    ):
        if dist.get_backend() == "gloo":  # then FSDP2 runs without ringcomm
            stack.enter_context(mock.patch("ringcomm.extras.fsdp2.plug"))
            stack.enter_context(mock.patch("ringcomm.extras.fsdp2.unplug"))
        main = runpy.run_path(str(EXAMPLES / name))["main"]
        main.__globals__["range"] = lambda count: range(min(count, FIRST_STEPS))
        main()
    lines = printed.getvalue().splitlines()
    found = [re.fullmatch(r"step +\d+ loss (\d+\.\d+)", line) for line in lines]
    assert all(found), lines
    return [float(match[1]) for match in found if match]


def check(example: str, share: float, rank: int, world_size: int) -> list[float]:
    """Runs an example on a rank; the rank that prints compares its losses with one process."""
    found = losses(example)
    printing = world_size - 1 if example == "gpt_3d.py" else 0
    assert bool(found) == (rank == printing)
    if found:
        assert not EVERY_CASE or found[-1] < share * found[0], found
        if example in REFERENCES:
            names = runpy.run_path(str(EXAMPLES / example))
            expected = REFERENCES[example](names)
            assert len(found) == len(expected)
            assert all(abs(a - b) < CLOSE for a, b in zip(found, expected, strict=True)), expected
    return found


def trained(names: dict[str, Any], model: nn.Module, loss_of: Any, clips: bool) -> list[float]:
    """Returns the losses of one process with torch only; ``loss_of`` gives a step's loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=names["LEARNING_RATE"], foreach=False)
    found = []
    for step in range(min(names["STEPS"], FIRST_STEPS)):
        loss = loss_of(names["make_batch"](step))
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def gpt_of_one_process(names: dict[str, Any]) -> list[float]:
    model = nn.Sequential(*names["make_stages"]())

    def loss_of(tokens: Tensor) -> Tensor:
        loss: Tensor = names["loss_of"](model(tokens[:, :-1]), tokens[:, 1:])
        return loss

    return trained(names, model, loss_of, clips=True)


def llama_of_one_process(names: dict[str, Any]) -> list[float]:
    model = names["make_model"]()
    return trained(names, model, lambda x: model(input_ids=x, labels=x).loss, clips=True)


def whole_context(names: dict[str, Any]) -> list[float]:
    model = names["make_model"]()
    at = torch.arange(names["LENGTH"])
    attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)

    def loss_of(tokens: Tensor) -> Tensor:
        loss: Tensor = names["loss_of"](model(tokens, at, attend), tokens)
        return loss

    return trained(names, model, loss_of, clips=False)


def moe_of_one_process(names: dict[str, Any]) -> list[float]:
    """Trains all experts on one rank with all tokens; returns only the losses of the text."""
    with ringcomm.local_world(1) as alone:
        model = names["make_model"](alone[0])
        printed: list[float] = []

        def loss_of(tokens: Tensor) -> Tensor:
            loss, auxiliary = names["losses_of"](model, tokens)
            printed.append(loss.item())
            total: Tensor = loss + auxiliary
            return total

        trained(names, model, loss_of, clips=True)
    return printed


REFERENCES = {
    "gpt_3d.py": gpt_of_one_process,
    "llama_tp.py": llama_of_one_process,
    "moe_gpt.py": moe_of_one_process,
    "long_context.py": whole_context,
}


@pytest.mark.parametrize(
    ("example", "ranks", "share"),
    [
        ("gpt_3d.py", 4, 1 / 4),
        ("moe_gpt.py", 4, 3 / 4),
        *in_test_all(
            ("gpt_3d.py", 8, 1 / 4),
            ("long_context.py", 4, 1 / 4),
            pytest.param(
                "llama_tp.py",
                4,
                1 / 2,
                marks=pytest.mark.skipif(
                    find_spec("transformers") is None, reason="transformers is not installed"
                ),
            ),
        ),
    ],
)
def test_as_one_process(rank_pools: Any, example: str, ranks: int, share: float) -> None:
    rank_pools(ranks).run(functools.partial(check, example, share))


@pytest.mark.parametrize(("example", "ranks"), [("fsdp2_tp.py", 4), ("fsdp2_plug.py", 2)])
def test_as_on_gloo(rank_pools: Any, example: str, ranks: int) -> None:
    rank_pools(ranks).compare(functools.partial(check, example, 1 / 4))
