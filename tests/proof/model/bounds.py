# SPDX-License-Identifier: Apache-2.0
"""The bounds of each model's exploration, and the mutants that must be found, with their bounds."""

from __future__ import annotations

from tests.proof.model.spin import Model


def model(source: str, world: int, defines: str, epochs: int = 4) -> Model:
    return Model(source, world, tuple(defines.split()), epochs)


EVERY_KIND = "KINDS=127"  # of one_shot.pml: all seven kinds of call
# What make test explores.
RIGHT: dict[str, Model] = {
    "one-shot, two segments": model("one_shot.pml", 2, f"START=2 SEGMENTS=2 CALLS=2 {EVERY_KIND}"),
    "one-shot, zero copy": model("one_shot.pml", 2, "START=2 SEGMENTS=3 CALLS=2 KINDS=7 LEND"),
    "one-shot, three ranks": model("one_shot.pml", 3, "START=2 SEGMENTS=1 CALLS=1 KINDS=112 LEND"),
    "one-shot, faults": model(
        "one_shot.pml", 2, f"START=2 SEGMENTS=1 CALLS=1 {EVERY_KIND} LEND FAULTS=2"
    ),
    "two communicators": model(
        "one_shot.pml", 2, "START=2 SEGMENTS=1 CALLS=1 KINDS=1 COMMUNICATORS=2"
    ),
    "ring, three ranks": model("ring.pml", 3, "START=2 SEGMENTS=2 CALLS=3"),
    "ring, faults": model("ring.pml", 3, "START=2 SEGMENTS=2 CALLS=1 FAULTS=2"),
    "two levels": model("two_levels.pml", 4, "START=2 SEGMENTS=2 CALLS=1"),
    "ll": model("ll.pml", 2, "START=0 CALLS=18 FAULTS=1"),
    "sleep": model("sleep.pml", 2, "START=2 ITEMS=5"),
    "sleep, fences for all": model("sleep.pml", 2, "START=2 ITEMS=5 FENCES_FOR_ALL"),
    "lent buffers": model("lend.pml", 2, ""),
    "regions": model("retired.pml", 2, "COMMUNICATORS=3 FAULTS=2"),
}
# The further bounds that make model-check explores.
LARGE: dict[str, Model] = {
    "ring, faults of two calls": model("ring.pml", 3, "START=2 SEGMENTS=2 CALLS=2 FAULTS=2"),
    "one-shot, three calls of two segments": model(
        "one_shot.pml", 2, f"START=2 SEGMENTS=2 CALLS=3 {EVERY_KIND}"
    ),
    "one-shot, three segments": model(
        "one_shot.pml", 2, f"START=2 SEGMENTS=3 CALLS=3 {EVERY_KIND} LEND"
    ),
    "one-shot, four calls": model("one_shot.pml", 2, f"START=2 SEGMENTS=1 CALLS=4 {EVERY_KIND}"),
    "one-shot, three ranks, two segments": model(
        "one_shot.pml", 3, f"START=2 SEGMENTS=2 CALLS=1 {EVERY_KIND} LEND"
    ),
    "one-shot, three ranks, two calls": model(
        "one_shot.pml", 3, f"START=2 SEGMENTS=1 CALLS=2 {EVERY_KIND}"
    ),
    "one-shot, two faults": model(
        "one_shot.pml", 2, f"START=2 SEGMENTS=3 CALLS=2 {EVERY_KIND} LEND FAULTS=2"
    ),
    "one-shot, three ranks, every fault": model(
        "one_shot.pml", 3, f"START=2 SEGMENTS=1 CALLS=1 {EVERY_KIND} LEND FAULTS=1"
    ),
    "one-shot, four ranks, every kind": model(
        "one_shot.pml", 4, f"START=2 SEGMENTS=1 CALLS=1 {EVERY_KIND}"
    ),
    "two communicators, two segments": model(
        "one_shot.pml", 2, "START=2 SEGMENTS=2 CALLS=1 KINDS=17 COMMUNICATORS=2"
    ),
    "two communicators, every kind": model(
        "one_shot.pml", 2, f"START=2 SEGMENTS=1 CALLS=1 {EVERY_KIND} COMMUNICATORS=2"
    ),
    "ring, four ranks, three calls": model("ring.pml", 4, "START=2 SEGMENTS=3 CALLS=3"),
    "ring, four ranks, faults": model("ring.pml", 4, "START=2 SEGMENTS=2 CALLS=2 FAULTS=1"),
    "two levels, three pieces": model("two_levels.pml", 4, "START=2 SEGMENTS=3 CALLS=1", epochs=8),
    "two levels, two calls": model("two_levels.pml", 4, "START=2 SEGMENTS=1 CALLS=2"),
    "two levels, faults": model("two_levels.pml", 4, "START=2 SEGMENTS=1 CALLS=1 FAULTS=1"),
    "ll, three ranks, eight calls": model("ll.pml", 3, "START=0 CALLS=8"),
    "ll, three ranks, faults": model("ll.pml", 3, "START=0 CALLS=9 FAULTS=1"),
    "ll, four ranks": model("ll.pml", 4, "START=0 CALLS=3"),
    "regions, three communicators": model("retired.pml", 3, "COMMUNICATORS=3 FAULTS=1"),
    "regions, four ranks": model("retired.pml", 4, "COMMUNICATORS=2"),
}
# The smallest bounds that show a mistake. 4 epochs wrap around if a sender does not wait.
PAIR = model("one_shot.pml", 2, "START=6 SEGMENTS=3 CALLS=2 KINDS=1", epochs=8)
LENT = model("one_shot.pml", 2, "START=2 SEGMENTS=2 CALLS=1 KINDS=3 LEND")
IN_PLACE = model("one_shot.pml", 2, "START=2 SEGMENTS=2 CALLS=1 KINDS=4 LEND")
FAULTY = model("one_shot.pml", 2, "START=2 SEGMENTS=2 CALLS=1 KINDS=1 LEND FAULTS=1")
# A broadcast before or after an all-reduce in one hop, on the same stream.
ONE_HOP = model("one_shot.pml", 2, "START=6 SEGMENTS=3 CALLS=2 KINDS=80", epochs=8)
SHARED = model("one_shot.pml", 3, "START=6 SEGMENTS=3 CALLS=1 KINDS=2", epochs=8)
RING = model("ring.pml", 3, "START=6 SEGMENTS=2 CALLS=2", epochs=8)
RING_FAULTY = model("ring.pml", 3, "START=2 SEGMENTS=1 CALLS=1 FAULTS=1")
LEVELS = model("two_levels.pml", 4, "START=6 SEGMENTS=3 CALLS=1", epochs=8)
LL = model("ll.pml", 2, "START=0 CALLS=10")
LL_FAULTY = model("ll.pml", 2, "START=0 CALLS=2 FAULTS=1")
SLEEP = model("sleep.pml", 2, "START=2 ITEMS=3")
SLEEP_FOR_ALL = model("sleep.pml", 2, "START=2 ITEMS=3 FENCES_FOR_ALL")
LEND = model("lend.pml", 2, "")
REGIONS = model("retired.pml", 2, "COMMUNICATORS=3 FAULTS=1")

