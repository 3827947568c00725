# SPDX-License-Identifier: Apache-2.0
"""A whole training step in one CUDA graph: captured once, and replayed by each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only

from ringcomm.comm.agreement import all_or_none
from ringcomm.comm.device.launch import DeviceCallEngine
from ringcomm.errors import ArgumentError, UnsupportedError, where
from ringcomm.integers import integer
from ringcomm.optim.sharded import ShardedOptimizer
from ringcomm.zero.stages.engine import ShardEngine
from ringcomm.zero.stages.order import module_order

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringcomm.cuda.runtime import Graph
    from ringcomm.optim.step import ShardedStep

OPERATION = "GraphedStep"

Tensor = torch.Tensor


class GraphedStep:
    """A training step that runs as one CUDA graph, so that the host launches once per step.

    ``step`` does a whole step: forward, backward, clipping, ``optimizer.step()`` and
    ``optimizer.zero_grad()``. The first ``warmup`` calls run ``step`` eagerly, and train. The next
    call captures ``step`` in a graph. Later calls copy their tensors into the tensors of the first
    call and replay the graph. The results have the same bits as the same number of eager steps::

        def step(tokens, targets):
            loss = loss_of(model(tokens), targets)
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = zero.GraphedStep(step, optimizer)
        for tokens, targets in batches:
            loss = step(tokens, targets)
            scheduler.step()

    All ranks make the same calls. The learning rate of each param group becomes a tensor on the
    device, which schedulers fill; a number that is assigned to ``group["lr"]`` is also used. All
    other values that the step reads on the host stay as they were in the capture.

    Args:
        step: the step; tensors among its arguments are on the device and require no gradient.
        optimizer: AdamW, Adam, AdamW8bit, SGD or Lion of ``ringcomm.optim``, on a GPU.
        warmup: number of eager calls before the capture, at least 1.

    Raises:
        ArgumentError: ``step``, ``optimizer`` or ``warmup`` has a wrong type or value.
        UnsupportedError: the optimizer, or the module that it trains, needs the host in a step; the
            message says why.
    """

    def __init__(
        self, step: Callable[..., Any], optimizer: ShardedOptimizer, *, warmup: int = 3
    ) -> None:
        if not callable(step):
            raise ArgumentError(f"{OPERATION}: step: expected a function, got {step!r}")
        if not isinstance(optimizer, ShardedOptimizer):
            raise ArgumentError(
                f"{OPERATION}: optimizer: expected one of ringcomm.optim, got {optimizer!r}"
            )
        calls = integer(warmup)
        if calls is None or calls < 1:
            raise ArgumentError(
                f"{OPERATION}: warmup: expected a number of calls >= 1, got {warmup!r}"
            )
        engine = _capturable_engine(optimizer)
        self._step, self._optimizer, self._warmup = step, optimizer, calls
        self._calls = engine
        self._where = where(OPERATION, *engine.rank_of)
        self._runtime, self._device = engine.device_ref
        # Warm-up and capture use one stream: autograd ties a parameter's gradient to the stream of
        # its first use, and a capture must not use another stream.
        self._stream = self._runtime.make_stream(self._device)
        self._rates = [self._rate_of(group["lr"]) for group in optimizer.param_groups]
        self._taken = 0
        self._inputs: _Inputs | None = None
        self._graph: Graph | None = None
        self._outputs: Any = None
        self._captured: _Captured | None = None
        self._take_rates()

    def __repr__(self) -> str:
        state = "captured" if self._graph is not None else f"{self._taken} eager calls"
        return f"<ringcomm.zero.GraphedStep: {state}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Takes one training step on all ranks.

        Returns:
            The step's result, without its autograd graph. Once the step is captured, every call
            returns the same tensors, and the next call replaces their values: clone the tensors
            that you keep.

        Raises:
            ArgumentError: the arguments differ from the first call's arguments in structure,
                shapes, dtypes or values of non-tensors; or, since the capture, a hyper-parameter
                except the learning rate, the param groups, or the set of parameters that require a
                gradient has changed. The call changed nothing; see :meth:`reset`.
            UnsupportedError: the step cannot be captured, on this rank or another rank. No rank has
                taken the step.
            RingcommError: a fault in an earlier call or replay; see ``ringcomm.errors``.
        """
        self._calls.check_usable(OPERATION)  # after a fault, a replay would silently do nothing
        leaves, structure = tree_flatten((args, kwargs))
        if self._inputs is not None:
            self._inputs.check(leaves, structure)
        if self._captured is not None:
            self._captured.check(self._where)
        if self._runtime.is_capturing(self._device):
            raise UnsupportedError(
                f"{self._where}: the current stream is capturing a graph, and this call replays "
                "one; call it outside of the capture"
            )
        with self._behind_the_caller():
            if self._inputs is None:
                self._inputs = _Inputs(self._where, self._torch_device, leaves, structure)
            else:
                self._inputs.fill(leaves)
            self._take_rates()
            if self._taken < self._warmup:
                self._taken += 1
                return self._run()
            if self._captured is None:
                self._capture()
            self._replay()
        return self._outputs

    def reset(self) -> None:
        """Drops the graph and the first call's arguments, after the graph's last replay has ended.

        The next ``warmup`` calls are eager, and may pass other shapes; then the step is captured
        again. Call it on all ranks, after changes that :meth:`__call__` refuses.
        """
        self._runtime.synchronize(self._device)
        self._graph = self._outputs = self._captured = self._inputs = None
        self._taken = 0

    @property
    def _torch_device(self) -> torch.device:
        return self._runtime.torch_device(self._device)

    @contextmanager
    def _behind_the_caller(self) -> Iterator[None]:
        """Runs the body on the step's stream, between the caller's earlier and later work."""
        runtime, device, own = self._runtime, self._device, self._stream
        caller = runtime.current_stream(device)
        runtime.wait_event(device, own.handle, runtime.record_event(device, caller))
        try:
            with runtime.on_stream(own):
                yield
        finally:
            runtime.wait_event(device, caller, runtime.record_event(device, own.handle))

    def _run(self) -> Any:
        assert self._inputs is not None
        args, kwargs = self._inputs.arguments()
        return tree_map_only(Tensor, Tensor.detach, self._step(*args, **kwargs))

    def _capture(self) -> None:
        """Captures the step on all ranks, or raises on all; collective."""
        captured = _Captured(self._optimizer)
        captured.begin_replay(self._engine)  # reshards, so that the graph unshards
        with all_or_none(self._optimizer.communicator, OPERATION):
            try:
                with self._runtime.capture_on(self._stream) as graph:
                    outputs = self._run()
            except Exception as error:
                raise UnsupportedError(
                    f"{self._where}: the step cannot be captured in a graph: "
                    f"{type(error).__name__}: {error}. A captured step must not read the device on "
                    "the host (.item(), .tolist(), .cpu(), error_if_nonfinite=True, an if on a "
                    "tensor), nor use a parameter for the first time; do that outside of it, or "
                    "run the step eagerly"
                ) from error
        self._graph, self._outputs, self._captured = graph, outputs, captured

    def _replay(self) -> None:
        """Replays the graph, and updates host state as an eager step would."""
        assert self._captured is not None
        assert self._graph is not None
        self._captured.begin_replay(self._engine)
        self._graph.replay()
        self._captured.step.count_step()

    @property
    def _engine(self) -> ShardEngine | None:
        placement = self._optimizer.placement
        engine = None if placement is None else placement.module
        assert engine is None or isinstance(engine, ShardEngine)
        return engine

    # ---- learning rates -------------------------------------------------------------------------

    def _rate_of(self, rate: float | Tensor) -> Tensor:
        """Returns a device tensor with a group's learning rate, which the graph reads."""
        if isinstance(rate, Tensor) and rate.device == self._torch_device:
            return rate
        return torch.tensor(float(rate), dtype=torch.float64, device=self._torch_device)

    @torch.no_grad()
    def _take_rates(self) -> None:
        """Copies learning rates that were assigned to param groups into the graph's tensors."""
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=False):
            given = group["lr"]
            if given is not rate:
                rate.fill_(given)
                group["lr"] = rate


