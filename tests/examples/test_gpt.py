"""The model of the training commands."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist

from ringcomm import zero
from ringcomm.errors import ArgumentError
from ringcomm.examples.gpt.config import EngineConfig, ModelConfig, TrainConfig
from ringcomm.examples.gpt.engines import TrainingGroup, build_engine
from ringcomm.examples.gpt.model import GPT, rotary_angles, rotate

SMALL = ModelConfig(width=16, depth=2, heads=2, context=8)


def model(config=SMALL):
    torch.manual_seed(0)
    return GPT(config)


def test_untrained_loss_is_that_of_a_guess():
    tokens = torch.randint(256, (4, 8))
    assert model()(tokens, tokens).item() == pytest.approx(math.log(256), abs=0.1)


def test_targets_do_not_reach_earlier_positions():
    gpt = model()
    embedded = []
    gpt.embed.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    tokens = torch.randint(256, (1, 8))
    targets = torch.full((1, 8), -100)  # cross-entropy leaves these positions out
    targets[0, 4] = 7
    (gradient,) = torch.autograd.grad(gpt(tokens, targets), embedded)
    reached = gradient[0].abs().sum(dim=-1) > 0
    assert reached.tolist() == [True] * 5 + [False] * 3


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    cos, sin = rotary_angles(context=8, head_width=4)
    query, key = torch.randn(4), torch.randn(4)
    queries = rotate(query.expand(1, 1, 8, 4), cos, sin)[0, 0]
    keys = rotate(key.expand(1, 1, 8, 4), cos, sin)[0, 0]
    torch.testing.assert_close(queries.norm(dim=-1), query.norm().expand(8))
    products = queries @ keys.T
    torch.testing.assert_close(products.diagonal(-2), products[2, 0].expand(6))


def test_tied_weights_are_one_parameter():
    tied = model(ModelConfig(16, 2, 2, 8, tied=True))
    assert tied.head.weight is tied.embed.weight
    assert model().parameter_elems - tied.parameter_elems == 256 * 16


def test_sequence_beyond_the_context_is_refused():
    tokens = torch.zeros(1, 9, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="9 tokens, the context is 8"):
        model()(tokens, tokens)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 1, 8), "width must be at least 1, got 0"),
        ((16, 1, 3, 8), "multiple of 2 x heads"),
        ((16, 1, 2, -1), "context must be at least 1"),
    ],
)
def test_impossible_model_is_refused(sizes, message):
    with pytest.raises(ArgumentError, match=message):
        ModelConfig(*sizes)


def gradients(gpt):
    tokens = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(1))
    gpt(tokens, tokens).backward()
    return [parameter.grad for parameter in gpt.parameters()]


def test_recomputed_layers_give_the_same_gradients_and_run_twice():
    calls = []

    def count(gpt):
        for block in gpt.blocks:
            block.register_forward_pre_hook(lambda *_: calls.append(1))
        return gpt

    plain = gradients(count(model()))
    assert len(calls) == SMALL.depth
    calls.clear()
    recomputing = count(model())
    recomputing.checkpoints_activations = True
    assert all(map(torch.equal, gradients(recomputing), plain))
    assert len(calls) == 2 * SMALL.depth


def test_loss_of_16_bit_weights_is_fp32():
    tokens = torch.randint(256, (2, 8))
    assert model().bfloat16()(tokens, tokens).dtype is torch.float32


def test_batch_must_divide_among_the_ranks_and_micro_batches():
    config = TrainConfig(SMALL, batch=12, steps=1, learning_rate=0.1, seed=0)
    assert config.micro_sequences(3) == 4
    with pytest.raises(ArgumentError, match="12 sequences does not divide among 5 ranks; choose"):
        config.micro_sequences(5)
    config = TrainConfig(SMALL, batch=12, steps=1, learning_rate=0.1, seed=0, accum=2)
    assert config.micro_sequences(3) == 2
    with pytest.raises(ArgumentError, match=r"12 .* among 4 ranks x 2 micro-batches; .* of 8"):
        config.micro_sequences(4)


def test_configuration_survives_the_way_to_the_ranks():
    config = TrainConfig(SMALL, batch=12, steps=1, learning_rate=0.1, seed=0, accum=2, clip=0.5)
    assert TrainConfig.from_plain(json.loads(json.dumps(asdict(config)))) == config


def test_the_engine_shares_over_nodes_as_it_is_asked(monkeypatch):
    asked = []

    def spying(*arguments, shard=zero.shard, **named):
        asked.append(named["options"])
        return shard(*arguments, **named)

    monkeypatch.setattr(zero, "shard", spying)
    dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for params, state in ((None, None), ("world", None), (None, "node")):
            config = EngineConfig(stage=3, params=params, state=state)
            build_engine(model(), config, TrainingGroup.of(config, 0))
    finally:
        dist.destroy_process_group()
    shared = [(options.params, options.state) for options in asked]
    assert shared == [("node", "world"), ("world", "world"), ("node", "node")]
