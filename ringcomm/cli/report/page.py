"""The page: one HTML file with its style, its program, the figures' data and plotly.js.

Nothing is fetched. Text from files is escaped wherever it stands, and a content security policy
lets no script run but the page's own two, which it names by their hashes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ringcomm.cli.report.parts import Block, Figure, Findings, Matrix, Section, Table, Text
from ringcomm.errors import ArgumentError, UnsupportedError, printable
from ringcomm.json_reader import read_bounded

__all__ = ["Library", "data_of", "find_library", "page"]

LARGEST_LIBRARY_BYTES = 32 << 20
BANNER_CHARS = 1000
_BANNER = re.compile(r"plotly\.js(?: \(basic[^)]*\))? v(\d+\.\d+\.\d+)")


@dataclass(frozen=True)
class Library:
    """plotly.js: its text and its version."""

    text: str
    version: str


def find_library(path: Path | None) -> Library:
    """Reads plotly.js out of the Python package, or from a file.

    Raises:
        UnsupportedError: the package is not installed.
        ArgumentError: the file cannot be read, or is no plotly.js.
    """
    if path is None:
        # The package itself takes a second to import, and only one file of it is needed.
        found = importlib.util.find_spec("plotly")
        folders = found.submodule_search_locations if found is not None else None
        if not folders:
            raise UnsupportedError(
                "report: expected the package plotly, which draws the figures, got none; install "
                "it with pip install 'ringcomm[report]', or give plotly.js itself: --plotly FILE"
            )
        path = Path(folders[0], "package_data", "plotly.min.js")
    try:
        text = read_bounded(path, LARGEST_LIBRARY_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--plotly {path}: cannot be read: {printable(str(error))}") from error
    version = _BANNER.search(text[:BANNER_CHARS])
    if version is None:
        raise ArgumentError(
            f"--plotly {path}: expected plotly.js, such as plotly-basic.min.js, got another file"
        )
    return Library(text, version[1])


def page(title: str, sections: Sequence[Section], left_out: Sequence[str], library: Library) -> str:
    """The HTML text.

    Args:
        title: of the page.
        sections: in their order.
        left_out: sentences about files that are not shown.
        library: draws the figures.
    """
    folder = Path(__file__).parent
    style = (folder / "page.css").read_text(encoding="utf-8")
    program = (folder / "page.js").read_text(encoding="utf-8")
    packed = base64.b64encode(gzip.compress(library.text.encode(), mtime=0)).decode()
    policy = (
        f"default-src 'none'; script-src {_hash(program)} {_hash(library.text)}; "
        "style-src 'unsafe-inline'"
    )
    body = "\n".join(_body(title, sections, left_out, library))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{_text(title)}</title>
<style>
{style}</style>
</head>
<body>
{body}
<script type="application/json" id="figures">{_json(data_of(sections))}</script>
<script type="application/octet-stream" id="plotly">{packed}</script>
<script>{program}</script>
</body>
</html>
"""


