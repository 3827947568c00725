"""The README's examples run, and the documents' links lead somewhere."""

import os
import re
import runpy
import sys

import pytest

from tests.support import ROOT, fork_server

GUIDES = [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "design.md"]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
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
    # The first of them in interpreters of its own, as a user's are.
    done = fork_server.run(command, anew=number == 0, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    for expected in re.findall(r"# (tensor\(.*\))", EXAMPLES[number]):
        assert expected in done.stdout


def test_the_readme_shows_the_recorded_figures():
    """Else run tools/readme_figures.py."""
    tool = runpy.run_path(str(ROOT / "tools" / "readme_figures.py"))
    readme = (ROOT / "README.md").read_text()
    assert tool["filled"](readme) == readme
    assert tool["filled"](readme.replace("| all_reduce | heap |", "| all_reduce | ? |")) == readme
    assert readme.count("| heap |") == readme.count("| plain |") == 3


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text())
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert missing == []


def test_the_map_of_the_design_names_every_module():
    design = (ROOT / "docs" / "design.md").read_text()
    rows = re.findall(r"^\| (?:`([\w/]+/)`|top) \| (.*) \|$", design, re.MULTILINE)
    mapped = {folder + name for folder, text in rows for name in re.findall(r"`(\w+)`", text)}
    package = ROOT / "ringcomm"
    paths = (path.relative_to(package).with_suffix("") for path in package.rglob("*.py"))
    modules = {str(path) for path in paths if path.name != "__init__" and path.parts[0] != "_tl"}
    assert len(modules) > 50
    assert modules - mapped == set()
    folders = {folder for folder, _ in rows}
    stale = {name for name in mapped - modules if name.rpartition("/")[0] + "/" in folders - {""}}
    assert stale == set()


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_the_paths_that_a_guide_names_exist(path):
    tops = "kernels|ringcomm|bench|tests|tools|docs|collectives|core|optimizer|protocol"
    named = re.findall(rf"`((?:{tops})/[\w./]+)", path.read_text())
    templates = ROOT / "kernels" / "include" / "ringcomm"
    assert len(named) > 10
    assert [n for n in named if not (ROOT / n).exists() and not (templates / n).exists()] == []
