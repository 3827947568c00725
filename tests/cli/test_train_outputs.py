"""The files that ``ringcomm train`` writes: record, profile, memory and picture."""

from __future__ import annotations

import json

import pytest
import torch

from ringcomm.examples.gpt.config import ModelConfig
from ringcomm.examples.gpt.model import GPT
from tests.cli.processes import run, train_arguments

STEPS = 4
# Large enough for its state to show beside what Python itself takes from step to step, which has
# been seen to be 12 MB; and of what it has before the model it may give back a little.
SIZE = ("--width", 256, "--depth", 8)
PARAMETERS = GPT(ModelConfig(256, 8, 2, 32)).parameter_elems
GIVEN_BACK_BYTES = 2_000_000
RANKS = 2


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "poem.txt"
    path.write_text("".join(f"{n} bottles of beer on the wall\n" for n in range(2000)))
    return path


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS)


@pytest.fixture
def without_matplotlib(tmp_path):
    """A program that is the command, and in whose folder Python finds that matplotlib is missing.

    Its ranks are forks: other places to find modules in would make each an interpreter of its own.
    """
    folder = tmp_path / "no_matplotlib"
    (folder / "matplotlib").mkdir(parents=True)
    missing = "raise ModuleNotFoundError(\"No module named 'matplotlib'\")\n"
    (folder / "matplotlib" / "__init__.py").write_text(missing)
    program = folder / "train.py"
    program.write_text("import sys\nfrom ringcomm.cli import main\nsys.exit(main(sys.argv[1:]))\n")
    return (*TORCHRUN, program)


def trained(folder, text, *options, program=("-m", "ringcomm")):
    """The record of a short run, and what it printed."""
    record = folder / "record.json"
    common = ("--data", text, "--steps", STEPS, "--memory", "--json", record)
    done = run(*program, *train_arguments(*SIZE, *common, *options)[2:])
    assert done.returncode == 0, done.stderr
    return json.loads(record.read_text()), done


def assert_memory_is(record, done, expected_bytes):
    """Each rank holds that much for the training, within a quarter."""
    for rank, held in enumerate(record["outcome"]["memory"]):
        steps = held["steps_bytes"]
        assert len(steps) == STEPS
        added = max(steps) - held["before_bytes"]
        assert expected_bytes - GIVEN_BACK_BYTES <= added <= 1.25 * expected_bytes
        assert f"rank {rank}         " in done.stdout
        assert f"{added / 1e6:,.1f}\n" in done.stdout


def test_all_outputs_of_a_split_model(tmp_path, text):
    pytest.importorskip("matplotlib")
    picture, profile = tmp_path / "x.png", tmp_path / "profile.json"
    record, done = trained(
        tmp_path, text, "--stage", 3, "--plot", picture, "--profile", profile, "--accum", 2
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"picture       {picture}\n" in done.stdout
    assert "loss (nats per byte)" not in done.stdout
    assert record["engine"]["stage"] == 3
    assert record["config"]["accum"] == 2
    assert record["ranks"] == RANKS
    assert record["software"]["torch"] == torch.__version__
    assert record["outcome"]["tokens_per_s"] > 0
    assert len(record["outcome"]["steps_s"]) == STEPS and min(record["outcome"]["steps_s"]) > 0
    buffers = 2 * 4 * 12 * 256 * 256  # two buckets in flight, each of a layer's gradients
    assert_memory_is(record, done, 16 * PARAMETERS / RANKS + buffers)
    assert "closed form   51.4 MB of model state, 6.3 MB of buffers for gradients" in done.stdout
    events = json.loads(profile.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(RANKS))
    calls = {
        name: sum(event["name"] == name for event in events) for name in ("forward", "backward")
    }
    assert calls == {"forward": RANKS * STEPS * 2, "backward": RANKS * STEPS * 2}
    assert sum(event["name"] == "step" for event in events) == RANKS * STEPS
    assert {"gather", "reduce_scatter"} <= {event["name"] for event in events}
    assert "of rank 0's communication was hidden behind computation" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"record.json", "profile.json", "x.png"}


def test_without_matplotlib_the_picture_is_text_and_training_goes_well(
    tmp_path, text, without_matplotlib
):
    picture = tmp_path / "x.png"
    record, done = trained(
        tmp_path, text, "--stage", 0, "--plot", picture, program=without_matplotlib
    )
    assert f"--plot {picture}: expected matplotlib, got No module named 'matplotlib'" in done.stderr
    assert not picture.exists()
    assert "\nloss (nats per byte)\n" in done.stdout
    assert "*" in done.stdout
    assert_memory_is(record, done, 16 * PARAMETERS)
    assert "Traceback" not in done.stderr
