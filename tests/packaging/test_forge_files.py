# SPDX-License-Identifier: Apache-2.0
"""The files for the forge: workflows, issue forms, citation, hooks and the container."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.support import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def targets_of(workflow: str) -> set[str]:
    """Returns the make targets that a workflow runs, with the values of its matrix."""
    jobs = yaml.safe_load(workflow)["jobs"].values()
    found = set()
    for job in jobs:
        commands = [step["run"] for step in job["steps"] if "run" in step]
        for target in re.findall(r"make (\S+|\$\{\{.*?\}\})", " ".join(commands)):
            found |= set(job["strategy"]["matrix"]["target"]) if "$" in target else {target}
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_of_the_makefile(path: Path) -> None:
    known = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets_of(path.read_text()) <= set(known)
    assert "run: make" in path.read_text() or ".ci/run" in path.read_text()


def test_a_target_that_does_not_exist_is_found() -> None:
    assert targets_of("jobs: {a: {steps: [{run: make no-such}]}}") == {"no-such"}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_can_be_read(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    for field in form.get("body", []):
        if field["type"] == "markdown":
            assert field["attributes"]["value"]
        else:
            assert field["attributes"]["label"] and field["type"] == "textarea"


def test_the_form_for_bugs_sends_vulnerabilities_elsewhere() -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    assert "`SECURITY.md`" in form["body"][0]["attributes"]["value"]
    assert (ROOT / "SECURITY.md").exists()


def test_the_citation_has_the_version_of_the_package() -> None:
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert version is not None and citation["version"] == version[1]
    assert citation["license"] == "Apache-2.0"
    released = f"## [{citation['version']}] - {citation['date-released']}"
    assert released in (ROOT / "CHANGELOG.md").read_text()


def test_the_container_and_the_hooks_use_our_versions() -> None:
    makefile, container = (ROOT / "Makefile").read_text(), (ROOT / "Containerfile").read_text()
    torch = re.search(r"(?<=^TORCH_SPEC \?= )torch==[\d.]+", makefile, re.MULTILINE)
    assert torch is not None and torch[0] in container
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert all(hook["entry"].startswith(".venv/bin/") for hook in hooks)
