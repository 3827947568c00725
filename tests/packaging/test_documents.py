# SPDX-License-Identifier: Apache-2.0
"""The README's examples run, and all links and quoted names of the documents exist."""

import itertools
import os
import pkgutil
import re
import sys
from functools import cache

import pytest

from tests.packaging.documents import DOCUMENTS, GUIDES, anchors_of, name_of, without_code
from tests.support import ROOT, fork_server
from tests.support.covering import EVERY_CASE

# Documents name a file from the root or, if the context is clear, from one of the others.
KERNELS = ROOT / "kernels"
FOLDERS = [ROOT, KERNELS, KERNELS / "include" / "ringcomm", ROOT / "ringcomm"]
ENDINGS = (".h", ".py", ".cpp", ".md")
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_readme_has_its_examples():
    assert len(EXAMPLES) == 5


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_a_readme_example_runs(tmp_path, number):
    script = tmp_path / "example.py"
    script.write_text(EXAMPLES[number])
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launcher = [] if "local_world" in EXAMPLES[number] else torchrun
    command = [sys.executable, *launcher, str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # In test-all the first example starts new interpreters, as for a user. In every run
    # tests/cli/test_launch.py and test_build.py do so.
    anew = EVERY_CASE and number == 0
    done = fork_server.run(command, anew=anew, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    for expected in re.findall(r"# (tensor\(.*\))", EXAMPLES[number]):
        assert expected in done.stdout


def lost_links(text, path):
    """Returns the links of a document to files or headings that do not exist."""
    lost = []
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", without_code(text)):
        if "://" in link:
            continue
        target = path.parent / link
        if not target.exists():
            lost.append(link)
        elif anchor and anchors_of(target.read_text() if link else text).count(anchor) != 1:
            lost.append(f"{link}#{anchor}")
    return lost


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path):
    assert lost_links(path.read_text(), path) == []


def test_a_link_that_leads_nowhere_is_found():
    text = (
        "# A\n\n## B c, d\n\n[a](x.md), [b](#b-c-d), [c](#b), [d](docs/zero.md#no), `[e](y.md)`\n"
    )
    assert lost_links(text, ROOT / "z.md") == ["x.md", "#b", "docs/zero.md#no"]
    everything = "".join(path.read_text() for path in GUIDES)
    assert len(re.findall(r"\.md#[\w-]+\)", everything)) > 60


def unlike_on_the_site(text):
    """Returns lines that GitHub reads as a list, but the site's Markdown does not.

    Also returns lines with a list item in the middle, as a wrong reflow leaves them.
    """
    lines = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE).splitlines()
    item = re.compile(r"( *)(?:[*-]|\d+\.) ")
    found = [line for line in lines if re.search(r"[.)] [*-] [A-Z`]", line) and line[:1] != "|"]
    for before, line in itertools.pairwise(lines):
        match = item.match(line)
        if match is None:
            continue
        # A list starts after an empty line, and a nested list is indented by four columns.
        begins = before and not item.match(before) and not before.startswith(" ")
        if begins or len(match[1]) % 4:
            found.append(line)
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_lists_are_lists_on_the_site_too(path):
    assert unlike_on_the_site(path.read_text()) == []


def test_what_would_be_no_list_is_found():
    text = "a\n* b\n\n* c\n  d\n* e\n    * f\n  * g\n```\na\n* b\n```\n\n- A. - B.\n"
    assert unlike_on_the_site(text) == ["- A. - B.", "* b", "  * g"]


def test_the_map_of_the_design_names_every_folder():
    design = (ROOT / "docs" / "design.md").read_text()
    table = design[design.index("### ringcomm") : design.index("### the rest")]
    mapped = set(re.findall(r"^\| `([\w/]+)/` \|", table, re.MULTILINE))
    package = ROOT / "ringcomm"
    folders = {str(path.parent.relative_to(package)) for path in package.rglob("*.py")}
    assert len(mapped) > 10
    assert mapped == folders - {".", "_tl", "bench"}


def misplaced(text):
    """Returns the names after "`file`:" in a table that the file does not contain."""
    found = re.findall(r"(`[\w/.]+/[\w.]+`): ((?:`\w+`(?:, )?|NOTE \[[^]]+\])+)", text)
    assert found
    return [
        name
        for path, names in found
        for name in re.findall(r"`(\w+)`|(NOTE \[.*\])", names)
        if "".join(name) not in (ROOT / path.strip("`")).read_text()
    ]