class _Inputs:
    """The arguments of a captured step: the tensors that its graph reads, and other values."""

    def __init__(
        self, called: str, device: torch.device, leaves: Sequence[Any], structure: TreeSpec
    ) -> None:
        self._where, self._structure = called, structure
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and (leaf.device != device or leaf.requires_grad):
                found = "that requires a gradient" if leaf.requires_grad else f"on {leaf.device}"
                raise ArgumentError(
                    f"{called}: argument {number}: expected a tensor on {device} that requires no "
                    f"gradient, got one {found}; move it with .to({str(device)!r}), or detach it"
                )
        self._leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def arguments(self) -> Any:
        """Returns the positional and the keyword arguments."""
        return self._structure.unflatten(self._leaves)

    def check(self, leaves: Sequence[Any], structure: TreeSpec) -> None:
        """Raises ArgumentError unless these arguments can replace the first call's arguments."""
        if structure != self._structure:
            raise ArgumentError(
                f"{self._where}: expected arguments as at the first call, {self._structure}, got "
                f"{structure}; call reset() on all ranks before calls of another form"
            )
        for number, (first, given) in enumerate(zip(self._leaves, leaves, strict=True)):
            if _form_of(first) != _form_of(given):
                raise ArgumentError(
                    f"{self._where}: argument {number}: expected {_form_of(first)} as at the first "
                    f"call, got {_form_of(given)}; pad batches to one shape, or call reset() on "
                    "all ranks before calls of another form"
                )

    @torch.no_grad()
    def fill(self, leaves: Sequence[Any]) -> None:
        for first, given in zip(self._leaves, leaves, strict=True):
            if isinstance(first, Tensor) and first is not given:
                first.copy_(given)


