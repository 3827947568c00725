# SPDX-License-Identifier: Apache-2.0
"""The documents' code: names in Python exist, programs run, and commands are accepted."""

import ast
import importlib
import importlib.util
import json
import os
import re
import socket
import sys
from typing import Any

import pytest
import torch.distributed
from torch.distributed.run import get_args_parser

import ringcomm
from ringcomm.bench.run import BENCHES
from ringcomm.cli import COMMANDS
from tests.packaging.code_names import problems_of, undefined_in
from tests.packaging.documents import (
    DOCS,
    GUIDES,
    blocks_of,
    commands_of,
    name_of,
)
from tests.support import ROOT, fork_server
from tools import site_pages

CODE = {path: blocks_of(path, "python") for path in GUIDES}
# Blocks that other tests run: those of the README, the tutorial, Triton (tests/tl), faults,
# integrations, and meshes (tests/c10d), which need several ranks.
ELSEWHERE = {
    "README.md": ("",),
    "docs/tutorial.md": ("",),
    "docs/parallelism.md": ("Mesh(pp=2",),
    "docs/triton.md": ("triton.language",),
    "docs/reliability.md": ("run_chain",),
    "docs/integrations/hugging-face.md": ("",),
    "docs/integrations/jupyter.md": ("",),
}
MISSING = ("deepspeed", "lightning", "ray")  # modules of some blocks that no set-up installs
COMMANDS_SHOWN = [command for path in GUIDES for command in commands_of(path)]
OTHER_PROGRAMS = {"python", "source", "impi/bin/pip"}


@pytest.mark.parametrize("path", CODE, ids=name_of)
def test_names_of_ringcomm_exist_and_calls_fit(path):
    assert problems_of([block.text for block in CODE[path]]) == []


def test_names_and_calls_that_are_wrong_are_found():
    texts = [
        "import ringcomm as r\nfrom ringcomm import zero, nothing\nr.all_gatherings(x)",
        "zero.shard(m, stag=3)\nopt = r.optim.AdamW(p, lr=1)\nopt.clip_norm_(1)\nopt.step(1, 2)",
        "with r.Communicator.from_env() as comm:\n    comm.all_reduce(x, squeeze=1)\n    comm.node",
        "def f(zero):\n    pass\nzero.shard(m, 3)",
    ]
    assert sorted(problem.partition(":")[0] for problem in problems_of(texts)) == [
        "AdamW().clip_norm_",
        "comm.all_reduce(x, squeeze=1)",
        "from ringcomm import nothing",
        "opt.step(1, 2)",
        "r.all_gatherings",
        "zero.shard(m, stag=3)",
    ]
    assert undefined_in(ast.parse("import a.b\nfor c in a.d: e(c, len(f))")) == {"e", "f"}


