"""The models of the signal protocol under SPIN, and mutants that it must reject.

RINGCOMM_MODEL_CHECK=all (``make model-check``) explores larger bounds.
"""

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.model.spin import FOLDER, INCLUDE, LACKING, ROOT, Checker, Model

ALL = os.environ.get("RINGCOMM_MODEL_CHECK") == "all"

needs_spin = pytest.mark.skipif(bool(LACKING), reason=f"not installed: {', '.join(LACKING)}")


def model(source: str, world: int, defines: str, epochs: int = 4) -> Model:
    return Model(source, world, tuple(defines.split()), epochs)


EVERY_KIND = "KINDS=63"  # of direct.pml
RIGHT: dict[str, Model] = {
    "direct, three calls": model("direct.pml", 2, f"START=2 SEGMENTS=2 CALLS=3 {EVERY_KIND}"),
    "direct, zero copy": model("direct.pml", 2, f"START=2 SEGMENTS=3 CALLS=2 {EVERY_KIND} LEND"),
    "direct, three ranks": model("direct.pml", 3, f"START=2 SEGMENTS=1 CALLS=1 {EVERY_KIND} LEND"),
    "direct, faults": model(
        "direct.pml", 2, f"START=2 SEGMENTS=2 CALLS=2 {EVERY_KIND} LEND FAULTS=2"
    ),
    "direct, three ranks, faults": model(
        "direct.pml", 3, "START=2 SEGMENTS=1 CALLS=1 KINDS=3 LEND FAULTS=1"
    ),
    "two communicators": model(
        "direct.pml", 2, "START=2 SEGMENTS=2 CALLS=1 KINDS=17 COMMUNICATORS=2"
    ),
    "ring, three ranks": model("ring.pml", 3, "START=2 SEGMENTS=2 CALLS=3"),
    "ring, four ranks": model("ring.pml", 4, "START=2 SEGMENTS=2 CALLS=2"),
    "ring, faults": model("ring.pml", 3, "START=2 SEGMENTS=2 CALLS=2 FAULTS=2"),
    "packets": model("packet.pml", 2, "START=0 CALLS=18 FAULTS=1"),
    "packets, three ranks": model("packet.pml", 3, "START=0 CALLS=8"),
    "sleep": model("sleep.pml", 2, "START=2 ITEMS=5"),
    "lent buffers": model("lend.pml", 2, ""),
    "regions": model("retired.pml", 2, "COMMUNICATORS=3 FAULTS=2"),
    "regions, three ranks": model("retired.pml", 3, "COMMUNICATORS=2 FAULTS=1"),
}
LARGE: dict[str, Model] = {
    "direct, three segments": model(
        "direct.pml", 2, f"START=2 SEGMENTS=3 CALLS=3 {EVERY_KIND} LEND"
    ),
    "direct, four calls": model("direct.pml", 2, f"START=2 SEGMENTS=1 CALLS=4 {EVERY_KIND}"),
    "direct, three ranks, two segments": model(
        "direct.pml", 3, f"START=2 SEGMENTS=2 CALLS=1 {EVERY_KIND} LEND"
    ),
    "direct, three ranks, two calls": model(
        "direct.pml", 3, f"START=2 SEGMENTS=1 CALLS=2 {EVERY_KIND}"
    ),
    "direct, two faults": model(
        "direct.pml", 2, f"START=2 SEGMENTS=3 CALLS=2 {EVERY_KIND} LEND FAULTS=2"
    ),
    "direct, three ranks, every fault": model(
        "direct.pml", 3, f"START=2 SEGMENTS=1 CALLS=1 {EVERY_KIND} LEND FAULTS=1"
    ),
    "direct, four ranks": model("direct.pml", 4, "START=2 SEGMENTS=1 CALLS=1 KINDS=59"),
    "two communicators, every kind": model(
        "direct.pml", 2, f"START=2 SEGMENTS=1 CALLS=1 {EVERY_KIND} COMMUNICATORS=2"
    ),
    "ring, four ranks, three calls": model("ring.pml", 4, "START=2 SEGMENTS=3 CALLS=3"),
    "ring, four ranks, faults": model("ring.pml", 4, "START=2 SEGMENTS=2 CALLS=2 FAULTS=1"),
    "packets, three ranks, faults": model("packet.pml", 3, "START=0 CALLS=9 FAULTS=1"),
    "packets, four ranks": model("packet.pml", 4, "START=0 CALLS=3"),
    "regions, three communicators": model("retired.pml", 3, "COMMUNICATORS=3 FAULTS=1"),
    "regions, four ranks": model("retired.pml", 4, "COMMUNICATORS=2"),
}
CHOSEN: dict[str, Model] = {**RIGHT, **(LARGE if ALL else {})}

