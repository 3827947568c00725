"""The options of ``ringcomm estimate``: how they are read, and what is refused."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict

import pytest
import torch

from ringcomm.cli import main
from ringcomm.cli.estimate_request import build_on_meta, parse_count
from ringcomm.zero.estimate_model import Transformer
from ringcomm.zero.estimate_model_parallel import ModelParallel, stage_activations, stage_model

GPT2 = ("--layers", 12, "--width", 768, "--heads", 12, "--context", 1024, "--vocab", 50257)
ON_DISK = ("--params", "1M", "--state-on", "disk")
MACHINE = ("--bandwidth-gbps", 25, "--peak-tflops", 100)
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
def modules(tmp_path, monkeypatch):
    """A folder to run in, with ``estimated_models.py``, which no other test sees."""
    (tmp_path / "estimated_models.py").write_text(MODULES)
    monkeypatch.chdir(tmp_path)
    yield "estimated_models"
    sys.modules.pop("estimated_models", None)


def estimate(capsys, *arguments):
    """Runs the command to its end; exit code, output and errors."""
    code = main(["estimate", *map(str, arguments)])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_a_module_is_counted_without_its_memory(capsys, modules):
    _, out, _ = estimate(capsys, "--module", f"{modules}:tied", "--world", 2, "--json")
    told = json.loads(out)["model"]
    assert (told["trainable"], told["frozen"], told["root"]) == (64_000, 0, 64_000)
    _, out, _ = estimate(capsys, "--module", f"{modules}:half_frozen", "--world", 2)
    assert "estimated_models:half_frozen: 1.24 K parameters, 930 of them frozen; world 2" in out
    assert "    3     9 P    2.79 K" in out, "310 gradients, and all 1240 parameters twice"
    _, out, _ = estimate(capsys, "--module", f"{modules}:Holder.huge", "--world", 8, "--json")
    assert json.loads(out)["model"]["trainable"] == 10**12 + 10**6
    assert os.getcwd() not in sys.path


def test_modules_are_built_on_the_meta_device(modules):
    built = build_on_meta(f"{modules}:tied")
    assert {param.device.type for param in built.parameters()} == {"meta"}
    assert torch.zeros(1).device.type == "cpu", "the device is the module's alone"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no model: give --params COUNT"),
        (
            ("--layers", 2, "--heads", 2),
            "--layers: a transformer needs --width, --vocab, --context",
        ),
        ((*GPT2, "--heads", 7), "expected a width that is a multiple of 7 heads, got 768"),
        ((*GPT2, "--micro-batch", 0), "--micro-batch: expected at least 1, got 0"),
        ((*GPT2, "--pp", 5), "layers that 5 divides, got 12"),
        ((*GPT2, "--sequence-parallel"), "sequence: expected tensor-parallel ranks (tp > 1)"),
        ((*GPT2, "--tp", 2, "--partition-checkpoints"), "expected --checkpointing full with it"),
        ((*GPT2, "--tp", 2, *MACHINE), "--tp, --pp: expected no times with them"),
        (("--params", "1M", "--tp", 2), "--tp, --pp and --micro-batches: expected the model as"),
        ((*GPT2, "--checkpoint-every", -1), "--checkpoint-every: expected at least 1, got -1"),
        (("--params", "1M", "--world", 0), "--world: expected at least 1, got 0"),
        (("--params", "1M", *MACHINE), "times need --bandwidth-gbps, --peak-tflops and --context"),
        (("--params", "1M", "--context", 8, "--peak-tflops", 5), "times need --bandwidth-gbps"),
        (
            ("--params", "1M", "--bucket-elems", "1000"),
            "expected a positive multiple of 512 below 2^63, got 1",
        ),
        (("--params", "1M", "--untied"), "--untied: a transformer needs --layers, --width"),
        (
            ("--params", "1M", "--checkpoint-every", 2),
            "--checkpoint-every 2: expected --checkpointing full with it, got none",
        ),
        (("--params", "1M", "--buffer-mib", 5), "--buffer-mib: expected --state-on disk with it"),
        (
            ("--params", "1M", "--params-buffer-mib", 5),
            "--params-buffer-mib: expected --params-on disk with it",
        ),
        (
            ("--params", "1M", "--params-on", "disk", "--stage", 2),
            "--params-on disk: expected --stage 3 or none with it, got 2",
        ),
        (
            ("--params", "1M", "--disk-read-gbps", 5),
            "--disk-read-gbps: expected --state-on disk with it",
        ),
        (
            ("--params", "1M", "--activations-on", "disk"),
            "--activations-on disk: expected --layers and the other sizes",
        ),
        (
            ("--params", "1M", "--activations-buffer-mib", 5),
            "--activations-buffer-mib: expected --activations-on disk with it",
        ),
        ((*ON_DISK, "--disk-write-gbps", 5), "--disk-write-gbps: expected both, or none"),
        (
            (*ON_DISK, "--disk-read-gbps", 5, "--disk-write-gbps", 0),
            "expected disk_write_gbps above 0 and finite, got 0",
        ),
        ((*ON_DISK, "--resident-gb", -1), "--resident-gb: expected a size of 0 or more, got -1"),
        ((*ON_DISK, "--buffer-mib", "nan"), "--buffer-mib: expected a size of 0 or more, got nan"),
        ((*ON_DISK, "--buffer-mib", 0), "Disk(buffer_bytes=): expected an integer from 4096 to"),
        ((*ON_DISK, "--buffer-mib", 0.01), "buffer_bytes: expected at least 32768, got 10486"),
        (
            ("--params", "1M", "--optimizer", "adamw8bit", "--amsgrad"),
            "amsgrad: AdamW8bit keeps no maximum",
        ),
        (("--params", "1M", "--context", 0, *MACHINE), "--context: expected at least 1, got 0"),
        (("--params", "1M", "--dtype", "fp16", "--master", "remainder"), "lower half of bfloat16"),
        (
            ("--params", "1M", "--preset", "fp32", "--dtype", "fp32", "--master", "none"),
            "--preset fp32: expected no --dtype, --master with it, which it decides",
        ),
        (("--module", "nothing"), "--module: expected PACKAGE.MODULE:CALLABLE, got 'nothing'"),
        (("--module", ":tied"), "--module: expected PACKAGE.MODULE:CALLABLE, got ':tied'"),
        (("--module", "no_such_package:f"), "ModuleNotFoundError: No module named 'no_such_pack"),
        (
            ("--module", "estimated_models:missing"),
            "AttributeError: module 'estimated_models' has no",
        ),
        (
            ("--module", "estimated_models:fails"),
            "--module estimated_models:fails: ValueError: no such size",
        ),
        (("--module", "estimated_models:number"), "TypeError: 'int' object is not callable"),
        (("--module", "estimated_models:gives_a_number"), "expected a torch.nn.Module, got int"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys, modules, arguments, says):
    world = () if "--world" in arguments else ("--world", 2)
    code, out, err = estimate(capsys, *arguments, *world)
    assert (code, out) == (2, "")
    assert err.startswith("ringcomm estimate: ") and len(err.splitlines()) == 1
    assert says in err


def test_the_share_of_a_rank_under_model_parallelism(capsys):
    divided = ("--tp", 2, "--pp", 3, "--micro-batches", 8, "--world", 4, "--json")
    code, out, _ = estimate(capsys, *GPT2, *divided)
    told = json.loads(out)
    shape = Transformer(12, 768, 12, 1024, 50257)
    parallel = ModelParallel(tp=2, pp=3, micro_batches=8)
    assert code == 0 and told["world"] == 4
    assert (
        told["stages"][0]["model_state_bytes"]["params"] == 2 * stage_model(shape, parallel).total
    )
    assert told["activations"] == asdict(stage_activations(shape, 1, parallel))
    assert "12 layers of width 768 / (tp 2 x pp 3)" in estimate(capsys, *GPT2, *divided[:-1])[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--params", "many", "--world", 2), "such as 7.5B, 125M or 1.3e9, got 'many'"),
        (("--params", "1M", "--world", 2, "--stage", 4), "--stage: invalid choice"),
        (("--params", "1M", "--module", "a:b", "--world", 2), "not allowed with argument --params"),
        (("--params", "1M", "--world", 2, "--budget-gb", "nan"), "a number above 0, got 'nan'"),
        (("--params", "1M", "--world", 2, "--peak-tflops", "x"), "a number above 0, got 'x'"),
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
