# SPDX-License-Identifier: Apache-2.0
"""Errors and traces describe the optimizer's calls by the dtypes reduced, without a root."""

import re

import pytest
import torch

import ringcomm
from ringcomm import MismatchError
from ringcomm.comm.recorder.records import OPTIMIZERS
from ringcomm.optim import AdamW

ELEMS = 600


def _optimizer(comm):
    param = torch.ones(ELEMS, dtype=torch.bfloat16).requires_grad_()
    param.grad = torch.ones_like(param)
    return AdamW([param], comm=comm)


def test_records_name_both_dtypes_and_no_root():
    def body(comm):
        optimizer = _optimizer(comm)
        optimizer.step()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        records = [
            each
            for each in comm.recording().ranks[1 - comm.rank].collectives
            if each.collective in OPTIMIZERS
        ]
        comm.barrier()
        return records

    with ringcomm.local_world(2, timeout=20.0) as world:
        first, _ = world.run(body)
    by_name = {each.collective: each for each in first}
    results = {
        "reduce_scatter_adamw_all_gather": "bfloat16",
        "reduce_scatter_norm": "float32",
        "adamw_all_gather": "bfloat16",
    }
    assert by_name.keys() == results.keys() == set(OPTIMIZERS)
    for name, record in by_name.items():
        assert record.root == -1
        gradients = "float32" if name == "adamw_all_gather" else "bfloat16"
        form = rf"{name}\({gradients} to {results[name]}, [A-Z]+, \d+ elements, one_shot\)"
        assert re.fullmatch(form, str(record)), str(record)


def test_a_mismatch_describes_them_as_the_records_do():
    def body(comm):
        optimizer = _optimizer(comm)
        optimizer.step()
        sharded = optimizer.sharded_step()
        bucket, words = sharded.buckets[0], torch.zeros(24, dtype=torch.int64)
        # Calls the plan directly: the optimizer itself would find a difference before.
        with pytest.raises(MismatchError) as raised:
            if comm.rank:
                sharded.plan.reduce_norm(bucket, "l2", words)
            else:
                sharded.plan.reduce_update(bucket)
        return str(raised.value)

    calls = ("reduce_scatter_norm(bfloat16 to float32", "adamw_all_gather(bfloat16 to bfloat16")
    with ringcomm.local_world(2, timeout=20.0) as world:
        for text in world.run(body):
            for call in calls:
                assert re.search(
                    re.escape(call) + r", [A-Z]+, \d+ elements, one_shot, call \d+", text
                )
            assert "root " not in text