def programs():
    """Returns the blocks that are whole programs and are run here."""
    found = []
    for path, blocks in CODE.items():
        for block in blocks:
            elsewhere = any(word in block.text for word in ELSEWHERE.get(name_of(path), ()))
            tree = ast.parse(block.text)
            needed = {
                name.partition(".")[0]
                for node in ast.walk(tree)
                for name in (
                    [each.name for each in node.names]
                    if isinstance(node, ast.Import)
                    else [node.module or ""]
                    if isinstance(node, ast.ImportFrom)
                    else []
                )
            }
            if not elsewhere and not undefined_in(tree) and not needed & set(MISSING):
                found.append(block)
    return found


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A folder, with a launcher's variables for one rank; closes groups afterwards."""
    monkeypatch.chdir(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in shared.items():
        monkeypatch.setenv(name, str(value))
    yield tmp_path
    if ringcomm.is_initialized():
        ringcomm.destroy_process_group()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("block", programs(), ids=str)
def test_a_program_of_a_page_runs(alone, block, capsys):
    code = block.text.replace('"/nvme"', repr(str(alone)))
    exec(compile(code, str(block), "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    for told in re.findall(r"print\(.*\)  # (\w+)$", code, re.MULTILINE):
        assert told in printed


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_search_for_a_non_finite_gradient_names_the_rank(stage, tmp_path):
    """Runs on two ranks, also at other stages than the page's."""
    page = DOCS / "howto" / "nan-loss.md"
    program = next(block.text for block in blocks_of(page, "python") if "watch" in block.text)
    assert "stage=2" in program
    script = tmp_path / "search.py"
    script.write_text(program.replace("stage=2", f"stage={stage}"))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *torchrun, str(script)]
    done = fork_server.run(command, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    (output,) = blocks_of(page, "text")
    assert sorted(done.stdout.splitlines()) == sorted(output.text.splitlines())


# Runs the programs of a file one after the other, as a rank of torchrun.
ON_RANKS = """
import json, os, sys
import ringcomm, torch.distributed as dist
for folder, code in json.load(open(sys.argv[1])).items():
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    try:
        exec(compile(code, folder, "exec"), {"__name__": "__main__"})
    except BaseException as error:
        error.args = (f"{folder}: {error}",)
        raise
    if ringcomm.is_initialized():
        ringcomm.destroy_process_group()
    if dist.is_initialized():
        dist.destroy_process_group()
"""


def launched_programs():
    """Returns the how-to pages' whole programs that join the group of a launcher."""
    joins = re.compile(r"\b(init_process_group|from_env)\(")
    pages = [block for block in programs() if block.path.parent.name == "howto"]
    return [block for block in pages if joins.search(block.text)]


def test_the_programs_of_how_to_pages_run_on_two_ranks(tmp_path):
    """One launch runs them all: each must make its own group, like a program of its own."""
    chosen = launched_programs()
    assert len(chosen) >= 12
    script, file = tmp_path / "all.py", tmp_path / "programs.json"
    script.write_text(ON_RANKS)
    texts = {
        str(tmp_path / str(block).replace("/", "-")): block.text.replace("/nvme", str(tmp_path))
        for block in chosen
    }
    file.write_text(json.dumps(texts))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *torchrun, str(script), str(file)]
    done = fork_server.run(command, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", launched_programs(), ids=str)
def test_a_program_of_a_how_to_page_names_its_launcher(block):
    assert re.match(r"# (torchrun --nproc-per-node|mpirun -n) 2 ", block.text), str(block)


def test_a_program_that_shards_a_model_joins_a_group():
    """Alone, ``zero.shard`` would work without a group, but under torchrun it refuses."""
    pages = [block for block in programs() if block.path.parent.name == "howto"]
    sharding = [block for block in pages if re.search(r"^zero\.shard\(", block.text, re.MULTILINE)]
    assert len(sharding) >= 10 and set(sharding) <= set(launched_programs())


def test_the_programs_are_many():
    assert len(programs()) >= 18


# Definitions that the parts of programs on some pages need, in a world of one rank. Parts of a page
# share names in order, so that a later part sees the names of earlier parts.
MODEL = """
model = torch.nn.Sequential(OrderedDict(embed=torch.nn.Embedding(9, 8), body=torch.nn.Linear(8, 8),
                                        head=torch.nn.Linear(8, 4)))
batch, loss_fn = torch.arange(8), lambda out: out.square().mean()
"""
FOUND = {
    ("docs/functional.md", "F.all_gather(shard"): """
shard, op, src, input_splits, output_splits = torch.ones(4), ringcomm.ReduceOp.SUM, 0, None, None
""",
    ("docs/functional.md", "F.context_positions("): """
length, tokens, angles = 8, torch.ones(2, 8), torch.ones(8, 4)
query = key = value = torch.ones(1, 2, 8, 4)
""",
    ("docs/functional.md", "F.all_gather_matmul"): """
x, up, down = torch.ones(4, 8), torch.ones(8, 16), torch.ones(16, 8)
""",
    ("docs/checkpoint.md", "FlatShard("): """
ranks, begin, other_begin, local, out = None, 0, 5, torch.ones(1024 * 512), torch.empty(9)
""",
    ("docs/checkpoint.md", "LoadPlanner()"): "state = {'a': torch.ones(3)}",
    ("docs/checkpoint.md", "export_safetensors("): """
import safetensors.torch
module = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
zero.shard(module, stage=1)
zero.save("runs/a", 100, module)
zero.remove_sharding(module)
""",
    ("docs/optimizer.md", "loss_fn(model(batch))"): MODEL,
    ("docs/optimizer.md", "AdamW8bit("): MODEL,
    ("docs/optimizer.md", "muon_groups("): MODEL,
    ("docs/optimizer.md", "Sharded("): MODEL,
    ("docs/optimizer.md", "LossScaler()"): MODEL + "loss = loss_fn(model(batch))",
    ("docs/zero.md", 'update="in_backward"'): MODEL + "zero.shard(model, stage=2)",
    ("docs/zero.md", "zero.uneven("): MODEL
    + """
zero.shard(model, stage=2)
optimizer = ringcomm.optim.AdamW(model.parameters())
loader = [(torch.arange(8), torch.zeros(8, 4))] * 3
loss_fn = torch.nn.functional.mse_loss
""",
    ("docs/ecosystem.md", "fsdp2.plug("): """
from torch.distributed.fsdp import fully_shard
torch.distributed.init_process_group("ringcomm")
mesh = torch.distributed.init_device_mesh("cpu", (1,))
model = torch.nn.Module()
model.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
""",
}
COMMON = """
from collections import OrderedDict
import torch, ringcomm
from ringcomm import functional as F, zero
ringcomm.init_process_group()
comm = ringcomm.Communicator.from_env()
group = None
"""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("page", "mark"), FOUND)
def test_a_part_of_a_program_runs(alone, page, mark):
    (block,) = (block for block in CODE[ROOT / page] if mark in block.text)
    assert undefined_in(ast.parse(block.text)), "a whole program: programs() must run it"
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(COMMON + FOUND[page, mark], "what it finds", "exec"), names)
    exec(compile(block.text, str(block), "exec"), names)
    names["comm"].close()


class Refused(Exception):
    pass


def parsed(parser, words):
    """Returns the parsed words; raises where the parser would exit the process."""

    def refuse(message):
        raise Refused(message)

    parser.error = refuse
    # Words in capitals are placeholders for a value.
    return parser.parse_args([re.sub(r"^[A-Z]+$", "1", word) for word in words if word != "..."])


def targets():
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def extras():
    text = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1]
    return set(re.findall(r"^(\w+) = \[", text.partition("\n[")[0], re.MULTILINE))


