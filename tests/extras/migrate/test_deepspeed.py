# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's configurations: the keys that are read, those refused, and training with them."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
import torch

from ringcomm import zero
from ringcomm.errors import ArgumentError, UnsupportedError
from ringcomm.extras.migrate.settings import (
    ALIASES,
    DEEPSPEED_KEYS,
    MAPPED,
    NO_EFFECT,
    OTHER_OPTIMIZERS,
    SCHEDULERS,
    UNSUPPORTED,
    section_of,
)
from ringcomm.optim import Adam, AdamW, AdamWOptions, LossScaleOptions, LossScaler
from ringcomm.optim.options import Compression
from ringcomm.zero.stages.options import DEFAULT_BUCKET_ELEMS
from tests.comm.conftest import worlds
from tests.zero.models import assert_same_bits, new_model, text

__all__ = ["worlds"]
Tensor = torch.Tensor
MICRO: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2}
ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}


def read(world_size: int = 2, **config: Any) -> Any:
    return zero.from_deepspeed({**MICRO, **config}, world_size=world_size)


# ---- training -----------------------------------------------------------------------------------


def train(comm, base: torch.nn.Module, setup: Any, by_hand: Any = None) -> dict[str, Tensor]:
    """Trains with a setup, or with the options and optimizer of ``by_hand`` in its place."""
    module: Any = deepcopy(base)
    options, build = by_hand or (setup.options, None)
    zero.shard(module, setup.stage, comm=comm, options=options)
    scaler = setup.build_loss_scaler()
    if build is None:
        optimizer = setup.build_optimizer(module.parameters(), loss_scaler=scaler)
        scheduler = setup.build_scheduler(optimizer)
    else:
        optimizer, scheduler = build(module.parameters())
        scaler = optimizer._setting.loss_scaler
    for turn in range(4):
        for number in range(setup.accumulation_steps):
            loss = module(*text(comm, 2 * turn + number)) / setup.accumulation_steps
            (loss if scaler is None else scaler.scale(loss)).backward()
        optimizer.clip_grad_norm_(setup.clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return zero.full_state_dict(module)


def _bf16_by_hand(params: Any) -> Any:
    adds = AdamWOptions(check_finite=True, accumulate_dtype=None)
    optimizer = AdamW(params, lr=1e-2, weight_decay=0.1, options=adds)
    # A linear warmup to 1e-2 in 4 steps; DeepSpeed's iteration 0 is torch's epoch 1.
    rates = (0.0, 0.0, 0.25, 0.5, 0.75)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: rates[epoch])


def _fp16_by_hand(params: Any) -> Any:
    scaler = LossScaler(LossScaleOptions(2.0**10, growth_interval=2, hysteresis=1, min_scale=4.0))
    optimizer = Adam(params, lr=1e-2, weight_decay=0.1, loss_scaler=scaler)
    return optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)


BF16: dict[str, Any] = {
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "bf16", "buffer_dtype": "bf16"},
    "optimizer": ADAMW,
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": 1e-2},
    },
}
FP16: dict[str, Any] = {
    "fp16": {
        "enabled": True,
        "initial_scale_power": 10,
        "loss_scale_window": 2,
        "hysteresis": 1,
        "min_loss_scale": 4,
    },
    "data_types": {"buffer_dtype": "fp16"},
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False, "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 1e-2, "warmup_num_steps": 2, "warmup_max_lr": 1e-2},
    },
}
HALF = torch.float16
BY_HAND = {
    "bf16": (
        BF16,
        zero.Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16, cast_inputs=False),
        _bf16_by_hand,
    ),
    "fp16": (FP16, zero.Precision(HALF, buffer=HALF, cast_inputs=False), _fp16_by_hand),
}


@pytest.mark.parametrize(("kind", "stage"), [("bf16", 1), ("bf16", 3), ("fp16", 0), ("fp16", 2)])
def test_training_is_that_of_options_written_by_hand(worlds, kind, stage):
    config, precision, build = BY_HAND[kind]
    setup = read(
        **config,
        gradient_accumulation_steps=2,
        gradient_clipping=0.5,
        zero_optimization={"stage": stage, "reduce_bucket_size": 5000, "overlap_comm": True},
    )
    options = zero.ZeroOptions(precision=precision, bucket_elems=4608, overlap=True)
    base = new_model("gpt")
    found = worlds(2).run(train, base, setup)
    wanted = worlds(2).run(train, base, setup, (options, build))
    for mine, theirs in zip(found, wanted, strict=True):
        assert_same_bits(mine, theirs)
    changed = found[0]["embed.weight"] != base.state_dict()["embed.weight"].to(precision.param)
    assert changed.any()


