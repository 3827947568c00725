# SPDX-License-Identifier: Apache-2.0
"""The models of the signal protocol under SPIN, and mutants that SPIN must reject.

RINGCOMM_MODEL_CHECK=all (``make model-check``) explores larger bounds, and tries every mutant.
"""

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.proof.model.bounds import (
    LARGE,
    LL,
    MUTANTS,
    PAIR,
    RIGHT,
    RING,
    SAMPLE,
    SLEEP,
    model,
)
from tests.proof.model.spin import FOLDER, INCLUDE, LACKING, Checker, Model
from tests.support import CAN_INSTALL, ROOT, must_not_skip
from tests.support.covering import in_test_all, thinned

pytestmark = pytest.mark.compiles

ALL = os.environ.get("RINGCOMM_MODEL_CHECK") == "all"

CHOSEN: dict[str, Model] = {**RIGHT, **(LARGE if ALL else {})}
TRIED = MUTANTS if ALL else thinned(SAMPLE, 2)

needs_spin = pytest.mark.skipif(bool(LACKING), reason=f"not installed: {', '.join(LACKING)}")


def test_ci_does_not_pass_without_the_models():
    if must_not_skip(os.environ, CAN_INSTALL):
        assert not LACKING, f"the models would be skipped; apt-get install {' '.join(LACKING)}"


@pytest.mark.parametrize(
    ("environment", "can_install", "fails"),
    [
        ({"CI": "true"}, True, True),
        ({"CI": "true"}, False, False),
        ({"CI": "false"}, True, False),
        ({}, True, False),
    ],
)
def test_where_the_models_must_not_be_skipped(environment, can_install, fails):
    assert must_not_skip(environment, can_install) == fails


@pytest.fixture(scope="module")
def checker(tmp_path_factory):
    return Checker(tmp_path_factory.mktemp("models"))


@needs_spin
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", thinned(CHOSEN, 3))
def test_the_protocol_holds(checker, name):
    found = checker.check(CHOSEN[name], large=name in LARGE)
    assert found.error == "", found.output
    assert found.complete, found.output
    print(f"{name}: {found.states} states")


@needs_spin
def test_every_wait_for_a_word_ends(checker):
    """No cycle without progress exists: no process looks at a word forever."""
    found = checker.check(RIGHT["sleep"], cycles=True)
    assert (found.error, found.complete) == ("", True), found.output


@needs_spin
@pytest.mark.parametrize(
    ("right", "mutant", "error"), TRIED, ids=[f"{m.source} {name}" for m, name, _ in TRIED]
)
def test_a_mistake_is_rejected(checker, right, mutant, error):
    found = checker.check(right, mutant, cycles=error == "cycle")
    assert found.error == error, found.output


def test_every_mistake_of_the_models_is_tried():
    assert len(set(MUTANTS)) == len(MUTANTS)
    text = "".join(path.read_text() for path in FOLDER.glob("*.pml"))
    tried = {mutant for _, mutant, _ in MUTANTS if mutant.startswith("MUTANT")}
    assert set(re.findall(r"\bMUTANT_[A-Z]\w*", text)) == tried


@needs_spin
def test_what_the_order_of_stores_of_x86_forgives(checker):
    """x86 needs no fence behind the abort word, but every other rule of lent buffers."""
    ordered = model("lend.pml", 2, "TOTAL_STORE_ORDER")
    assert checker.check(ordered, "MUTANT_NO_FENCE_AFTER_THE_WORD").error == ""
    other = checker.check(ordered, "MUTANT_WORD_OF_THE_OTHER_NOT_AWAITED")
    assert other.error == "assertion"


@needs_spin
@pytest.mark.parametrize(
    ("header", "text", "wrong", "right", "error"),
    [
        ("core/schedule.h", "2 * world - 1 - hop", "2 * world - hop", RING, "assertion"),
        (
            "protocol/layout.h",
            "return epoch - slots;",
            "return epoch - slots - 1;",
            PAIR,
            "assertion",
        ),
        ("protocol/ll.h", "last + 1 == 0 ? 2 :", "last + 1 == 0 ? 3 :", LL, "deadlock"),
        *in_test_all(
            (
                "protocol/signal.h",
                "int32_t(seen - want) >= 0",
                "int32_t(seen - want) > 0",
                RING,
                "deadlock",
            ),
            (
                "protocol/layout.h",
                "return epoch - slots;",
                "return epoch - slots + 1;",
                PAIR,
                "deadlock",
            ),
        ),
    ],
)
def test_the_models_take_their_arithmetic_from_the_headers(
    tmp_path, header, text, wrong, right, error
):
    shutil.copytree(INCLUDE, tmp_path / "include")
    path = tmp_path / "include/ringcomm" / header
    assert path.read_text().count(text) == 1
    path.write_text(path.read_text().replace(text, wrong))
    found = Checker(tmp_path, tmp_path / "include").check(right)
    assert found.error == error, found.output


@needs_spin
def test_an_exploration_that_stops_early_says_so(checker):
    assert checker.check(SLEEP).complete
    assert not checker.check(SLEEP, depth=20).complete


STEP = re.compile(r"^ *// (\w+\.(?:h|cpp)): (\w+)$", re.M)
MODEL = re.compile(
    r"^ *// model: (\w+) \(tests/proof/model/([\w., ]+)\)\n((?: *template <.*>\n)?.*)$", re.M
)


def steps_of_models(folder: Path) -> set[tuple[str, str, str]]:
    """Returns each (file, function, model) that a model names and for which it has such a step."""
    found = set()
    for path in folder.glob("*.pml"):
        text = path.read_text()
        for file, name in STEP.findall(text):
            if re.search(rf"^(?:inline|#define) {name}\(", text, re.M):
                found.add((file, name, path.name))
            else:
                found.add((file, name, f"{path.name}: no such step"))
    return found


def steps_of_code(root: Path) -> set[tuple[str, str, str]]:
    """Returns each (file, function, model) that the code names above a function of that name."""
    found = set()
    for path in [*(root / "include").rglob("*.h"), *(root / "host").glob("*.*")]:
        for name, models, below in MODEL.findall(path.read_text()):
            missing = "" if re.search(rf"\b{name}\(", below) else ": no such function"
            found |= {(path.name, name, each + missing) for each in models.split(", ")}
    return found


def test_models_and_code_name_each_other(tmp_path):
    models = steps_of_models(FOLDER)
    assert len(models) > 40
    assert models == steps_of_code(ROOT / "kernels")

    shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    signal = tmp_path / "kernels/include/ringcomm/protocol/signal.h"
    signal.write_text(signal.read_text().replace("void publish(", "void post("))
    assert steps_of_code(tmp_path / "kernels") != models
    shutil.copy(FOLDER / "sleep.pml", tmp_path)
    sleep = tmp_path / "sleep.pml"
    assert steps_of_models(tmp_path) <= models
    sleep.write_text(sleep.read_text().replace("inline publish(", "inline post("))
    assert not steps_of_models(tmp_path) <= models
