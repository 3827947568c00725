# SPDX-License-Identifier: Apache-2.0
"""The harness's command line."""

import argparse
import runpy
import sys
import warnings
from importlib import import_module

import pytest
from torch.distributed import HashStore

from ringcomm.bench import collectives, moe
from ringcomm.bench.cases import COLLECTIVES
from ringcomm.bench.collectives import (
    DEFAULT_COLLECTIVES,
    expected_s,
    filled_sizes,
    find_rank,
    parse,
    placements_of,
    sizes_bytes,
)
from ringcomm.bench.launch import LaunchError, RankInfo, Wanted
from ringcomm.bench.options import parse_size, without_files
from ringcomm.bench.run import BENCHES, CANNOT_RUN, Run, run


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4K", 4096),
        ("4k", 4096),
        ("4KB", 4096),
        ("4KiB", 4096),
        ("1M", 1 << 20),
        ("64MiB", 64 << 20),
        ("2G", 2 << 30),
    ],
)
def test_sizes(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5M", "4T", "4 KM", "0x10"])
def test_what_is_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError, match="not a size"):
        parse_size(text)


def test_defaults(monkeypatch):
    monkeypatch.setattr(collectives, "missing_of_mpich", lambda: "")
    options = parse([])
    assert options.note == ""
    assert options.collectives == DEFAULT_COLLECTIVES
    assert options.systems == ("ringcomm", "gloo", "mpi")
    assert sizes_bytes(options)[0] == 4 << 10
    assert sizes_bytes(options)[-1] == 64 << 20
    assert options.placement == "usual"
    assert (options.device, options.graph) == ("cpu", None)
    assert options.check and options.tensors == "plain"


@pytest.mark.parametrize("missing", ["mpi4py", "mpiexec"])
def test_missing_mpi_is_left_out_unless_it_was_asked_for(monkeypatch, missing):
    monkeypatch.setattr(collectives, "missing_of_mpich", lambda: missing)
    options = parse([])
    assert options.systems == ("ringcomm", "gloo")
    assert options.note == f"note: MPI is left out: no {missing} (pip install mpi4py mpich)"
    asked = parse(["--peers", "gloo,mpi"])
    assert (asked.systems, asked.note) == (("ringcomm", "gloo", "mpi"), "")
    assert parse(["--device", "cuda"]).note == parse(["--subject", "mpi"]).note == ""


def test_sizes_stop_at_the_largest():
    options = parse(["-b", "4K", "-e", "100K", "-f", "4"])
    assert sizes_bytes(options) == [4096, 16384, 65536]
    assert sizes_bytes(parse(["-b", "8K", "-e", "1M", "-f", "1"])) == [8192]


def test_all_collectives_and_no_peers():
    options = parse(["all", "--peers", "", "-c", "0", "--placement", "in"])
    assert "send_recv" in options.collectives and "all_to_all" in options.collectives
    assert options.systems == ("ringcomm",)
    assert not options.check and options.placement == "in"


def test_the_subject_is_not_its_own_peer():
    assert parse(["--subject", "gloo", "--peers", "gloo,mpi"]).systems == ("gloo", "mpi")


def test_a_gpu_has_peers_of_its_own():
    options = parse(["--device", "cuda"])
    assert options.systems == ("ringcomm", "nccl", "torch", "copy")
    assert (options.mode, options.graph, options.graph_calls) == ("auto", None, 20)
    assert parse(["--device", "cuda", "--graph"]).graph
    assert not parse(["--device", "cuda", "--no-graph"]).graph


def test_algorithms_of_ringcomm_are_systems_of_their_own():
    options = parse(["--subject", "ringcomm:one_shot", "--peers", "ringcomm,ringcomm:ring"])
    assert options.systems == ("ringcomm:one_shot", "ringcomm", "ringcomm:ring")


@pytest.mark.parametrize(
    ("asked", "name", "placements"),
    [
        ("both", "all_gather", ["out", "in"]),
        ("both", "broadcast", ["in"]),
        ("out", "broadcast", []),
        ("usual", "all_gather", ["out"]),
        ("usual", "all_reduce", ["in"]),
        ("usual", "send_recv", ["out"]),
    ],
)
def test_placements(asked, name, placements):
    options = parse(["--placement", asked])
    assert placements_of(options, COLLECTIVES[name]) == placements


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["all_reduced"], "unknown collective all_reduced; known: reduce_scatter"),
        (["--peers", "ucc"], "unknown peer ucc; known: ringcomm"),
        (["--peers", "gloo:ring"], "unknown peer gloo:ring"),
        (["--peers", "ringcomm:star"], "unknown peer ringcomm:star"),
        (["--subject", "rccl"], "unknown subject rccl"),
        (["--peers", "nccl"], "--device cpu cannot run nccl"),
        (["--peers", "", "--subject", "torch"], "--device cpu cannot run torch"),
        (["--device", "cuda", "--peers", "gloo"], "--device cuda cannot run gloo"),
        (["--algorithm", "ll"], "copy_engine and multicast need --device cuda"),
        (["--peers", "ringcomm:copy_engine"], "copy_engine and multicast need --device cuda"),
        (["--peers", "ringcomm:multicast"], "copy_engine and multicast need --device cuda"),
        (["--subject", "ringcomm:ll"], "copy_engine and multicast need --device cuda"),
        (["--graph"], "--graph and --mode need --device cuda"),
        (["--mode", "one-launch"], "--graph and --mode need --device cuda"),
        (["--device", "cuda", "--pin"], "--pin needs --device cpu"),
        (["--device", "cuda", "--threads", "2"], "--threads needs --device cpu"),
        (["--threads", "0"], "'0' is not a positive whole number"),
        (["--threads", "65"], "argument --threads: threads"),
        (["-b", "1M", "-e", "1K"], "--maxbytes 1024 is below --minbytes 1048576"),
        (["-o", "avg", "-d", "int32"], "avg needs a floating-point"),
        (["-n", "0"], "'0' is not a positive whole number"),
        (["--busy", "some"], "'some' is not a whole number"),
        (["--busy", "1", "--device", "cuda"], "--busy needs --device cpu"),
        (["-b", "0"], "--minbytes 0: the smallest size must have a byte"),
        (["-b", "lots"], "'lots' is not a size"),
        (["--csv", "/nowhere/x.csv"], "--csv: /nowhere/x.csv: its folder does not exist"),
    ],
)
def test_wrong_command_lines(arguments, words, capsys):
    with pytest.raises(SystemExit) as ending:
        parse(arguments)
    assert ending.value.code == 2
    assert words in capsys.readouterr().err