def test_a_file_is_read_as_the_dict_is(tmp_path):
    config = {**MICRO, **BF16, "zero_optimization": {"stage": 1}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert zero.from_deepspeed(path) == zero.from_deepspeed(str(path)) == read(1, **config)


# ---- what is read -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "micro", "steps", "found"),
    [
        (24, 2, 4, (24, 2, 4)),
        (24, 2, None, (24, 2, 4)),
        (24, None, 2, (24, 4, 2)),
        (24, None, None, (24, 8, 1)),
        (None, 2, 4, (24, 2, 4)),
        (None, 2, None, (6, 2, 1)),
        (25, 2, None, "2 x 4 x 3 = 24"),
        (24, 2, 3, "2 x 3 x 3 = 18"),
        (2, None, None, "0 x 1 x 3 = 0"),
        (2, 2, None, "2 x 0 x 3 = 0"),
        (None, None, 2, "got neither"),
    ],
)
def test_batches_are_divided_as_deepspeed_divides_them(batch, micro, steps, found):
    names = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    )
    given = zip(names, (batch, micro, steps), strict=True)
    config = {name: value for name, value in given if value is not None}
    if isinstance(found, str):
        with pytest.raises(ArgumentError, match=found):
            zero.from_deepspeed(config, world_size=3)
        return
    setup = zero.from_deepspeed(config, world_size=3)
    assert (setup.train_batch_size, setup.micro_batch_size, setup.accumulation_steps) == found


def test_the_ranks_are_those_of_the_communicator(worlds):
    config = {"train_batch_size": 12}
    for setup in worlds(3).run(lambda comm: zero.from_deepspeed(config, comm=comm)):
        assert setup.micro_batch_size == 4


