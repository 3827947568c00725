"""Activations of a transformer, against the papers and against what autograd saves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from ringcomm import Disk, zero
from ringcomm.errors import ArgumentError
from ringcomm.memory.scratch import PAGE_BYTES
from ringcomm.zero.estimate_activations import (
    ActivationBytes,
    attention_core_bytes,
    checkpoint_working_bytes,
    layer_bytes,
)
from ringcomm.zero.estimate_model import Transformer
from ringcomm.zero.estimate_model_parallel import ModelParallel, stage_activations
from tests.memory.disk_folder import skip_unless_disk

SHAPE = Transformer(layers=3, width=24, heads=4, context=10, vocab=50)
MICRO_BATCH = 2
ALONE = ModelParallel()
# Korthikanti et al. (2022), table 3: GPT-3 and Megatron-Turing NLG.
GPT3 = Transformer(layers=96, width=12288, heads=96, context=2048, vocab=51200)
MT_NLG = Transformer(layers=105, width=20480, heads=128, context=2048, vocab=51200)


class Layer(nn.Module):
    """The layer that Korthikanti et al. draw in figure 2, with its three dropouts."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps x [batch, context, width] to the same shape."""
        x = x + dropout(self.project_out(self.attention(self.norms[0](x))))
        inner = nn.functional.gelu(self.expand(self.norms[1](x)))
        return x + dropout(self.contract(inner))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, width = x.shape
        split = self.project_in(x).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        shares = dropout((query @ key.transpose(-1, -2)).softmax(dim=-1))
        return (shares @ value).transpose(1, 2).reshape(batch, context, width)


def dropout(x: torch.Tensor) -> torch.Tensor:
    """With a mask of one byte per element, as on a GPU."""
    return torch.native_dropout(x, 0.1, train=True)[0]


def saved_bytes(layer: nn.Module, x: torch.Tensor) -> int:
    """Returns the bytes that autograd keeps of a forward, without parameters and norms' means."""
    params = {param.data_ptr() for param in layer.parameters()}
    kept = {}

    def keep(tensor):
        if tensor.data_ptr() not in params and tensor.shape[-1] != 1:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_is_what_autograd_saves(dtype):
    layer = Layer(SHAPE).to(dtype)
    x = torch.randn(MICRO_BATCH, SHAPE.context, SHAPE.width, dtype=dtype, requires_grad=True)
    assert saved_bytes(layer, x) == layer_bytes(SHAPE, MICRO_BATCH, dtype.itemsize)


def test_equation_1_of_korthikanti():
    s, b, h, a = SHAPE.context, MICRO_BATCH, SHAPE.width, SHAPE.heads
    assert layer_bytes(SHAPE, b) * h == s * b * h * (34 * h + 5 * a * s)
    assert attention_core_bytes(SHAPE, b) == 5 * a * s**2 * b


@pytest.mark.parametrize(("shape", "per_34"), [(GPT3, 80), (MT_NLG, 64)])
def test_the_attention_core_of_large_models(shape, per_34):
    """5 a s / h is 80 for GPT-3 and 64 for MT-NLG (section 5)."""
    rest = layer_bytes(shape, 1) - attention_core_bytes(shape, 1)
    assert attention_core_bytes(shape, 1) * 34 == rest * per_34


def test_checkpointing():
    s, b, h, a, v = SHAPE.context, MICRO_BATCH, SHAPE.width, SHAPE.heads, SHAPE.vocab
    layer, ends = 34 * s * b * h + 5 * a * s**2 * b, 5 * s * b * h + 4 * s * b * v
    none, selective, full = (
        stage_activations(SHAPE, b, ALONE, checkpointing)
        for checkpointing in ("none", "selective", "full")
    )
    assert (none.layers, none.recomputed, none.ends) == (3 * layer, 0, ends)
    assert (selective.layers, selective.recomputed) == (3 * 34 * s * b * h, 5 * a * s**2 * b)
    assert (full.layers, full.recomputed) == (3 * 2 * s * b * h, layer)
    assert selective.ends == full.ends == ends
    assert none.total == 3 * layer + ends


@pytest.mark.parametrize(("every", "checkpoints", "again"), [(1, 3, 1), (2, 2, 2), (5, 1, 3)])
def test_fewer_checkpoints_recompute_more(every, checkpoints, again):
    told = stage_activations(SHAPE, MICRO_BATCH, ALONE, "full", every)
    tokens = SHAPE.context * MICRO_BATCH
    assert told.layers == 2 * tokens * SHAPE.width * checkpoints
    assert told.recomputed == again * layer_bytes(SHAPE, MICRO_BATCH)


def test_checkpoints_of_zero_infinity():
    """Equation 3: 2 bsz seq hd nl / ci."""
    told = stage_activations(GPT3, 32, ALONE, "full", every=4)
    assert told.layers * 4 == 2 * 32 * 2048 * 12288 * 96
    working = checkpoint_working_bytes(GPT3, 32, every=4)
    assert working == 32 * 2048 * 4 * (16 * 12288 + 2 * 96 * 2048)
    assert working < told.recomputed


def test_activations_of_four_bytes():
    s, b, h, a, v = SHAPE.context, MICRO_BATCH, SHAPE.width, SHAPE.heads, SHAPE.vocab
    told = stage_activations(SHAPE, b, ALONE, "none", elem_bytes=4)
    assert told.layers == 3 * (66 * s * b * h + 9 * a * s**2 * b)
    assert told.ends == 9 * s * b * h + 4 * s * b * v


def test_what_a_disk_has_of_them_is_what_runs_move(tmp_path):
    """Layers whose tensors are of whole pages: bytes written and read, and memory's bound."""
    shape = Transformer(layers=3, width=64, heads=4, context=64, vocab=1)
    disk = Disk(skip_unless_disk(tmp_path), buffer_bytes=1 << 18)
    model = nn.Sequential(*(Layer(shape) for _ in range(shape.layers)))
    activations = zero.activations_on(disk, module=model, least_bytes=PAGE_BYTES)
    start = torch.randn(4, shape.context, shape.width, requires_grad=True)
    most = []

    def hold(*_):
        most.append(activations.held_bytes)

    for layer in model:
        layer.register_forward_hook(hold)
        layer.register_full_backward_hook(hold)
    with activations:
        loss = model(start * 1).sum()
    loss.backward()
    size = layer_bytes(shape, 4, 4)
    told = ActivationBytes(shape.layers * size, 0, 0).kept_on(disk, size)
    assert told.moved == activations.bytes_written == activations.bytes_read
    assert told.moved <= activations.size_bytes <= 2 * told.moved
    assert max(most) + size <= told.layers == disk.buffer_bytes + size
    resident = replace(disk, resident_bytes=size)
    held = ActivationBytes(2 * size, 7, size // 2).kept_on(resident, size)
    assert held == ActivationBytes(2 * size + disk.buffer_bytes - 7, 7, 0, moved=3 * size // 2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: stage_activations(SHAPE, 1, ALONE, "some"),
            "expected one of none, selective, full, got 'some'",
        ),
        (lambda: stage_activations(SHAPE, 0, ALONE), "expected micro_batch of at least 1, got 0"),
        (
            lambda: stage_activations(SHAPE, 1, ALONE, "full", 0),
            "expected every of at least 1, got 0",
        ),
        (lambda: checkpoint_working_bytes(SHAPE, -1), "expected micro_batch of at least 1, got -1"),
    ],
)
def test_what_makes_no_sense_is_refused(call, says):
    with pytest.raises(ArgumentError, match=says):
        call()
