"""``ringcomm train``, as a user runs it."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.cli.processes import is_running, ranks_of, run, start, train_arguments, wait_until

STEPS = 6
ALONE = ()
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "poem.txt"
    path.write_text("".join(f"{n} bottles of beer on the wall\n" for n in range(2000)))
    return path


def outcome_of(folder, text, backend, launcher=ALONE, ranks=2):
    """Losses and the like of a short run, from its JSON record."""
    record = folder / "record.json"
    options = ["--backend", backend, "--data", text, "--steps", STEPS, "--json", record]
    if launcher is ALONE:
        options += ["--ranks", ranks]
    done = run(*launcher, *train_arguments(*options))
    assert done.returncode == 0, done.stderr
    assert f"ranks   {ranks} on {backend}" in done.stdout
    assert "in 1 file of" in done.stdout
    assert f"{STEPS}/{STEPS}" in done.stderr
    outcome = json.loads(record.read_text())["outcome"]
    assert f"step {STEPS - 1:>6}   loss {outcome['losses'][-1]:.4f}" in done.stdout
    del outcome["tokens_per_s"]
    return outcome


@pytest.fixture(scope="module")
def on_gloo(tmp_path_factory, text):
    return outcome_of(tmp_path_factory.mktemp("gloo"), text, "gloo")


def test_losses_on_ringcomm_are_those_on_gloo(tmp_path, text, on_gloo):
    assert len(on_gloo["losses"]) == STEPS
    assert on_gloo["held_out_after"] < on_gloo["held_out_before"]
    assert outcome_of(tmp_path, text, "ringcomm") == on_gloo


def test_losses_under_torchrun_are_those_of_own_ranks(tmp_path, text, on_gloo):
    assert outcome_of(tmp_path, text, "ringcomm", TORCHRUN) == on_gloo


def test_losses_hardly_depend_on_the_number_of_ranks(tmp_path, text, on_gloo):
    alone = outcome_of(tmp_path, text, "ringcomm", ranks=1)
    assert alone["losses"] == pytest.approx(on_gloo["losses"], abs=1e-4)
    assert alone["held_out_after"] == pytest.approx(on_gloo["held_out_after"], abs=1e-4)


def test_killed_rank_ends_the_run(text):
    with start(*train_arguments("--data", text, "--steps", 1_000_000)) as process:
        assert process.stdout is not None
        # The line is printed when training begins.
        assert any(line.startswith("steps") for line in process.stdout)
        ranks = ranks_of(process.pid)
        assert sorted(ranks) == [0, 1]
        os.kill(ranks[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1 was killed by SIGKILL; all ranks were ended" in errors
    wait_until(lambda: not any(map(is_running, ranks.values())), "the ranks' end")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--data", "/no/such/place"), "--data /no/such/place: no such file or folder"),
        (("--data", "{small}"), "holds 5 bytes of text"),
        (("--width", 30, "--heads", 4), "width must be a multiple of 2 x heads"),
        (("--batch", 3), "a batch of 3 sequences does not divide among 2 ranks"),
        (("--ranks", 0), "--ranks must be at least 1"),
        (("--steps", 0), "steps must be at least 1"),
        (("--learning-rate", "nan"), "the learning rate must be above 0"),
        (("--seed", -1), "the seed must be in 0"),
        (("--json", "/no/such/place/x.json"), "its folder does not exist"),
    ],
)
def test_wrong_option_is_refused_before_any_rank_starts(tmp_path, options, message):
    small = tmp_path / "small"
    small.write_text("short")
    done = run(*train_arguments(*(str(option).format(small=small) for option in options)))
    assert done.returncode == 1
    assert done.stderr.startswith("ringcomm train: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_ranks_option_contradicting_torchrun_is_refused(monkeypatch):
    done = run(
        "-c",
        "import os, sys; os.environ.update(RANK='0', WORLD_SIZE='2');"
        "from ringcomm.cli import main; sys.exit(main(['train', '--ranks', '3']))",
    )
    assert done.returncode == 1
    assert "--ranks 3: WORLD_SIZE=2 is set" in done.stderr