def test_what_the_design_places_in_a_file_stands_there():
    design = (ROOT / "docs" / "design.md").read_text()
    assert misplaced(design) == []
    assert misplaced(design.replace("`same_call`", "`same_calls`")) == [("same_calls", "")]
    assert misplaced(design.replace("[Busy cores]", "[Busy]")) == [("", "NOTE [Busy]")]


def quoted(text):
    """Returns the texts in single back-ticks, outside code blocks."""
    return re.findall(
        r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    )


def missing_paths(text):
    """Returns the paths in the text that are below a folder of the tree and do not exist."""
    named = [
        path
        for span in quoted(text)
        for path in re.findall(r"(?<![\w./-])\w[\w.-]*/[\w./*-]+", span)
    ]
    missing = []
    for path in named:
        # A pattern may name files that are not made yet, so only its folder must exist.
        wanted = path if "*" not in path else path.partition("*")[0].rpartition("/")[0]
        folders = [folder for folder in FOLDERS if (folder / path.split("/")[0]).is_dir()]
        if folders and not any((folder / wanted).exists() for folder in folders):
            missing.append(path)
    return missing


def missing_names(text):
    """Returns the dotted names of ringcomm in the text that cannot be imported."""
    missing = []
    for span in quoted(text):
        for name in re.findall(r"(?<![\w./-])ringcomm(?:\.\w+)+", span):
            try:
                pkgutil.resolve_name(name)
            except (AttributeError, ImportError):
                missing.append(name)
    return missing


@cache
def words_of_sources():
    """Returns every word in the sources of the tree."""
    folders, endings = ("ringcomm", "kernels", "tests", "tools", "bench"), (".py", ".h", ".cpp")
    return {
        word
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in endings
        for word in re.findall(r"\w+", path.read_text())
    }


def unknown_identifiers(text):
    """Returns identifiers such as `half_index` or `Comm::send()` that no source contains."""
    return [
        word
        for span in quoted(text)
        if re.fullmatch(r"\w+(?:(?:\.|::)\w+)*(?:\(\))?", span) and not span.endswith(ENDINGS)
        for word in re.findall(r"\w+", span)
        if re.search(r"_|[a-z][A-Z]", word) and word not in words_of_sources()
    ]


CODE_GUIDES = (
    "CONTRIBUTING.md",
    *(f"docs/{name}.md" for name in ("design", "reading", "protocol")),
)


@pytest.mark.parametrize("name", CODE_GUIDES)
def test_the_identifiers_that_a_guide_to_the_code_quotes_exist(name):
    assert unknown_identifiers((ROOT / name).read_text()) == []


def test_a_made_up_identifier_is_found():
    # In halves, since this file is itself a source.
    method, kind = "all_" + "reduces", "Kernel" + "Tables"
    text = f"`half_index`, `Comm::{method}()`, `{kind}`, `kernel_table.h`, `docs/{method}.md`"
    assert unknown_identifiers(text) == [method, kind]


@pytest.mark.parametrize("path", GUIDES, ids=name_of)
def test_the_paths_and_names_that_a_guide_quotes_exist(path):
    assert missing_paths(path.read_text()) == []
    assert missing_names(path.read_text()) == []


def test_a_made_up_path_or_name_is_found():
    text = (
        "`kernels/host/x.cpp`, `make comm/x.py`, `ringcomm/x*.py`, `ringcomm/x/*.py`, `torch/x.py`"
    )
    assert missing_paths(text) == ["kernels/host/x.cpp", "comm/x.py", "ringcomm/x/*.py"]
    text = (
        "`ringcomm.optim.x`, `ringcomm.x.shard()`, `ringcomm.optim.AdamW.x`, `ringcomm.zero.shard`"
    )
    assert missing_names(text) == ["ringcomm.optim.x", "ringcomm.x.shard", "ringcomm.optim.AdamW.x"]
    everything = "".join(path.read_text() for path in GUIDES)
    assert len(re.findall(r"`(?:kernels|ringcomm|tests)/", everything)) > 100
    assert len(re.findall(r"`ringcomm\.\w", everything)) > 40
