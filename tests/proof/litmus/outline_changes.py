# SPDX-License-Identifier: Apache-2.0
"""Changes of the sources that the outlines must notice; tests on x86 rarely show such mistakes."""

from __future__ import annotations

from dataclasses import dataclass

SIGNAL, ENDPOINT = "include/ringcomm/protocol/signal.h", "include/ringcomm/protocol/endpoint.h"
WAITER, RECORD, WORDS = "host/waiter.cpp", "tl/waiting.py", "tl/words.py"


@dataclass(frozen=True)
class Change:
    """A change of a function's text; `case`: the litmus test whose program contradicts it."""

    file: str
    function: str
    text: str
    replacement: str = ""
    case: str = ""


FENCE = "  fence_seq_cst_sys();"
LOOK = "    if (load_relaxed_sys(sleeping) != 0) team.wake(word);"
RAISED = "  store_relaxed_sys(pause.sleeping, 1);\n"
WRITER_FENCED = "    team.fence_as_writer();\n"
LOOKED = "  fence_as_sleeper();  // raise the flag, then look again: see NOTE [signals]\n"
PUBLISHED = "store_release_sys(word, epoch);  // pairs with the acquire in await() of the reader"
PEERS_ABORT = "load_acquire_sys(&v.control(rank)->aborted)"
CHANGES = {
    "wake without a fence": Change(SIGNAL, "wake", WRITER_FENCED, "", "sleep"),
    "wake with a fence at times": Change(
        SIGNAL,
        "wake",
        WRITER_FENCED,
        "    if (word != nullptr) team.fence_as_writer();\n",
    ),
    "nobody woken": Change(SIGNAL, "wake", LOOK, "", "sleep"),
    "some never woken": Change(SIGNAL, "wake", "(sleeping) != 0)", "(sleeping) > 1)"),
    "no call of the kernel": Change(WAITER, "Waiter::wake", "futex(word,", "if (0) futex(word,"),
    "the kernel called for another": Change(
        WAITER, "Waiter::wake", "FUTEX_WAKE", "FUTEX_WAIT", "sleep"
    ),
    "pause without a fence": Change(WAITER, "Waiter::pause", LOOKED, "", "sleep"),
    "pause with a weak fence": Change(
        WAITER,
        "Waiter::pause",
        LOOKED,
        LOOKED.replace("fence_as_sleeper", "fence_acq_rel_sys"),
        "sleep",
    ),
    "pause fenced before the flag": Change(
        WAITER, "Waiter::pause", RAISED + LOOKED, LOOKED + RAISED, "sleep"
    ),
    "the messenger sleeps without a fence": Change(
        "host/messenger_wait.cpp",
        "Messenger::sleep",
        "  comm_.waiter().fence_as_sleeper();  // raise",
        "//",
        "messenger's sleep",
    ),
    "a sleeper that has no fence": Change(
        WAITER, "Waiter::fence_as_sleeper", f"{FENCE}\n}}", "}", "sleep"
    ),
    "a writer that never fences": Change(
        "host/waiter.h",
        "Waiter::fence_as_writer",
        "    fence_seq_cst_sys();",
        "    fence_seq_cst_compiler();",
        "sleep",
    ),
    "raise_fault without a fence": Change(
        SIGNAL, "raise_fault", f"{FENCE}\n  team.tell", "  team.tell", "buffer"
    ),
    "raised behind the fence only": Change(
        SIGNAL,
        "raise_fault",
        f"{FENCE}\n  team.tell",
        f"{FENCE}\n  store_relaxed_sys(&v.control(v.rank)->aborted, 2);\n  team.tell",
    ),
    "verify_peer_buffers without a fence": Change(
        ENDPOINT,
        "verify_peer_buffers",
        "if (reads_peer_buffers)\n      fence_seq_cst_sys();",
        "",
        "buffer",
    ),
    "verify_peer_buffers with a rarer fence": Change(
        ENDPOINT, "verify_peer_buffers", "if (reads_peer_buffers)\n", "if (world() > 2)\n"
    ),
    "a message without the acknowledgement's fence": Change(
        SIGNAL, "wake", WRITER_FENCED, "", "message"
    ),
    "a failed call that does not wait": Change(
        SIGNAL,
        "await_raised",
        "  while (load_acquire_sys(&v.control(v.rank)->aborted) == 0) {\n",
        "  {\n",
        "claim",
    ),
    "a failed call that waits for ever": Change(
        SIGNAL,
        "await_raised",
        "        store_relaxed_sys(&v.control(v.rank)->aborted, kRaisedWithoutRecord);",
        "        continue;",
        "stopped owner",
    ),
    "a failed call without a fence": Change(
        SIGNAL, "await_raised", f"{FENCE}  // as in raise_fault()", "", "claim"
    ),
    "claimed by a look": Change(
        SIGNAL,
        "claim_fault",
        "exchange_acq_rel_sys(&mine->claimed, 1)",
        "load_acquire_sys(&mine->claimed)",
        "fault",
    ),
    "published without release": Change(
        SIGNAL, "publish", PUBLISHED, PUBLISHED.replace("release", "relaxed"), "stream"
    ),
    "published in another word": Change(
        SIGNAL,
        "publish",
        "team.channel(), v.rank)->ready",
        "team.channel(), v.rank)->consumed",
        "stream",
    ),
    "an acknowledgement that wakes readers": Change(
        SIGNAL, "acknowledge", "v.rank)->on_consumed", "v.rank)->on_ready"
    ),
    "aborts seen without acquire": Change(
        SIGNAL, "aborted", PEERS_ABORT, PEERS_ABORT.replace("acquire", "relaxed"), "fault"
    ),
    "sent without a sync": Change(
        ENDPOINT,
        "send",
        "    team.sync();\n    each_by_lanes(readers",
        "    each_by_lanes(readers",
        "teams",
    ),
    "detach without release": Change(
        "host/comm.cpp", "Comm::detach", "store_release_sys", "store_relaxed_sys", "detach"
    ),
    "Triton: lanes that nothing orders": Change(
        WORDS, "exchange_release_sys", "    tl.debug_barrier()\n"
    ),
    "Triton: stored without release": Change(
        WORDS, "exchange_release_sys", 'sem="release"', 'sem="relaxed"'
    ),
    "Triton: an acquire of the device": Change(
        WORDS, "load_acquire_sys", 'sem="acquire", scope="sys"', 'sem="acquire", scope="gpu"'
    ),
    "Triton: claimed without order": Change(
        RECORD, "claim_fault", 'sem="acq_rel"', 'sem="relaxed"'
    ),
    "Triton: raised before it is whole": Change(
        RECORD,
        "fail_header",
        "        copy_words(page + PAGE_FAULT + FAULT_T",
        "        raise_fault(ws, page)\n        copy_words(page + PAGE_FAULT + FAULT_T",
    ),
}
