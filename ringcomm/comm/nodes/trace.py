"""The trace file that the ranks of one node leave at a fault of a communicator over nodes.

Only the ranks of a node can read each other's records, so every node has a file of its own.
``ringcomm trace`` reads those of all nodes together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ringcomm.comm.nodes.places import Places
from ringcomm.comm.recorder import trace_file
from ringcomm.comm.recorder.reader import LIMIT_S, FlightRecorder, Writing
from ringcomm.comm.recorder.records import renumbered
from ringcomm.comm.recorder.trace_file import OfNode
from ringcomm.errors import RingcommError

# NOTE [A trace over nodes]
#
# The watch of a rank leaves the trace when it hears of the fault, and not the call that raises: a
# rank that the others wait for may make no call any more. It copies the records before it aborts
# its node, so that they show calls under way and whom they wait for, and it writes the file after
# it has told everybody.


class NodeTrace:
    """The trace of one fault, as one rank leaves it unless another rank of its node has.

    Args:
        recorder: reads the records of this node's ranks, which it numbers by place.
        places: of all ranks.
        awaited: returns whom the rank at a place waits for on a rail, -1: nobody.
        world_id: identifies the communicator on all nodes.
    """

    def __init__(
        self, recorder: FlightRecorder, places: Places, awaited: Callable[[int], int], world_id: int
    ) -> None:
        self._recorder = recorder
        self._places = places
        self._awaited = awaited
        self._of_node = OfNode(world_id, places.node, places.nodes)
        self._copies: list[bytes] = []
        self._waits: list[int] = []
        self._trouble = ""
        self._writing: Writing | None = None
        self._begun = threading.Event()

    def copy(self) -> None:
        """Copies what the ranks of this node do at this moment; raises nothing."""
        if trace_file.is_off():
            return
        try:
            self._waits = [self._awaited(place) for place in range(len(self._places.mates))]
            self._copies = self._recorder.copies()
        except Exception as trouble:
            self._trouble = f". No trace was written: {trouble}"

    def write(self, error: RingcommError) -> None:
        """Begins to write what was copied, with the error; does not wait, and raises nothing."""
        if self._copies:
            self._writing = Writing(partial(self._leave, str(error)))
        self._begun.set()

    def told(self) -> str:
        """Returns what an error adds of the trace; waits until it is written, or late."""
        if not self._begun.wait(LIMIT_S):
            return ""
        return self._trouble if self._writing is None else self._writing.told()

    def _leave(self, error: str) -> str:
        recording = renumbered(self._recorder.read(self._copies), self._places.mates)
        ranks = []
        for each in recording.ranks:
            beyond = self._waits[self._places.place_of(each.rank)]
            ranks.append(replace(each, waits_for=beyond) if beyond >= 0 else each)
        recording = replace(recording, ranks=tuple(ranks))
        return trace_file.leave(recording, self._places.rank, error, self._of_node)
