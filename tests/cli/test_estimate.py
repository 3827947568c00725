# SPDX-License-Identifier: Apache-2.0
"""``ringcomm estimate``: the output of its subjects, and the options that they refuse."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import pytest
import torch

from ringcomm import Disk
from ringcomm.cli import main
from ringcomm.cli.estimate import build_on_meta, parse_count
from ringcomm.extras.estimate import ExpertLayer, ModelElems, Training, Transformer
from ringcomm.optim import AdamWOptions
from ringcomm.zero import Precision, ZeroOptions
from tests.cli.processes import run

GPT2 = ("--layers", 12, "--width", 768, "--heads", 12, "--context", 1024, "--vocab", 50257)
COUNT = ("--params", "1M", "--world", 2)
TIMES = ("--tokens", 1000, "--peak-tflops", 100, "--bandwidth", 25)
RATES = ("--disk-read", 6, "--disk-write", 4)
EXPERTS = ("experts", "--experts", 64, "--top-k", 8, "--hidden", 1024, "--tokens", 4096)
MEMORY, STEP = "memory of a rank", "time of a step"
MODULES = """
import torch.nn as nn

def tied():
    net = nn.ModuleDict({"embed": nn.Embedding(1000, 64), "head": nn.Linear(64, 1000, bias=False)})
    net["head"].weight = net["embed"].weight
    return net

def half_frozen():
    net = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 10))
    net[0].requires_grad_(False)
    return net

def fails():
    raise ValueError("no such size\\nand more")

class Holder:
    huge = staticmethod(lambda: nn.Linear(1_000_000, 1_000_000))

number = 5
def gives_a_number():
    return number
"""


@pytest.fixture
def estimate(capsys):
    """Runs the command to its end; returns exit code, output and errors."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main(["estimate", *map(str, arguments)])
        output = capsys.readouterr()
        return code, output.out, output.err

    return call