# The smallest bounds that show a mistake. With 4 epochs a sender that does not wait comes around.
PAIR = model("direct.pml", 2, "START=6 SEGMENTS=3 CALLS=2 KINDS=1", epochs=8)
LENT = model("direct.pml", 2, "START=2 SEGMENTS=2 CALLS=1 KINDS=3 LEND")
IN_PLACE = model("direct.pml", 2, "START=2 SEGMENTS=2 CALLS=1 KINDS=4 LEND")
FAULTY = model("direct.pml", 2, "START=2 SEGMENTS=2 CALLS=1 KINDS=1 LEND FAULTS=1")
SHARED = model("direct.pml", 3, "START=6 SEGMENTS=3 CALLS=1 KINDS=2", epochs=8)
RING = model("ring.pml", 3, "START=6 SEGMENTS=2 CALLS=2", epochs=8)
PACKETS = model("packet.pml", 2, "START=0 CALLS=10")
SLEEP = model("sleep.pml", 2, "START=2 ITEMS=3")
LEND = model("lend.pml", 2, "")
REGIONS = model("retired.pml", 2, "COMMUNICATORS=3 FAULTS=1")

# What is wrong, where it shows, and the error that it must be.
MUTANTS: list[tuple[Model, str, str]] = [
    (PAIR, "MUTANT_READY_NOT_AWAITED", "assertion"),
    (PAIR, "MUTANT_WRONG_EPOCH", "assertion"),
    (PAIR, "MUTANT_CONSUMED_NOT_AWAITED", "assertion"),
    (PAIR, "MUTANT_SLOT_REUSED_EARLY", "assertion"),
    (PAIR, "MUTANT_SLOT_AWAITED_LONGER", "deadlock"),
    (PAIR, "MUTANT_PUBLISHED_BEFORE_WRITTEN", "assertion"),
    (PAIR, "MUTANT_ACKNOWLEDGED_BEFORE_READ", "assertion"),
    (PAIR, "MUTANT_FAREWELL_COUNTS_MORE", "assertion"),
    (PAIR, "LOOKAHEAD=2", "deadlock"),
    (model("direct.pml", 2, "START=0 SEGMENTS=3 CALLS=1 KINDS=1", epochs=2), "", "deadlock"),
    (SHARED, "MUTANT_ONE_READER_AWAITED", "assertion"),
    (LENT, "MUTANT_BUFFER_RETURNED_EARLY", "assertion"),
    (IN_PLACE, "MUTANT_SHARED_BEFORE_REDUCED", "assertion"),
    (FAULTY, "MUTANT_NO_LOOK_AFTER_THE_LAST_READ", "assertion"),
    (FAULTY, "MUTANT_NO_ABORT_RAISED", "assertion"),
    (
        model("direct.pml", 2, "START=2 SEGMENTS=3 CALLS=1 KINDS=1 FAULTS=1"),
        "MUTANT_NO_LOOK_AT_ABORT_WORDS",
        "deadlock",
    ),
    (
        model("direct.pml", 2, "START=2 SEGMENTS=1 CALLS=1 KINDS=1 COMMUNICATORS=2"),
        "MUTANT_ONE_REGION",
        "assertion",
    ),
    (RING, "MUTANT_READY_NOT_AWAITED", "assertion"),
    (RING, "MUTANT_WRONG_EPOCH", "assertion"),
    (RING, "MUTANT_SLOT_REUSED_EARLY", "assertion"),
    (RING, "MUTANT_SLOT_AWAITED_LONGER", "deadlock"),
    (RING, "MUTANT_RELEASED_BEFORE_REDUCED", "assertion"),
    (PACKETS, "MUTANT_ONE_SET", "deadlock"),
    (PACKETS, "MUTANT_FLAG_ZERO_USED", "assertion"),
    (PACKETS, "MUTANT_NOT_CLEARED", "assertion"),
    (PACKETS, "MUTANT_OWN_SET_CLEARED", "deadlock"),
    (PACKETS, "MUTANT_PACKETS_NOT_AWAITED", "assertion"),
    (model("packet.pml", 3, "START=0 CALLS=4"), "MUTANT_ONE_PEER_AWAITED", "deadlock"),
    (SLEEP, "MUTANT_NO_FENCE_OF_THE_WRITER", "deadlock"),
    (SLEEP, "MUTANT_NO_FENCE_OF_THE_SLEEPER", "deadlock"),
    (SLEEP, "MUTANT_NO_FLAG_RAISED", "deadlock"),
    (SLEEP, "MUTANT_SLEEPS_WITHOUT_COMPARING", "deadlock"),
    (SLEEP, "MUTANT_LOADED_ONCE", "cycle"),
    (LEND, "MUTANT_NO_FENCE_AFTER_THE_WORD", "assertion"),
    (LEND, "MUTANT_WORD_OF_THE_OTHER_NOT_AWAITED", "assertion"),
    (LEND, "MUTANT_CLOSED_WITHOUT_A_WORD", "assertion"),
    (LEND, "MUTANT_LOOKED_BEFORE_THE_LAST_READ", "assertion"),
    (REGIONS, "MUTANT_REUSED_WITHOUT_FAREWELL", "assertion"),
    (REGIONS, "MUTANT_WRITTEN_BEFORE_ALL_CONNECTED", "assertion"),
    (model("retired.pml", 3, "COMMUNICATORS=3"), "MUTANT_ONE_FAREWELL_IS_ENOUGH", "assertion"),
]


