"""The optimizer's collectives under ThreadSanitizer, and mutants that must be rejected."""

import shutil

import pytest

from tests.native import test_races as races

TEAMS = [(1, 1, 2, 4), (2, 1, 1, 8), (2, 2, 3, 4), (3, 1, 2, 8), (4, 2, 1, 4), (8, 1, 1, 4)]

# What each mutant breaks: header, text, replacement.
MUTANTS = {
    "parameters stored before their owner offers": (
        "signal.h",
        "if (reached(load_acquire_sys(word_at(v, team.channel(), site)), want)) return",
        "if (!site.on_consumed || "
        "reached(load_acquire_sys(word_at(v, team.channel(), site)), want)) return",
    ),
    "returned while peers read and store": (
        "buckets.h",
        "RC_RETURN_IF_FAILED(e.drained(e.pairs, p, 1));",
        "",
    ),
    "returned before the team has read and stored": (
        "buckets.h",
        "const Peers all{1, e.world()};\n  e.team.sync();\n  e.each_by_lanes(all, [&](int p) {\n"
        "    e.release(e.pairs",
        "const Peers all{1, e.world()};\n  e.each_by_lanes(all, [&](int p) {\n"
        "    e.release(e.pairs",
    ),
    "a chunk's edge updated twice": (
        "buckets.h",
        "return {begin, elems - begin < size ? elems : begin + size};",
        "return {begin, elems - begin <= size ? elems : begin + size + 1};",
    ),
}

pytestmark = pytest.mark.skipif(races.COMPILER is None, reason="no C++ compiler")

objects = races.objects


def build(folder, name, include):
    program = folder / name
    sources = [str(races.ROOT / "tests/native/step_race_test.cpp")]
    sources += [str(folder / "isa_baseline.o"), str(folder / "waiter.o")]
    races.compile_to(program, include, *sources)
    return program


def test_no_race_and_right_results(objects):
    program = build(objects, "step_race_test", races.ROOT / "kernels/include")
    for team in TEAMS:
        done = races.run(program, team)
        assert (done.returncode, done.stdout) == (0, "ok\n"), f"{team}: {done.stderr[:4000]}"


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_rejected(objects, name, tmp_path):
    header, text, replacement = MUTANTS[name]
    include = tmp_path / "include"
    shutil.copytree(races.ROOT / "kernels/include", include)
    source = (include / "ringcomm" / header).read_text()
    assert text in source, f"{header} no longer says {text!r}"
    (include / "ringcomm" / header).write_text(source.replace(text, replacement))
    program = build(objects, f"mutant-{list(MUTANTS).index(name)}", include)
    teams = ((2, 1, 2, 20), (4, 1, 2, 12))
    assert any(races.run(program, team).returncode != 0 for team in teams)
