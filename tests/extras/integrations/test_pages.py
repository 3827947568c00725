# SPDX-License-Identifier: Apache-2.0
"""Integration pages that need no other library: loops, notebooks and manifests."""

import ast
import contextlib
import functools
import io
import pprint
import runpy
import sys
from unittest import mock

import pytest
import torch.distributed as dist

from tests.packaging.documents import DOCS, blocks_of
from tests.support.covering import EVERY_CASE

PAGES = DOCS / "integrations"


def lines_of(folder, tp):
    """Returns the lines that a rank's run of the loop prints, in the present group."""
    printed, examples = io.StringIO(), DOCS / "examples"
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        # A script can import files in its folder; the interpreter sets this path.
        mock.patch.object(sys, "path", [str(examples), *sys.path]),
        contextlib.redirect_stdout(printed),
    ):
        main = runpy.run_path(str(examples / "titan_loop.py"))["main"]
        if not EVERY_CASE:
            main.__globals__.update(STEPS=4, SAVE_EVERY=2)
        main(str(folder), tp)
    return printed.getvalue().splitlines()


def loop(folder, rank, world_size):
    lines, resumed = lines_of(folder, 2), lines_of(folder, 2)
    # The second run resumed from the first run's checkpoint.
    assert resumed == lines[len(lines) // 2 :]
    if rank == 0:
        losses = [float(line.split()[-1]) for line in lines]
        assert len(losses) == (8 if EVERY_CASE else 4)
        assert not EVERY_CASE or losses[-1] < 0.9 * losses[0], losses


def test_a_loop_in_the_manner_of_torchtitan(rank_pools, tmp_path):
    rank_pools(4).run(functools.partial(loop, tmp_path))


def shown(cell, names):
    """Returns a notebook's output of a cell: the printed text, and the value of its last line."""
    tree, printed = ast.parse(cell), io.StringIO()
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            if value is not None:
                pprint.pp(value, width=79)  # as IPython wraps lists
    return printed.getvalue()


def test_the_cells_of_the_notebook_show_what_the_page_says():
    cells = blocks_of(PAGES / "jupyter.md", "python")
    outputs = {block.line: block for block in blocks_of(PAGES / "jupyter.md", "text")}
    names, compared = {"__name__": "__main__"}, 0
    for cell in cells:
        found = shown(cell.text, names)
        # An output follows its cell after an empty line.
        told = outputs.get(cell.line + cell.text.count("\n") + 3)
        assert found.splitlines() == (told.text.splitlines() if told else []), cell
        compared += told is not None
    assert compared == len(outputs) >= 4


# Variables that launchers set in the manifests' containers; torchrun reads PET_*.
TORCHRUN = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR"}
TORCHRUN |= {"PET_MASTER_PORT", "PET_RDZV_BACKEND", "PET_RDZV_ENDPOINT", "PET_RDZV_ID"}


def manifests():
    yaml = pytest.importorskip("yaml")
    found = []
    for block in blocks_of(PAGES / "launchers.md", "yaml"):
        found += list(yaml.safe_load_all(block.text))
    return found


def dicts_in(value):
    if isinstance(value, dict):
        yield value
    inside = value.values() if isinstance(value, dict) else value
    for each in inside if isinstance(value, dict | list) else ():
        yield from dicts_in(each)


def test_the_manifests_name_what_there_is():
    found = {each["kind"]: each for each in manifests()}
    assert set(found) == {"Service", "Job", "TrainJob", "PyTorchJob"}
    options = (DOCS / "reference" / "environment.md").read_text()
    for manifest in found.values():
        assert {"apiVersion", "metadata", "spec"} <= set(manifest)
        for each in dicts_in(manifest["spec"]):
            for variable in each.get("env", ()):
                name = variable["name"]
                assert name in TORCHRUN or f"`{name}`" in options, name
    # Pods find the first pod by the service's name, and pass their own node rank to the command.
    job = found["Job"]["spec"]
    pod = job["template"]["spec"]
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"] == 2
    assert found["Service"]["spec"]["clusterIP"] == "None"
    assert pod["subdomain"] == found["Service"]["metadata"]["name"]
    selector = found["Service"]["spec"]["selector"]
    assert selector == {"batch.kubernetes.io/job-name": found["Job"]["metadata"]["name"]}
    (container,) = pod["containers"]
    values = {each["name"]: each for each in container["env"]}
    first = f"{found['Job']['metadata']['name']}-0.{pod['subdomain']}"
    assert values["PET_MASTER_ADDR"]["value"] == first
    path = values["PET_NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def test_torchrun_reads_the_variables_of_the_manifests(monkeypatch):
    from torch.distributed.run import config_from_args, parse_args

    (job,) = (each for each in manifests() if each["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable.get("value", "1"))
    assert container["command"][0] == "torchrun"
    config, _, _ = config_from_args(parse_args(container["command"][1:]))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 2)
    assert config.rdzv_endpoint == "train-0.train:29500"
    assert config.rdzv_configs["rank"] == 1