@pytest.fixture(scope="module")
def checker(tmp_path_factory):
    return Checker(tmp_path_factory.mktemp("models"))


@needs_spin
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CHOSEN)
def test_the_protocol_holds(checker, name):
    found = checker.check(CHOSEN[name])
    assert found.error == "", found.output
    assert found.complete, found.output
    print(f"{name}: {found.states} states")


@needs_spin
def test_every_wait_for_a_word_ends(checker):
    """No cycle without progress: nobody looks at a word for ever."""
    found = checker.check(RIGHT["sleep"], cycles=True)
    assert (found.error, found.complete) == ("", True), found.output


@needs_spin
@pytest.mark.parametrize(
    ("right", "mutant", "error"), MUTANTS, ids=[f"{m.source} {name}" for m, name, _ in MUTANTS]
)
def test_a_mistake_is_rejected(checker, right, mutant, error):
    found = checker.check(right, mutant, cycles=error == "cycle", optimize=False)
    assert found.error == error, found.output


def test_every_mistake_of_the_models_is_tried():
    text = "".join(path.read_text() for path in FOLDER.glob("*.pml"))
    tried = {mutant for _, mutant, _ in MUTANTS if mutant.startswith("MUTANT")}
    assert set(re.findall(r"\bMUTANT_[A-Z]\w*", text)) == tried


@needs_spin
def test_what_the_order_of_stores_of_x86_forgives(checker):
    """The fence behind the abort word, but no other rule of lent buffers."""
    ordered = model("lend.pml", 2, "TOTAL_STORE_ORDER")
    assert checker.check(ordered, "MUTANT_NO_FENCE_AFTER_THE_WORD", optimize=False).error == ""
    other = checker.check(ordered, "MUTANT_WORD_OF_THE_OTHER_NOT_AWAITED", optimize=False)
    assert other.error == "assertion"


@needs_spin
@pytest.mark.parametrize(
    ("header", "text", "wrong", "right", "error"),
    [
        ("schedule.h", "2 * world - 1 - step", "2 * world - step", RING, "assertion"),
        ("signal.h", "int32_t(seen - want) >= 0", "int32_t(seen - want) > 0", RING, "deadlock"),
        ("packet.h", "last + 1 == 0 ? 2 :", "last + 1 == 0 ? 3 :", PACKETS, "deadlock"),
    ],
)
def test_the_models_take_their_arithmetic_from_the_headers(
    tmp_path, header, text, wrong, right, error
):
    shutil.copytree(INCLUDE, tmp_path / "include")
    path = tmp_path / "include/ringcomm" / header
    assert path.read_text().count(text) == 1
    path.write_text(path.read_text().replace(text, wrong))
    found = Checker(tmp_path, tmp_path / "include").check(right, optimize=False)
    assert found.error == error, found.output


@needs_spin
def test_an_exploration_that_stops_early_says_so(checker):
    assert checker.check(SLEEP, optimize=False).complete
    assert not checker.check(SLEEP, optimize=False, depth=20).complete


STEP = re.compile(r"^ *// (\w+\.(?:h|cpp)): (\w+)$", re.M)
MODEL = re.compile(
    r"^ *// model: (\w+) \(tests/model/([\w., ]+)\)\n((?: *template <.*>\n)?.*)$", re.M
)


def steps_of_models(folder: Path) -> set[tuple[str, str, str]]:
    """Each (file, function, model) that a model names, if the model has a step of that name."""
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
    """Each (file, function, model) that the code names, if the function stands below the name."""
    found = set()
    for path in [*(root / "include/ringcomm").glob("*.h"), *(root / "host").glob("*.cpp")]:
        for name, models, below in MODEL.findall(path.read_text()):
            missing = "" if re.search(rf"\b{name}\(", below) else ": no such function"
            found |= {(path.name, name, each + missing) for each in models.split(", ")}
    return found


def test_models_and_code_name_each_other(tmp_path):
    models = steps_of_models(FOLDER)
    assert len(models) > 40
    assert models == steps_of_code(ROOT / "kernels")

    shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    signal = tmp_path / "kernels/include/ringcomm/signal.h"
    signal.write_text(signal.read_text().replace("void publish(", "void post("))
    assert steps_of_code(tmp_path / "kernels") != models
    shutil.copy(FOLDER / "sleep.pml", tmp_path)
    sleep = tmp_path / "sleep.pml"
    assert steps_of_models(tmp_path) <= models
    sleep.write_text(sleep.read_text().replace("inline publish(", "inline post("))
    assert not steps_of_models(tmp_path) <= models