def _form_of(leaf: Any) -> Any:
    """Returns the part of an argument that a graph fixes: everything but a tensor's values."""
    if not isinstance(leaf, Tensor):
        return leaf
    gradient = " that requires a gradient" if leaf.requires_grad else ""
    return f"a {leaf.dtype} of {tuple(leaf.shape)} on {leaf.device}{gradient}"


class _Captured:
    """The values that a captured step has read from its optimizer on the host."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer
        self.step: ShardedStep = optimizer.sharded_step()
        self._names = [name for name in optimizer.defaults if name != "lr"]
        self._hyper, self._trained = self._found()

    def _found(self) -> tuple[list[list[Any]], list[bool]]:
        groups = self._optimizer.param_groups
        hyper = [[group.get(name) for name in self._names] for group in groups]
        return hyper, [param.requires_grad for group in groups for param in group["params"]]

    def check(self, called: str) -> None:
        """Raises ArgumentError if a captured value has changed since the capture."""
        after = "call reset() on all ranks after the change, to capture the step again"
        hyper, trained = self._found()
        if self._optimizer.sharded_step() is not self.step or len(hyper) != len(self._hyper):
            raise ArgumentError(f"{called}: a param group was added since the capture; {after}")
        for index, (now, before) in enumerate(zip(hyper, self._hyper, strict=True)):
            for name, value, captured in zip(self._names, now, before, strict=True):
                if value is not captured and value != captured:
                    raise ArgumentError(
                        f"{called}: param group {index}: {name} was {captured!r} in the capture "
                        f"and is {value!r} now, but lr alone may change; {after}"
                    )
        if trained != self._trained:
            raise ArgumentError(
                f"{called}: parameters were frozen or unfrozen since the capture; {after}"
            )

    def begin_replay(self, engine: ShardEngine | None) -> None:
        """Takes over writes to parameters since the last step, and reshards the parameters."""
        self.step.refuse_if_partly_updated("step")
        self.step.written.take_over()
        if engine is not None:
            engine.reshard_for_step()


def _capturable_engine(optimizer: ShardedOptimizer) -> DeviceCallEngine:
    """Returns the engine that runs the device calls of an optimizer's communicator.

    Raises:
        UnsupportedError: a graph cannot capture the optimizer's steps.
    """
    comm = optimizer.communicator
    engine = None if comm is None else comm.engine
    if comm is None or not comm.launches:
        raise _refusal("its parameters are on the CPU, where there are no graphs", "Run it eagerly")
    if not isinstance(engine, DeviceCallEngine):
        raise _refusal("its ranks are on several nodes, so hosts take part", "Run it eagerly")
    if engine.joint_launch is not None:
        raise _refusal(
            "ranks of this process share the device and launch jointly, which no single rank can "
            "capture",
            "Give each rank a process, or a device",
        )
    reason = optimizer.uncapturable()
    if reason is not None:
        raise _refusal(reason, "Run it eagerly, or change this")
    if optimizer.placement is not None and module_order(comm).has_several:
        raise _refusal(
            "several sharded modules share its communicator, and agree on the host at each "
            "backward",
            "Shard one of them over another communicator (comm.split(0))",
        )
    return engine


def _refusal(reason: str, remedy: str) -> UnsupportedError:
    return UnsupportedError(f"{OPERATION}: the step cannot be captured: {reason}. {remedy}")
