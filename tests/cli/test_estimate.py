"""``ringcomm estimate``: what it prints and draws."""

from __future__ import annotations

import json
import sys

import pytest

from ringcomm.cli import main
from ringcomm.cli.estimate import count, number
from ringcomm.zero.estimate_model import Transformer
from ringcomm.zero.estimate_model_parallel import ModelParallel, stage_activations
from tests.cli.processes import run

GPT2 = ("--layers", 12, "--width", 768, "--heads", 12, "--context", 1024, "--vocab", 50257)
RATES = ("--disk-read-gbps", 6, "--disk-write-gbps", 4)
DISK = ("--state-on", "disk", "--buffer-mib", 128, "--resident-gb", 0.5, *RATES)
MACHINE = ("--bandwidth-gbps", 25, "--peak-tflops", 100)


@pytest.fixture
def estimate(capsys):
    """Runs the command to its end; exit code, output and errors."""

    def call(*arguments):
        code = main(["estimate", *map(str, arguments)])
        output = capsys.readouterr()
        return code, output.out, output.err

    return call


def table(text, title):
    """The rows under a title, as lists of words; the first is the head."""
    lines = text.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(title)) + 1
    rows = []
    for line in lines[begin:]:
        if not line.startswith((" ", "stage")):
            break
        rows.append(line.split())
    return rows


def test_the_papers_example(estimate):
    code, out, err = estimate("--params", "7.5B", "--world", 64, "--reduce", "param")
    assert (code, err) == (0, "")
    assert out.splitlines()[:3] == [
        "model: 7.5 B parameters; world 64",
        "bf16, reduced to bf16, master fp32",
        "bytes per element: parameter 2, gradient 2, reduced gradient 2, state 12",
    ]
    rows = table(out, "memory of a rank, GB = 1e9 bytes")
    assert rows[1:] == [
        ["0", "15.0", "15.0", "90.0", "120", "0.00419", "0", "0.234", "?", "120"],
        ["1", "15.0", "15.0", "1.41", "31.4", "0", "0", "0", "?", "31.4"],
        ["2", "15.0", "0.234", "1.41", "16.6", "0.00839", "0", "0", "?", "16.6"],
        ["3", "0.234", "0.234", "1.41", "1.88", "0.00839", "?", "0", "?", "1.88"],
    ]
    assert "?: not known without the model's sizes" in out
    rows = table(out, "communication of a step")
    assert rows[1] == ["0", "2", "P", "15", "B", "14.77", "B", "29.5"]
    assert rows[4] == ["3", "3", "P", "22.5", "B", "22.15", "B", "44.3"]
    assert "time of a step" not in out and "fits" not in out


def test_a_transformer_on_a_machine(estimate):
    shape = (*GPT2, "--micro-batch", 4, "--world", 8, "--checkpointing", "full")
    code, out, _ = estimate(*shape, *MACHINE, "--budget-gb", 1, "--clip", "--json")
    told = json.loads(out)
    assert code == 0
    elems, tokens = 124_439_808, 4096
    assert (
        told["model"]["trainable"] == sum(told["model"]["units"]) + told["model"]["root"] == elems
    )
    gpt2 = Transformer(12, 768, 12, 1024, 50257)
    held = stage_activations(gpt2, 4, ModelParallel(), "full").total
    for stage, row in enumerate(told["stages"]):
        assert row["stage"] == stage
        assert row["activation_bytes"] == held
        parts = (row["model_state_bytes"]["total"], row["working_bytes"]["total"], held)
        assert row["total_bytes"] == sum(parts)
        assert row["sent_elems"] == (3 if stage == 3 else 2) * elems * 7 // 8
        assert row["time"]["compute_s"] == 2 * 4 * tokens * elems / 100e12
        assert row["time"]["communication_s"] == row["sent_bytes"] / 25e9
        assert row["largest_model_elems"] == 0, "activations alone take more"
    assert told["stages"][1]["working_bytes"]["grad_shard"] == 4 * elems // 8
    outside = told["outside_efficiency"]
    assert outside["parameters"] == pytest.approx(4096 * 25e9 / (4096 * 25e9 + 100e12))
    assert outside["state"] == pytest.approx(1024 * 200e9 / (1024 * 200e9 + 100e12))
    assert outside["checkpoints"] == pytest.approx(24 * 768 * 25e9 / (24 * 768 * 25e9 + 100e12))


