"""The templates under ThreadSanitizer, several lanes per team, and mutants that it must reject."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
FLAGS = [
    "-std=c++20",
    "-O1",
    "-g",
    "-ffp-contract=off",
    "-fsanitize=thread",
    "-Wno-tsan",
    "-pthread",
]

# world, channels, lanes per team, rounds
TEAMS = [
    (1, 1, 2, 1),
    (2, 1, 1, 3),
    (2, 1, 2, 3),
    (2, 2, 3, 2),
    (3, 1, 2, 2),
    (4, 2, 1, 2),
    (5, 1, 2, 1),
    (8, 1, 1, 1),
]

# What each mutant breaks: header, text, replacement, teams that show it.
MUTANTS = {
    "acquire loads relaxed": ("atomics.h", "__ATOMIC_ACQUIRE)", "__ATOMIC_RELAXED)"),
    "release stores relaxed": ("atomics.h", "__ATOMIC_RELEASE)", "__ATOMIC_RELAXED)"),
    "published before the team is done": (
        "endpoint.h",
        "team.sync();\n    each_by_lanes(readers, [&](int reader) {\n      if (gets_item(reader)) "
        "pub",
        "each_by_lanes(readers, [&](int reader) {\n      if (gets_item(reader)) pub",
    ),
    "slot reused before it was read": (
        "endpoint.h",
        "epoch - v.layout.slots)",
        "epoch - 64)",
    ),
    "returned while peers read the buffer": (
        "endpoint.h",
        "const uint32_t epoch = sent(s, reader) + items_sent;",
        "const uint32_t epoch = sent(s, reader) - 64 + 0 * items_sent;",
    ),
    "acknowledged before the team has read": (
        "reduce_scatter.h",
        "e.team.sync();\n  e.each_by_lanes({1, e.world()}, [&](int p) { e.release(",
        "e.each_by_lanes({1, e.world()}, [&](int p) { e.release(",
    ),
    "data read without waiting": (
        "signal.h",
        "if (reached(load_acquire_sys(word_at(v, team.channel(), site)), want)) return",
        "if (site.step <= 1 || reached(load_acquire_sys(word_at(v, team.channel(), site)), want)) "
        "return",
    ),
}

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def compile_to(output: Path, include: Path, *sources: str, extra: tuple[str, ...] = ()) -> None:
    command = [
        str(COMPILER),
        *FLAGS,
        *extra,
        f"-I{ROOT}",
        f"-I{include}",
        *sources,
        "-o",
        str(output),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-4000:]}"


def skip_without_sanitizer(folder: Path) -> None:
    probe = folder / "probe"
    (folder / "probe.cpp").write_text("int main() { return 0; }\n")
    compile_to(probe, ROOT / "kernels/include", str(folder / "probe.cpp"))
    if subprocess.run([str(probe)], capture_output=True, check=False).returncode != 0:
        pytest.skip("ThreadSanitizer does not run on this kernel")


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """The parts that no mutant touches."""
    folder = tmp_path_factory.mktemp("tsan")
    skip_without_sanitizer(folder)
    include = ROOT / "kernels/include"
    for name in ("isa_baseline", "waiter"):
        compile_to(
            folder / f"{name}.o", include, str(ROOT / f"kernels/host/{name}.cpp"), extra=("-c",)
        )
    return folder


def build(folder: Path, name: str, include: Path) -> Path:
    program = folder / name
    test = str(ROOT / "tests/native/race_test.cpp")
    compile_to(program, include, test, str(folder / "isa_baseline.o"), str(folder / "waiter.o"))
    return program


def run(program: Path, team: tuple[int, ...]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
    arguments = [str(program), *map(str, team)]
    return subprocess.run(
        arguments, capture_output=True, text=True, timeout=200, env=environment, check=False
    )


def test_no_race_and_right_results(objects):
    program = build(objects, "race_test", ROOT / "kernels/include")
    for team in TEAMS:
        done = run(program, team)
        assert (done.returncode, done.stdout) == (0, "ok\n"), f"{team}: {done.stderr[:4000]}"


def mutant_survives(folder: Path, number: int, mutation: tuple[str, str, str]) -> bool:
    header, text, replacement = mutation
    include = folder / f"mutant{number}"
    shutil.copytree(ROOT / "kernels/include", include)
    source = (include / "ringcomm" / header).read_text()
    assert source.count(text) >= 1, f"{header} no longer says {text!r}"
    (include / "ringcomm" / header).write_text(source.replace(text, replacement))
    program = build(folder, f"race_test_{number}", include)
    return all(run(program, team).returncode == 0 for team in ((2, 1, 2, 20), (4, 1, 2, 10)))


def test_mutants_are_rejected(objects):
    with ThreadPoolExecutor(2) as pool:
        numbers = range(len(MUTANTS))
        survives = pool.map(mutant_survives, [objects] * len(MUTANTS), numbers, MUTANTS.values())
        survivors = [name for name, alive in zip(MUTANTS, survives, strict=True) if alive]
    assert survivors == []


def test_schedule_compiles(tmp_path):
    """The schedule's proofs are static assertions; a wrong schedule must not compile."""
    source = str(ROOT / "tests/native/schedule_test.cpp")
    command = [str(COMPILER), "-std=c++20", "-fsyntax-only", "-fconstexpr-ops-limit=1000000000"]
    include = ROOT / "kernels/include"
    right = subprocess.run(
        [*command, f"-I{include}", f"-I{ROOT}", source], capture_output=True, text=True, check=False
    )
    assert right.returncode == 0, right.stderr
    mutated = tmp_path / "include"
    shutil.copytree(include, mutated)
    schedule = mutated / "ringcomm/schedule.h"
    text = schedule.read_text()
    assert "rank + 2 * world - 1 - step" in text
    schedule.write_text(text.replace("rank + 2 * world - 1 - step", "rank + 2 * world - step"))
    wrong = subprocess.run(
        [*command, f"-I{mutated}", f"-I{ROOT}", source], capture_output=True, text=True, check=False
    )
    assert wrong.returncode != 0
    assert "ring_reduce_hands_on" in wrong.stderr
