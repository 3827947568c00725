# SPDX-License-Identifier: Apache-2.0
"""Comments, docstrings, messages and documents contain no phrase that readers stumble over.

The patterns find fewer than half of the sentences that must be read twice, and half of their hits
are clear sentences. ``allowed_sentences.txt`` lists the hits that a reader found to be clear.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.prose import SUFFIXES, Passage, passages

# Pattern, advice, and a sentence that the pattern rejects.
RULES = [
    (
        r"^(What|Whose|Whom|That of|Those|Of (?!course))\b",
        "begin with the noun",
        "What a rank has sent.",
    ),
    (
        r"^(Returns|Tells|Says|Keeps|Takes|Raises|Puts|Undoes|Adds)( \w+)? "
        r"(what|whose|those|that of)\b",
        "name the thing in place of what or those",
        "Returns what the peers have sent.",
    ),
    (
        r"(?:^|[.;:] )(Of|Beside|Behind) [a-z]",
        "begin with the subject, not with a preposition",
        "It waits. Of a device nobody asks.",
    ),
    (
        r"(?<![Tt]here )\b(is|are|was|were) (no|none|nobody|nothing) (?!longer|more|one)",
        "say what it is, or use 'not'",
        "A rank that is none of the group's.",
    ),
    (
        r"\b(that|those) of\b[^.]{0,60}\b(that|those|which|whose)\b",
        "repeat the noun in place of the pronoun",
        "The rate is that of the link that is slower.",
    ),
    (
        r"\b(alike|anew|unasked|farewell|for want of|in vain|all the same|from here on|for good"
        r"|by turns)\b",
        "use a common word",
        "All ranks count alike.",
    ),
    (
        r"\b(is|are|was|be) (told|asked|owed)\b"
        r"|\b(nobody|nothing|that|it) (asks?|knows?|tells?|hears?|owes)\b",
        "things do not ask, know, tell, hear or owe",
        "The kernel is told of it.",
    ),
    (
        r"\b(stands?|lies?) (for|in|behind|at|there)\b"
        r"|\b(goes|comes) (on|back|with|along|behind|beside)\b",
        "use a plain verb: is, represents, continues, returns",
        "The header lies in the heap.",
    ),
    (
        r"\b\d[\d.]* (bytes|us|elements) an? \w+",
        "write per: '4 bytes per element'",
        "It takes 4 bytes an element.",
    ),
    (
        r"\b(so many|of which|of whom|in whose)\b",
        "split the sentence",
        "Two ranks, one of which waits.",
    ),
]
COMPILED = [(re.compile(pattern), advice) for pattern, advice, _ in RULES]
FOLDERS = ("kernels", "ringcomm", "bench", "tools", "docs")
LEFT_OUT = ROOT / "kernels" / "cuda" / "serial"
ALLOWED = ROOT / "tests" / "allowed_sentences.txt"


def allowed_sentences() -> set[str]:
    rows = ALLOWED.read_text().split("\n")
    return {row for row in rows if row and not row.startswith("#")}


def rejected(passage: Passage) -> Iterator[tuple[str, str]]:
    """Yields the sentences that match a pattern, with the advice."""
    for pattern, advice in COMPILED:
        for match in pattern.finditer(passage.text):
            yield passage.sentence_at(match.start(1) if match[1] else match.end() - 1), advice


def read_files() -> Iterator[Path]:
    """Yields the files whose prose users and developers read.

    Tests are left out, and so are the older loops of the CUDA kernels, which must stay unchanged.
    """
    below = (path for top in FOLDERS for path in (ROOT / top).rglob("*"))
    for path in sorted([*below, *ROOT.glob("*.md"), ROOT / "setup.py"]):
        left_out = LEFT_OUT in path.parents or path.is_symlink()
        if path.suffix in SUFFIXES and path.is_file() and not left_out:
            yield path


def test_no_sentence_must_be_read_twice():
    allowed, used, found = allowed_sentences(), set(), []
    for path in read_files():
        for passage in passages(path):
            for sentence, advice in rejected(passage):
                used.add(sentence)
                if sentence not in allowed:
                    where = f"{path.relative_to(ROOT)}:{passage.line}"
                    found.append(f"{where}: {advice}: {sentence}")
    assert found == [], "\n".join(found)
    assert allowed - used == set(), "allowed sentences that no longer occur"


@pytest.mark.parametrize(("pattern", "advice", "bad"), RULES, ids=[rule[1] for rule in RULES])
def test_each_pattern_rejects_its_example(pattern, advice, bad):
    assert advice in [each for _, each in rejected(Passage(1, bad))]
    assert list(rejected(Passage(1, "Returns the rank that sent the message."))) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("comment.py", "x = 1\n# What waits\n# here\ny = 2\n"),
        ("docstring.py", 'def f():\n    """What waits\n    here"""\n'),
        ("message.py", 'def f(x):\n    raise ValueError(f"What waits " f"here {x}")\n'),
        ("comment.h", "int x;\n  // What waits\n  // here\n"),
        ("paragraph.md", "# Title\n\nWhat waits\nhere\n\n```\nWhat\n\nWhat\n```\n"),
    ],
)
def test_prose_is_found_wherever_it_is_written(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    assert [passage.text for passage in passages(path)] == ["What waits here"]