def test_times_and_budget_in_the_tables(estimate):
    arguments = ("--params", "1B", "--context", 1000, "--world", 4, "--budget-gb", 10)
    _, out, _ = estimate(*arguments, *MACHINE, "--stage", 3)
    assert "time of a step of 1000 tokens per rank: 2 x 3 x tokens x parameters at 100" in out
    rows = table(out, "time of a step")
    # 6e12 operations; 3e9 x 3/4 elements of 2 bytes.
    assert rows[1:] == [["3", "60.0", "180", "240", "25.0%", "180", "33.3%"]]
    # (10 GB - 2 buckets of 2 Mi bf16) / (18 bytes / 4 ranks)
    assert table(out, "in 10.0 GB")[1:] == [["3", "yes", "2.22", "B"]]
    _, out, _ = estimate(*arguments, "--stage", 0)
    # (10 GB - a bucket of 2 Mi FP32 - 1e9 / 4 sums in FP32) / 16 bytes
    assert table(out, "in 10.0 GB")[1:] == [["0", "no", "562", "M"]]


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (("--dtype", "fp32"), [4, 4, 4, 0, 4, 4, 0, 0]),
        (("--preset", "fp32"), [4, 4, 4, 0, 4, 4, 0, 0]),
        (("--preset", "bf16-remainder"), [2, 2, 4, 2, 4, 4, 0, 0]),
        (("--preset", "bf16-pure-sr", "--amsgrad"), [2, 2, 2, 0, 4, 4, 4, 0]),
        (("--dtype", "fp16", "--amsgrad"), [2, 2, 4, 4, 4, 4, 4, 0]),
        (("--master", "remainder"), [2, 2, 4, 2, 4, 4, 0, 0]),
        (("--dtype", "fp16", "--master", "none", "--reduce", "param"), [2, 2, 2, 0, 4, 4, 0, 0]),
        (("--optimizer", "adamw8bit"), [2, 2, 4, 4, 1, 1, 0, 2]),
        (("--accumulate", "fp32"), [2, 4, 4, 4, 4, 4, 0, 0]),
    ],
)
def test_dtypes(estimate, options, sizes):
    _, out, _ = estimate("--params", "1M", "--world", 2, "--json", *options)
    *found, keeps_reduced = json.loads(out)["bytes_per_element"].values()
    assert found == sizes and keeps_reduced is True


def test_state_on_a_disk(estimate):
    """Eight ranks of a node share the disk; the state is neither in memory nor in the budget."""
    elems = 1 << 33
    arguments = ("--params", elems, "--world", 8, "--context", 1000, "--budget-gb", 20, *MACHINE)
    _, out, _ = estimate(*arguments, "--stage", 3, "--json", *DISK)
    (row,) = json.loads(out)["stages"]
    _, out, _ = estimate(*arguments, "--stage", 3, "--json")
    (without,) = json.loads(out)["stages"]
    in_memory = (128 << 20) + 500_000_000
    assert row["model_state_bytes"]["state"] == in_memory
    assert without["total_bytes"] - row["total_bytes"] == 12 * elems // 8 - in_memory
    # 18 bytes an element in all, 6 without the state; of the budget the buffers are gone.
    room = 20e9 - without["working_bytes"]["total"]
    assert without["largest_model_elems"] == pytest.approx(8 * room / 18, rel=1e-9)
    assert row["largest_model_elems"] == pytest.approx(8 * (room - in_memory) / 6, rel=1e-9)
    told = row["state_elsewhere"]
    # Pieces of 256 Ki elements are 3 MiB.
    moved, resident = told["moved_bytes"], told["resident_bytes"]
    assert resident == 500_000_000 // (3 << 20) * (3 << 20)
    assert moved + resident == 12 * elems // 8
    assert told["stored_bytes"] == moved
    assert told["time"]["read_s"] == pytest.approx(8 * moved / 6e9)
    assert told["time"]["write_s"] == pytest.approx(8 * moved / 4e9)
    compute_s = 6 * elems * 1000 / 100e12
    io_s = told["time"]["read_s"] + told["time"]["write_s"]
    hidden_s = 8 * 126 * 2**20 * (1 / 6e9 + 1 / 4e9)
    assert told["hidden_share"] == pytest.approx(hidden_s / io_s)
    assert told["added_s"] == pytest.approx(io_s - hidden_s)
    assert told["efficiency"] == pytest.approx(compute_s / (compute_s + io_s))
    assert told["needed_gbps"] == pytest.approx(9 * 2 * 8 * moved / compute_s / 1e9)
    assert without["state_elsewhere"] is None


