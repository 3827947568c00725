# SPDX-License-Identifier: Apache-2.0
"""Prints what training steps on a device cost: ``python -m tests.support.stub_driver.step_cost``.

One rank trains a GPT with twelve blocks and a tiny width by AdamW, on a driver that does nothing.
Gradients are therefore not reduced and parameters do not change, which changes no count. The first
few steps are not counted; later steps all do the same work. The counts per step:

* frames: calls of ringcomm's Python functions, including calls by autograd's hooks. The model
  is an example of ringcomm, and does not count.
* ops: torch operators that such a function calls. A dispatch mode of torch counts them. The mode
  sees the called operators but not the operators inside them, and keeps calls off the native
  fast path, so they are counted in a separate step.
* launches and events (records and waits) of the driver.
* syncs: the host's waits for the device, and values of device tensors that Python reads.

With several ranks, reductions of stages 2 and 3 run on a second stream if a bucket is larger than
the buckets here, which takes events. "beside" counts a step with such reductions.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ringcomm
from ringcomm import Communicator, cuda, zero
from ringcomm.cli import table_lines
from ringcomm.comm import agreement
from ringcomm.examples.train_gpt import GPT, VOCABULARY, ModelConfig
from ringcomm.memory import device_heap
from ringcomm.optim import AdamW
from ringcomm.zero.stages.engine import owner_of
from tests.support.stub_driver import StubRuntime

LIBRARY = str(Path(ringcomm.__file__).parent) + "/"
EXAMPLES = LIBRARY + "examples/"
TORCH = str(Path(torch.__file__).parent) + "/"
MODEL = ModelConfig(width=16, depth=12, heads=2, context=8, tied=True)
BATCH = 2
#: Steps before the counted ones: the first three make buffers, order and plans.
WARM_UP = 5
READS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__")


@dataclass(frozen=True)
class Cost:
    """The counts of one step; see the module's docstring."""

    frames: int
    ops: int
    launches: int
    events: int
    syncs: int


def is_ours(path: str) -> bool:
    """True if the file is ringcomm's own, except its examples."""
    return path.startswith(LIBRARY) and not path.startswith(EXAMPLES)


def caller_of_op(frame: FrameType | None) -> str:
    """Returns file and line of the innermost caller outside torch and this file."""
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(TORCH) and path != __file__:
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class _Ops(TorchDispatchMode):
    """Counts the operators that functions of ringcomm call, by caller and name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        caller = caller_of_op(sys._getframe(1))
        if is_ours(caller):
            self.found[f"{caller.removeprefix(LIBRARY)} {func}"] += 1
        return func(*args, **(kwargs or {}))


def ops_of(call: Callable[[], object]) -> Counter[str]:
    """Returns the operators that ringcomm calls in ``call``, by file, line and name."""
    with _Ops() as ops:
        call()
    return ops.found


def frames_of(call: Callable[[], object]) -> Counter[str]:
    """Counts ringcomm's Python functions that run in ``call``, by file and name."""
    found: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and is_ours(code.co_filename):
            found[f"{code.co_filename.removeprefix(LIBRARY)} {code.co_name}"] += 1

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def syncs_of(runtime: StubRuntime, call: Callable[[], object]) -> Counter[str]:
    """Returns how often ``call`` waits for the device or reads a tensor, by the code that does it.

    The stub's device has CPU tensors, so tensors that are on the host with a real device would
    count as well; a step reads none.
    """
    found: Counter[str] = Counter()
    runtime.driver.reset()
    before = runtime.calls["synchronize"]

    def counting(name: str) -> Callable[..., Any]:
        plain = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor, *args: Any) -> Any:
            caller = caller_of_op(sys._getframe(1))
            if is_ours(caller):
                found[f"{caller.removeprefix(LIBRARY)} {name}"] += 1
            return plain(tensor, *args)

        return read

    with ExitStack() as patches:
        for name in READS:
            patches.enter_context(mock.patch.object(torch.Tensor, name, counting(name)))
        call()
    found["runtime.synchronize"] = runtime.calls["synchronize"] - before
    found["event.synchronize"] = runtime.driver.counted().get("synchronize", 0)
    return +found


def make_step(comm: Communicator, stage: int, beside: bool = False) -> Callable[[], None]:
    """Returns a function for a training step on one communicator, called ``WARM_UP`` times before.

    Args:
        comm: the communicator.
        stage: of ZeRO.
        beside: reductions run on a second stream, as among several ranks.
    """
    torch.manual_seed(0)
    module = zero.shard(GPT(MODEL), stage, comm=comm)
    if beside:
        engine = owner_of(module.embed.weight)
        assert engine is not None and engine.reduction is not None
        engine.reduction._device_ref = None
    optimizer = AdamW(module.parameters(), lr=1e-3, comm=comm)
    tokens = torch.randint(VOCABULARY, (BATCH, MODEL.context + 1))

    def step() -> None:
        module(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    return step


@contextmanager
def on_stub(runtime: StubRuntime) -> Iterator[Communicator]:
    """Yields the communicator of a single rank on a stub; inside, the stub is the current runtime.

    The rank's rendezvous answers with its own data, since there are no other ranks.
    """
    before = cuda.use(runtime)
    told = mock.patch.object(agreement, "gather_bytes", lambda comm, text, longest: [text])
    try:
        with told, ringcomm.local_world(1, device="cuda:0") as (comm,):
            yield comm
    finally:
        device_heap.close_heaps()
        cuda.use(before)


def cost_of(runtime: StubRuntime, step: Callable[[], None]) -> Cost:
    """Returns the counts of a step."""
    frames, ops, syncs = frames_of(step), ops_of(step), syncs_of(runtime, step)
    step()
    runtime.driver.reset()
    step()
    driver = runtime.driver.counted()
    events = driver.get("record", 0) + driver.get("wait", 0)
    totals = frames.total(), ops.total(), driver.get("launch", 0), events, syncs.total()
    return Cost(*totals)


def main(arguments: Sequence[str]) -> None:
    """Prints the table; with stages as arguments also prints the single sources of the counts."""
    runtime = StubRuntime()
    rows = []
    for name in arguments or ("1", "2", "2, beside", "3", "3, beside"):
        with on_stub(runtime) as comm:
            step = make_step(comm, int(name[0]), name.endswith("beside"))
            if arguments:
                for kind in (frames_of(step), ops_of(step), syncs_of(runtime, step)):
                    print(
                        "\n".join(f"{count:5} {name}" for name, count in kind.most_common()), "\n"
                    )
            cost = cost_of(runtime, step)
        rows.append((f"stage {name}", *map(str, vars(cost).values())))
    head = ("step", "frames", "ops", "launches", "events", "syncs")
    print("\n".join(table_lines([head, *rows])))


if __name__ == "__main__":
    main(sys.argv[1:])
