# SPDX-License-Identifier: Apache-2.0
"""Runs of ``ringcomm train`` that share one pair of processes, to save start-up time."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cli.processes import LIMIT_S, start, train_arguments

# The variables that mpirun and srun set for a rank.
LAUNCHERS = {
    "MPICH": {"PMI_RANK": "{rank}", "PMI_SIZE": "{ranks}"},
    "Slurm": {
        "SLURM_PROCID": "{rank}",
        "SLURM_NTASKS": "{ranks}",
        "SLURM_NNODES": "1",
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
    },
}
PROGRAM = (
    "import json, os, sys; from ringcomm.cli import main;"
    "os.environ.update(json.loads(sys.argv[1]));"
    "sys.exit(max([main(run) for run in json.loads(sys.argv[2])]))"
)


def train_all(
    folder: Path, runs: Mapping[str, Sequence[object]], launcher: str = "MPICH", ranks: int = 2
) -> tuple[dict[str, Any], dict[str, str]]:
    """Trains the runs one after the other.

    Args:
        folder: the folder for the records.
        runs: the options of each run, by the run's name.
        launcher: the launcher whose environment variables the ranks get.
        ranks: the number of ranks.

    Returns:
        The JSON record of each run, and the text that rank 0 printed in the run.
    """
    commands = [
        [str(word) for word in train_arguments(*options, "--json", folder / f"{name}.json")[2:]]
        for name, options in runs.items()
    ]
    processes = []
    try:
        for rank in range(ranks):
            told = LAUNCHERS[launcher].items()
            variables = {name: text.format(rank=rank, ranks=ranks) for name, text in told}
            processes.append(start("-c", PROGRAM, json.dumps(variables), json.dumps(commands)))
        ends = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, ends, strict=True):
        assert process.returncode == 0, errors
    assert [output for output, _ in ends[1:]] == [""] * (ranks - 1)
    printed = re.split(r"^(?=ranks )", ends[0][0], flags=re.MULTILINE)[1:]
    records = {name: json.loads((folder / f"{name}.json").read_text()) for name in runs}
    return records, dict(zip(runs, printed, strict=True))


def without_measurements(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a record that is equal in every run of the same training."""
    outcome = dict(record["outcome"])
    del outcome["tokens_per_s"], outcome["memory"], outcome["steps_s"]
    return outcome