def test_defaults_are_those_of_deepspeed():
    setup = read()
    assert (setup.stage, setup.clip, setup.schedule, setup.loss_scale) == (0, None, None, None)
    assert setup.options == zero.ZeroOptions(precision=zero.Precision(cast_inputs=False))
    assert setup.optimizer_options == AdamWOptions()
    assert setup.notes.keys() == MICRO.keys()
    scale = read(fp16={"enabled": True}).loss_scale
    assert scale == LossScaleOptions(2.0**16, growth_interval=1000, hysteresis=2)
    assert read(bf16={"enabled": True}).optimizer_options.check_finite


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"stage": 3}, {"params": "world"}),
        ({"stage": 3, "zero_hpz_partition_size": 8}, {"params": "node"}),
        ({"stage": 2, "zero_hpz_partition_size": 1}, {"params": "node"}),
        (
            {"stage": 3, "zero_quantized_weights": True},
            {"compression": Compression(parameters="int8")},
        ),
        ({"stage": 2, "zero_quantized_weights": True}, {"compression": Compression()}),
        ({"stage": 3, "prefetch_bucket_size": 0}, {"prefetch": 0}),
        ({"stage": 3, "stage3_prefetch_bucket_size": 5e7}, {"prefetch": 1}),
        ({"overlap_comm": False}, {"overlap": False}),
        ({"reduce_bucket_size": 5e8}, {"bucket_elems": DEFAULT_BUCKET_ELEMS}),
        ({"reduce_bucket_size": 100_000}, {"bucket_elems": 195 * 512}),
        ({"reduce_bucket_size": 10}, {"bucket_elems": 512}),
    ],
)
def test_zero_is_mapped(config, expected):
    options = read(zero_optimization=config).options
    assert {name: getattr(options, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("optimizer", "kind", "decay"),
    [
        ({"type": "Adam"}, AdamW, 0.0),
        ({"type": "adamw"}, AdamW, 0.0),
        ({"type": "AdamW", "params": {"torch_adam": True}}, AdamW, 0.01),
        ({"type": "Adam", "params": {"torch_adam": True}}, AdamW, 0.01),
        ({"type": "Adam", "params": {"adam_w_mode": False, "torch_adam": True}}, Adam, 0.0),
        ({"type": "AdamW", "params": {"adam_w_mode": False}}, AdamW, 0.0),
        ({"type": "Adam", "params": {"weight_decay": 0.3, "bias_correction": True}}, AdamW, 0.3),
    ],
)
def test_adam_is_what_deepspeed_builds(optimizer, kind, decay):
    params = optimizer.setdefault("params", {})
    params |= {"betas": [0.8, 0.95], "eps": 1e-7}
    built = read(optimizer=optimizer).build_optimizer([torch.zeros(2, requires_grad=True)])
    assert type(built) is kind
    assert built.defaults["decoupled_weight_decay"] is (kind is AdamW)
    assert built.defaults["weight_decay"] == decay
    assert (built.defaults["lr"], built.defaults["betas"], built.defaults["eps"]) == (
        1e-3,
        (0.8, 0.95),
        1e-7,
    )


@pytest.mark.parametrize("loss_scale", [128, 0.5])
def test_a_static_scale_stays(loss_scale):
    setup = read(fp16={"enabled": True, "loss_scale": loss_scale})
    scaler = setup.build_loss_scaler()
    for found_inf in (0.0, 1.0, 1.0):
        scaler.update(torch.tensor(found_inf))
        assert scaler.current == loss_scale


@pytest.mark.parametrize(
    ("dtypes", "stage", "reduce", "adds"),
    [
        ({}, 1, None, None),
        ({"grad_accum_dtype": "fp32"}, 1, None, torch.float32),
        ({"grad_accum_dtype": "fp32"}, 2, None, torch.float32),
        ({"grad_accum_dtype": "bf16"}, 2, torch.bfloat16, None),
    ],
)
def test_gradients_add_up_in_the_dtype_that_is_asked(dtypes, stage, reduce, adds):
    setup = read(bf16={"enabled": True}, data_types=dtypes, zero_optimization={"stage": stage})
    assert setup.options.precision.reduce is reduce
    assert setup.optimizer_options.accumulate_dtype is adds


def test_what_a_config_lacks_is_said_when_it_is_built():
    setup = read()
    with pytest.raises(ArgumentError, match="has no optimizer"):
        setup.build_optimizer([])
    with pytest.raises(ArgumentError, match="has no scheduler"):
        setup.build_scheduler(AdamW([torch.zeros(1, requires_grad=True)], comm="alone"))


def test_a_note_says_what_became_of_each_key():
    notes = read(
        steps_per_print=10,
        tensorboard={"enabled": True, "output_path": "logs"},
        zero_optimization={"stage": 1, "stage3_max_live_parameters": "auto", "cpu_offload": False},
    ).notes
    assert notes["zero_optimization.stage"] == "mapped: `stage`"
    assert notes["tensorboard"].startswith("no effect here: ")
    assert notes["zero_optimization.cpu_offload"] == "unsupported, and False does not ask for it"
    assert len(notes) == 6


# ---- what is refused ----------------------------------------------------------------------------

ASKS = {
    "sequence_parallel_size": 2,
    "optimizer.params.bias_correction": False,
    "optimizer.params.max_grad_norm": 1.0,
    "scheduler.params.last_batch_iteration": 100,
    "zero_optimization.offload_param": {"device": "nvme", "nvme_path": "/tmp"},
    "zero_optimization.offload_optimizer": {"device": "cpu", "pin_memory": True},
    "zero_optimization.mics_shard_size": 8,
    "zero_optimization.zenflow": {"topk_ratio": 0.1},
    "zero_optimization.zeropp_loco_param": {"err_beta": 0.8},
    "compile": {"deepcompile": True, "passes": ["autosp"]},
    "tensor_parallel": {"autotp_size": 4},
    "pipeline": {"stages": 2},
    "sparse_attention": {"mode": "fixed"},
    "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}},
    "weight_quantization": {"enabled": True},
}
ASKS_NOTHING: dict[str, Any] = {
    "sequence_parallel_size": 1,
    "optimizer.params.bias_correction": True,
    "optimizer.params.max_grad_norm": 0,
    "scheduler.params.last_batch_iteration": -1,
    "zero_optimization.offload_param": {"device": "none", "pin_memory": True},
    "zero_optimization.offload_optimizer": None,
    "zero_optimization.mics_shard_size": -1,
    "compile": {"deepcompile": False, "backend": "inductor"},
    "tensor_parallel": {"autotp_size": 1},
    "pipeline": {},
    "sparse_attention": None,
    "compression_training": {
        "weight_quantization": {"shared_parameters": {"enabled": False, "quantize_groups": 1}}
    },
    "elasticity": {"enabled": False, "max_train_batch_size": 2000},
}


def config_with(name: str, value: Any) -> dict[str, Any]:
    config: dict[str, Any] = {**MICRO}
    if name.startswith("optimizer."):
        config["optimizer"] = {"type": "Adam"}
    if name.startswith("scheduler."):
        config["scheduler"] = {"type": "WarmupLR"}
    *sections, own = name.split(".")
    inner = config
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[own] = value
    return config


@pytest.mark.parametrize(
    "name", [name for name, key in DEEPSPEED_KEYS.items() if key.fate == UNSUPPORTED]
)
def test_each_unsupported_key_is_refused_if_it_asks_for_something(name):
    switched = name in section_of("switches")
    asks = ASKS.get(name, {"enabled": True} if switched else True)
    with pytest.raises(UnsupportedError) as raised:
        zero.from_deepspeed(config_with(name, asks), world_size=1)
    assert f"\n  {name}: {DEEPSPEED_KEYS[name].text}" in str(raised.value)
    nothing = ASKS_NOTHING.get(name, {"enabled": False} if switched else None)
    setup = zero.from_deepspeed(config_with(name, nothing), world_size=1)
    assert setup.notes[name].startswith("unsupported, and ")


def test_all_unsupported_keys_are_named_at_once():
    with pytest.raises(UnsupportedError, match="3 of the keys") as raised:
        read(
            zero_optimization={"stage": 3, "offload_param": {"device": "cpu"}},
            sparse_gradients=True,
            optimizer={"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 100}},
        )
    for said in ("offload_param: ", "sparse_gradients: ", "optimizer.type 'OneBitAdam': gradients"):
        assert said in str(raised.value)


@pytest.mark.parametrize("kind", [*OTHER_OPTIMIZERS, "SomethingElse"])
def test_other_optimizers_are_refused_by_name(kind):
    with pytest.raises(UnsupportedError, match=f"optimizer.type '{kind}'.*there are adam, adamw"):
        read(optimizer={"type": kind, "params": {"momentum": 0.9}})


OTHER_TYPES: dict[str, tuple[dict[str, Any], Any]] = {
    "SGD": ({"lr": 0.1, "momentum": 0.9, "nesterov": True}, torch.optim.SGD),
    "Adagrad": ({"lr": 0.1, "weight_decay": 0.01}, torch.optim.Adagrad),
}


@pytest.mark.parametrize("kind", OTHER_TYPES)
def test_other_types_step_as_torchs(kind):
    params, torchs = OTHER_TYPES[kind]
    mine, other = (torch.linspace(-1, 1, 9).requires_grad_() for _ in range(2))
    optimizers = [
        read(optimizer={"type": kind, "params": params}).build_optimizer([mine]),
        torchs([other], **params, foreach=False),
    ]
    for step in range(3):
        for param, optimizer in zip((mine, other), optimizers, strict=True):
            param.grad = torch.arange(9.0) - step
            optimizer.step()
    assert torch.equal(mine, other)


def test_lion_has_its_own_defaults():
    setup = read(optimizer={"type": "Lion", "params": {"lr": 1e-4}})
    (group,) = setup.build_optimizer([torch.ones(3, requires_grad=True)]).param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-4, (0.9, 0.99), 0.0)


def test_parameters_of_another_type_are_refused():
    with pytest.raises(ArgumentError, match=r"params.betas: SGD has only lr, momentum"):
        read(optimizer={"type": "SGD", "params": {"betas": [0.9, 0.99]}})


def test_other_schedulers_are_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"scheduler.type 'Linear'.*WarmupCosineLR"):
        read(scheduler={"type": "Linear", "params": {"anything": 1}})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gradient_cliping": 1.0}, "'gradient_cliping' .*nearest .* 'gradient_clipping'"),
        (
            {"zero_optimization": {"overlap_com": True}},
            "'zero_optimization.overlap_com' .* 'zero_optimization.overlap_comm'",
        ),
        ({"optimizer": {"type": "Adam", "params": {"learning_rate": 1}}}, "params.learning_rate"),
        ({"xyzzy": 1}, "none is near it"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "got both"),
        ({"bf16": {}, "bfloat16": {}, "zero_optimization": {"stage": 4}}, "expected 0, 1, 2 or 3"),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, "bf16.enabled: given twice"),
        ({"fp16": True}, "fp16: expected an object, got True"),
        ({"fp16": {"enabled": "yes"}}, "fp16.enabled: expected true or false, got 'yes'"),
        ({"gradient_clipping": -1}, "gradient_clipping: expected a number >= 0, got -1"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping: expected a number >= 0, got nan"),
        ({"gradient_clipping": True}, "expected a number >= 0, got True"),
        ({"train_batch_size": 2.5}, "train_batch_size: expected an integer >= 1, got 2.5"),
        ({"zero_optimization": {"stage": True}}, "stage: expected an integer >= 0, got True"),
        ({"gradient_allreduce_op": "max"}, 'expected "mean" or "sum", got \'max\''),
        ({"optimizer": {"type": 1}}, "optimizer.type: expected a name, got 1"),
        (
            {"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}},
            "betas: expected two numbers",
        ),
        (
            {"data_types": {"grad_accum_dtype": "bf16"}},
            "grad_accum_dtype: expected fp32, got 'bf16'",
        ),
        ({"data_types": {"param_dtype": "int8"}}, "expected fp32, fp16 or bf16, got 'int8'"),
        (
            {"data_types": {"param_dtype": "bf16"}, "fp16": {"enabled": True}},
            "param_dtype: expected the dtype that is enabled, got 'bf16'",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 5}}},
            "total_num_steps: is no parameter of WarmupLR",
        ),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "WarmupDecayLR needs total_num_steps too"),
    ],
)
def test_what_makes_no_sense_is_refused(config, message):
    with pytest.raises(ArgumentError, match=message):
        read(**config)


