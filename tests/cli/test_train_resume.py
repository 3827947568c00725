# SPDX-License-Identifier: Apache-2.0
"""``ringcomm train --save --resume``: a resumed run equals the uninterrupted run."""

from __future__ import annotations

import json
import shutil

import pytest

from ringcomm.zero.checkpoint import Checkpoints
from tests.cli.processes import run, train_arguments
from tests.cli.train_runs import train_all, without_measurements

STEPS = 8
# FP16 with overflows before the checkpoint: the loss scale and its count are saved as well.
OPTIONS = ("--steps", STEPS, "--dtype", "fp16", "--loss-scale", 2.0**20, "--save-every", 3)
# Runs each entry of the list, as the only rank of a world.
PROGRAM = (
    "import json, os, sys; from ringcomm.cli import main; os.environ.update(RANK='0', "
    "WORLD_SIZE='1');"
    "sys.exit(sum(main(run) for run in json.loads(sys.argv[1])))"
)
# Kills a rank once, after the save of step 3.
KILLED_ONCE = """
import os, signal, sys
from ringcomm.cli import main
from ringcomm import zero
save = zero.save
def save_and_die(*arguments, **named):
    save(*arguments, **named)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
zero.save = save_and_die
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "poem.txt"
    path.write_text("".join(f"{n} bottles of beer on the wall\n" for n in range(2000)))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    """Returns a whole run's outcome, its folder with only step 6, and the complete folder."""
    folder = tmp_path_factory.mktemp("whole")
    saved = folder / "saved"
    records, _ = train_all(folder, {"whole": ("--data", text, *OPTIONS, "--save", saved)})
    # The latest two of the saved steps 3, 6 and 8 are kept.
    assert sorted(path.name for path in saved.iterdir()) == ["step-00000006", "step-00000008"]
    complete = shutil.copytree(saved, folder / "complete")
    shutil.rmtree(saved / "step-00000008")
    return without_measurements(records["whole"]), saved, complete


def copies(saved, folder, *names):
    """Returns options by name, each with its own copy of the checkpoints."""
    for name in names:
        shutil.copytree(saved, folder / name)
    return {name: ("--save", folder / name, "--resume") for name in names}


def test_resumed_run_is_the_whole_run_at_any_stage(tmp_path, text, whole):
    outcome, saved, _ = whole
    assert 0 < outcome["skipped_steps"] < 6
    folders = copies(saved, tmp_path, "as saved", "stage 0", "stage 3")
    runs = {
        name: ("--data", text, *OPTIONS, *folder, "--stage", stage)
        for (name, folder), stage in zip(folders.items(), (2, 0, 3), strict=True)
    }
    records, printed = train_all(tmp_path, runs, launcher="Slurm")
    for name, record in records.items():
        assert len(record["outcome"]["memory"][0]["steps_bytes"]) == 2
        assert without_measurements(record) == {**outcome, "first_step": 6}
        assert "step      6   loss " in printed[name] and "step      5 " not in printed[name]
        assert (tmp_path / name / "step-00000008").is_dir()


def test_resumed_run_in_another_world_is_nearly_the_whole_run(tmp_path, text, whole):
    outcome, saved, _ = whole
    runs = {"alone": ("--data", text, *OPTIONS, *copies(saved, tmp_path, "folder")["folder"])}
    records, _ = train_all(tmp_path, runs, ranks=1)
    alone = records["alone"]["outcome"]
    assert alone["losses"][:6] == outcome["losses"][:6]
    assert alone["losses"][6:] == pytest.approx(outcome["losses"][6:], abs=2e-3)
    assert alone["first_step"] == 6


def test_what_cannot_be_resumed_is_refused(tmp_path, text, whole):
    _, saved, complete = whole
    here = copies(saved, tmp_path, "here")["here"]
    foreign = tmp_path / "foreign"
    Checkpoints(foreign).save(1, {}, data={"user": {"epoch": 3}})
    common = ("--data", text, *OPTIONS)
    cases = [
        ((*common, "--save", tmp_path / "here"), "holds a checkpoint of step 6 already; add"),
        ((*common, *here, "--seed", 5), "saved with seed 0, got 5"),
        ((*common, *here, "--depth", 2), "saved with depth 1, got 2"),
        ((*common, "--save", foreign, "--resume"), "saved with width None, got 32"),
        (
            (*common, "--save", tmp_path / "none", "--resume"),
            "none holds no complete checkpoint; drop",
        ),
        ((*common, "--save", complete, "--resume"), "all 8 steps are done in "),
        ((*common, *here, "--steps", 6), "saved with steps 8, got 6"),
        ((*common, *here, "auto", "--seed", 5), "saved with seed 0, got 5"),
    ]
    done = (*common, "--save", complete, "--resume", "auto")
    commands = [
        [str(word) for word in train_arguments(*options)[2:]]
        for options in (*(options for options, _ in cases), done)
    ]
    ended = run("-c", PROGRAM, json.dumps(commands))
    # The sum of the statuses.
    assert ended.returncode == 2 * len(cases)
    # The other commands end before or just after their headline.
    assert ended.stdout.splitlines()[-1] == "done          all 8 steps were done before"
    messages = [
        line for line in ended.stderr.splitlines() if line.startswith("ringcomm train: error: ")
    ]
    for message, (_, expected) in zip(messages, cases, strict=True):
        assert expected in message


def test_a_run_that_torchrun_starts_again_is_the_whole_run(tmp_path, text, whole):
    """The same command starts first, and resumes after a rank was killed after a save."""
    program, record = tmp_path / "program.py", tmp_path / "record.json"
    program.write_text(KILLED_ONCE)
    options = ("--data", text, *OPTIONS, "--save", tmp_path / "saved", "--resume", "auto")
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    ended = run(
        *(*command, "--max-restarts=1", program),
        *train_arguments(*options, "--json", record)[2:],
    )
    assert ended.returncode == 0, ended.stderr
    headlines = [line for line in ended.stdout.splitlines() if line.startswith("ranks ")]
    assert len(headlines) == 2
    found = without_measurements(json.loads(record.read_text()))
    # first_step is not 0, because the second attempt ended
    assert found == {**whole[0], "first_step": 3}
