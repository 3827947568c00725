"""What the site is made of beside docs/*.md: pages of other files, and of the commands' options.

``make site`` builds the site by ``mkdocs.yml``, whose hooks (``tools/site_hooks.py``) call this.
The documents are written for a reader of the tree: their links name files of it. On the site each
such file has a page, so that the same link leads there, too.
"""

from __future__ import annotations

import argparse
import html
import importlib
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ringcomm.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs"
# Documents that lie beside docs/ in the tree, and their pages.
BESIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
    "SECURITY.md": "security-policy.md",
}
PICTURES = (".png", ".svg", ".jpg", ".gif")
LANGUAGES = {
    ".py": "python",
    ".h": "cpp",
    ".cpp": "cpp",
    ".cu": "cpp",
    ".sh": "sh",
    ".toml": "toml",
}
COMMAND_PAGES = "reference/commands"
COMMANDS_PLACE = "<!-- commands -->"
# A link of a document: its text, and its target up to the anchor. Code spans have none.
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)


# ---- links of the tree, and where they lead on the site ----------------------------


def tree_path_of(page: str) -> str:
    """The path in the tree, from its root, of what a page is made of."""
    for path, beside in BESIDE.items():
        if beside == page and path != "README.md":
            return path
    return posixpath.join(DOCS, page)


def page_of(path: str) -> str:
    """The page, or the picture, that a file of the tree has on the site."""
    if path in BESIDE:
        return BESIDE[path]
    inside = posixpath.relpath(path, DOCS)
    is_ours = not inside.startswith("..")
    if is_ours and path.endswith((".md", *PICTURES)):
        return inside
    if path.endswith(PICTURES):
        return posixpath.join("assets", "from-tree", path)
    return posixpath.join("files", f"{path}.md")


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    parts = _CODE.split(text)
    parts[::2] = [change(part) for part in parts[::2]]
    return "".join(parts)


def links_of(text: str) -> Iterator[str]:
    """The relative targets of the links of a document, without anchors and outside of code."""
    for part in _CODE.split(text)[::2]:
        for _, target, _ in _LINK.findall(part):
            if "://" not in target and not target.startswith(("mailto:", "#")):
                yield target


def with_site_links(text: str, page: str) -> str:
    """A document whose links lead to pages, as Markdown that stands at ``page``."""
    folder = posixpath.dirname(tree_path_of(page))

    def replaced(match: re.Match[str]) -> str:
        begin, target, end = match.groups()
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        there = page_of(posixpath.normpath(posixpath.join(folder, target)))
        return begin + posixpath.relpath(there, posixpath.dirname(page) or ".") + end

    return _outside_code(text, lambda part: _LINK.sub(replaced, part))


def linked_files(root: Path = ROOT) -> dict[str, str]:
    """By page, the files of the tree that documents link to and that are none of docs/*.md."""
    found = {}
    documents = [*(root / DOCS).rglob("*.md"), *(root / name for name in BESIDE)]
    for document in documents:
        folder = document.parent.relative_to(root).as_posix()
        for target in links_of(document.read_text()):
            path = posixpath.normpath(posixpath.join(folder, target))
            page = page_of(path)
            if not (root / DOCS / page).exists() and path not in BESIDE:
                found[page] = path
    return found


def file_page(path: str, root: Path = ROOT) -> str:
    """The page of a file of the tree: its text."""
    language = LANGUAGES.get(os.path.splitext(path)[1], "text")
    text = (root / path).read_text()
    return f"# {path}\n\n`````{language}\n{text.rstrip()}\n`````\n"


# ---- what is made of rendered pages ----------------------------

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|exc|data):(?=<code>)")
_TOLD_PAGE = re.compile(r"<code>docs/([\w-]+)\.md</code>")


def with_docstring_links(rendered: str, page: str) -> str:
    """The HTML of a reference page, on which docstrings' roles are dropped and pages are links."""
    up = posixpath.relpath(".", posixpath.dirname(page) or ".")
    plain = _ROLE.sub("", rendered).replace("::</p>", ":</p>")
    return _TOLD_PAGE.sub(rf'<a href="{up}/\1.html">\1</a>', plain)