def test_sizes_without_an_element_of_each_rank_are_skipped():
    options = parse(["all_reduce", "all_gather", "-b", "4", "-e", "64", "-f", "2"])
    found = {name: filled_sizes(options, COLLECTIVES[name], 3) for name in options.collectives}
    assert found == {"all_reduce": [4, 8, 16, 32, 64], "all_gather": [16, 32, 64]}
    assert len(expected_s(options, 3)) == 8


def test_sizes_that_are_all_too_small_are_refused_with_a_size_that_is_not():
    options = parse(["all_reduce", "all_gather", "-b", "4", "-e", "8", "-n", "3"])
    with pytest.raises(
        LaunchError, match=r"all_gather has no element for each of 3 ranks.* -b 12$"
    ):
        find_rank(options, Wanted(3))
    assert find_rank(parse(["all_gather", "-b", "12", "-e", "12", "-n", "3"]), Wanted(3)) is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["moe", "foo"], "'foo' is not EXPERTS,K, positive whole numbers such as 16,2"),
        (["moe", "16,0"], "'16,0' is not EXPERTS,K"),
        (["training", "--batches", "4"], "'4' is not SEQUENCES,CONTEXT"),
        (["steps"], "the following arguments are required: shard|step"),
        (["curves", "all"], "argument optimizers|compression: invalid choice: 'all'"),
        (["device_steps"], "the following arguments are required: shard|step"),
    ],
)
def test_errors_name_the_words_that_a_bench_takes(words, says, capsys):
    with pytest.raises(SystemExit) as ending:
        run(words)
    assert ending.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("name", BENCHES)
def test_usage_and_errors_call_an_argument_by_one_name(name):
    actions = bench_of(name).build_parser()._actions
    assert all(action.option_strings or isinstance(action.metavar, str) for action in actions)


def bench_of(name):
    return import_module(f"ringcomm.bench.{name}").BENCH


@pytest.mark.parametrize("name", BENCHES)
def test_short_names_mean_the_same_in_every_bench(name):
    """-n is the number of ranks, and -r the number of rounds."""
    parser = bench_of(name).build_parser()
    meanings = {"-n": "ranks", "-r": "rounds"}
    found = {short: parser._option_string_actions.get(short) for short in meanings}
    assert all(action is None or action.dest == meanings[s] for s, action in found.items())


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("colectives", "collectives"),
        ("trainning", "training"),
        ("all_reduced", "all_reduce"),
        ("zzz", None),
    ],
)
def test_a_word_that_is_no_bench_is_refused(word, meant, capsys):
    assert run([word, "-n", "2"]) == CANNOT_RUN
    usage, listed, error = capsys.readouterr().err.splitlines()
    assert usage == "usage: ringcomm bench [options] COLLECTIVE"
    assert listed == "       ringcomm bench --help lists every option"
    ends = "" if meant is None else f"; did you mean {meant}?"
    assert error == f"ringcomm bench: error: unknown benchmark or collective '{word}'{ends}"
    told = " ".join(bench_of("collectives").build_parser().format_help().split())
    assert all(name in told for name in (*BENCHES, *COLLECTIVES))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("-n", "3"), "16 experts do not divide among 3 ranks; give shapes EXPERTS,K such as 12,2"),
        (("-n", "3", "6,2", "64,2"), "64 experts do not divide among 3 ranks"),
        (("2,4", "-n", "2"), "shape 2,4: expected K from 1 to the 2 experts"),
    ],
)
def test_experts_that_do_not_divide_are_refused_before_ranks_start(words, says, capsys):
    with pytest.raises(SystemExit) as ending:
        run(["moe", *words])
    assert ending.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_ranks_of_a_launcher_that_do_not_divide_the_experts_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    asked = moe.BENCH.parse(["16,2"])
    with pytest.raises(LaunchError, match="16 experts do not divide among 3 ranks"):
        moe.measure(Run(moe.BENCH, asked, RankInfo(0, 3, HashStore())))


@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_is_run_by_its_module(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--bogus"])
    with pytest.raises(SystemExit) as ending, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the module is already imported
        runpy.run_module(f"ringcomm.bench.{name}", run_name="__main__")
    assert ending.value.code == 2
    said = capsys.readouterr().err
    assert f"usage: {' '.join(bench_of(name).command([]))} " in said
    assert "--bogus" in said or "required" in said


def test_rounds_and_roots_of_collectives_have_long_names():
    options = parse(["-n", "3", "-r", "7", "--root", "1"])
    assert (options.ranks, options.rounds, options.root) == (3, 7, 1)
    assert parse(["--iters", "5"]).rounds == parse(["--rounds", "5"]).rounds == 5


def test_a_recorded_command_names_no_files():
    words = ["-b", "4K", "--json", "a/b", "--csv=c", "-e", "8K"]
    assert without_files(words) == ["-b", "4K", "-e", "8K"]
