# SPDX-License-Identifier: Apache-2.0
"""Every name that the design and the glossary quote is an identifier of the code."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from tests.packaging.documents import DOCS
from tests.support import ROOT

PAGES = (DOCS / "design.md", DOCS / "glossary.md")
FOLDERS = ("kernels", "ringcomm", "bench", "tools")
ENDINGS = {".py", ".pyi", ".h", ".cpp", ".cu", ".cuh"}
# Names that pages quote and that are not identifiers here, each with the reason.
EXCEPTIONS = {
    "DeepSpeedEngine": "a class of DeepSpeed",
    "NCCL_BUFFSIZE": "a variable of NCCL",
    "copy_engine": "a value of algorithm=",
    "two_shot": "a value of algorithm=",
}
_STRING = r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
_NOT_CODE = {
    ".py": re.compile(rf'"""(?:.|\n)*?"""|#[^\n]*|{_STRING}'),
    ".h": re.compile(rf"//[^\n]*|/\*(?:.|\n)*?\*/|{_STRING}"),
}
_NAME = re.compile(r"[A-Za-z_]\w*")
_PATH = re.compile(r"[\w.*-]*/[\w./*<>-]*|\w+\.(?:py|h|cpp|cu|md|so|svg)\b")


def identifiers_in(text: str, ending: str) -> set[str]:
    """Returns the identifiers of a source, without comments, docstrings and strings."""
    return set(_NAME.findall(_NOT_CODE[".py" if ending.startswith(".py") else ".h"].sub("", text)))


@cache
def sources() -> tuple[Path, ...]:
    found = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")))
    return tuple(path for path in found if path.suffix in ENDINGS)


@cache
def identifiers() -> frozenset[str]:
    """Returns the identifiers of all sources, and the names of their files and folders."""
    names = {part for path in sources() for part in path.relative_to(ROOT).with_suffix("").parts}
    for path in sources():
        names |= identifiers_in(path.read_text(), path.suffix)
    return frozenset(names)


@cache
def note_titles() -> frozenset[str]:
    return frozenset(
        title
        for path in sources()
        for title in re.findall(r"^[ /*#]*NOTE \[([^]]+)\]", path.read_text(), re.MULTILINE)
    )


def quoted_names(text: str) -> Iterable[str]:
    """Yields the identifiers in a page's code spans, except commands, paths, files and strings."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for span in re.findall(r"`([^`\n]+)`", prose):
        code = re.sub(_STRING, "", _PATH.sub("", span))
        if " " not in code.strip():
            yield from _NAME.findall(code)


def is_known(name: str) -> bool:
    """True if a source has the identifier or, for an ending like `_bytes`, one with this ending."""
    if name in identifiers():
        return True
    return name.startswith("_") and any(each.endswith(name) for each in identifiers())


def unknown(text: str) -> list[str]:
    """Returns the names and NOTE titles in a page that no source has."""
    names = {name for name in quoted_names(text) if name not in EXCEPTIONS and not is_known(name)}
    titles = set(re.findall(r"NOTE \[([^]]+)\]", text)) - note_titles()
    return sorted(names | titles)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_quoted_names_are_identifiers_of_the_code(page):
    assert unknown(page.read_text()) == []


def test_the_pages_quote_many_names():
    assert [
        len(set(quoted_names(page.read_text()))) > least
        for page, least in zip(PAGES, (120, 15), strict=True)
    ] == [True, True]


def test_every_exception_is_needed():
    quoted = {name for page in PAGES for name in quoted_names(page.read_text())}
    assert {name for name in EXCEPTIONS if name in quoted and not is_known(name)} == {*EXCEPTIONS}


def test_names_that_no_source_has_are_found():
    missing = "Kernel" + "Tables"
    text = f"`{missing}`, `ShardLayout.assign_{missing}()`, `_{missing}`, `ring`, `_bytes`"
    assert unknown(f"{text}, `two {missing}`, `a/{missing}.py`, `'{missing}'`") == [
        missing,
        f"_{missing}",
        f"assign_{missing}",
    ]
    assert unknown("NOTE [Busy cores], NOTE [Busy bees]") == ["Busy bees"]
    source = "def f():  # g\n    return h('i')\n"
    assert identifiers_in(source, ".py") == {"def", "f", "return", "h"}
    assert identifiers_in('int f(); // g\n/* h */ char* i = "j";', ".h") == {
        "int",
        "f",
        "char",
        "i",
    }
