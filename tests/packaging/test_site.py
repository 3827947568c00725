# SPDX-License-Identifier: Apache-2.0
"""The site documents every public name, and builds without a warning."""

import argparse
import dataclasses
import html as html_module
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys

import pytest

import ringcomm
from ringcomm import c10d, functional, optim, testing, zero
from ringcomm.cli import COMMANDS
from ringcomm.extras import fsdp2, moe, parallel
from ringcomm.process import KNOWN
from ringcomm.zero import checkpoint
from tests.packaging.code_names import exported_by
from tests.packaging.documents import DOCS, DOCUMENTS, GUIDES, anchors_of, without_code
from tests.support import ROOT
from tools import site_pages
from tools.commands import PYTHONS

REFERENCE = DOCS / "reference"
MODULES = (ringcomm, c10d, fsdp2, functional, moe, optim, parallel, testing, zero, checkpoint)
# These modules import Triton and other libraries, which may be missing.
UNIMPORTED = (
    "ringcomm.tl",
    *(f"ringcomm.extras.{each}" for each in ("accelerate", "lightning", "transformers")),
)
MENU = (ROOT / "mkdocs.yml").read_text()
# Modules hidden by a function of the same name; a reader of the sources finds the module first.
HIDDEN: set[str] = set()
OPTIONS = (
    *(ringcomm.CommOptions, zero.ZeroOptions, zero.UnitOptions, zero.Precision, zero.Compression),
    *(optim.AdamWOptions, optim.LossScaleOptions, ringcomm.Disk, moe.RoutingOptions),
)


def told_names():
    """Returns the names on the reference pages, with repetitions."""
    text = "\n".join(path.read_text() for path in sorted(REFERENCE.glob("*.md")))
    names = re.findall(r"^::: ([\w.]+)$|^### `(ringcomm\.\w+)`$", text, re.MULTILINE)
    found = ["".join(pair) for pair in names]
    return [name.rpartition(".")[0] if name in HIDDEN else name for name in found]


def test_every_public_name_is_on_a_page_of_the_reference():
    public = {f"{module.__name__}.{name}" for module in MODULES for name in module.__all__}
    public |= {f"{module}.{name}" for module in UNIMPORTED for name in exported_by(module)}
    modules = {name for name in public if inspect.ismodule(_resolved(name))}
    assert modules == {f"ringcomm.{m}" for m in ("extras", "functional", "optim", "zero")}
    told = told_names()
    assert sorted(told) == sorted(public - modules)


def _resolved(name):
    module, _, attribute = name.rpartition(".")
    known = {each.__name__: each for each in MODULES}
    return getattr(known[module], attribute) if module in known else None


# Methods of a communicator that the package itself calls: see NOTE [Internal API].
INTERNAL = {
    *("all_gather_lists_coalesced", "group_at", "launches", "on_host", "topology_choice"),
}


def test_the_page_of_communicators_lists_all_members():
    text = (REFERENCE / "communicators.md").read_text()
    listed = re.findall(r"^        - (\w+)$", text, re.MULTILINE)
    public = {name for name in dir(ringcomm.Communicator) if not name.startswith("_")}
    assert sorted(listed) == sorted(public - INTERNAL) and public >= INTERNAL


def test_the_note_on_the_internal_api_lists_all_members_without_documentation():
    with ringcomm.local_world(1) as world:
        parts = {name for name in vars(world[0]) if not name.startswith("_")}
    source = (ROOT / "ringcomm" / "comm" / "host" / "engine.py").read_text()
    (note,) = re.findall(r"^# NOTE \[Internal API\]\n((?:#.*\n)+)", source, re.MULTILINE)
    assert set(re.findall(r"``(\w+)``", note)) == INTERNAL | parts


def rows_of(section):
    """Returns the table of a section of the options page, by the first cell of each row."""
    text = (REFERENCE / "environment.md").read_text()
    part = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells[1:] for cells in rows}


UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "Mi": 1 << 20, "minutes": 60}


def default_of(cell):
    """Returns the value in a cell: a number with a unit, or a Python expression."""
    stripped = cell.strip("`| ")
    number, _, unit = stripped.partition(" ")
    if unit in UNITS:
        return int(number) * UNITS[unit]
    return (
        eval(stripped, {"Compression": optim.Compression, "Precision": zero.Precision})
        if stripped
        else None
    )