def test_the_table_of_a_disk(estimate):
    arguments = ("--params", 1 << 33, "--world", 8, "--stage", 1, *DISK)
    _, out, _ = estimate(*arguments)
    assert table(out, "state on a disk")[1:] == [
        ["1", "0.629", "12.4", "12.4", "16.5", "24.8", "-", "-", "-", "-"]
    ]
    assert "times: 8 ranks share a disk of 6 GB/s read, 4 GB/s written, by turns" in out
    _, out, _ = estimate(*arguments[:-4])
    assert table(out, "state on a disk")[1:] == [["1", "0.629", "12.4", "12.4"]]
    _, out, _ = estimate("--params", "8M", "--world", 8, *MACHINE, "--context", 8, *DISK)
    rows = table(out, "state on a disk")
    assert rows[2] == ["1", "0.012", "0", "0", "0", "0", "100.0%", "0", "-", "-"]


def test_activations_on_a_disk(estimate):
    """Beside a state in memory: what is left of them there, what moves, and how long that takes."""
    gpt = ("--layers", 24, "--width", 1024, "--heads", 16, "--context", 1024, "--vocab", 50000)
    asked = (*gpt, "--world", 4, "--stage", 2)
    before = json.loads(estimate(*asked, "--json")[1])
    on_disk = ("--activations-on", "disk", "--activations-buffer-mib", 64, *RATES)
    told = json.loads(estimate(*asked, *on_disk, "--json")[1])
    kept = before["activations"]["layers"] + before["activations"]["ends"]
    layer = before["activations"]["layers"] // 24
    most = max(layer, before["activations"]["ends"]) + (64 << 20)
    assert told["activations"] == {"layers": most, "recomputed": 0, "ends": 0, "moved": kept}
    assert told["stages"][0]["activation_bytes"] == most
    assert told["activations_write_read_s"] == [4 * kept / 4e9, 4 * kept / 6e9]
    line = f"activations on a disk: a step writes {kept / 1e9:.2f} GB of a rank, and reads them; "
    assert line + f"{kept / 1e9:.2f} s and" in estimate(*asked, *on_disk)[1]


def test_parameters_on_a_disk(estimate):
    """At stage 3 they are neither in memory nor in the budget, but for the buffers."""
    elems = 1 << 33
    arguments = ("--params", elems, "--world", 8, "--context", 1000, "--budget-gb", 20, *MACHINE)
    on_disk = ("--params-on", "disk", "--params-resident-gb", 0.5, *RATES)
    _, out, _ = estimate(*arguments, "--json", *on_disk)
    *others, row = json.loads(out)["stages"]
    assert [each["params_on_disk"] for each in others] == [None] * 3
    _, out, _ = estimate(*arguments, "--stage", 3, "--json")
    (without,) = json.loads(out)["stages"]
    in_memory = (64 << 20) + 500_000_000
    assert row["model_state_bytes"]["params"] == in_memory
    assert without["total_bytes"] - row["total_bytes"] == 2 * elems // 8 - in_memory
    room = 20e9 - without["working_bytes"]["total"]
    assert row["largest_model_elems"] == pytest.approx(8 * (room - in_memory) / 16, rel=1e-9)
    # Chunks of 256 Ki elements are 512 KiB.
    told = row["params_on_disk"]
    moved, resident = told["stored_bytes"], told["resident_bytes"]
    assert resident == 500_000_000 // (512 << 10) * (512 << 10)
    assert moved + resident == 2 * elems // 8
    assert (told["read_bytes"], told["written_bytes"]) == (2 * moved, moved)
    assert told["time"]["read_s"] == pytest.approx(8 * 2 * moved / 6e9)
    io_s = told["time"]["read_s"] + told["time"]["write_s"]
    hidden_s = min(6 * elems * 1000 / 100e12, 8 * (2 * moved / 6e9 + (64 << 20) / 4e9))
    assert told["added_s"] == pytest.approx(io_s - hidden_s)
    _, out, _ = estimate("--params", elems, "--world", 8, *on_disk)
    rows = table(out, "parameters on a disk")
    assert rows[1] == ["3", "0.567", "1.65", "3.30", "1.65", "4.39", "3.30", "-", "-"]
    _, out, _ = estimate("--params", elems, "--world", 8, *on_disk, "--master", "remainder")
    assert table(out, "parameters on a disk")[1][3] == "4.94"


def test_state_on_the_host(estimate):
    """Of a GPU's memory it takes the buffers."""
    _, out, _ = estimate("--params", 1 << 33, "--world", 8, "--stage", 3, "--state-on", "cpu")
    assert table(out, "state on a host")[1:] == [["3", "0.0661", "12.9", "12.9"]]
    assert table(out, "memory of a rank")[1][3] == "0.0671"


