"""``ringcomm train`` at every stage: the same losses, to the bit, whatever else is asked for."""

from __future__ import annotations

import pytest
import torch

from ringcomm import Disk, zero
from ringcomm.examples.gpt.config import STAGES, ModelConfig
from ringcomm.examples.gpt.model import GPT
from ringcomm.zero.estimate import BytesPerElement
from ringcomm.zero.estimate_model import ModelElems
from ringcomm.zero.estimate_tier import params_in_tier, state_in_tier
from tests.cli.train_runs import train_all, without_measurements
from tests.memory.disk_folder import skip_unless_disk

STEPS = 5
LOSS_SCALE = 2.0**20  # FP16 gradients overflow at it, and do not at a few halves of it
OPTIONS = {
    "plain": (),
    "accum": ("--accum", 2),
    "clip": ("--accum", 2, "--clip", 0.05),
    "recomputed": ("--checkpoint-activations",),
    "bf16": ("--dtype", "bf16"),
    "fp16": ("--dtype", "fp16", "--loss-scale", LOSS_SCALE, "--tied"),
}
# Options change what a micro-batch and a step are, stages where things lie: with each of them,
# stage 0 and one that shards gradients at least.
OPTION_STAGES = {
    "plain": STAGES,
    "accum": (0, 2),
    "clip": (0, 2, 3),
    "recomputed": (0, 3),
    "bf16": (0, 2),
    "fp16": (0, 1, 3),
}
TORCH = {
    "ddp": ("--engine", "ddp"),
    "ddp gloo": ("--engine", "ddp", "--backend", "gloo"),
    "ddp clip": ("--engine", "ddp", *OPTIONS["clip"]),
    "fsdp2 clip": ("--engine", "fsdp2", *OPTIONS["clip"]),
    "fsdp2 recomputed": ("--engine", "fsdp2", "--backend", "gloo", *OPTIONS["recomputed"]),
}


