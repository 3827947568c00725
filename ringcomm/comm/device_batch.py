"""Collectives of all ranks of a process from one thread: one launch for each device.

For graphs, which one thread captures, for timing, and for tests. The streams are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor

from ringcomm.comm.calls import Call
from ringcomm.comm.communicator import Communicator
from ringcomm.comm.device_engine import DeviceEngine
from ringcomm.comm.device_triton import Prepared, launch

__all__ = ["make_call", "run_together"]


def make_call(
    communicator: Communicator, name: str, arguments: tuple[Any, ...], algorithm: str
) -> Call:
    """A checked call of ``communicator``.

    Args:
        communicator: on a device.
        name: all_reduce, reduce_scatter_tensor or all_gather_into_tensor.
        arguments: tensors, and the op of a reduction.
        algorithm: as the call takes it.

    Raises:
        ArgumentError: bad argument; a tensor that is not contiguous: it would need a copy behind
            the launch; or the algorithm "copy".
    """
    if algorithm == "copy":
        # Its copies have to wait for the other ranks' launches, which come later here.
        communicator._site(name).fail(
            'algorithm: expected any but "copy" for all ranks from one thread; run the ranks as '
            "threads (LocalWorld.run) for that one"
        )
    for tensor in arguments:
        if isinstance(tensor, Tensor):
            communicator._site(name).contiguous("tensors", tensor)
    makers: dict[str, Callable[..., Call]] = {
        "all_reduce": communicator._all_reduce_call,
        "reduce_scatter_tensor": communicator._reduce_scatter_call,
        "all_gather_into_tensor": communicator._all_gather_call,
    }
    return makers[name](*arguments, algorithm)


def run_together(communicators: Sequence[Communicator], calls: Sequence[Call]) -> None:
    """Launches one checked call of every rank.

    Args:
        communicators: the ranks of a world, all on devices of this process.
        calls: of the same ranks, whose tensors need no copies.

    Raises:
        ArgumentError: the ranks' calls cannot share a launch.
        RingcommError: a communicator is unusable.
    """
    by_device: dict[int, list[tuple[DeviceEngine, Call]]] = {}
    engines = cast(Sequence[DeviceEngine], communicators)
    for engine, call in zip(engines, calls, strict=True):
        engine._check_usable(call.name)
        by_device.setdefault(engine._place[1], []).append((engine, call))
    for device, group in by_device.items():
        _launch_group(device, group)


def _launch_group(device: int, group: list[tuple[DeviceEngine, Call]]) -> None:
    first = group[0][0]
    runtime = first._place[0]
    with runtime.on_device(device):
        stream = runtime.current_stream(device)
        prepared: list[Prepared] = []
        try:
            for engine, call in group:
                with engine._turn(call.name):
                    prepared.append(engine._prepare(call, stream))
            with first._worded(group[0][1].name):
                if first._meeting is not None:
                    first._meeting.launch_together(prepared, stream)
                else:
                    launch(prepared, stream)
        except BaseException:
            for engine, _ in group[: len(prepared)]:
                engine._withdraw()
            raise
