"""What a rank has of a transformer under tensor and pipeline parallelism, against the papers."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from ringcomm import ArgumentError, Communicator
from ringcomm.functional import checkpoint, partitioned_checkpoint
from ringcomm.zero.estimate_model import Transformer
from ringcomm.zero.estimate_model_parallel import ModelParallel, stage_activations, stage_model

SHAPE = Transformer(layers=8, width=64, heads=8, context=32, vocab=256)
PLANE = SHAPE.context * 3 * SHAPE.width  # s b h of micro-batches of 3
CORE = 5 * SHAPE.heads * SHAPE.context**2 * 3  # 5 a s^2 b


def test_undivided_it_is_the_whole_model():
    assert stage_model(SHAPE, ModelParallel()) == SHAPE.model


def test_a_layer_is_that_of_the_equations():
    divided = stage_activations(SHAPE, 3, ModelParallel(tp=4))
    assert divided.layers == 8 * (PLANE * (10 + 24 // 4) + CORE // 4)  # equation 2
    shared = stage_activations(SHAPE, 3, ModelParallel(tp=4, sequence=True))
    assert shared.layers == 8 * (PLANE * 34 + CORE) // 4  # equation 4
    selective = stage_activations(SHAPE, 3, ModelParallel(tp=4, sequence=True), "selective")
    assert selective.layers == 8 * PLANE * 34 // 4  # equation 6
    assert selective.recomputed == CORE // 4


def test_checkpoints():
    whole, part = (
        stage_activations(SHAPE, 3, ModelParallel(tp=4, partitioned=partitioned), "full")
        for partitioned in (False, True)
    )
    assert (whole.layers, part.layers) == (8 * 2 * PLANE, 8 * 2 * PLANE // 4)
    assert whole.recomputed == part.recomputed == PLANE * (10 + 24 // 4) + CORE // 4


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages():
    layer = PLANE * 34 + CORE
    many = stage_activations(SHAPE, 3, ModelParallel(pp=4, micro_batches=9))
    assert (many.layers, many.ends) == (4 * 2 * layer, 4 * PLANE)
    few = stage_activations(SHAPE, 3, ModelParallel(pp=4, micro_batches=2))
    assert few.layers == 2 * 2 * layer
    # Of one micro-batch the last stage has most, since it has the logits, too.
    one = stage_activations(SHAPE, 3, ModelParallel(pp=4))
    logits = 4 * SHAPE.context * 3 * SHAPE.vocab
    assert (one.layers, one.ends) == (2 * layer, 4 * PLANE + logits)


def test_parameters():
    """Of column-parallel layers matrix and bias are divided, of row-parallel ones the matrix."""
    h, tp = SHAPE.width, 4
    layer = 12 * h * h // tp + 7 * h // tp + 6 * h
    divided = stage_model(SHAPE, ModelParallel(tp=tp))
    assert divided.units == (layer,) * 8
    assert divided.root == SHAPE.vocab * h // tp + (SHAPE.context + 2) * h
    first = stage_model(SHAPE, ModelParallel(tp=tp, pp=2))
    assert first.trainable == 4 * layer + SHAPE.vocab * h // tp + SHAPE.context * h


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ModelParallel(tp=0), "tp"),
        (lambda: ModelParallel(sequence=True), "data-parallel ranks have different ones"),
        (lambda: ModelParallel(partitioned=True), "data-parallel ranks have different ones"),
        (lambda: ModelParallel(tp=2, sequence=True, partitioned=True), "divided already"),
        (lambda: stage_model(SHAPE, ModelParallel(pp=3)), "layers that 3 divides, got 8"),
        (lambda: stage_model(SHAPE, ModelParallel(tp=3)), "heads that 3 divides, got 8"),
        (lambda: stage_activations(SHAPE, 1, ModelParallel(), "some"), "checkpointing: expected"),
    ],
)
def test_what_is_refused(make, says):
    with pytest.raises(ArgumentError, match=says):
        make()


def test_divided_checkpoints_take_what_is_estimated(worlds, monkeypatch):
    """Measured on 2 tensor-parallel ranks: what is kept between forward and backward."""
    monkeypatch.setattr(checkpoint, "_keep", _counting(checkpoint._keep))
    shape = Transformer(layers=3, width=16, heads=2, context=8, vocab=32)
    same = [nn.Linear(shape.width, shape.width) for _ in range(shape.layers)]
    models = [deepcopy(same) for _ in range(2)]

    def body(comm: Communicator) -> int:
        x = torch.zeros(2, shape.context, shape.width, requires_grad=True)
        _kept[comm.rank] = []
        for layer in models[comm.rank]:
            x = partitioned_checkpoint(layer, x, group=comm)
        held_bytes = sum(piece.nbytes for piece in _kept[comm.rank])
        x.sum().backward()
        return held_bytes

    estimated = stage_activations(
        shape, 2, ModelParallel(tp=2, partitioned=True), "full", elem_bytes=4
    )
    assert worlds(2).run(body) == [estimated.layers] * 2


_kept: dict[int, list[torch.Tensor]] = {}


def _counting(keep: Any) -> Any:
    def counted(comm: Communicator, tensor: torch.Tensor) -> Any:
        found = keep(comm, tensor)
        _kept[comm.rank].append(found.piece)
        return found

    return counted
