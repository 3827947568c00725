"""The page of ``ringcomm report`` in a browser: from a disk, alone, drawn, and without an error."""

import html
import importlib.util
import json
import re
import shutil
import subprocess

import pytest

from ringcomm.bench.report import Report, Row, write_json
from ringcomm.cli import main
from ringcomm.comm.recorder import trace_file
from tests.cli.test_report import HANG, HOSTILE

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
LIMIT_S = 120

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="no browser: apt-get install chromium"),
    pytest.mark.skipif(
        importlib.util.find_spec("plotly") is None, reason="no plotly: pip install '.[report]'"
    ),
]

# Stands before the page's policy, which would not let it run. It says what it saw once the page has
# drawn, and has pressed a button by then.
PROBE = """<script>
const seen = {errors: [], refused: []};
addEventListener("error", (event) => seen.errors.push(String(event.message)), true);
addEventListener("unhandledrejection", (event) => seen.errors.push(String(event.reason)));
addEventListener("securitypolicyviolation", (event) => seen.refused.push(event.violatedDirective));
for (const name of ["error", "warn"]) console[name] = (...all) => seen.errors.push(all.join(" "));
const timer = setInterval(async () => {
  const page = document.documentElement;
  if (page.dataset.drawn === undefined) return;
  clearInterval(timer);
  const plots = [...document.querySelectorAll(".plot")];
  const range = () => plots[0]._fullLayout.xaxis.range.map(Number);
  seen.fetched = performance.getEntriesByType("resource").map((entry) => entry.name);
  seen.overflow = page.scrollWidth - innerWidth;
  seen.bars = plots.map((plot) => plot.querySelectorAll(".bars .point").length);
  seen.lines = plots.map((plot) => plot.querySelectorAll(".scatterlayer .js-line").length);
  seen.widths = plots.map((plot) => plot.getBoundingClientRect().width);
  seen.all = range();
  const buttons = [...document.querySelectorAll("button")];
  buttons.find((each) => /last calls/.test(each.textContent)).click();
  seen.before = range();
  seen.colours = ["--text", "--back"].map((name) => getComputedStyle(page).getPropertyValue(name));
  seen.ran = window.ran;
  seen.drawn_in = plots[0].querySelector(".xtick text").style.fill;
  page.dataset.seen = JSON.stringify(seen);
}, 20);
</script>"""


def seen_in_browser(text, folder, *options):
    """What the probe saw of a page."""
    assert BROWSER is not None
    probed = folder / "probed.html"
    probed.write_text(text.replace("<head>", f"<head>{PROBE}", 1))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += [f"--user-data-dir={folder / 'profile'}", "--disable-background-networking"]
    command += ["--virtual-time-budget=20000", *options, "--dump-dom", probed.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found is not None, done.stderr
    return json.loads(html.unescape(found[1]))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    trace = folder / "trace.json"
    trace.write_text(trace_file.text_of(trace_file.Trace(HANG, 0, 1.5e9, HOSTILE)))
    rows = [
        Row("all_reduce", size, 1, "float32", "SUM", -1, 2, HOSTILE, "out", 1.0, busbw_gbps=2.0)
        for size in (64, 4096)
    ]
    write_json(Report({"cpu": HOSTILE}, rows), folder / "bench.json")
    out = folder / "report.html"
    assert main(["report", str(trace), str(folder / "bench.json"), "--output", str(out)]) == 0
    return out.read_text()


def assert_drawn(seen, text_colour, drawn_colour):
    calls, waits, bandwidths = range(3)
    assert (seen["bars"][calls], seen["bars"][waits], seen["lines"][bandwidths]) == (3, 4, 1)
    assert seen["overflow"] <= 0 and min(seen["widths"]) > 300
    assert seen["all"][1] > -0.1 and seen["before"][1] < -0.8
    assert (seen["colours"][0], seen["drawn_in"]) == (text_colour, drawn_colour)


def test_the_page_draws_itself_and_asks_for_nothing(text, tmp_path):
    seen = seen_in_browser(text, tmp_path, "--window-size=1280,900")
    assert seen["errors"] == [] and seen["refused"] == [] and seen["fetched"] == []
    assert_drawn(seen, "#1b1f27", "rgb(27, 31, 39)")


def test_in_the_dark_on_a_narrow_screen_with_something_smuggled_in(text, tmp_path):
    """Of what an escape too few would let in, the browser runs nothing, and refuses to fetch it.

    That it was asked to is seen: the other test would see it, too.
    """
    smuggled = '<script>window.ran = 1</script><img src="https://127.0.0.1:9/x.png">'
    dark = "--blink-settings=preferredColorScheme=0"
    text = text.replace("</main>", f"{smuggled}</main>")
    seen = seen_in_browser(text, tmp_path, "--window-size=500,900", dark)
    assert sorted(seen["refused"]) == ["img-src", "script-src-elem"]
    assert seen["fetched"] == ["https://127.0.0.1:9/x.png"] and "ran" not in seen
    assert_drawn(seen, "#e6e9ee", "rgb(230, 233, 238)")
