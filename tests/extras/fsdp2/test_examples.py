"""The examples in docs/ run under torchrun, learn, and print what a reference prints."""

import contextlib
import gc
import io
import os
import re
import runpy
import sys
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ringcomm
from tests.support import ROOT, fork_server
from tests.support.ranks import run_ranks

EXAMPLES = ROOT / "docs" / "examples"
# Nothing may be downloaded.
OFFLINE = {"HF_HUB_OFFLINE": "1"}


def needs(package):
    return pytest.mark.skipif(
        find_spec(package) is None, reason=f"{package} is not installed: pip install {package}"
    )


def under_torchrun(name: str) -> list[str]:
    """The lines that two ranks print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = fork_server.run(
        [*command, str(EXAMPLES / name)],
        env={**os.environ, **OFFLINE, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def losses(lines: list[str]) -> list[float]:
    found = [re.fullmatch(r"(?:step|epoch) +\d+ loss (\d+\.\d+)", line) for line in lines]
    assert all(found), lines
    return [float(match[1]) for match in found if match]


def on_gloo(store, rank, world_size, path):
    """The output of the example with torch's own backend, and FSDP2 as torch has it."""

    def begin(backend, before=dist.init_process_group):
        # No port that another test might take first.
        before(backend, store=store, rank=rank, world_size=world_size)

    def end(before=dist.destroy_process_group):
        assert not [each for each in gc.get_objects() if type(each) is DistributedDataParallel]
        before()

    os.environ |= {
        **OFFLINE,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    torch.set_num_threads(1)
    printed = io.StringIO()
    with (
        mock.patch("ringcomm.fsdp2.plug"),
        mock.patch("ringcomm.fsdp2.unplug"),
        mock.patch.object(dist, "init_process_group", begin),
        mock.patch.object(dist, "destroy_process_group", end),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(path)["main"]("gloo")
    return printed.getvalue().splitlines()


def by_one_process(store, rank, world_size, path):
    """The output of one process that averages the gradients of the two ranks' batches itself."""
    torch.set_num_threads(1)
    example = runpy.run_path(path)
    model = example["make_model"]()
    optimizer = ringcomm.optim.AdamW(model.parameters(), lr=example["LEARNING_RATE"])
    lines = []
    for step in range(example["STEPS"]):
        means, gradients = [], []
        for rank in range(2):
            tokens = example["make_batch"](step, rank, 2)
            loss = model(input_ids=tokens, labels=tokens).loss
            means.append(loss.detach())
            gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        for parameter, one, other in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = (one + other) / 2
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        lines.append(f"step {step:2d} loss {(sum(means) / 2).item():.6f}")
    return lines


@needs("transformers")
def test_transformers():
    lines = under_torchrun("transformers_adamw.py")
    found = losses(lines)
    assert len(found) == 30 and found[-1] < found[0] / 8
    path = str(EXAMPLES / "transformers_adamw.py")
    assert run_ranks(by_one_process, 1, path, timeout_s=120)[0] == lines


@pytest.mark.parametrize(
    ("name", "count", "share"),
    [
        pytest.param("accelerate_ddp.py", 10, 1 / 4, marks=needs("accelerate")),
        ("fsdp2_plug.py", 30, 1 / 4),
    ],
)
def test_as_on_gloo(name, count, share):
    lines = under_torchrun(name)
    found = losses(lines)
    assert len(found) == count and found[-1] < share * found[0]
    printed = run_ranks(on_gloo, 2, str(EXAMPLES / name), timeout_s=120)
    assert printed == [lines, []]