@pytest.mark.parametrize("options", OPTIONS, ids=lambda each: each.__name__)
def test_the_page_of_options_has_all_with_their_defaults(options):
    rows = rows_of(f"`{options.__name__}`")
    fields = dataclasses.fields(options)
    assert list(rows) == [field.name for field in fields]
    for field in fields:
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if default is dataclasses.MISSING:
            assert rows[field.name][0].strip("| ") in ("", "a folder on a disk")
            continue
        told = default_of(rows[field.name][0])
        assert told == (default.total_seconds() if field.name == "timeout" else default)


def variables_read():
    """Returns ringcomm's environment variables that sources and tests read."""
    found = set()
    sources = [ROOT / "setup.py"]
    for folder in ("ringcomm", "bench", "tools"):
        sources += (ROOT / folder).rglob("*.py")
    for source in sources:
        if source.name != "process.py":
            found |= set(re.findall(r"""["'](RINGCOMM_[A-Z_]+)["']""", source.read_text()))
    # Tests also contain names that must be refused.
    read = re.compile(
        r"""(?:environ(?:\.get\(|\[)|getenv\(|^[A-Z]+ = )["'](RINGCOMM_[A-Z_]+)["']""", re.MULTILINE
    )
    for source in (ROOT / "tests").rglob("*.py"):
        found |= set(read.findall(source.read_text()))
    for source in (ROOT / "kernels").rglob("*"):
        if source.suffix in (".h", ".cpp", ".cu"):
            found |= set(re.findall(r'getenv\("(\w+)"\)', source.read_text()))
    # These are macros of kernel units, not environment variables.
    return {name for name in found if not name.startswith("RINGCOMM_UNIT_")}


def test_the_page_of_variables_has_all_that_are_read():
    read = variables_read()
    assert read == KNOWN
    text = (REFERENCE / "environment.md").read_text().split("\n## `CommOptions`")[0]
    assert set(re.findall(r"`(RINGCOMM_\w+)`", text)) == read
    guides = "".join(path.read_text() for path in GUIDES)
    targets = (ROOT / "Makefile").read_text() + (ROOT / "CMakeLists.txt").read_text()
    told = set(re.findall(r"\bRINGCOMM_[A-Z_]+[A-Z]", guides))
    elsewhere = set(re.findall(r"\bRINGCOMM_[A-Z_]+[A-Z]", targets))
    assert told - read - elsewhere <= {"RINGCOMM_NVIDIA_SMI_LIMIT_S"}


def test_the_page_of_commands_has_all_their_options():
    page = site_pages.commands_help()
    sections = re.split(r"^## ringcomm ([\w-]+)$", page, flags=re.MULTILINE)
    helps = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert len(helps) == 11 and set(helps) == set(COMMANDS)
    for name, shown in helps.items():
        for parser in site_pages._with_subcommands(site_pages.parser_of(name)):
            for action in parser._actions:
                assert action.help == argparse.SUPPRESS or all(
                    re.search(rf"^ +(?:.*, )?{option}\b", shown, re.MULTILINE)
                    for option in action.option_strings
                )
    assert site_pages.COMMANDS_MARK in (REFERENCE / "commands.md").read_text()


def test_the_help_of_a_subcommand_stands_below_its_command():
    parser = argparse.ArgumentParser(prog="x")
    inner = parser.add_subparsers().add_parser("y", aliases=["z"])
    assert list(site_pages._with_subcommands(parser)) == [parser, inner]


def test_links_of_the_tree_become_links_of_the_site():
    text = "[a](../CONTRIBUTING.md#x), [b](examples/elastic.py), `[c](../y.md)`, [d](zero.md#z)"
    assert site_pages.with_site_links(text, "trace.md") == (
        "[a](contributing.md#x), [b](files/docs/examples/elastic.py.md), `[c](../y.md)`, "
        "[d](zero.md#z)"
    )
    text = "[a](docs/zero.md), [b](https://x.y/z), [c](#here), [d](mailto:e)"
    assert site_pages.with_site_links(text, "changelog.md") == (
        "[a](zero.md), [b](https://x.y/z), [c](#here), [d](mailto:e)"
    )
    assert site_pages.with_site_links("[a](../zero.md)", "reference/zero.md") == "[a](../zero.md)"


def test_documents_link_to_files_that_have_pages():
    linked = set()
    for path in DOCUMENTS:
        for link in re.findall(r"\]\((?!\w+:)([^)#\s]+)", without_code(path.read_text())):
            linked.add(site_pages._page_of(os.path.relpath(path.parent / link, ROOT)))
    made = {page for page in linked if page.startswith("files/docs/examples/")}
    made |= set(site_pages.BESIDE.values())
    assert (
        len(made) > 10 and {page for page in linked - made if not (DOCS / page).exists()} == set()
    )


