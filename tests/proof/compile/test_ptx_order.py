# SPDX-License-Identifier: Apache-2.0
"""The check finds missing barriers in compiled kernels, whatever path lacks them."""

import pytest

from tests.proof.compile.ptx_order import misplaced

ACQUIRE = "@%p1 ld.global.sys.acquire.b32 %r1, [ %rd1 + 0 ];"
RELEASE = "@%p1 atom.global.sys.release.exch.b32 %r2, [ %rd2 + 0 ], %r3;"
LOAD = "ld.global.v4.b32 { %r4, %r5, %r6, %r7 }, [ %rd3 + 0 ];"
STORE = "@%p2 st.global.b32 [ %rd4 + 0 ], { %r4 };"
COPY = "cp.async.cg.shared.global [ %r8 + 0 ], [ %rd3 + 0 ], 0x10, %r9;"
BARRIER = "bar.sync \t0;"
SOUND = {
    "around": [ACQUIRE, BARRIER, LOAD, STORE, BARRIER, RELEASE],
    "a loop": ["$L1:", ACQUIRE, BARRIER, "@%p3 bra \t$L1;", LOAD, BARRIER, RELEASE],
    "copies": [ACQUIRE, BARRIER, COPY, "cp.async.wait_group \t0;", BARRIER, RELEASE],
    "a call": [ACQUIRE, BARRIER, "call.uni wait, (param0);", BARRIER, RELEASE],
    "a loop of its own": ["waitLoop:", "@!complete bra.uni waitLoop;", BARRIER, RELEASE],
}
UNSOUND = {
    "none after the acquire": ([ACQUIRE, LOAD], LOAD),
    "none before a copy": ([ACQUIRE, COPY], COPY),
    "none before the release": ([BARRIER, STORE, RELEASE], RELEASE),
    "before the loads that follow": ([BARRIER, LOAD, RELEASE], RELEASE),
    "at the beginning": ([RELEASE], RELEASE),
    "on one of two paths": (["@%p3 bra \t$L1;", BARRIER, "$L1: // of both", RELEASE], RELEASE),
    "around a loop": (["$L1:", LOAD, BARRIER, ACQUIRE, "@%p3 bra \t$L1;", BARRIER], LOAD),
    "behind a call": ([BARRIER, "call.uni wait, (param0);", RELEASE], RELEASE),
    "before a call": ([ACQUIRE, "call.uni wait, (param0);"], "call.uni"),
    "at the end": ([ACQUIRE], "ret;"),
    "copies under way": (
        [COPY, "cp.async.wait_group \t2;", BARRIER, RELEASE],
        RELEASE,
    ),
    "every lane": ([BARRIER, RELEASE.partition(" ")[2]], "atom.global"),
}


def _found(code):
    return misplaced(
        {"kernel": "\n".join(f"\t{line}" if line[0] != "$" else line for line in code)}
    )


@pytest.mark.parametrize("code", SOUND.values(), ids=SOUND)
def test_barriers_that_stand_right(code):
    assert _found([*code, "ret;"]) == []


@pytest.mark.parametrize(("code", "at"), UNSOUND.values(), ids=UNSOUND)
def test_barriers_that_miss(code, at):
    found = _found([*code, "ret;"])[0]
    assert found.startswith(f"kernel: {at}")
