"""The program that compares the losses of optimizers trains them on the same text."""

from __future__ import annotations

from ringcomm.bench.curves import CONTEXT, RUNS, curve
from ringcomm.examples.gpt.config import ModelConfig
from ringcomm.examples.gpt.corpus import find_source, load, min_corpus_bytes


def test_runs_begin_alike_and_part_by_what_is_rounded():
    corpus = load(find_source(None, min_corpus_bytes(CONTEXT)))
    model = ModelConfig(16, 1, 4, CONTEXT, tied=True)
    wide, narrow, other = (curve(name, model, corpus, (1, 4)) for name in RUNS)
    # A first step rounds only what the second one reads.
    assert wide[0] == narrow[0] != other[0]
    assert 0.0 < abs(wide[1] - narrow[1]) < abs(wide[1] - other[1])
    assert wide[1] < wide[0]
