"""The training text."""

from __future__ import annotations

import pytest
import torch

from ringcomm.errors import ArgumentError
from ringcomm.examples.gpt import corpus
from ringcomm.examples.gpt.corpus import find_source, load, min_corpus_bytes


def test_standard_library_is_the_default():
    source = find_source(None, min_bytes=1_000_000)
    assert all(path.suffix == ".py" for path in source.files)
    assert not any("site-packages" in path.parts for path in source.files)
    assert source.size_bytes == sum(path.stat().st_size for path in source.files)


def test_folder_gives_its_text_files_in_order(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"second")
    (tmp_path / "a.txt").write_bytes(b"first ")
    (tmp_path / "binary").write_bytes(b"x\0y")
    (tmp_path / ".hidden").write_bytes(b"no")
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "c.md").write_bytes(b" third")
    source = find_source(str(tmp_path), min_bytes=1)
    assert [path.name for path in source.files] == ["a.txt", "b.txt", "c.md"]
    content = load(source)
    whole = torch.cat((content.train, content.held_out))
    assert bytes(whole.tolist()) == b"first second third"


def test_text_is_cut_at_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "LIMIT_BYTES", 100)
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 60)
    source = find_source(str(tmp_path), min_bytes=1)
    assert (source.size_bytes, source.cut) == (100, True)
    content = load(source)
    assert bytes(torch.cat((content.train, content.held_out)).tolist()) == b"a" * 60 + b"b" * 40


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing", None, "no such file or folder"),
        ("small", b"tiny", "holds 4 bytes of text; this model and batch need at least 1000"),
        ("binary", b"\0" * 5000, "is binary"),
    ],
)
def test_unusable_data_is_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ArgumentError, match=message):
        find_source(str(tmp_path / name), min_bytes=1000)


def test_smallest_corpus_gives_batches(tmp_path):
    context = 32
    (tmp_path / "text").write_bytes(bytes(range(1, 251)) * 20)
    source = find_source(str(tmp_path / "text"), min_corpus_bytes(context))
    whole = load(corpus.Source(source.root, source.files, min_corpus_bytes(context), cut=True))
    tokens, targets = whole.held_out_batch(seed=1, index=0, sequences=3, context=context)
    assert tokens.shape == targets.shape == (3, context)


def test_batch_is_text_with_the_next_byte_as_target_and_depends_on_the_step(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(250)[1:]) * 50)
    content = load(find_source(str(tmp_path / "text"), 1))
    tokens, targets = content.batch(seed=3, step=5, sequences=4, context=16)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens % 249 + 1, targets)
    again, _ = content.batch(seed=3, step=5, sequences=4, context=16)
    other, _ = content.batch(seed=3, step=6, sequences=4, context=16)
    assert torch.equal(tokens, again)
    assert not torch.equal(tokens, other)
