# SPDX-License-Identifier: Apache-2.0
"""Hooks of MkDocs (mkdocs.yml): pages of files outside docs/*.md, and the commands' help.

The links of documents name files of the source tree. On the site each of these files has a page,
and the hooks change the links accordingly.
"""

from __future__ import annotations

import argparse
import importlib
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from ringcomm.bench import collectives
from ringcomm.cli import COMMANDS, module_of
from ringcomm.cli.usage import CommandParser

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# Documents outside docs/, and their pages.
BESIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
    "SECURITY.md": "security-policy.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
}
COMMANDS_MARK = "<!-- commands -->"
# Patterns of code, in which nothing is a link, and of a link's target without its anchor.
_CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(\]\()(?!\w+:)([^)\s#]+)((?:#[^)\s]*)?\))")
# Patterns of Sphinx's roles in docstrings, and of references to pages.
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|exc|data):(?=<code>)")
_NAMED_PAGE = re.compile(r"<code>docs/([\w-]+)\.md</code>")


def _page_of(path: str) -> str:
    """Returns the page of a file of the tree; for an example it is a page with its source text."""
    own = posixpath.relpath(path, "docs")
    return BESIDE.get(path, f"files/{path}.md" if path.endswith(".py") else own)


def _document_of(page: str) -> str:
    """Returns the path in the tree of the document of ``page``."""
    beside = {page: path for path, page in BESIDE.items() if path != "README.md"}
    return beside.get(page, posixpath.join("docs", page))


def with_site_links(text: str, page: str) -> str:
    """Returns the document of ``page`` with links to pages instead of files."""
    folder = posixpath.dirname(_document_of(page))

    def replaced(match: re.Match[str]) -> str:
        begin, target, end = match.groups()
        there = _page_of(posixpath.normpath(posixpath.join(folder, target)))
        return begin + posixpath.relpath(there, posixpath.dirname(page) or ".") + end

    parts = _CODE.split(text)
    parts[::2] = [_LINK.sub(replaced, part) for part in parts[::2]]
    return "".join(parts)


def with_docstring_links(html: str, page: str) -> str:
    """Returns the HTML of a page with links for names of pages in docstrings, and without roles."""
    up = posixpath.relpath(".", posixpath.dirname(page) or ".")
    named = _ROLE.sub("", html).replace("::</p>", ":</p>")
    return _NAMED_PAGE.sub(rf'<a href="{up}/\1.html">\1</a>', named)


def parser_of(name: str) -> argparse.ArgumentParser:
    """Returns the parser of a subcommand, the same as for ``ringcomm NAME --help``."""
    if COMMANDS[name].forwards:
        return collectives.BENCH.build_parser()
    parser = CommandParser(prog=f"ringcomm {name}", description=COMMANDS[name].summary)
    importlib.import_module(f"ringcomm.cli.{module_of(name)}").add_arguments(parser)
    return parser


def _with_subcommands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in dict.fromkeys(action.choices.values()):
                yield from _with_subcommands(each)


def commands_help() -> str:
    """Returns one section per subcommand of ``ringcomm``, with its help."""
    sections = []
    for name in sorted(COMMANDS):
        with mock.patch.dict(os.environ, {"COLUMNS": "88", "NO_COLOR": "1"}):
            helps = [each.format_help() for each in _with_subcommands(parser_of(name))]
        blocks = "\n\n".join(f"```text\n{text.rstrip()}\n```" for text in helps)
        sections.append(f"## ringcomm {name}\n\n{blocks}")
    return "\n\n".join(sections)


# ---- hooks ----------------------------


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of documents outside docs/, and of examples."""
    from mkdocs.structure.files import File  # tests use this module without MkDocs

    for path, page in BESIDE.items():
        if path != "README.md":
            files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    for example in (ROOT / "docs" / "examples").glob("*.py"):
        path = example.relative_to(ROOT).as_posix()
        text = f"# {path}\n\n`````python\n{example.read_text().rstrip()}\n`````\n"
        files.append(File.generated(config, _page_of(path), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Changes links to pages; hides a menu that would contain only this page."""
    uri = page.file.src_uri
    if uri in ("index.md", "tutorial.md"):
        page.meta["hide"] = ["navigation", *(["toc"] if uri == "index.md" else [])]
    if uri.startswith("files/"):
        return markdown
    return with_site_links(markdown, uri).replace(COMMANDS_MARK, commands_help())


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adds links for names of pages in docstrings on reference pages."""
    uri = page.file.src_uri
    return with_docstring_links(html, uri) if uri.startswith("reference/") else html