def common_options(folder):
    """Of all runs; writes their text."""
    text = folder / "text"
    text.write_text("".join(f"{n} bottles of beer on the wall\n" for n in range(2000)))
    return ("--data", text, "--steps", STEPS, "--depth", 2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Outcomes and printed words, by name of the options and stage."""
    folder = tmp_path_factory.mktemp("runs")
    common = common_options(folder)
    runs: dict[str, tuple[object, ...]] = {
        f"{name} {stage}": (*common, "--stage", stage, *options)
        for name, options in OPTIONS.items()
        for stage in OPTION_STAGES[name]
    }
    runs |= {name: (*common, *options) for name, options in TORCH.items()}
    records, printed = train_all(folder, runs)
    outcomes = {name: without_measurements(record) for name, record in records.items()}
    return outcomes, printed


@pytest.mark.parametrize(
    ("name", "stage"), [(name, stage) for name in OPTIONS for stage in OPTION_STAGES[name][1:]]
)
def test_every_stage_trains_alike(trained, name, stage):
    outcomes, printed = trained
    assert outcomes[f"{name} {stage}"] == outcomes[f"{name} 0"]
    assert f"engine  zero, stage {stage}, " in printed[f"{name} {stage}"]


def test_training_lowers_the_loss(trained):
    plain = trained[0]["plain 0"]
    assert len(plain["losses"]) == STEPS
    assert plain["losses"][-1] < plain["losses"][0]
    assert plain["held_out_after"] < plain["held_out_before"]
    assert (plain["skipped_steps"], plain["loss_scale"], plain["first_step"]) == (0, None, 0)


def test_micro_batches_of_a_batch_are_the_batch(trained):
    plain, accum = trained[0]["plain 2"], trained[0]["accum 2"]
    assert accum != plain  # the sums round otherwise
    assert accum["losses"] == pytest.approx(plain["losses"], abs=1e-5)


def test_clipping_shortens_the_first_steps_and_is_what_torch_does(trained):
    outcomes, printed = trained
    clip = outcomes["clip 2"]
    assert clip["losses"][0] == outcomes["accum 2"]["losses"][0]
    assert abs(clip["losses"][-1] - outcomes["accum 2"]["losses"][-1]) > 1e-4
    assert "in 2 micro-batches, gradients clipped to a norm of 0.05" in printed["clip 2"]
    for name in ("ddp clip", "fsdp2 clip"):
        assert outcomes[name]["losses"] == pytest.approx(clip["losses"], abs=1e-6)


def test_layers_computed_again_change_no_bit(trained):
    outcomes, printed = trained
    assert outcomes["recomputed 0"] == outcomes["plain 0"]
    assert "layers computed again in backward" in printed["recomputed 3"]
    losses = outcomes["fsdp2 recomputed"]["losses"]
    assert losses == pytest.approx(outcomes["plain 0"]["losses"], abs=1e-6)


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


def test_ddp_on_gloo_is_ddp_on_ringcomm_to_the_bit(trained):
    outcomes, printed = trained
    assert outcomes["ddp gloo"] == outcomes["ddp"]
    assert printed["ddp gloo"].startswith("ranks   2 on gloo, ")
    # Both optimizers follow the same formula, and round it otherwise.
    assert outcomes["ddp"]["losses"] == pytest.approx(outcomes["plain 0"]["losses"], abs=1e-6)


# Parameters, at the stage where they can be.
ON_DISK = ("--stage", 3, "--params-buffer-mib", 1, "--params-on")


def test_state_on_a_disk_trains_alike_and_is_reported(tmp_path):
    """Bytes of a step as the estimate has them; steps around saves are left out."""
    skip_unless_disk(tmp_path)
    common = (*common_options(tmp_path), "--width", 128)
    on_disk = (*common, "--state-on", tmp_path, "--state-buffer-mib", 1)
    runs = {
        "memory": (*common, "--stage", 1),
        "1": (*on_disk, "--stage", 1, "--memory"),
        "3": (*on_disk, "--stage", 3, "--state-resident-mib", 100),
        "params": (*common, *ON_DISK, tmp_path, "--memory"),
        "saves": (*on_disk, "--save", tmp_path / "saved", "--save-every", 2),
    }
    records, printed = train_all(tmp_path, runs)
    for record in records.values():
        assert without_measurements(record) == without_measurements(records["memory"])
    assert records["memory"]["outcome"]["disk"] is None
    model = ModelElems.of_module(GPT(ModelConfig(128, 2, 2, 32)))
    disk = Disk(tmp_path, 1 << 20)
    each = BytesPerElement.of(torch.float32)
    told = state_in_tier(model, 1, 2, each, zero.ZeroOptions(), disk)
    for use in records["1"]["outcome"]["disk"]:
        assert use["file_bytes"] == told.stored
        assert use["steps"] == STEPS - 2
        for what in ("read_bytes", "written_bytes"):
            # On a busy machine the last transfers may be seen a step later.
            assert abs(use[what] - use["steps"] * told.moved) <= told.behind
        assert min(use["reading_s"], use["writing_s"]) > 0
    assert f"state   on a disk, in {tmp_path}" in printed["1"]
    assert f"state on disk {told.stored / 1e6:.1f} MB; a step reads " in printed["1"]
    assert f"closed form   {(8 * model.total + (1 << 20)) / 1e6:.1f} MB of model" in printed["1"]
    # All of it is resident; beside a save, at which buffers are read, one step of three is left.
    assert [each["file_bytes"] for each in records["3"]["outcome"]["disk"]] == [0, 0]
    assert "state on disk 0.0 MB; a step reads 0.0 MB and writes 0.0 MB, on" in printed["3"]
    assert [each["steps"] for each in records["saves"]["outcome"]["disk"]] == [1, 1]
    moved = params_in_tier(model, 2, each, zero.ZeroOptions(), disk)
    for use in records["params"]["outcome"]["disk"]:
        # All of them fit into the buffers.
        assert use["file_bytes"] == moved.stored
        assert use["read_bytes"] == moved.read == 0
        assert abs(use["written_bytes"] - use["steps"] * moved.written) <= moved.behind
    assert f"params  on a disk, in {tmp_path}" in printed["params"]
    assert f"parameters on disk {moved.stored / 1e6:.1f} MB; a step reads " in printed["params"]
