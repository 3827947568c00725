# SPDX-License-Identifier: Apache-2.0
"""The training example's model and text; ``tests/cli/test_train*.py`` run the example."""

from __future__ import annotations

import math

import pytest
import torch

from ringcomm.errors import ArgumentError
from ringcomm.examples import corpus as corpus_module
from ringcomm.examples.corpus import draw, read_corpus
from ringcomm.examples.train_gpt import (
    GPT,
    ModelConfig,
    rotary_angles,
    rotate,
)

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
    targets = torch.full((1, 8), -100)  # cross-entropy ignores these positions
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


def test_sequence_beyond_the_context_is_refused():
    tokens = torch.zeros(1, 9, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="9 tokens, the context is 8"):
        model()(tokens, tokens)


@pytest.mark.parametrize("sizes", [(0, 1, 1, 8), (16, 1, 3, 8), (16, 1, 2, -1), (16, 1, 0, 8)])
def test_impossible_model_is_refused(sizes):
    told = "--width must be a multiple of 2 x --heads|--(width|heads|context) must be at least 1"
    with pytest.raises(ArgumentError, match=told):
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

    kept_all = gradients(count(model()))
    assert len(calls) == SMALL.depth
    calls.clear()
    recomputing = count(model())
    recomputing.checkpoints_activations = True
    assert all(map(torch.equal, gradients(recomputing), kept_all))
    assert len(calls) == 2 * SMALL.depth


def test_loss_of_16_bit_weights_is_fp32():
    tokens = torch.randint(256, (2, 8))
    assert model().bfloat16()(tokens, tokens).dtype is torch.float32


# The text.


def text_of(corpus):
    return bytes(torch.cat((corpus.train, corpus.held_out)).tolist())


def test_folder_gives_its_text_files_in_order(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"second" * 50)
    (tmp_path / "a.txt").write_bytes(b"first ")
    (tmp_path / "binary").write_bytes(b"x\0y")
    (tmp_path / ".hidden").write_bytes(b"no")
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "c.md").write_bytes(b" third")
    corpus = read_corpus(str(tmp_path), 1)
    assert text_of(corpus) == b"first " + b"second" * 50 + b" third"
    assert "3 file(s) of" in corpus.source


def test_files_that_the_kernel_makes_up_are_no_text(tmp_path):
    # Reading /proc/kmsg would wait for the kernel; this file ends, and has no size either.
    (tmp_path / "a").symlink_to("/proc/self/status")
    (tmp_path / "b").write_bytes(b"text" * 50)
    assert text_of(read_corpus(str(tmp_path), 1)) == b"text" * 50


def test_text_is_cut_at_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "LIMIT_BYTES", 100)
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 60)
    assert text_of(read_corpus(str(tmp_path), 1)) == b"a" * 60 + b"b" * 40


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing", None, "no such file or folder"),
        ("x" * 300, None, "cannot be read: File name too long"),
        ("small", b"tiny", "holds 4 bytes of text; this context needs 81"),
        ("binary", b"\0" * 5000, "holds 0 bytes of text"),
    ],
)
def test_unusable_data_is_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ArgumentError, match=message):
        read_corpus(str(tmp_path / name), 1)


def test_smallest_corpus_gives_batches(tmp_path):
    context = 32
    (tmp_path / "text").write_bytes(b"x" * (2 * (context + 1) * 20 + 1))
    corpus = read_corpus(str(tmp_path / "text"), context)
    tokens, targets = draw(corpus.held_out, 1, 0, (3, context))
    assert tokens.shape == targets.shape == (3, context)
    (tmp_path / "text").write_bytes(b"x" * (2 * (context + 1) * 20))
    with pytest.raises(ArgumentError, match="of text; this context needs 1321"):
        read_corpus(str(tmp_path / "text"), context)


def test_batch_is_text_with_the_next_byte_as_target_and_depends_on_the_step():
    text = torch.arange(1, 250, dtype=torch.uint8).repeat(50)
    tokens, targets = draw(text, 3, 5, (4, 16))
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens % 249 + 1, targets)
    again, _ = draw(text, 3, 5, (4, 16))
    other, _ = draw(text, 3, 6, (4, 16))
    assert torch.equal(tokens, again)
    assert not torch.equal(tokens, other)
