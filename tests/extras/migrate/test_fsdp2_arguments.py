# SPDX-License-Identifier: Apache-2.0
"""The arguments of FSDP2's fully_shard, and the docs' page about migration."""

from __future__ import annotations

import inspect
import re
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from ringcomm import zero
from ringcomm.errors import ArgumentError, UnsupportedError
from ringcomm.extras.migrate.settings import DEEPSPEED_KEYS, FSDP2_KEYS
from ringcomm.optim import AdamW
from tests.comm.conftest import worlds
from tests.support import ROOT
from tests.zero.models import assert_same_bits, new_model, text

__all__ = ["worlds"]
PAGE = (ROOT / "docs" / "migrating.md").read_text()


def test_arguments_are_mapped():
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        output_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    setup = zero.from_fsdp2(
        reshard_after_forward=False, mp_policy=policy, offload_policy=OffloadPolicy()
    )
    precision = zero.Precision(
        torch.bfloat16, output=torch.float32, cast_inputs=False, master="fp32"
    )
    assert setup.stage == 3 and setup.comm is None
    assert setup.options == zero.ZeroOptions(
        precision=precision, reshard_after_forward=False, params="world"
    )
    assert setup.notes["reshard_after_forward"].startswith(
        "mapped: `ZeroOptions(reshard_after_forward="
    )
    assert setup.notes["offload_policy"].startswith("unsupported, and OffloadPolicy()")
    assert len(setup.notes) == 6


def test_without_arguments_it_is_stage_3_in_the_models_dtypes():
    setup = zero.from_fsdp2()
    assert setup.options == zero.ZeroOptions(params="world")
    assert not setup.notes


def test_training_is_that_of_options_written_by_hand(worlds):
    base = new_model("gpt")

    def work(comm, options):
        module: Any = zero.shard(deepcopy(base), 3, comm=comm, options=options)
        optimizer = AdamW(module.parameters())
        for turn in range(2):
            module(*text(comm, turn)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return zero.full_state_dict(module)

    setup = zero.from_fsdp2(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    options = zero.ZeroOptions(precision=zero.Precision(torch.bfloat16))
    # The model's angles are FP32 buffers; both conversions leave them in FP32.
    base.bfloat16()
    wanted = worlds(2).run(work, options)
    for found, state in zip(worlds(2).run(work, setup.options), wanted, strict=True):
        assert_same_bits(found, state)


def test_what_is_not_there_is_named_at_once():
    param = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(UnsupportedError, match="5 of the keys") as raised:
        zero.from_fsdp2(
            reshard_after_forward=4,
            shard_placement_fn=lambda param: None,
            offload_policy=CPUOffloadPolicy(),
            ignored_params={param},
            dp_mesh_dims=object(),
        )
    for name in ("reshard_after_forward", "shard_placement_fn", "offload_policy"):
        assert f"\n  {name}: {FSDP2_KEYS[name].text}" in str(raised.value)


def test_nested_calls_become_units(worlds):
    """A call without a policy stays FP32 next to a call with a policy, as in FSDP2."""
    setup = zero.from_fsdp2().with_nested(
        {
            "0": {"reshard_after_forward": False},
            "1": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        }
    )
    assert setup.options.precision == zero.Precision(torch.float32, master="fp32")
    assert setup.options.per_unit == {
        "0": zero.UnitOptions(param=torch.float32, reshard_after_forward=False),
        "1": zero.UnitOptions(param=torch.bfloat16, reshard_after_forward=True),
    }

    def work(comm):
        module: Any = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
        zero.shard(module, setup.stage, comm=comm, options=setup.options)
        optimizer = AdamW(module.parameters())
        out = module(torch.ones(2, 4))
        out.sum().backward()
        optimizer.step()
        kinds = [tensor.dtype for tensor in zero.full_state_dict(module).values()]
        return out.dtype, kinds[::2]

    kinds = [torch.float32, torch.bfloat16, torch.float32]
    assert worlds(2).run(work) == [(torch.float32, kinds)] * 2


def test_nested_calls_that_ask_for_more():
    policy = MixedPrecisionPolicy(output_dtype=torch.float16, cast_forward_inputs=False)
    with pytest.raises(UnsupportedError, match="3 of the keys"):
        zero.from_fsdp2().with_nested({"0": {"mp_policy": policy, "reshard_after_forward": 2}})
    with pytest.raises(ArgumentError, match=r"nested: '0': expected reshard.*got 'mesh'"):
        zero.from_fsdp2().with_nested({"0": {"mesh": None}})


@pytest.mark.parametrize(
    "arguments",
    [
        {"mesh": "cpu"},
        {"mp_policy": torch.bfloat16},
        {"offload_policy": True},
        {"reshard_after_forward": "yes"},
    ],
)
def test_arguments_of_other_types_are_refused(arguments):
    (name,) = arguments
    with pytest.raises(ArgumentError, match=f"from_fsdp2: {name}: expected "):
        zero.from_fsdp2(**arguments)


def test_every_argument_of_torch_has_a_row():
    """Torch 2.11 has fewer arguments. A later torch may have more, which need a row then."""
    theirs = set(inspect.signature(fully_shard).parameters)
    policy = set(inspect.signature(MixedPrecisionPolicy).parameters)
    known = {name.partition(".")[0] for name in FSDP2_KEYS}
    assert theirs <= known
    assert policy == {name.partition(".")[2] for name in FSDP2_KEYS if "." in name}


# ---- the page -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "keys"),
    [("DeepSpeed", DEEPSPEED_KEYS), ("FSDP2", FSDP2_KEYS)],
)
def test_the_page_has_a_row_for_each_key(section, keys):
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(
        r"^\| (`[^|]*` \| (?:mapped|no effect here|unsupported) \| .*) \|$", text, re.M
    )
    assert rows == [f"`{key.name}` | {key.fate} | {key.text}" for key in keys.values()]


def test_what_the_page_shows_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "migrating.md", "exec"), {})