def test_a_preset_that_scales_the_loss_takes_two_passes(estimate):
    arguments = ("--params", "1M", "--world", 2, "--stage", 1, "--json", "--preset")
    stored = []
    for name in ("bf16-mixed", "fp16-scaled"):
        _, out, _ = estimate(*arguments, name)
        stored.append(json.loads(out)["stages"][0]["working_bytes"]["grad_shard"])
    assert stored == [0, 4 * 10**6 // 2]


def test_a_count_keeps_its_shape_for_activations(estimate):
    _, out, _ = estimate("--params", "2B", "--world", 2, "--json", *GPT2)
    told = json.loads(out)
    assert told["model"]["trainable"] == 2 * 10**9
    assert told["model"]["units"] == [12 * 768**2 + 13 * 768] * 12
    assert told["activations"]["layers"] > 0


def test_an_output_layer_of_its_own(estimate):
    _, out, _ = estimate("--world", 2, "--untied", "--json", *GPT2)
    assert json.loads(out)["model"]["trainable"] == 124_439_808 + 50257 * 768


@pytest.mark.parametrize(
    "arguments",
    [
        ("--params", "999.9T", "--world", 1, "--dtype", "fp32", "--amsgrad"),
        ("--params", "999.9T", "--world", 99_999, "--context", 1_000_000, *MACHINE),
        ("--params", "123", "--world", 7, "--budget-gb", 0.123456789),
        (*GPT2, "--world", 7, "--micro-batch", 1000, "--checkpointing", "full", *MACHINE),
        (*GPT2, "--world", 123, "--clip", "--budget-gb", 123_456, *MACHINE),
        ("--params", "9.99T", "--world", 8, "--context", 1_000_000, *MACHINE, *DISK),
        ("--params", "1M", "--world", 2, *DISK[:4], "--resident-gb", 1e9),
    ],
)
def test_tables_fit_100_columns(estimate, arguments):
    code, out, _ = estimate(*arguments)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 100
    assert not any(line.endswith(" ") for line in out.splitlines())


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_picture_is_written(estimate, tmp_path, ending):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"estimate.{ending}"
    code, _, err = estimate(*GPT2, "--world", 8, "--budget-gb", 4, "--plot", path)
    assert (code, err) == (0, "")
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[ending]
    assert path.read_bytes().startswith(begins)


def test_the_picture_names_what_it_shows(estimate, tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    path = tmp_path / "estimate.svg"
    estimate("--params", "7.5B", "--world", 64, "--stage", 2, "--budget-gb", 32, "--plot", path)
    drawn = path.read_text()
    for words in ("parameters", "gradients", "optimizer state", "working buffers", "stage 2"):
        assert words in drawn
    assert "budget 32 GB" in drawn and "world 64" in drawn
    assert "stage 1" not in drawn and "activations" not in drawn


def test_without_matplotlib_the_picture_is_refused(estimate, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = tmp_path / "estimate.png"
    code, out, err = estimate("--params", "1M", "--world", 2, "--plot", path)
    assert (code, out) == (1, "")
    assert err.startswith(f"ringcomm estimate: --plot {path}: expected matplotlib, got ")
    assert "or leave --plot out" in err and len(err.splitlines()) == 1
    assert not path.exists()


@pytest.mark.parametrize("name", ["nowhere/estimate.png", "estimate.nonsense"])
def test_a_picture_that_cannot_be_written_is_told(estimate, tmp_path, name):
    pytest.importorskip("matplotlib")
    code, out, err = estimate("--params", "1M", "--world", 2, "--plot", tmp_path / name)
    assert (code, out) == (2, "")
    assert f"{name}: cannot be written: " in err


def test_numbers_have_three_digits():
    values = (0.0, 0.00012345, 0.12345, 0.99961, 1.2345, 9.9961, 12.345, 99.961, 12345.6)
    shown = ["0", "0.000123", "0.123", "1.00", "1.23", "10.0", "12.3", "100", "12346"]
    assert [number(value) for value in values] == shown
    assert [count(elems) for elems in (999, 1240, 7_500_000_000, 3 * 10**12)] == [
        "999",
        "1.24 K",
        "7.5 B",
        "3 T",
    ]


def test_the_command_as_a_process():
    done = run("-m", "ringcomm", "estimate", "--params", "7.5B", "--world", 64)
    assert (done.returncode, done.stderr) == (0, "")
    assert "model: 7.5 B parameters; world 64" in done.stdout
    assert "estimate" in run("-m", "ringcomm", "--help").stdout
