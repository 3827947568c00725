"""Proves the links between the ranks' devices before anything relies on them.

A driver may report peer access, and even map a peer's memory, where data never arrive. So every
rank writes to every peer and looks for what the peers write to it, and reads every peer's memory,
with the same pointers that the kernels will use.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringcomm.errors import RendezvousError
from ringcomm.memory.device_blocks import DeviceHeap
from ringcomm.memory.device_peers import USUAL_CAUSES, DeviceHandle, MappedDeviceHeap

LINE_BYTES = 64
WORD_BYTES = 8
FIRST_POLL_S = 0.0002
LAST_POLL_S = 0.02


@dataclass(frozen=True)
class Links:
    """This rank and whom it reaches, by rank, itself included.

    ``scratch_offset_bytes`` counts from the beginning of every rank's region: world_size lines of
    64 bytes, one for each rank to write to, that nothing else uses until all ranks have proved
    their links. They are left as they are.
    """

    heap: DeviceHeap
    rank: int
    handles: Sequence[DeviceHandle]
    mapped: Sequence[MappedDeviceHeap]
    scratch_offset_bytes: int

    def line_ptr(self, owner: int, writer: int) -> int:
        """The line of rank ``owner``'s region that rank ``writer`` writes, as this rank sees it."""
        region_ptr = self.mapped[owner].base_ptr + self.handles[owner].region_offset_bytes
        return region_ptr + self.scratch_offset_bytes + writer * LINE_BYTES

    def word(self, owner: int, writer: int) -> bytes:
        """What that line holds once it is written; no two communicators have the same."""
        handle = self.handles[owner]
        text = f"{handle.token} {handle.proof} {owner} {writer}"
        return hashlib.sha256(text.encode()).digest()[:WORD_BYTES]

    def holds(self, owner: int, writer: int) -> bool:
        """Whether this rank sees the word there now."""
        ptr = self.line_ptr(owner, writer)
        return self.heap.runtime.read(self.heap.device, ptr, WORD_BYTES) == self.word(owner, writer)

    def write(self, owner: int) -> None:
        ptr, word = self.line_ptr(owner, self.rank), self.word(owner, self.rank)
        self.heap.runtime.write(self.heap.device, ptr, word)


def prove_links(
    links: Links,
    operation: str,
    deadline: float,
    timeout_s: float,
    look: Callable[[], None] | None = None,
) -> None:
    """Writes to all peers and returns when this rank has seen what all peers wrote.

    All ranks call it, between the exchange of handles and the confirmation that all are ready:
    a rank may leave it while a peer still looks.

    Args:
        links: the ranks; all of them are mapped.
        operation: named in errors.
        deadline: in seconds of ``time.monotonic()``.
        timeout_s: the wait that ends at ``deadline``, for errors.
        look: called while peers are awaited for long; raises if one of them will not come.

    Raises:
        RendezvousError: a link does not carry data, or a peer did not come; names both ranks, both
            devices, the direction, and usual causes.
    """
    # The own line first: whoever finds its word from this rank may read this one, too.
    for owner in (links.rank, *(r for r in range(len(links.handles)) if r != links.rank)):
        links.write(owner)
    peers = [rank for rank in range(len(links.handles)) if rank != links.rank]
    unseen = [(links.rank, peer) for peer in peers] + [(peer, peer) for peer in peers]
    pause_s = FIRST_POLL_S
    while True:
        unseen = [line for line in unseen if not links.holds(*line)]
        if not unseen:
            return
        if time.monotonic() >= deadline:
            raise _broken_link(links, unseen, operation, timeout_s)
        if look is not None and pause_s == LAST_POLL_S:
            look()
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, LAST_POLL_S)


def _broken_link(
    links: Links, unseen: list[tuple[int, int]], operation: str, timeout_s: float
) -> RendezvousError:
    owner, writer = unseen[0]
    mine, theirs = links.handles[links.rank].place, links.handles[writer].place
    if owner == links.rank:
        failure = f"what {theirs} writes into the memory of {mine} does not arrive"
    else:
        failure = f"{mine} does not see in the memory of {theirs} what that rank wrote there"
    peers = sorted({peer for _, peer in unseen})
    others = f" The same with ranks {peers[1:]}." if len(peers) > 1 else ""
    return RendezvousError(
        f"{operation}: {failure}, within {timeout_s:g} s.{others} {USUAL_CAUSES}. Or that rank "
        "did not come this far in time: see what it reports, or raise timeout="
    )
