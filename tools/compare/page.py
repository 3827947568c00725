# SPDX-License-Identifier: Apache-2.0
"""The pages with tables of ``make compare``, between two markers."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
PICTURES = ROOT / "docs" / "pictures"
BEGIN = "<!-- make compare: begin -->"
END = "<!-- make compare: end -->"


def parts(page: str) -> tuple[str, str, str]:
    """Returns the text before the tables, the tables, and the text after them.

    Raises ``ValueError`` if the page does not have each marker once, in their order.
    """
    before, begin, rest = page.partition(BEGIN)
    tables, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"expected {BEGIN} and then {END} in a page, each once")
    return before, tables.strip("\n"), after


def replaced(page: str, tables: str) -> str:
    """Returns the page with other tables between the markers."""
    before, _, after = parts(page)
    return f"{before}{BEGIN}\n\n{tables.strip()}\n\n{END}{after}"