def test_docstrings_name_pages_by_links():
    html = "<p>as :class:<code>X</code>, see <code>docs/zero.md</code>::</p>"
    assert site_pages.with_docstring_links(html, "reference/zero.md") == (
        '<p>as <code>X</code>, see <a href="../zero.html">zero</a>:</p>'
    )


def test_every_document_is_in_the_menu():
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert pages - set(re.findall(r"([\w/-]+\.md)\b", MENU)) == set()
    assert anchors_of("# A `b_c`: d - e\n") == ["a-b_c-d---e"]


# Phrases that users search for, and the page that must have a heading with the phrase.
SEARCHED = {
    "learning rate scheduler": "howto/schedulers",
    "evaluate": "howto/evaluation",
    "evaluation": "howto/evaluation",
    "logging": "howto/logging",
    "metrics": "howto/logging",
    "tensorboard": "howto/logging",
    "prometheus": "howto/metrics",
    "pytest": "howto/testing",
    "loss is nan": "howto/nan-loss",
    "performance": "performance",
}


def unfound(searched, titles):
    """Returns the phrases that no heading of their page contains.

    Args:
        searched: for each phrase, its page's name without an ending.
        titles: for each page, its headings in lower case.
    """
    return [
        phrase
        for phrase, page in searched.items()
        if not any(phrase in title for title in titles.get(page, []))
    ]


def test_pages_have_headings_with_the_words_that_users_search_for():
    titles = {}
    for path in DOCS.rglob("*.md"):
        headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
        page = path.relative_to(DOCS).as_posix().removesuffix(".md")
        titles[page] = [heading.lower() for heading in headings]
    assert unfound(SEARCHED, titles) == []
    del titles["howto/logging"]
    assert unfound(SEARCHED, titles) == ["logging", "metrics", "tensorboard"]


def test_supported_pythons_are_stated_alike():
    project = (ROOT / "pyproject.toml").read_text()
    (least,) = re.findall(r'^requires-python = ">=(3\.\d+)"$', project, re.MULTILINE)
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert tuple(named) == PYTHONS and named[0] == least
    told: dict[str, list[str]] = {}
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))):
        text = path.read_text()
        for found in re.findall(r"Python(?: \|)? (3\.\d+)(?: or newer| and later|\+)", text):
            told.setdefault(found, []).append(path.name)
    assert set(told) == {least} and len(told[least]) >= 4


def test_extras_for_users_pin_no_version():
    project = (ROOT / "pyproject.toml").read_text()
    for extra in ("cuda13", "cuda12", "bench"):
        (line,) = re.findall(rf"^{extra} = \[(.*)\]$", project, re.MULTILINE)
        assert "==" not in line


def test_consoles_are_told_from_text():
    """So that the copy button of a block copies commands without prompt and output."""
    for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))):
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
        for language, text in blocks:
            assert (language == "console") == text.startswith("$ "), (path.name, text)
    style = (DOCS / "assets" / "site.css").read_text()
    assert "[data-md-copying] .gp" in style and "[data-md-copying] .go" in style


@pytest.mark.compiles
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="make site installs MkDocs")
def test_the_site_builds_and_asks_for_nothing_from_the_network(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    pages = {path: path.read_text() for path in tmp_path.rglob("*.html")}
    assert len(pages) > 50
    fetched = re.compile(
        r"<(?:script|img|iframe)[^>]* src=\"?(?:https?:)?//|<link[^>]* href=\"?http|@import"
    )
    assert [path for path, html in pages.items() if fetched.search(html)] == []
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())
    titles: dict[str, list[str]] = {}
    for entry in index["docs"]:
        page = entry["location"].partition("#")[0].removesuffix(".html")
        titles.setdefault(page, []).append(html_module.unescape(entry["title"]).lower())
    assert unfound(SEARCHED, titles) == []
    # The style sheet finds prompts and output by the class of the block.
    for path, html in pages.items():
        blocks = re.findall(r'<div class="([^"]*)"><pre>(?:(?!</pre>).)*?class="gp"', html, re.S)
        assert all("language-console" in block.split() for block in blocks), path
    shard = pages[tmp_path / "reference" / "zero.html"]
    assert 'id="ringcomm.zero.shard"' in shard and 'id="ringcomm.zero.uneven"' in shard
