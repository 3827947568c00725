"""The number of a module's elements, against counts by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ringcomm.errors import ArgumentError
from ringcomm.zero.estimate_model import ModelElems, Transformer

GPT2 = Transformer(layers=12, width=768, heads=12, context=1024, vocab=50257)
GPT2_XL = Transformer(layers=48, width=1600, heads=25, context=1024, vocab=50257)


class Tied(nn.Module):
    """An embedding whose matrix is the output layer's, around two odd layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.zeros(1000))


class Gpt(nn.Module):
    """The shape that ``Transformer`` counts, out of torch's own parts."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(shape.width, shape.heads, 4 * shape.width)
            for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_tied_weights_count_once_and_buffers_not_at_all(place):
    with torch.device(place):
        told = ModelElems.of_module(Tied())
    assert told == ModelElems(77 + 2 * 56 + 14, largest=77, units=(56, 56), root=77 + 14)


def test_frozen_parameters_are_counted_apart_and_stay_in_their_unit():
    net = Tied()
    net.embed.weight.requires_grad_(False)
    net.layers[1].weight.requires_grad_(False)
    told = ModelElems.of_module(net)
    assert told == ModelElems(2 * 56 + 14 - 49, 77 + 49, largest=49, units=(56, 56), root=91)
    assert told.total == 77 + 2 * 56 + 14


def test_a_scalar_and_an_empty_parameter():
    net = nn.Module()
    net.scalar = nn.Parameter(torch.zeros(()))
    net.empty = nn.Parameter(torch.zeros(0, 3))
    assert ModelElems.of_module(net) == ModelElems(1, largest=1, root=1)


def test_a_weight_that_two_units_share_is_in_the_one_around_both():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    told = ModelElems.of_module(nn.Sequential(first, second))
    assert (told.units, told.root, told.trainable) == ((3, 3), 9, 15)


def test_units_may_be_named():
    net = Tied()
    told = ModelElems.of_module(net, units=[nn.Linear, nn.LayerNorm])
    assert (told.units, told.root) == ((56, 56, 14), 77)
    told = ModelElems.of_module(net, units=lambda name, module: name == "norm")
    assert (told.units, told.root) == ((14,), 77 + 2 * 56)


def test_a_module_without_parameters_has_none():
    assert ModelElems.of_module(nn.ReLU()) == ModelElems(0)


def test_a_lazy_module_is_refused():
    with pytest.raises(ArgumentError, match="parameter weight has no shape before the first"):
        ModelElems.of_module(nn.LazyLinear(3))


def test_another_dtype_is_refused_by_name():
    with pytest.raises(ArgumentError, match=r"parameter weight: expected dtype .* torch.float64"):
        ModelElems.of_module(nn.Linear(2, 2).double())


def test_known_models():
    """The sizes of OpenAI's checkpoints."""
    assert GPT2.model.trainable == 124_439_808
    assert GPT2_XL.model.trainable == 1_557_611_200


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 30),
    st.integers(1, 30),
    st.booleans(),
)
def test_a_shape_counts_as_the_module_does(layers, heads, head_width, context, vocab, tied):
    shape = Transformer(layers, heads * head_width, heads, context, vocab, tied)
    with torch.device("meta"):
        assert ModelElems.of_module(Gpt(shape)) == shape.model


def test_the_approximation_is_the_matrices_of_the_layers():
    assert GPT2.approximate_elems == 12 * 12 * 768**2
    small = GPT2.model.trainable - GPT2.approximate_elems
    assert small == 12 * 13 * 768 + (50257 + 1024 + 2) * 768


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((0, 8, 2, 4, 5), "expected layers of at least 1, got 0"),
        ((1, 8, 2, 4, -5), "expected vocab of at least 1, got -5"),
        ((1, 8, 3, 4, 5), "expected a width that is a multiple of 3 heads, got 8"),
    ],
)
def test_impossible_shapes_are_refused(sizes, says):
    with pytest.raises(ArgumentError, match=says):
        Transformer(*sizes)