def check_module(words):
    """Checks the words after ``-m``."""
    module, *rest = words
    if module == "ringcomm":
        check_ringcomm(rest)
        return
    assert module == "venv" or importlib.util.find_spec(module), module
    if module == "ringcomm.bench":
        check_bench(rest)


def check_bench(words):
    """Checks the words after ``ringcomm bench``."""
    name, *rest = words if words[:1] and words[0] in BENCHES else ["collectives", *words]
    parsed(importlib.import_module(f"ringcomm.bench.{name}").BENCH.build_parser(), rest)


def check_ringcomm(words):
    if words[:1] in ([], ["COMMAND"]) or re.search(r"(^| )\[|\w\.\.\.( |$)", " ".join(words)):
        return  # a summary of options
    assert words[0] in COMMANDS, words
    if words[0] == "bench":
        check_bench(words[1:])
        return
    parsed(site_pages.parser_of(words[0]), [*words[1:]])


def check_script(words):
    """Checks a command that a launcher starts."""
    if words[0] == "ringcomm":
        check_ringcomm(words[1:])
    elif words[0] == "python" and words[1] == "-m":
        check_module(words[2:])
    elif words[0].startswith("docs/"):
        assert (ROOT / words[0]).is_file(), words[0]


def check(command):
    """Raises if a command of a document is wrong."""
    program, *words = command.words
    for variable in command.variables:
        if variable.startswith("RINGCOMM_"):
            assert f"`{variable}`" in (DOCS / "reference" / "environment.md").read_text(), variable
    if program == "ringcomm":
        check_ringcomm(words)
    elif program == "make":
        assert {word for word in words if "=" not in word} <= targets(), words
    elif program == "torchrun":
        check_torchrun(words)
    elif program in ("mpirun", "mpiexec", "srun"):
        begin = next(i for i, word in enumerate(words) if word in ("python", "ringcomm", "sh"))
        check_script(words[begin:])
    elif program.endswith("python") and words[:1] == ["-m"]:
        check_module(words[1:])
    elif program == "pip":
        for asked in re.findall(r"\.\[([\w,]+)\]", " ".join(words)):
            assert set(asked.split(",")) <= extras(), asked
    elif program == "docker":
        check_torchrun(words[words.index("torchrun") + 1 :])
    else:
        assert program in OTHER_PROGRAMS, program


def check_torchrun(words):
    args = parsed(get_args_parser(), words)
    script = [args.training_script, *args.training_script_args]
    if args.module:
        check_module(script)
    else:
        check_script(script)


@pytest.mark.parametrize("path", GUIDES, ids=name_of)
def test_commands_are_what_their_parsers_take(path):
    for command in commands_of(path):
        try:
            check(command)
        except (Refused, AssertionError) as error:
            pytest.fail(f"{command}: {error}")


def test_the_commands_are_many_and_wrong_ones_are_found(tmp_path):
    assert len(COMMANDS_SHOWN) > 60
    page = tmp_path / "page.md"
    wrong = [
        "ringcomm trane",
        "ringcomm train --stages 3",
        "ringcomm estimate --params many",
        "make everything",
        "pip install '.[everything]'",
        "torchrun --nproc 2 --everything train.py",
        "torchrun --nproc-per-node 2 -m ringcomm.bench nothing --tokens 1",
        "ringcomm bench disk --paths /nvme",
        "torchrun --nproc-per-node 2 docs/examples/nothing.py",
        "mpirun -n 2 ringcomm train --nothing",
        "RINGCOMM_HEAP_BYTE=1 ringcomm doctor",
    ]
    page.write_text("```sh\n" + "\n".join(wrong) + "\n```\n")
    for command in commands_of(page):
        with pytest.raises((Refused, AssertionError)):
            check(command)


def test_blocks_name_their_languages_as_the_site_colours_them():
    known = {"", "python", "text", "console", "sh", "yaml"}
    assert {block.language for path in GUIDES for block in blocks_of(path)} <= known
