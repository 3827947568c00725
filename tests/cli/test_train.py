"""``ringcomm train``, as a user runs it: started by itself and by launchers, and refusing options.

What is trained at each stage is tested in ``test_train_stages.py``; Slurm's variables are those of
``test_train_resume.py``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch

from ringcomm.rendezvous.environment import LAUNCHERS, launched_world
from tests.cli.processes import LIMIT_S, is_running, run, start, train_arguments, wait_until
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


def under_mpich(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Ranks of one parent with MPICH's variables: rendezvous/test_environment.py has a real one."""
    ranks = []
    for rank in range(2):
        told = {"PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
        with mock.patch.dict(os.environ, told):
            ranks.append(start(*arguments))
    texts = [each.communicate(timeout=LIMIT_S) for each in ranks]
    output, errors = ("".join(each) for each in zip(*texts, strict=True))
    code = max(abs(each.returncode) for each in ranks)
    return subprocess.CompletedProcess(ranks[0].args, code, output, errors)


def outcome_of(folder, text, launch=run, ranks: int | None = 2):
    """Losses and the like of a short run, from its JSON record."""
    record = folder / "record.json"
    options = ["--data", text, "--steps", STEPS, "--json", record]
    if launch is run:
        options += ["--ranks", ranks]
    done = launch(*train_arguments(*options))
    assert done.returncode == 0, done.stderr
    assert f"ranks   {ranks} on ringcomm" in done.stdout
    assert "engine  zero, stage 2, fp32" in done.stdout
    assert "in 1 file of" in done.stdout
    assert f"{STEPS}/{STEPS}  loss " in done.stderr
    outcome = without_measurements(json.loads(record.read_text()))
    assert f"step {STEPS - 1:>6}   loss {outcome['losses'][-1]:.4f}" in done.stdout
    return outcome


@pytest.fixture(scope="module")
def alone(tmp_path_factory, text):
    return outcome_of(tmp_path_factory.mktemp("alone"), text)


def test_losses_under_torchrun_are_those_of_own_ranks(tmp_path, text, alone):
    assert outcome_of(tmp_path, text, under_torchrun) == alone


def test_losses_under_mpirun_are_those_of_own_ranks(tmp_path, text, alone):
    assert outcome_of(tmp_path, text, under_mpich) == alone


def test_losses_hardly_depend_on_the_number_of_ranks(tmp_path, text, alone):
    single = outcome_of(tmp_path, text, ranks=1)
    assert single["losses"] == pytest.approx(alone["losses"], abs=1e-4)
    assert single["held_out_after"] == pytest.approx(alone["held_out_after"], abs=1e-4)


def test_a_launcher_has_set_both_a_rank_and_a_world(monkeypatch):
    for _, rank, size, _ in LAUNCHERS:
        monkeypatch.delenv(rank, raising=False)
        monkeypatch.delenv(size, raising=False)
    assert launched_world() is None
    monkeypatch.setenv("SLURM_NTASKS", "3")
    assert launched_world() is None
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert launched_world() == "SLURM_NTASKS=3"


# A run as torchrun starts it, and one as mpirun does. Where DDP outlives its group, some runs hang.
ENDS_GROUPS_LAST = """
import gc, os, sys
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from ringcomm.cli import main

def destroy(before=dist.destroy_process_group):
    assert not [each for each in gc.get_objects() if type(each) is DistributedDataParallel]
    before()
    ended.append(1)

ended = []
dist.destroy_process_group = destroy
for set_by_launcher in (
    {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
    {"PMI_RANK": "0", "PMI_SIZE": "1"},
):
    os.environ.update(set_by_launcher)
    assert main(sys.argv[1:]) == 0
    for name in set_by_launcher:
        del os.environ[name]
assert ended == [1, 1]
"""


def test_ddp_is_gone_before_its_group_is(text):
    options = ("--data", text, "--steps", 2, "--engine", "ddp", "--backend", "gloo")
    done = run("-c", ENDS_GROUPS_LAST, *train_arguments(*options)[2:])
    assert done.returncode == 0, done.stderr


def children_of(pid: int) -> list[int]:
    """In the order in which they were started."""
    return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_killed_rank_ends_the_run(text):
    with start(*train_arguments("--data", text, "--steps", 1_000_000)) as process:
        assert process.stdout is not None
        # The line is printed when training begins.
        assert any(line.startswith("steps") for line in process.stdout)
        # The fork's own server is its first child.
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
        (("--width", 30, "--heads", 4), "width must be a multiple of 2 x heads"),
        (("--batch", 3), "a batch of 3 sequences does not divide among 2 ranks; choose --batch"),
        (("--accum", 4), "does not divide among 2 ranks x 4 micro-batches; choose --batch as a"),
        (("--accum", 0), "accum must be at least 1"),
        (("--ranks", 0), "--ranks must be at least 1"),
        (("--steps", 0), "steps must be at least 1"),
        (("--learning-rate", "nan"), "the learning rate must be above 0"),
        (("--seed", -1), "the seed must be in 0"),
        (("--clip", 0), "--clip must be a norm above 0"),
        (("--json", "/no/such/place/x.json"), "--json /no/such/place/x.json: its folder does not"),
        (("--plot", "/no/such/place/x.png"), "--plot /no/such/place/x.png: its folder does not"),
        (("--plot", "x.xyz"), "--plot x.xyz: expected a name in .png, .svg, .pdf"),
        (
            ("--profile", "/no/such/place/x.json"),
            "--profile /no/such/place/x.json: its folder",
        ),
        (("--save", "{small}"), "small: expected a folder, or nothing yet, got a file"),
        (("--resume",), "--resume: expected --save FOLDER beside it"),
        (("--save-every", 5), "--save-every: expected --save FOLDER beside it"),
        (("--save", "{small}.runs", "--save-every", -5), "--save-every must be at least 1"),
        (("--engine", "ddp", "--stage", 0), "--stage 0: --engine ddp has no stages"),
        (("--engine", "ddp", "--shard-state", "node"), "--shard-state: --engine ddp does not have"),
        (("--engine", "fsdp2", "--dtype", "bf16"), "--dtype bf16: --engine fsdp2 trains in fp32"),
        (("--engine", "ddp", "--save", "{small}.runs"), "--save: --engine ddp has none"),
        (("--engine", "fsdp2", "--profile", "{small}.json"), "--profile: --engine fsdp2 has none"),
        (("--state-on", "/no/such/place"), "--state-on /no/such/place: expected a folder on a"),
        (("--state-buffer-mib", 5), "--state-buffer-mib: expected --state-on PATH beside it"),
        (("--state-on", ".", "--state-resident-mib", -1), "--state-resident-mib must be at least"),
        (("--state-on", ".", "--device", "cuda"), "--state-on: expected --device cpu, whose state"),
        (("--params-on", "/no/such"), "--params-on: expected --stage 3, got 2, where each rank"),
        (("--params-resident-mib", 5), "--params-resident-mib: expected --params-on PATH beside"),
        (("--engine", "ddp", "--params-on", "."), "--params-on: --engine ddp keeps its params in"),
        (("--engine", "ddp", "--state-on", "."), "--state-on: --engine ddp keeps its state in"),
        (("--backend", "gloo"), "--backend gloo: --engine zero runs on ringcomm alone"),
        (("--loss-scale", 8), "--loss-scale: fp32 gradients need no scale"),
        (("--dtype", "fp16", "--loss-scale", 0), "--loss-scale: expected 1 to 2^32"),
        (
            ("--engine", "ddp", "--backend", "gloo", "--device", "cuda"),
            "--device cuda: expected --backend ringcomm, got gloo",
        ),
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
    assert done.returncode == 1
    assert f"--ranks 3: {size}=2 is set" in done.stderr