def data_of(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """Returns the data of all figures, in their order, for the page's program."""
    return [
        {
            "data": figure.data,
            "layout": figure.layout,
            "height": figure.height,
            "buttons": [change for _, change in figure.buttons],
        }
        for section in sections
        for figure in section.blocks
        if isinstance(figure, Figure)
    ]


def _hash(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _text(text: str) -> str:
    return html.escape(text)


def _json(plain: Any) -> str:
    """JSON in which no text can end the element that it stands in."""
    text = json.dumps(plain, separators=(",", ":"), allow_nan=False)
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _body(
    title: str, sections: Sequence[Section], left_out: Sequence[str], library: Library
) -> Iterator[str]:
    yield f'<header><h1>{_text(title)}</h1><p id="state" role="status">drawing the figures ...</p>'
    yield "<noscript><p>Figures need scripts; the tables below them do not.</p></noscript>"
    for each in left_out:
        yield f'<p class="note">Left out: {_text(each)}</p>'
    yield "</header>"
    yield '<nav aria-label="Sections"><ul>'
    for index, section in enumerate(sections):
        kind = f'<span class="kind">{_text(section.kind)}</span>'
        yield f'<li>{kind} <a href="#s{index}">{_text(section.title)}</a></li>'
    yield "</ul></nav>\n<main>"
    number = 0
    for index, section in enumerate(sections):
        yield f'<section id="s{index}" aria-labelledby="h{index}">'
        kind = f'<span class="kind">{_text(section.kind)}</span>'
        yield f'<h2 id="h{index}">{_text(section.title)} {kind}</h2>'
        yield f'<p class="files">{_text(", ".join(section.files))}</p>'
        yield _facts(section.facts)
        yield '<div class="blocks">'
        for block in _filling(section.blocks):
            yield _block(block, number)
            number += isinstance(block, Figure)
        yield "</div></section>"
    yield "</main>"
    yield (
        f"<footer><p>Made by <code>ringcomm report</code>. Figures are drawn by plotly.js "
        f"{_text(library.version)}, Copyright Plotly, Inc., MIT License, which is part of this "
        "file. Nothing is fetched from a network.</p></footer>"
    )


def _filling(blocks: Sequence[Block]) -> Iterator[Block]:
    """The blocks, of which two narrow figures stand beside each other; one alone is wide."""
    beside = 0
    for block, after in zip_longest(blocks, blocks[1:]):
        beside = beside + 1 if isinstance(block, Figure) and not block.is_wide else 0
        is_last = not (isinstance(after, Figure) and not after.is_wide)
        if isinstance(block, Figure) and beside % 2 and is_last:
            yield replace(block, is_wide=True)
        else:
            yield block


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f"<div><dt>{_text(n)}</dt><dd>{_text(v)}</dd></div>" for n, v in facts)
    return f'<dl class="facts">{rows}</dl>' if facts else ""


def _block(block: Block, number: int) -> str:
    if isinstance(block, Figure):
        return _figure(block, number)
    if isinstance(block, Table):
        return f'<div class="wide"><h3>{_text(block.caption)}</h3>{_table(block)}</div>'
    if isinstance(block, Matrix):
        return _matrix(block)
    if isinstance(block, Findings):
        return _findings(block)
    return _pre(block)


def _pre(text: Text) -> str:
    pre = f'<pre tabindex="0">{_text(text.text)}</pre>'
    if text.folded:
        pre = f"<details><summary>{_text(text.folded)}</summary>{pre}</details>"
    return f'<div class="wide">{pre}</div>'


def _figure(figure: Figure, number: int) -> str:
    notes = "".join(f'<p class="note">{_text(note)}</p>' for note in figure.notes)
    buttons = "".join(
        f'<button type="button" data-figure="{number}" data-button="{index}" '
        f'aria-pressed="{"false" if index else "true"}">{_text(label)}</button>'
        for index, (label, _) in enumerate(figure.buttons)
    )
    row = f'<p class="buttons">{buttons}</p>' if buttons else ""
    kind = "wide" if figure.is_wide else "half"
    return (
        f'<figure class="{kind}"><figcaption><h3>{_text(figure.title)}</h3>{notes}</figcaption>'
        f'{row}<div class="plot" id="f{number}" role="img" aria-label="{_text(figure.title)}; the '
        f'table below has its values" style="min-height:{figure.height}px"></div>'
        f"<details><summary>as a table ({len(figure.table.rows):,} rows)</summary>"
        f"{_table(figure.table)}</details></figure>"
    )


def _row(cells: Sequence[str], numeric: frozenset[int], styles: Sequence[str]) -> str:
    out = [f'<th scope="row">{_text(cells[0])}</th>']
    for index, cell in enumerate(cells[1:], 1):
        kind = ' class="n"' if index in numeric else ""
        style = styles[index - 1] if styles else ""
        out.append(f"<td{kind}{style}>{_text(cell)}</td>")
    return f"<tr>{''.join(out)}</tr>"


def _table(table: Table, styles: Sequence[Sequence[str]] = ()) -> str:
    head = "".join(
        f'<th scope="col"{" class=n" if index in table.numeric else ""}>{_text(title)}</th>'
        for index, title in enumerate(table.columns)
    )
    rows = "\n".join(
        _row(row, table.numeric, styles[index] if styles else ())
        for index, row in enumerate(table.rows)
    )
    label = _text(table.caption)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>'
        f"<caption>{label}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _matrix(matrix: Matrix) -> str:
    styles = [
        [f' style="--heat:{heat:.3f}"' if heat > 0 else "" for heat in line] for line in matrix.heat
    ]
    notes = "".join(f'<p class="note">{_text(note)}</p>' for note in matrix.notes)
    title = f"<h3>{_text(matrix.table.caption)}</h3>"
    return f'<div class="wide matrix">{title}{notes}{_table(matrix.table, styles)}</div>'


def _findings(findings: Findings) -> str:
    items = []
    for verdict, name, value, advice in findings.entries:
        kind = {"ok": "ok", "note": "warn"}.get(verdict, "bad")
        more = f'<p class="advice">{_text(advice)}</p>' if advice else ""
        items.append(
            f'<li class="{kind}"><span class="verdict">{_text(verdict)}</span> '
            f"<strong>{_text(name)}</strong> <span>{_text(value)}</span>{more}</li>"
        )
    return f'<ul class="findings wide">{"".join(items)}</ul>'