_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_CODE_SPAN = re.compile(r"<code>[^<]*</code>")
_INSIDE_NAME = re.compile(r"(?<=\w)([_.,(=/|])(?=[\w{])")


def with_breaks(rendered: str) -> str:
    """The HTML of a page, in whose tables long names may be broken between their parts."""

    def broken(code: re.Match[str]) -> str:
        return _INSIDE_NAME.sub(r"\1<wbr>", code[0])

    return _TABLE.sub(lambda table: _CODE_SPAN.sub(broken, table[0]), rendered)


# ---- the commands' options ----------------------------


@dataclass(frozen=True)
class Command:
    """A command and its parser."""

    words: str
    summary: str
    parser: argparse.ArgumentParser

    @property
    def page(self) -> str:
        return f"{COMMAND_PAGES}/{self.words.split()[-1].rpartition('.')[2]}.md"


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of a subcommand, as ``ringcomm NAME --help`` has it."""
    if COMMANDS[name].forwards:
        found: argparse.ArgumentParser = importlib.import_module(
            f"ringcomm.{name}.options"
        ).build_parser()
        return found
    parser = argparse.ArgumentParser(prog=f"ringcomm {name}", description=COMMANDS[name].summary)
    importlib.import_module(f"ringcomm.cli.{name}").add_arguments(parser)
    return parser


def commands() -> list[Command]:
    """All subcommands of ``ringcomm``, by name."""
    return [
        Command(f"ringcomm {name}", COMMANDS[name].summary, parser_of(name))
        for name in sorted(COMMANDS)
    ]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")


def _cell(text: str) -> str:
    """A help text in a table of Markdown: no marks of it but links to pages."""
    plain = html.escape(text, quote=False).replace("|", "\\|").replace("*", "\\*")
    plain = plain.replace("_", "\\_")
    return re.sub(r"docs/([\w-]+)\.md", r"[\1](../../\1.md)", plain)


def _invocation(action: argparse.Action, formatter: argparse.HelpFormatter) -> str:
    if not action.option_strings:
        return formatter._format_args(action, action.metavar or action.dest)  # type: ignore[arg-type]
    names = ", ".join(action.option_strings)
    if action.nargs == 0:
        return names
    return f"{names} {formatter._format_args(action, action.dest.upper())}"


def _rows(actions: Iterable[argparse.Action], parser: argparse.ArgumentParser) -> list[str]:
    formatter = argparse.HelpFormatter(parser.prog)
    rows = []
    for action in actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        told = formatter._expand_help(action) if action.help else ""
        shown = _invocation(action, formatter).replace("|", "\\|")
        rows.append(f"| `{shown}` | {_cell(told)} |")
    return rows


def command_page(command: Command) -> str:
    """The page of a command, made of its parser."""
    parser = command.parser
    usage = argparse.HelpFormatter(parser.prog, width=72)
    usage.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups, prefix="")
    lines = [f"# {command.words}", "", _sentence(_cell(parser.description or command.summary)), ""]
    # Python 3.14 colours what goes to a terminal.
    plain = re.sub(r"\x1b\[[\d;]*m", "", usage.format_help())
    shown = re.sub(r"\n +", "\n    ", plain.strip())
    lines += ["```text", shown, "```", ""]
    for group in parser._action_groups:
        rows = _rows(group._group_actions, parser)
        if not rows:
            continue
        title = group.title or "options"
        lines += [f"## {title[:1].upper()}{title[1:]}", ""]
        lines += [_sentence(_cell(group.description)), ""] if group.description else []
        lines += ["| option | |", "|---|---|", *rows, ""]
    lines += [_sentence(_cell(parser.epilog)), ""] if parser.epilog else []
    return "\n".join(lines)


def with_commands(text: str) -> str:
    """The page that lists the commands, with a table of their pages in its place."""
    rows = [
        f"| [`{each.words}`]({posixpath.relpath(each.page, 'reference')}) | {_cell(each.summary)} |"
        for each in commands()
    ]
    return text.replace(COMMANDS_PLACE, "\n".join(["| command | |", "|---|---|", *rows]))