def test_auto_is_refused_with_what_to_put():
    with pytest.raises(ArgumentError) as raised:
        read(
            train_micro_batch_size_per_gpu="auto",
            zero_optimization={"stage": 2, "reduce_bucket_size": "auto"},
            optimizer={"type": "AdamW", "params": {"lr": "auto"}},
        )
    for said in (
        "train_micro_batch_size_per_gpu: put TrainingArguments.per_device_train_batch_size",
        "zero_optimization.reduce_bucket_size: put a value, or leave the key out",
        "optimizer.params.lr: put TrainingArguments.learning_rate",
    ):
        assert said in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"bf16": {"enabled": true, "enabled": false}}', "'enabled' occurs twice in one object"),
        ('{"gradient_clipping": NaN}', "NaN is not a number in JSON"),
        ('{\n  // of 8 GPUs\n  "train_batch_size": 8}', "line 2 column 3 .*JSON has no comments"),
        ("[1]", r"expected an object, got \[1\]"),
        ("[" * 100_000, "nested too deep"),
        ("", "no JSON"),
        ("\xff", "utf-8"),
    ],
)
def test_a_file_that_is_no_json_object_is_refused(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ArgumentError, match=message):
        zero.from_deepspeed(path)


@pytest.mark.parametrize("config", ["nothing.json", 5])
def test_what_is_no_config_is_refused(config):
    with pytest.raises(ArgumentError, match="from_deepspeed: "):
        zero.from_deepspeed(config)


def test_the_table_is_whole():
    assert {key.fate for key in DEEPSPEED_KEYS.values()} == {MAPPED, NO_EFFECT, UNSUPPORTED}
    assert not DEEPSPEED_KEYS.keys() & ALIASES.keys()
    refused = {name for name, key in DEEPSPEED_KEYS.items() if key.fate == UNSUPPORTED}
    assert {*section_of("off"), *section_of("switches")} <= refused
    assert section_of("auto").keys() <= DEEPSPEED_KEYS.keys()
    optimizers = map(json.loads, section_of("optimizer parameters").values())
    for section, kinds in (("scheduler", SCHEDULERS.values()), ("optimizer", optimizers)):
        names = [name for params in kinds for name in params]
        assert all(DEEPSPEED_KEYS[f"{section}.params.{name}"].fate == MAPPED for name in names)
    # An alias names a key, or a section of keys.
    for name in ALIASES.values():
        assert any(known == name or known.startswith(f"{name}.") for known in DEEPSPEED_KEYS)
    # No section is also a key.
    for name in DEEPSPEED_KEYS:
        assert not any(known.startswith(f"{name}.") for known in DEEPSPEED_KEYS)
