# SPDX-License-Identifier: Apache-2.0
"""Runs each release-acquire pair of the protocol alone, in every execution that C++ allows.

The tests must find the mutants of litmus_cases.py. The machine cannot know whether the sources do
what the programs say: test_outlines.py compares them, and
test_the_headers_spell_the_orders_that_their_names_say() checks the names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.proof.litmus.litmus_cases import CASES, RACE, STUCK, WRONG, Program, Registers
from tests.proof.litmus.litmus_ops import (
    exchange_relaxed,
    fence_seq_cst_sys,
    load_acquire_sys,
    load_relaxed_sys,
    store_relaxed_sys,
    store_release_sys,
)
from tests.proof.litmus.view_machine import DataRace, Machine

pytestmark = pytest.mark.compiles

KERNELS = Path(__file__).resolve().parents[3] / "kernels"


def verdict(programs: Sequence[Program], right: Callable[[Registers], bool]) -> str:
    """Returns the failure of some execution, or the empty text."""
    try:
        outcomes = Machine(programs).outcomes()
    except DataRace:
        return RACE
    for outcome in outcomes:
        if None in outcome:
            return STUCK
        if not right({name: value for thread in outcome if thread for name, value in thread}):
            return WRONG
    return ""


@pytest.mark.parametrize("name", CASES)
def test_every_execution_is_right(name):
    case = CASES[name]
    assert verdict(case.programs, case.right) == ""


@pytest.mark.parametrize(
    ("name", "mutant"), [(name, mutant) for name in CASES for mutant in CASES[name].mutants]
)
def test_weakened_orders_are_found(name, mutant):
    case, weakened = CASES[name], CASES[name].mutants[mutant]
    programs = [list(program) for program in case.programs]
    program = programs[weakened.thread]
    program[weakened.at : weakened.at + 1] = [] if weakened.op is None else [weakened.op]
    assert verdict(programs, case.right) == weakened.found_as


def test_the_headers_spell_the_orders_that_their_names_say():
    host = (KERNELS / "include/ringcomm/core/atomics.h").read_text().partition("#else\n")[2]
    orders = dict(re.findall(r"RC_FN \w+ (\w+_sys)\(.*?__ATOMIC_([A-Z_]+)\)", host, re.S))
    assert {name: order for name, order in orders.items() if "ll_packet" not in name} == {
        "load_acquire_sys": "ACQUIRE",
        "load_relaxed_sys": "RELAXED",
        "store_release_sys": "RELEASE",
        "store_relaxed_sys": "RELAXED",
        "fence_seq_cst_sys": "SEQ_CST",
        "fence_acq_rel_sys": "ACQ_REL",
        "exchange_acq_rel_sys": "ACQ_REL",
        "exchange_relaxed_sys": "RELAXED",
    }


# Tests of the machine itself: the litmus tests of the literature, with the outcomes that C++20
# allows (Lahav et al., "Repairing sequential consistency in C/C++11", PLDI 2017).
def _both_zero(r: Registers) -> bool:
    return r["a"] == r["b"] == 0


STORE_BUFFERING = [
    [store_relaxed_sys("x", 1), load_relaxed_sys("a", "y")],
    [store_relaxed_sys("y", 1), load_relaxed_sys("b", "x")],
]
FOUR_RANKS = [
    [store_release_sys("x", 1)],
    [store_release_sys("y", 1)],
    [load_acquire_sys("a", "x"), load_acquire_sys("b", "y")],
    [load_acquire_sys("c", "y"), load_acquire_sys("d", "x")],
]
COHERENCE = [
    [store_relaxed_sys("x", 1), store_relaxed_sys("x", 2)],
    [load_relaxed_sys("a", "x"), load_relaxed_sys("b", "x")],
]
TWICE_TAKEN = [
    [exchange_relaxed("a", "x", 1)],
    [exchange_relaxed("b", "x", 1)],
]


def _fenced(programs: Sequence[Program]) -> list[Program]:
    """Returns the programs with a sequentially consistent fence after each operation."""
    return [[each for op in program for each in (op, fence_seq_cst_sys())] for program in programs]


def _split(r: Registers) -> bool:
    return (r["a"], r["b"], r["c"], r["d"]) == (1, 0, 1, 0)


@pytest.mark.parametrize(
    ("programs", "happens", "allowed"),
    [
        (STORE_BUFFERING, _both_zero, True),
        (_fenced(STORE_BUFFERING), _both_zero, False),
        (FOUR_RANKS, _split, True),
        (_fenced(FOUR_RANKS), _split, False),
        (COHERENCE, lambda r: r["a"] == 2 and r["b"] == 1, False),
        (COHERENCE, lambda r: r["a"] == 0 and r["b"] == 1, True),
        (TWICE_TAKEN, _both_zero, False),
        (TWICE_TAKEN, lambda r: r["a"] + r["b"] == 1, True),
    ],
)
def test_the_machine_allows_what_the_language_allows(programs, happens, allowed):
    found = any(
        happens({name: value for thread in outcome if thread for name, value in thread})
        for outcome in Machine(programs).outcomes()
    )
    assert found == allowed
