# SPDX-License-Identifier: Apache-2.0
"""Models of the transformers library: loaded from their files into shards, and saved back."""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from ringcomm import zero
from ringcomm.errors import CheckpointError
from ringcomm.optim import AdamW
from tests.support.covering import covering
from tests.zero.models import SMALL_BUCKET_ELEMS, assert_same_bits

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MODELS = ("llama", "gpt2", "mixtral")


@cache
def library() -> Any:
    """Imports the library at first use: all test workers import this file; the import is slow."""
    import transformers

    return transformers


@cache
def configs() -> dict[str, Any]:
    transformers = library()
    return {
        # The files hold no rotary frequencies, and the head is tied to the embedding.
        "llama": transformers.LlamaConfig(**TINY, tie_word_embeddings=True),
        # Conv1D stores its weights transposed.
        "gpt2": transformers.GPT2Config(
            n_embd=32,
            n_layer=2,
            n_head=2,
            vocab_size=64,
            n_positions=32,
            bos_token_id=0,
            eos_token_id=1,
        ),
        # The files store each expert as a tensor; the model stacks them in one parameter.
        "mixtral": transformers.MixtralConfig(**TINY, num_local_experts=3),
    }


OPTIONS = zero.ZeroOptions(bucket_elems=SMALL_BUCKET_ELEMS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """``saved(name)`` returns a folder of several weight files, and the model that they hold."""

    @cache
    def save(name: str) -> Any:
        folder = tmp_path_factory.mktemp(name)
        torch.manual_seed(1)
        library().AutoModelForCausalLM.from_config(configs()[name]).save_pretrained(
            folder, max_shard_size="20KB"
        )
        assert (folder / "model.safetensors.index.json").exists()
        return folder, library().AutoModelForCausalLM.from_pretrained(folder)

    return save


def meta_models(config: Any, kind: str = "AutoModelForCausalLM") -> list[Any]:
    with torch.device("meta"):
        return [getattr(library(), kind).from_config(config) for _ in range(2)]


@covering(strength=1, stage=[0, 1, 2, 3], name=MODELS)
def test_a_model_is_what_the_library_loads(worlds, saved, stage, name):
    """Values, logits and buffers that no file holds equal those of the model the library loads."""
    folder, wanted = saved(name)
    models = meta_models(configs()[name])
    tokens = torch.arange(8)[None]

    def work(comm):
        model = models[comm.rank]
        zero.shard(model, stage, comm=comm, options=OPTIONS, init=zero.pretrained(folder))
        assert_same_bits(zero.full_state_dict(model), wanted.state_dict())
        assert_same_bits(dict(model.named_buffers()), dict(wanted.named_buffers()))
        with torch.no_grad():
            return model.eval()(tokens).logits

    with torch.no_grad():
        expected = wanted(tokens).logits
    for logits in worlds(2).run(work):
        assert torch.equal(logits, expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_trained_model_goes_back(worlds, saved, tmp_path, name):
    """A trained model returns by checkpoint and export, and loads into shards in both ways."""
    folder, _ = saved(name)
    models = meta_models(configs()[name])

    def work(comm):
        model = models[comm.rank]
        zero.shard(model, 3, comm=comm, options=OPTIONS, init=zero.pretrained(folder))
        optimizer = AdamW(model.parameters(), lr=1e-2)
        tokens = torch.arange(8)[None] + comm.rank
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        state = zero.full_state_dict(model)
        step = zero.save(tmp_path / "run", 1, model, optimizer)
        if comm.rank == 0:
            zero.export_safetensors(step, tmp_path / "out", max_file_bytes=20_000)
            model.config.save_pretrained(tmp_path / "out")
        zero.save_pretrained(model, tmp_path / "direct", max_file_bytes=20_000, aliases="skip")
        zero.load_pretrained(model, folder)
        assert not torch.equal(zero.full_state_dict(model)[first], state[first])
        zero.load_pretrained(model, tmp_path / "out")
        assert_same_bits(zero.full_state_dict(model), state)
        return state

    first = next(name for name, _ in models[0].named_parameters())
    state = worlds(2).run(work)[0]
    assert json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    back, told = library().AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(told.values())
    assert_same_bits(dict(back.state_dict()), state)


def test_a_head_that_the_files_do_not_have(worlds, saved):
    """The files fill the base model; the library's rule initialises the head on all ranks."""
    folder, wanted = saved("llama")
    config = library().LlamaConfig(**TINY, pad_token_id=0, num_labels=3)
    models = meta_models(config, "AutoModelForSequenceClassification")

    def work(comm):
        source = zero.pretrained(folder)
        with pytest.raises(CheckpointError, match=r"they have no 'score\.weight'"):
            zero.shard(models[comm.rank], 3, comm=comm, init=source)
        source = zero.pretrained(folder, strict=False)
        zero.shard(models[comm.rank], 3, comm=comm, init=source)
        assert source.missing_keys == ("score.weight",) and source.unexpected_keys == ()
        return zero.full_state_dict(models[comm.rank])

    first, second = worlds(2).run(work)
    assert_same_bits(first, second)
    assert 0 < first["score.weight"].std() < 0.04
    for name, value in first.items():
        assert name == "score.weight" or torch.equal(value, wanted.state_dict()[name])


def test_a_base_model_takes_its_part_of_a_whole(worlds, saved):
    """A base model loads from files whose names have the base model's prefix."""
    folder, wanted = saved("gpt2")
    with torch.device("meta"):
        models = [type(wanted.transformer)(configs()["gpt2"]) for _ in range(2)]

    def work(comm):
        zero.shard(models[comm.rank], 3, comm=comm, init=zero.pretrained(folder))
        return zero.full_state_dict(models[comm.rank])

    for state in worlds(2).run(work):
        assert_same_bits(state, wanted.transformer.state_dict())
