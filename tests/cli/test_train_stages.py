# SPDX-License-Identifier: Apache-2.0
"""``ringcomm train`` at every stage has the same losses, bit for bit, with any options."""

from __future__ import annotations

import math

import pytest
import torch

from ringcomm.examples.corpus import draw, read_corpus
from ringcomm.examples.train_gpt import GPT, Options
from tests.cli.train_runs import train_all, without_measurements
from tests.memory.disk_folder import skip_unless_disk

STEPS = 5
LOSS_SCALE = 2.0**20  # FP16 gradients overflow at this scale, but not after a few halvings
OPTIONS = {
    "plain": (),
    "accum": ("--accum", 2),
    "clip": ("--accum", 2, "--clip", 0.05),
    "recomputed": ("--checkpoint-activations",),
    "bf16": ("--dtype", "bf16"),
    "fp16": ("--dtype", "fp16", "--loss-scale", LOSS_SCALE, "--tied"),
}
# tests/zero/test_same_bits.py proves that stages train equally with any options.
OPTION_STAGES = {
    "plain": (0, 2, 3),
    "accum": (2,),
    "clip": (2,),
    "recomputed": (3,),
    "bf16": (2,),
    "fp16": (3,),
}


def common_options(folder):
    """Returns the options of all runs, and writes their text."""
    text = folder / "text"
    text.write_text("".join(f"{n} bottles of beer on the wall\n" for n in range(2000)))
    return ("--data", text, "--steps", STEPS, "--depth", 2)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return tmp_path_factory.mktemp("runs") / "text"


@pytest.fixture(scope="module")
def trained(text):
    """Outcomes and printed text, by the options' name and stage."""
    folder = text.parent
    common = common_options(folder)
    runs: dict[str, tuple[object, ...]] = {
        f"{name} {stage}": (*common, "--stage", stage, *options)
        for name, options in OPTIONS.items()
        for stage in OPTION_STAGES[name]
    }
    records, printed = train_all(folder, runs)
    outcomes = {name: without_measurements(record) for name, record in records.items()}
    return outcomes, printed


def test_every_stage_trains_alike(trained):
    outcomes, printed = trained
    for stage in (2, 3):
        assert outcomes[f"plain {stage}"] == outcomes["plain 0"]
        assert f"stage {stage}, dtype " in printed[f"plain {stage}"]


def test_training_lowers_the_loss(trained):
    usual = trained[0]["plain 0"]
    assert len(usual["losses"]) == STEPS
    assert usual["losses"][-1] < usual["losses"][0]
    assert usual["held_out_after"] < usual["held_out_before"]
    assert (usual["skipped_steps"], usual["loss_scale"], usual["first_step"]) == (0, None, 0)


def test_micro_batches_of_a_batch_are_the_batch(trained):
    usual, accum = trained[0]["plain 2"], trained[0]["accum 2"]
    assert accum != usual  # the sums round differently
    assert accum["losses"] == pytest.approx(usual["losses"], abs=1e-5)


def losses_of_torch(text, clip=None):
    """Returns the losses of one process with torch's optimizer, on the same batches."""
    options = Options(width=32, depth=2, heads=2, context=32, batch=4, steps=STEPS, data=str(text))
    torch.manual_seed(options.seed)
    gpt, corpus = GPT(options), read_corpus(options.data, options.context)
    optimizer = torch.optim.AdamW(gpt.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    # There is almost no warm-up: the first of five steps already has the peak rate.
    rates = [0.1 + 0.9 * (1 + math.cos(math.pi * n / (STEPS - 1))) / 2 for n in range(STEPS - 1)]
    losses = []
    for index, rate in enumerate([1.0, *rates]):
        optimizer.param_groups[0]["lr"] = options.learning_rate * rate
        batch = draw(corpus.train, options.seed, index, (options.batch, options.context))
        loss = gpt(*batch)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(gpt.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_losses_are_those_of_one_process(trained, text):
    """Both optimizers use one formula, but round differently."""
    outcomes, _ = trained
    assert outcomes["plain 0"]["losses"] == pytest.approx(losses_of_torch(text), abs=1e-5)
    clipped = losses_of_torch(text, clip=0.05)
    assert outcomes["clip 2"]["losses"] == pytest.approx(clipped, abs=1e-5)
    assert abs(clipped[-1] - outcomes["accum 2"]["losses"][-1]) > 1e-4


def test_layers_computed_again_change_no_bit(trained):
    outcomes, printed = trained
    assert outcomes["recomputed 3"] == outcomes["plain 0"]
    assert "checkpoint_activations True" in printed["recomputed 3"]


def test_16_bits_train_nearly_as_fp32(trained):
    outcomes, _ = trained
    assert outcomes["bf16 2"] != outcomes["plain 2"]
    assert outcomes["bf16 2"]["losses"] == pytest.approx(outcomes["plain 2"]["losses"], abs=0.05)


def test_overflows_are_skipped_and_reported(trained):
    outcomes, printed = trained
    fp16 = outcomes["fp16 3"]
    skipped = fp16["skipped_steps"]
    assert 0 < skipped < STEPS
    assert fp16["loss_scale"] == LOSS_SCALE / 2**skipped
    assert f"{skipped} of {STEPS} steps were skipped for an overflow" in printed["fp16 3"]
    assert fp16["held_out_after"] < fp16["held_out_before"]


def test_state_and_parameters_on_a_disk_train_alike(tmp_path, trained):
    skip_unless_disk(tmp_path)
    common = common_options(tmp_path)
    runs = {
        "state": (*common, "--offload-state", tmp_path),
        "both": (*common, "--stage", 3, "--offload-state", tmp_path, "--offload-params", tmp_path),
    }
    records, _ = train_all(tmp_path, runs)
    for record in records.values():
        assert without_measurements(record) == trained[0]["plain 0"]
