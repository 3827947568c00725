# SPDX-License-Identifier: Apache-2.0
"""Only pyproject.toml names the placeholder address, so a release replaces it in one file."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT

HOME = "pyproject.toml"
# Joined here, so that this file does not contain the address.
PLACEHOLDER = "/".join(("example.org", "ringcomm"))
WANTED = ["Changelog", "Documentation", "Homepage", "Issues", "Source"]


def urls_in(project: str) -> dict[str, str]:
    """Returns the entries of [project.urls]; Python 3.10 cannot read TOML."""
    section = re.search(r"(?ms)^\[project\.urls\]\n(.*?)(?=^\[|^$)", project)
    assert section is not None
    return dict(re.findall(r'^(\w+) = "(.*)"$', section[1], re.MULTILINE))


def files_with(text: str, root: Path) -> list[str]:
    """Returns the tracked files of a repository that contain a text."""
    command = ["git", "grep", "--fixed-strings", "--files-with-matches", text]
    done = subprocess.run(command, cwd=root, text=True, capture_output=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.split()


def test_the_project_has_its_urls():
    urls = urls_in((ROOT / HOME).read_text())
    assert sorted(urls) == WANTED
    # All URLs start with the home page's, so a release replaces one prefix.
    assert all(url.startswith(urls["Homepage"]) for url in urls.values())


@pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="not a git checkout"
)
def test_no_other_file_names_the_placeholder():
    assert set(files_with(PLACEHOLDER, ROOT)) <= {HOME}


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_file_that_names_it_is_found(tmp_path):
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / "page.md").write_text(f"See https://{PLACEHOLDER}/docs.\n")
    subprocess.run(["git", "add", "page.md"], cwd=tmp_path, check=True)
    assert files_with(PLACEHOLDER, tmp_path) == ["page.md"]
