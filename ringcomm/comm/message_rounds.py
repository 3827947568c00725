"""Messages between devices that go out together, in as few launches as there can be.

A kernel that sends to a rank may wait until that rank receives. Of two ranks that both send before
they receive, each would wait for the other if they did so one by one; in one launch they do both
at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor

from ringcomm.comm.communicator import Communicator
from ringcomm.comm.device_work import DeviceWork

__all__ = ["Letter", "exchange", "rounds"]


class Letter(NamedTuple):
    """One message of a batch; ``communicator`` is on a device, ``peer`` one of its ranks."""

    communicator: Communicator
    tensor: Tensor
    peer: int
    tag: int
    is_send: bool


def rounds(letters: Sequence[Letter]) -> list[list[int]]:
    """The launches that carry ``letters``, in their order, each as indices into ``letters``.

    A launch carries messages of one communicator and tag, at most one each way with a rank.
    Further messages between two ranks follow in later launches, in the order of the batch, which
    is the same on both. All ranks launch by round, then by tag, then by communicator: so no launch
    waits for one that comes later.
    """
    turns: Counter[tuple[int, int, bool]] = Counter()
    launches: dict[tuple[int, int, int], list[int]] = {}
    for index, letter in enumerate(letters):
        one_way = (id(letter.communicator), letter.peer, letter.is_send)
        launch = (turns[one_way], letter.tag, id(letter.communicator))
        launches.setdefault(launch, []).append(index)
        turns[one_way] += 1

    def place(launch: tuple[int, int, int]) -> tuple[int, int, str]:
        turn, tag, _ = launch
        return turn, tag, letters[launches[launch][0]].communicator.name

    return [launches[launch] for launch in sorted(launches, key=place)]


def exchange(letters: Sequence[Letter]) -> DeviceWork:
    """Launches what :func:`rounds` has put together.

    Raises:
        ArgumentError: bad argument; none of these messages was sent.
        RingcommError: a fault; see ``ringcomm.errors``.
    """
    # A communicator on a device has this method, one on the host does not.
    communicator = cast(Any, letters[0].communicator)
    work: DeviceWork = communicator.exchange_messages(
        [(letter.tensor, letter.peer) for letter in letters if letter.is_send],
        [(letter.tensor, letter.peer) for letter in letters if not letter.is_send],
        letters[0].tag,
    )
    return work
