# SPDX-License-Identifier: Apache-2.0
"""``ringcomm train``, as a user runs it: started by itself and by launchers; refused options.

``test_train_stages.py`` tests training at each stage, with MPICH's variables;
``test_train_resume.py`` uses Slurm's variables.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import ringcomm
from ringcomm.cli import main, train
from ringcomm.examples import train_gpt
from ringcomm.examples.train_gpt import GPT, ModelConfig
from ringcomm.rendezvous.launchers import LAUNCHERS, launched_world
from tests.cli.processes import is_running, run, start, train_arguments, wait_until
from tests.cli.train_runs import without_measurements

STEPS = 6
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "poem.txt"
    path.write_text("".join(f"{n} bottles of beer on the wall\n" for n in range(2000)))
    return path


def under_torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run(*TORCHRUN, *arguments)


def outcome_of(folder, text, launch=run):
    """Returns losses and other results of a short run, from its JSON record."""
    record = folder / "record.json"
    options = ["--data", text, "--steps", STEPS, "--json", record]
    if launch is run:
        options += ["--ranks", 2]
    done = launch(*train_arguments(*options))
    assert done.returncode == 0, done.stderr
    assert "ranks   2, " in done.stdout
    assert "stage 2, dtype fp32" in done.stdout
    assert "in 1 file(s) of" in done.stdout
    outcome = without_measurements(json.loads(record.read_text()))
    assert f"step {STEPS - 1:>6}   loss {outcome['losses'][-1]:.4f}" in done.stdout
    return outcome


@pytest.fixture(scope="module")
def alone(tmp_path_factory, text):
    return outcome_of(tmp_path_factory.mktemp("alone"), text)


def test_losses_under_torchrun_are_those_of_own_ranks(tmp_path, text, alone):
    assert outcome_of(tmp_path, text, under_torchrun) == alone


@pytest.mark.parametrize(("heartbeat_s", "printed"), [(math.inf, 10), (0.0, 20)])
def test_a_slow_run_also_prints_steps_between_its_ten(
    text, monkeypatch, capsys, heartbeat_s, printed
):
    """With a heartbeat of 0 s every step is slow."""
    monkeypatch.setattr(train_gpt, "HEARTBEAT_S", heartbeat_s)
    sizes: dict[str, Any] = {"width": 16, "depth": 1, "heads": 1, "context": 16, "batch": 2}
    options = train_gpt.Options(data=str(text), steps=20, **sizes)
    with ringcomm.local_world(1) as world:
        world.run(lambda comm: train_gpt.train(options, comm))
    assert capsys.readouterr().out.count("\nstep ") == printed


@pytest.fixture
def copied(tmp_path):
    """Returns a copy of the example, as docs/train.md describes it."""
    return shutil.copy(train_gpt.__file__, tmp_path / "copied.py")


def test_a_copy_of_the_example_trains_as_the_command_does(tmp_path, text, alone, copied):
    def launch(*words):
        return under_torchrun(copied, *words[3:])

    assert outcome_of(tmp_path, text, launch) == alone


def test_the_example_refuses_options_in_a_line(copied):
    done = run(copied, "--batch", 3, "--accum", 2)
    assert (done.returncode, done.stdout) == (1, "")
    told = "train_gpt: --batch: 3 sequences do not divide among 1 ranks x 2 micro-batches; choose"
    assert done.stderr.splitlines()[-1].startswith(told) and "Traceback" not in done.stderr
    done = run("-m", "ringcomm.examples.train_gpt", "--bogus")
    assert done.returncode == 2 and "unrecognized arguments: --bogus" in done.stderr


def test_a_launcher_has_set_both_a_rank_and_a_world(monkeypatch):
    for _, rank, size, _ in LAUNCHERS:
        monkeypatch.delenv(rank, raising=False)
        monkeypatch.delenv(size, raising=False)
    assert launched_world() is None
    monkeypatch.setenv("SLURM_NTASKS", "3")
    assert launched_world() is None
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert launched_world() == "SLURM_NTASKS=3"


def children_of(pid: int) -> list[int]:
    """Returns a process's children in the order in which they were started."""
    return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_killed_rank_ends_the_run(text):
    with start(*train_arguments("--data", text, "--steps", 1_000_000)) as process:
        assert process.stdout is not None
        # The line is printed when training begins.
        assert any(line.startswith("options") for line in process.stdout)
        # The fork server is the first child.
        _, *ranks = children_of(process.pid)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1 was killed by SIGKILL; all ranks were ended" in errors
    wait_until(lambda: not any(map(is_running, ranks)), "the ranks' end")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--data", "/no/such/place"), "--data /no/such/place: no such file or folder"),
        (("--data", "{small}"), "holds 5 bytes of text"),
        (
            ("--width", 30, "--heads", 4),
            "must be a multiple of 2 x --heads, which is 8, got 30",
        ),
        (("--batch", 3), "3 sequences do not divide among 2 ranks x 1 micro-batches; choose a mul"),
        (("--accum", 4), "do not divide among 2 ranks x 4 micro-batches; choose a multiple of 8"),
        (("--accum", 0), "--accum must be at least 1"),
        (("--ranks", 0), "--ranks must be at least 1"),
        (("--steps", 0), "--steps must be at least 1"),
        (("--stage", 4), "--stage must be in 0 .. 3, got 4"),
        (("--learning-rate", "nan"), "--learning-rate must be above 0"),
        (("--seed", -1), "--seed must be in 0"),
        (("--clip", 0), "--clip must be a norm above 0"),
        (("--json", "/no/such/place/x.json"), "--json /no/such/place/x.json: its folder does not"),
        (("--profile", "/no/such/place/x"), "--profile /no/such/place/x: its folder does not"),
        (("--profile", "{small}"), "small: expected a folder, or nothing yet, got a file"),
        (("--save", "{small}"), "small: expected a folder, or nothing yet, got a file"),
        (("--resume",), "--resume: expected --save FOLDER beside it"),
        (("--save", "{small}.runs", "--save-every", -5), "--save-every must be at least 1"),
        (
            ("--offload-state", "/no/such/place"),
            "--offload-state /no/such/place: expected a folder on a",
        ),
        (
            ("--offload-params", "."),
            "--offload-params: expected --stage 3, got 2, which keeps all in memory",
        ),
        (("--loss-scale", 8), "--loss-scale: fp32 gradients need no scale"),
        (("--dtype", "fp16", "--loss-scale", 0), "--loss-scale: expected a scale from 1 to "),
        (("--heads", 0), "--heads must be at least 1, got 0"),
        (
            ("--profile", "/proc/x"),
            "--profile /proc/x: cannot be written: no file can be made",
        ),
        (("--save", "/proc/x"), "--save /proc/x: cannot be written: no file can be made in"),
        (
            ("--save", "{small}.runs", "--resume"),
            "small.runs holds no complete checkpoint; drop --resume, or use --resume auto",
        ),
    ],
)
def test_wrong_option_is_refused_before_any_rank_starts(
    tmp_path, monkeypatch, capsys, options, message
):
    small = tmp_path / "small"
    small.write_text("short")
    monkeypatch.setattr(train, "launch_ranks", lambda plan: pytest.fail("ranks were started"))
    words = train_arguments(*(str(option).format(small=small) for option in options))
    assert main([str(word) for word in words[2:]]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("usage: ringcomm train [options]\n")
    assert message in errors.splitlines()[2]
    assert errors.count("\n") == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which the run would take")
def test_gpus_that_are_not_there_are_refused(text):
    done = run(*train_arguments("--data", text, "--device", "cuda", "--ranks", 1))
    assert done.returncode == 1
    assert "ringcomm: rank 0: CUDA device: " in done.stderr


@pytest.mark.parametrize(
    ("rank", "size"), [("RANK", "WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")], ids=["torchrun", "MPICH"]
)
def test_ranks_option_contradicting_the_launcher_is_refused(rank, size):
    done = run(
        "-c",
        f"import os, sys; os.environ.update({rank}='0', {size}='2');"
        "from ringcomm.cli import main; sys.exit(main(['train', '--ranks', '3']))",
    )
    assert done.returncode == 2
    assert f"--ranks 3: {size}=2 is set" in done.stderr


# So large that its state shows beside Python's own memory, which varies by up to 12 MB per step.
# Memory held before the model may shrink a little.
LARGER = ("--width", 256, "--depth", 8)
LARGER_ELEMS = sum(each.numel() for each in GPT(ModelConfig(256, 8, 2, 32)).parameters())
GIVEN_BACK_BYTES = 2_000_000


def test_record_memory_and_profile_of_a_run(tmp_path, text):
    """Each rank holds the model state and buffers of its stage, with a tolerance of a quarter."""
    record, profile = tmp_path / "record.json", tmp_path / "profile"
    options = ("--data", text, "--steps", 4, "--stage", 3, "--accum", 2, "--memory")
    done = run(*train_arguments(*LARGER, *options, "--json", record, "--profile", profile))
    assert done.returncode == 0, done.stderr
    told = json.loads(record.read_text())
    assert (told["options"]["stage"], told["options"]["accum"], told["ranks"]) == (3, 2, 2)
    assert told["software"]["torch"] == torch.__version__
    outcome = told["outcome"]
    assert outcome["tokens_per_s"] > 0
    assert len(outcome["steps_s"]) == 4 and min(outcome["steps_s"]) > 0
    # Two buckets are in flight, each with a layer's gradients.
    expected = 8 * LARGER_ELEMS + 2 * 4 * 12 * 256 * 256
    for rank, held in enumerate(outcome["memory"]):
        assert len(held["steps_bytes"]) == 4
        added = max(held["steps_bytes"]) - held["before_bytes"]
        assert expected - GIVEN_BACK_BYTES <= added <= 1.25 * expected
        assert f"rank {rank}: " in done.stdout and f"{added / 1e6:,.1f} by training" in done.stdout
        events = json.loads((profile / f"rank{rank}.json").read_text())["traceEvents"]
        names = [event["name"] for event in events]
        assert {event["pid"] for event in events} == {rank}
        assert (names.count("forward"), names.count("backward"), names.count("step")) == (8, 8, 4)
        assert "unshard" in names
    assert {path.name for path in profile.iterdir()} == {"rank0.json", "rank1.json"}