@pytest.fixture
def told(estimate):
    """Runs the command with ``--json``; returns its tables by title."""

    def call(*arguments: object) -> Any:
        code, out, err = estimate(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return call


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Changes to a new folder with ``estimated_models.py``, which other tests cannot import."""
    (tmp_path / "estimated_models.py").write_text(MODULES)
    monkeypatch.chdir(tmp_path)
    yield "estimated_models"
    sys.modules.pop("estimated_models", None)


def table(text: str, title: str) -> list[list[str]]:
    """Returns the rows under a title as lists of words; the first row is the head."""
    part = next(part for part in text.split("\n\n") if part.startswith(title))
    return [line.split() for line in part.splitlines()[1:]]


def test_the_papers_example(estimate):
    code, out, err = estimate("memory", "--params", "7.5B", "--world", 64, "--reduce", "param")
    assert (code, err) == (0, "")
    assert table(out, MEMORY)[1:5] == [
        ["0", "15", "15", "90", "0.00419", "0", "0.234", "?", "120"],
        ["1", "15", "15", "1.41", "0", "0", "0", "?", "31.4"],
        ["2", "15", "0.234", "1.41", "0.00839", "0", "0", "?", "16.6"],
        ["3", "0.234", "0.234", "1.41", "0.00839", "?", "0", "?", "1.88"],
    ]
    assert "?: unknown without the model's sizes" in out
    assert table(out, "elements")[1] == ["7500000000", "0", "2", "2", "2", "4", "4", "4", "0"]


def test_memory_of_a_transformer(told):
    shape = Transformer(12, 768, 12, 1024, 50257)
    options = ("--micro-batch", 4, "--checkpointing", "full", "--checkpoint-every", 2, "--clip")
    rows = told("memory", *GPT2, "--world", 8, *options)[MEMORY]
    bf16 = ZeroOptions(Precision(param=torch.bfloat16))
    training = Training(shape.model, 8, options=bf16, two_passes=True)
    held = sum(shape.activations(4, "full", 2))
    for stage, row in enumerate(rows):
        sizes = [*training.state(stage), *training.buffers(stage), held]
        assert list(row.values()) == [stage, *sizes, sum(sizes)]
    untied = told("memory", *GPT2, "--world", 2, "--untied")["elements, and bytes of one"]
    assert untied[0]["trained"] == 124_439_808 + 50257 * 768
    kept = told("memory", *GPT2, "--world", 2, "--params", "2B")["elements, and bytes of one"]
    assert kept[0]["trained"] == 2 * 10**9


def test_nothing_fits_while_sizes_are_unknown(estimate, told):
    """A model with unknown activations may exceed the budget, but is never said to fit."""

    def fits(*arguments: object) -> list[object]:
        rows = told("memory", "--world", 64, "--budget-gb", 24, *arguments)[MEMORY]
        return [row["fits"] for row in rows]

    assert fits("--params", "7.5B") == [False, False, None, None]
    assert fits("--params", "1K") == [None] * 4
    assert fits(*GPT2) == [True] * 4
    assert fits("--params", "7.5B", *GPT2) == [False, False, True, True]
    _, out, _ = estimate("memory", "--params", "1K", "--world", 2, "--budget-gb", 24)
    assert [row[-1] for row in table(out, MEMORY)[1:5]] == ["?"] * 4


def test_a_module_is_counted_without_its_memory(told, modules, estimate):
    model = "elements, and bytes of one"
    found = told("memory", "--module", f"{modules}:tied", "--world", 2)
    assert (found[model][0]["trained"], found[model][0]["frozen"]) == (64_000, 0)
    assert found[MEMORY][3]["units_bytes"] == 2 * 64_000 and "fits" not in found[MEMORY][3]
    found = told("memory", "--module", f"{modules}:half_frozen", "--world", 2)
    assert (found[model][0]["trained"], found[model][0]["frozen"]) == (310, 930)
    found = told("memory", "--module", f"{modules}:Holder.huge", "--world", 8)
    assert found[model][0]["trained"] == 10**12 + 10**6
    # A module's activations are unknown.
    for asked in ("--budget-gb", "1e9"), ("--budget-gb", "1e9", "--stage", 2):
        rows = told("memory", "--module", f"{modules}:tied", "--world", 2, *asked)[MEMORY]
        assert all(row["fits"] is None for row in rows)
    assert os.getcwd() not in sys.path
    built = build_on_meta(f"{modules}:tied")
    assert {param.device.type for param in built.parameters()} == {"meta"}
    assert torch.zeros(1).device.type == "cpu", "the device is the module's alone"


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (("--preset", "fp32"), [4, 4, 4, 0, 4, 4, 0]),
        (("--preset", "bf16-remainder"), [2, 2, 4, 2, 4, 4, 0]),
        (("--preset", "bf16-pure-sr", "--optimizer", "amsgrad"), [2, 2, 2, 0, 4, 4, 4]),
        (("--preset", "bf16-pure-sr", "--reduce", "fp32"), [2, 2, 4, 0, 4, 4, 0]),
        (("--preset", "fp16-scaled", "--reduce", "param"), [2, 2, 2, 4, 4, 4, 0]),
        (("--optimizer", "adamw8bit"), [2, 2, 4, 4, 1, 1, 0]),
        (("--accumulate", "fp32"), [2, 4, 4, 4, 4, 4, 0]),
    ],
)
def test_dtypes(told, options, sizes):
    (row,) = told("memory", *COUNT, *options)["elements, and bytes of one"]
    assert list(row.values())[2:] == sizes


def test_options_of_nodes(told):
    """The command uses the options of nodes as the estimate uses those of ``zero``."""
    shared = ("--shard-state", "node", "--compression", "int4", "--error-feedback")
    asked = ("--params", "1M", "--world", 8, "--nodes", 4, *shared)
    rows = told("memory", *asked)[MEMORY]
    assert rows[0]["state_bytes"] == 12 * 10**6 + 4 * 10**6 // 2
    assert rows[1]["state_bytes"] == 12 * 10**6 // 2 + 4 * (10**6 // 2 + 10**6 // 8)
    sent = told("step", *asked)["traffic of a step"]
    assert sent[1]["leaves_a_node_bytes"] < sent[0]["leaves_a_node_bytes"] < 4 * 10**6
    by_world = told("memory", "--params", "1M", "--world", 8, "--nodes", 4)[MEMORY]
    assert by_world[3]["params_bytes"] == 2 * 10**6 // 2
    quantized = ("--preset", "fp32", "--compression-parameters", "int8", "--shard-params", "world")
    rows = told("memory", *asked[:6], *quantized)[MEMORY]
    assert [row["state_bytes"] * 8 // 10**6 for row in rows] == [64, 12, 12, 12]
    assert rows[3]["params_bytes"] == 4 * 10**6 // 8


def test_steps_that_take_two_passes_and_updates_in_backward(told):
    def sizes(*options: object) -> tuple[int, int]:
        row = told("memory", *COUNT, "--stage", 1, *options)[MEMORY][0]
        two = told("memory", *COUNT, "--stage", 2, *options)[MEMORY][0]
        return row["grad_shard_bytes"], two["grads_bytes"]

    shard = 4 * 10**6 // 2
    assert sizes() == (0, shard)
    assert sizes("--clip") == sizes("--preset", "fp16-scaled") == (shard, shard)
    assert sizes("--update", "in_backward") == (0, 0)


def test_what_is_outside_memory(told, estimate):
    asked = ("--params", 1 << 33, "--world", 8)
    disk = (
        "--offload-state",
        "disk",
        "--offload-params",
        "disk",
        "--buffer-mib",
        128,
        "--resident-gb",
        0.5,
    )
    found = told("memory", *asked, *disk, "--stage", 3)
    in_memory = (128 << 20) + 500_000_000
    assert found[MEMORY][0]["state_bytes"] == found[MEMORY][0]["params_bytes"] == in_memory
    told_disk = Disk("disk", 128 << 20, 500_000_000)
    training = Training(
        ModelElems(1 << 33),
        8,
        options=ZeroOptions(Precision(param=torch.bfloat16), offload_params=told_disk),
        optimizer=AdamWOptions(offload_state=told_disk),
    )
    state, params = training.offloaded_state(3), training.offloaded_params()
    assert [list(row.values()) for row in found["outside memory"]] == [
        [3, "state", *state[:3]],
        [3, "parameters", *params[:3]],
    ]
    rows = told("step", *asked, *disk, "--stage", 3, *TIMES, *RATES)["outside memory, in a step"]
    compute_s = 6 * (1 << 33) * 1000 / 100e12
    for row, moved in zip(rows, (state, params), strict=True):
        time = moved.time(8, 6.0, 4.0)
        told_s = [time.read_s, time.write_s, time.added_s(compute_s)]
        assert list(row.values())[2:] == [*moved[3:], *told_s]
    rows = told("step", *asked, *disk, *RATES)["outside memory, in a step"]
    assert rows[0]["write_s"] > rows[0]["read_s"] and "added_s" not in rows[0]
    code, _, err = estimate("step", *asked, *disk, "--disk-write", 4)
    assert code == 2 and "--disk-read and --disk-write: expected both or none" in err
    _, out, _ = estimate("memory", *asked, "--stage", 3, "--offload-state", "cpu")
    assert table(out, "outside memory")[1:] == [["3", "state", "0.0661", "0", "12.9"]]


def test_activations_on_a_disk(told):
    shape = Transformer(12, 768, 12, 1024, 50257)
    asked = ("memory", *GPT2, "--world", 4, "--activations-on", "disk", "--buffer-mib", 64)
    found = told(*asked)
    held = shape.activations(1).kept_on(Disk("disk", 64 << 20), shape.layer_bytes(1))
    assert found[MEMORY][0]["activations_bytes"] == sum(held[:3])
    moved = [{"written_bytes": held.moved, "read_bytes": held.moved}]
    assert found["activations on disk in a step"] == moved


def test_traffic_and_time_of_a_step(told, estimate):
    """6e12 operations; 3e9 x 3/4 elements of 2 bytes."""
    asked = ("step", "--params", "1B", "--world", 4)
    (row,) = told(*asked, "--stage", 3, *TIMES)[STEP]
    assert list(row.values()) == [3, 0.06, 0.18, pytest.approx(0.24), 0.18]
    (row,) = told(*asked, "--stage", 3, *TIMES, "--recompute")[STEP]
    assert row["compute_s"] == 0.08
    (sent,) = told(*asked, "--stage", 3)["traffic of a step"]
    assert sent == {"stage": 3, "a_rank_sends_bytes": 45 * 10**8, "leaves_a_node_bytes": 0}
    assert STEP not in estimate(*asked)[1]
    nodes = told(*asked, "--nodes", 2, "--stage", 3, *TIMES, "--network", 50)[STEP][0]
    bf16 = ZeroOptions(Precision(param=torch.bfloat16))
    wanted = Training(ModelElems(10**9), 4, 2, bf16).communication_s(3, 25.0, 50.0)
    assert nodes["communication_s"] == wanted


def test_experts(told, estimate):
    asked = (*EXPERTS, "--world", 32, "--nodes", 4)
    title = "a rank's share of a layer of experts"
    rows = told(*asked)[title]
    assert [(row["group"], row["compression"]) for row in rows] == [
        (group, compression) for group in (8, 32) for compression in ("none", "int8", "fp8")
    ]
    layer = ExpertLayer(64, 8, 1024, 4096, 8 << 20, 32, 32, 4, 2, "fp8")
    assert rows[-1]["dispatch_bytes"] == layer.between_nodes().dispatch
    training = layer.training(ZeroOptions(Precision(param=torch.bfloat16)))
    assert rows[-1]["state_bytes"] == sum(training.state(2))
    assert {row["group"] for row in told(*asked, "--group", 16)[title]} == {16}
    assert max(map(len, estimate(*asked)[1].splitlines())) <= 110


@pytest.mark.parametrize(
    "arguments",
    [
        ("memory", "--params", "999.9T", "--world", 1, "--preset", "fp32", "--budget-gb", 5),
        ("memory", *GPT2, "--world", 7, "--micro-batch", 1000, "--budget-gb", 0.123456789),
        ("step", "--params", "999.9T", "--world", 99_999, *TIMES),
        ("step", *COUNT, "--offload-state", "disk", *RATES, *TIMES),
        ("step", "--params", "9.99T", "--world", 8, "--offload-state", "disk", *RATES, *TIMES),
    ],
)
def test_tables_fit_100_columns(estimate, arguments):
    code, out, _ = estimate(*arguments)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 100
    assert not any(line.endswith(" ") for line in out.splitlines())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "error: expected --params, --module, or all of --layers, --width, --h"),
        (("--params", "1M", "--module", "a:b"), "expected --params or --module, got both"),
        (
            ("--layers", 2, "--heads", 2),
            "error: expected --width; and --context; and --vocab, as in",
        ),
        (("--params", "1M", "--untied"), "error: expected --layers; and --width; and --heads"),
        ((*GPT2, "--heads", 7), "expected a width that is a multiple of 7 heads, got 768"),
        (("--params", "1M", "--nodes", 3), "--nodes: expected a divisor of 2 ranks, got 3"),
        (("--params", "1M", "--bucket-elems", "1000"), "expected a positive multiple of 512"),
        (("--params", "1M", "--activations-on", "disk"), "expected --layers and the other sizes"),
        (("--params", "1M", "--offload-params", "disk", "--stage", 2), "expected --stage 3, got 2"),
        (("--params", "1M", "--offload-state", "disk", "--buffer-mib", 1e-3), "from 4096 to"),
        (
            ("--params", "1M", "--offload-state", "disk", "--buffer-mib", 0.01),
            "at least 32768, got 104",
        ),
        (("--params", "1M", "--update", "in_backward", "--clip"), "steps of two passes"),
        (
            ("--params", "1M", "--compression-parameters", "fp8", "--offload-state", "disk"),
            "--offload-state: expected",
        ),
        (("--params", "1M", "--error-feedback"), "--error-feedback: expected quantized gradients"),
        (("--module", "nothing"), "--module: expected PACKAGE.MODULE:CALLABLE, got 'nothing'"),
        (("--module", ":tied"), "--module: expected PACKAGE.MODULE:CALLABLE, got ':tied'"),
        (("--module", "no_such_package:f"), "ModuleNotFoundError: No module named 'no_such_pack"),
        (("--module", "estimated_models:missing"), "AttributeError: module 'estimated_models'"),
        (("--module", "estimated_models:fails"), "models:fails: ValueError: no such size"),
        (("--module", "estimated_models:number"), "TypeError: 'int' object is not callable"),
        (("--module", "estimated_models:gives_a_number"), "a torch.nn.Module, got int"),
    ],
)
def test_what_makes_no_sense_is_refused(estimate, modules, arguments, says):
    code, out, err = estimate("memory", *arguments, "--world", 2)
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert lines[0] == "usage: ringcomm estimate memory [options]" and len(lines) == 3
    assert lines[2].startswith("ringcomm estimate memory: error: ") and says in lines[2]


def test_all_missing_options_are_named_together(estimate):
    code, _, err = estimate("memory", "--params", "1M")
    example = ", as in: ringcomm estimate memory --params 7B --world 8\n"
    assert code == 2 and err.endswith("error: expected --world" + example)
    code, _, err = estimate("memory", "--layers", 2, "--width", 8)
    assert code == 2
    assert err.endswith("expected --heads; and --context; and --vocab; and --world" + example)
    code, _, err = estimate("step", "--stage", 3)
    sizes = "--params, --module, or all of --layers, --width, --heads, --context, --vocab"
    assert code == 2 and err.endswith(f"error: expected {sizes}; and --world{example}")


def test_times_need_all_rates(estimate):
    code, _, err = estimate("step", *COUNT, *TIMES[:4])
    assert code == 2 and "times need --tokens, --peak-tflops and --bandwidth" in err
    code, _, err = estimate("step", *COUNT, "--nodes", 2, *TIMES)
    assert code == 2 and "--network: expected the rate of the network between nodes" in err
    code, _, err = estimate("step", *COUNT, "--nodes", 2, "--network", 50)
    assert code == 2 and "--network: is for times, which need --tokens" in err
    code, out, err = estimate("step", *COUNT, *TIMES, "--network", 50)
    assert (code, out, len(err.splitlines())) == (2, "", 3)
    assert "--network: expected none on one node" in err and "got 50; drop it" in err
    code, _, err = estimate(*EXPERTS, "--world", 3)
    assert code == 2 and "divides 3 ranks and 64 experts, got 3" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "the following arguments are required: SUBJECT"),
        (("experts",), "the following arguments are required: --experts, --hidden, --tokens, --wo"),
        (("memory", "--params", "many", "--world", 2), "such as 7.5B, 125M or 1.3e9, got 'many'"),
        (("memory", *COUNT, "--stage", 4), "--stage: invalid choice"),
        (("memory", *COUNT, "--compression", "int2"), "--compression: invalid choice"),
        (("step", *COUNT, "--compression-parameters", "fp32"), "parameters: invalid choice"),
        (("memory", *COUNT, "--budget-gb", "nan"), "a number above 0, got 'nan'"),
        (("step", *COUNT, "--peak-tflops", "x"), "a number above 0, got 'x'"),
        (("memory", *COUNT, "--world", 0), "--world: expected a positive whole number, got '0'"),
    ],
)
def test_options_that_cannot_be_read(capsys, arguments, says):
    with pytest.raises(SystemExit) as ended:
        main(["estimate", *map(str, arguments)])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "elems"),
    [
        ("7.5B", 7_500_000_000),
        ("125M", 125_000_000),
        ("1.3e9", 1_300_000_000),
        ("1.1t", 1_100_000_000_000),
        ("0.5k", 500),
        ("124439808", 124_439_808),
        ("1", 1),
    ],
)
def test_counts_are_read_exactly(text, elems):
    assert parse_count(text) == elems


@pytest.mark.parametrize(
    "text", ["", "B", "-1B", "0", "1.5", "0.0001K", "nan", "inf", "1e30", "7G"]
)
def test_other_counts_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected a positive whole number"):
        parse_count(text)


def test_the_command_as_a_process():
    done = run("-m", "ringcomm", "estimate", "memory", "--params", "7.5B", "--world", 64)
    assert (done.returncode, done.stderr) == (0, "")
    assert "7500000000" in done.stdout
    assert "estimate" in run("-m", "ringcomm", "--help").stdout
