"""Writes the README's table of figures from bench/results.

`python tools/readme_figures.py` after a new measurement; a test compares the two.
"""

import csv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
SIZE_BYTES = 64 << 20
BEGIN, END = "<!-- figures: tools/readme_figures.py -->\n", "<!-- end of figures -->\n"
# torch.distributed has all_reduce in place only.
CASES = {"reduce_scatter": "out", "all_gather": "out", "all_reduce": "in"}


def rows_of(path: Path) -> tuple[dict[str, str], dict[tuple[str, str], dict[str, str]]]:
    """A result file's heading, and its rows of SIZE_BYTES by collective and system."""
    lines = path.read_text().splitlines()
    heading = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    rows = {}
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        wanted = row["placement"] == CASES.get(row["collective"])
        if wanted and int(row["size_bytes"]) == SIZE_BYTES:
            rows[row["collective"], row["system"]] = row
    return heading, rows


def table() -> str:
    """The table in Markdown, with what it was measured on."""
    text = [
        "| collective | tensors | ringcomm | Gloo takes | MPICH takes |",
        "|---|---|---|---|---|",
    ]
    headings = []
    for tensors in ("heap", "plain"):
        heading, rows = rows_of(ROOT / "bench" / "results" / f"2ranks-float-{tensors}.csv")
        headings.append(heading)
        for collective in CASES:
            own_ms = float(rows[collective, "ringcomm"]["time_us"]) / 1e3
            gloo = float(rows[collective, "gloo"]["ratio"])
            mpi = float(rows[collective, "mpi"]["ratio"])
            cells = f"{own_ms:.1f} ms | {gloo:.1f}x | {mpi:.1f}x"
            text.append(f"| {collective} | {tensors} | {cells} |")
    machine, loads = headings[0], " and ".join(one["load"].split()[0] for one in headings)
    text.append(
        f"\n64 MiB of FP32, 2 ranks on {machine['cores']} cores ({machine['cpu']}).\n"
        "All systems took turns in one run; medians of the times, and of the ratios in a round.\n"
        f"Load of the machine beside them: {loads}."
    )
    return "\n".join(text) + "\n"


def filled(readme: str) -> str:
    """The README's text with the table in its place."""
    before, _, rest = readme.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    README.write_text(filled(README.read_text()))