# The mistake, the bounds that show it, and the expected error: one per model and kind of error,
# besides those that mistakes in the headers cause (test_model_check.py).
SAMPLE: list[tuple[Model, str, str]] = [
    (SHARED, "MUTANT_ONE_READER_AWAITED", "assertion"),
    (LENT, "MUTANT_BUFFER_RETURNED_EARLY", "assertion"),
    (
        model("one_shot.pml", 2, "START=2 SEGMENTS=1 CALLS=1 KINDS=1 COMMUNICATORS=2"),
        "MUTANT_ONE_REGION",
        "assertion",
    ),
    (RING, "MUTANT_RELEASED_BEFORE_REDUCED", "assertion"),
    (LL, "MUTANT_NOT_CLEARED", "assertion"),
    (SLEEP, "MUTANT_NO_FENCE_OF_THE_SLEEPER", "deadlock"),
    (SLEEP, "MUTANT_LOADED_ONCE", "cycle"),
    (REGIONS, "MUTANT_REUSED_WITHOUT_DETACH", "assertion"),
    (FAULTY, "MUTANT_NO_DEADLINE", "deadlock"),
]
MUTANTS: list[tuple[Model, str, str]] = [
    *SAMPLE,
    (PAIR, "MUTANT_READY_NOT_AWAITED", "assertion"),
    (PAIR, "MUTANT_WRONG_EPOCH", "assertion"),
    (PAIR, "MUTANT_CONSUMED_NOT_AWAITED", "assertion"),
    (PAIR, "MUTANT_SLOT_REUSED_EARLY", "assertion"),
    (PAIR, "MUTANT_SLOT_AWAITED_LONGER", "deadlock"),
    (PAIR, "MUTANT_PUBLISHED_BEFORE_WRITTEN", "assertion"),
    (PAIR, "MUTANT_ACKNOWLEDGED_BEFORE_READ", "assertion"),
    (PAIR, "MUTANT_DETACHED_COUNTS_MORE", "assertion"),
    (PAIR, "LOOKAHEAD=2", "deadlock"),
    (model("one_shot.pml", 2, "START=0 SEGMENTS=3 CALLS=1 KINDS=1", epochs=2), "", "deadlock"),
    (ONE_HOP, "MUTANT_ACKNOWLEDGED_BEFORE_REDUCED", "assertion"),
    (ONE_HOP, "MUTANT_SLOT_FILLED_UNASKED", "assertion"),
    (ONE_HOP, "MUTANT_REDUCED_WITHOUT_ARRIVAL", "assertion"),
    (IN_PLACE, "MUTANT_SHARED_BEFORE_REDUCED", "assertion"),
    (FAULTY, "MUTANT_NO_LOOK_AFTER_THE_LAST_READ", "assertion"),
    (FAULTY, "MUTANT_NO_ABORT_RAISED", "assertion"),
    (
        model("one_shot.pml", 2, "START=2 SEGMENTS=3 CALLS=1 KINDS=1 FAULTS=1"),
        "MUTANT_NO_LOOK_AT_ABORT_WORDS",
        "deadlock",
    ),
    (RING, "MUTANT_READY_NOT_AWAITED", "assertion"),
    (RING, "MUTANT_WRONG_EPOCH", "assertion"),
    (RING, "MUTANT_SLOT_REUSED_EARLY", "assertion"),
    (RING, "MUTANT_SLOT_AWAITED_LONGER", "deadlock"),
    (LEVELS, "MUTANT_READY_NOT_AWAITED", "assertion"),
    (LEVELS, "MUTANT_SLOT_REUSED_EARLY", "assertion"),
    (LEVELS, "MUTANT_RELEASED_BEFORE_REDUCED", "assertion"),
    (LEVELS, "MUTANT_PARTIAL_SUMS_LEFT_LONGER", "deadlock"),
    (LEVELS, "LOOKAHEAD=2", "deadlock"),
    (LL, "MUTANT_ONE_SET", "deadlock"),
    (LL, "MUTANT_FLAG_ZERO_USED", "assertion"),
    (LL, "MUTANT_OWN_SET_CLEARED", "deadlock"),
    (LL, "MUTANT_LL_NOT_AWAITED", "assertion"),
    (model("ll.pml", 3, "START=0 CALLS=4"), "MUTANT_ONE_PEER_AWAITED", "deadlock"),
    (SLEEP, "MUTANT_NO_FENCE_OF_THE_WRITER", "deadlock"),
    (SLEEP_FOR_ALL, "MUTANT_FENCES_FOR_ITSELF", "deadlock"),
    (SLEEP, "MUTANT_NO_FLAG_RAISED", "deadlock"),
    (SLEEP, "MUTANT_SLEEPS_WITHOUT_COMPARING", "deadlock"),
    (LEND, "MUTANT_NO_FENCE_AFTER_THE_WORD", "assertion"),
    (LEND, "MUTANT_WORD_OF_THE_OTHER_NOT_AWAITED", "assertion"),
    (LEND, "MUTANT_STOPPED_OWNER_AWAITED", "deadlock"),
    (LEND, "MUTANT_NO_FENCE_AFTER_THE_WAIT", "assertion"),
    (LEND, "MUTANT_CLOSED_WITHOUT_A_WORD", "assertion"),
    (LEND, "MUTANT_LOOKED_BEFORE_THE_LAST_READ", "assertion"),
    (REGIONS, "MUTANT_WRITTEN_BEFORE_ALL_CONNECTED", "assertion"),
    (model("retired.pml", 3, "COMMUNICATORS=3"), "MUTANT_ONE_DETACH_IS_ENOUGH", "assertion"),
    *(
        (right, mutant, "deadlock")
        for right in (FAULTY, RING_FAULTY, LL_FAULTY)
        for mutant in (
            "MUTANT_NO_DEADLINE",
            "MUTANT_NO_LOOK_AT_DETACHED",
            "MUTANT_NO_LOOK_AT_PROCESSES",
        )
        if (right, mutant) != (FAULTY, "MUTANT_NO_DEADLINE")
    ),
]
