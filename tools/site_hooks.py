"""Hooks of MkDocs: pages that no file of docs/ has, and links between the tree and the site."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# MkDocs loads this file by its path, wherever it is started.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import site_pages

ALONE = ("index.md", "tutorial.md")  # pages whose menu would have them alone


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Refuses to build without the formatter: mkdocstrings only notes that it is missing."""
    if importlib.util.find_spec("ruff") is None:
        raise PluginError("ruff is not installed, and signatures would be cut off: make site")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of files beside docs/, and those of the commands."""
    for path, page in site_pages.BESIDE.items():
        if path != "README.md":
            text = (site_pages.ROOT / path).read_text()
            files.append(File.generated(config, page, content=text))
    for page, path in site_pages.linked_files().items():
        if page.endswith(site_pages.PICTURES):
            file = File.generated(config, page, abs_src_path=str(site_pages.ROOT / path))
        else:
            file = File.generated(config, page, content=site_pages.file_page(path))
        files.append(file)
    for command in site_pages.commands():
        text = site_pages.command_page(command)
        files.append(File.generated(config, command.page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Has links to files of the tree lead to their pages."""
    uri = page.file.src_uri
    if uri in ALONE:
        page.meta["hide"] = ["navigation", *(["toc"] if uri == "index.md" else [])]
    if uri.startswith((f"{site_pages.COMMAND_PAGES}/", "files/")):
        return markdown
    return site_pages.with_commands(site_pages.with_site_links(markdown, uri))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Has docstrings on reference pages name pages by links, and tables break long names."""
    uri = page.file.src_uri
    if uri.startswith("reference/"):
        html = site_pages.with_docstring_links(html, uri)
    return site_pages.with_breaks(html)
