# SPDX-License-Identifier: Apache-2.0
"""Adafactor: second moments by row and column; one rank, the owner, updates a whole parameter.

The update of an element needs sums over its row, its column and the whole parameter, so each
parameter has an owner (``optim/muon.py``). The state of an m x n matrix is m + n numbers, few
compared to its m n elements. So every rank keeps the whole state, and a single rank can save and
load it. The state of a parameter that is not a matrix, such as a bias, is a variance per element.

The W ranks divide the updates. They exchange W buckets at a time, so that each rank owns about one
bucket; a step needs memory for two float32 buckets in addition to one bucket of gradients. If
several ranks have pieces of a parameter, 12 bytes per element are sent: the gradient and the value
to the owner, and the new value back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.c10d.comm_argument import CommArgument
from ringcomm.comm.communicator import Communicator
from ringcomm.errors import UnsupportedError
from ringcomm.optim.backends import Backend, StepTable
from ringcomm.optim.buckets import Bucket, Buckets
from ringcomm.optim.layout import ParamSpec, ShardLayout
from ringcomm.optim.muon import (
    OwnedParam,
    OwnerExchange,
    is_divided,
    params_of,
    refuse_other_options,
)
from ringcomm.optim.options import AdamWOptions
from ringcomm.optim.rules import (
    Group,
    ParamState,
    TensorBackend,
    TensorRule,
    check_positive,
    check_rate,
    fail,
    numbers,
)
from ringcomm.optim.setting import LossScaler
from ringcomm.optim.sharded import Params, ShardedOptimizer, Sharing

Tensor = torch.Tensor

ROWS, COLUMNS, VARIANCE = "row_var", "col_var", "variance"


def take_step(
    value: Tensor, grad: Tensor, kept: Mapping[str, Tensor], step: float, group: Group
) -> None:
    """Steps one whole parameter in place, with the operations of ``torch.optim.Adafactor``.

    Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", ICML 2018,
    with torch's meaning of lr and eps.

    Args:
        value: float32, of the parameter's shape.
        grad: as ``value``.
        kept: the parameter's state tensors by name, changed in place.
        step: number of this step, from 1 on.
        group: hyper-parameters.
    """
    eps1, eps2 = group["eps"]
    eps1 = torch.finfo(value.dtype).eps if eps1 is None else eps1
    lr = float(group["lr"])
    if group["maximize"]:
        grad = -grad
    weight = step ** group["beta2_decay"]
    rate = max(eps2, value.norm(2).item() / value.numel() ** 0.5) * min(lr, 1 / step**0.5)
    if group["weight_decay"] != 0:
        value.mul_(1 - lr * group["weight_decay"])
    if grad.dim() > 1:
        rows, columns = kept[ROWS], kept[COLUMNS]
        for mean, dim in ((rows, -1), (columns, -2)):
            squares = torch.norm(grad, dim=dim, keepdim=True).square_().div_(grad.size(dim))
            mean.lerp_(squares, weight)
        variance = rows @ columns
        variance.div_(rows.mean(dim=-2, keepdim=True).clamp_(min=eps1))
    else:
        kept[VARIANCE].lerp_(grad * grad, weight)
        variance = kept[VARIANCE].clone()
    update = variance.clamp_(min=eps1 * eps1).rsqrt_().mul_(grad)
    clip = max(1.0, update.norm(2).item() / (update.numel() ** 0.5 * group["d"]))
    value.add_(update, alpha=-rate / clip)


def kept_of(spec: ParamSpec, device: torch.device) -> dict[str, Tensor]:
    """Returns a parameter's initial state by name: tensors of zeros."""
    shape = list(spec.shape)
    if len(shape) < 2:
        return {VARIANCE: torch.zeros(shape, device=device)}
    return {
        ROWS: torch.zeros([*shape[:-1], 1], device=device),
        COLUMNS: torch.zeros([*shape[:-2], 1, shape[-1]], device=device),
    }


class AdafactorRule(TensorRule):
    """The update rule of ``torch.optim.Adafactor``, with FP32 state.

    It updates W buckets at a time; each parameter's owner updates the parameter.
    """

    elementwise = False
    name = "Adafactor"
    hypers = ("beta2_decay", "eps", "d", "weight_decay", "maximize")

    def __init__(self) -> None:
        self.groups: Sequence[Group] = ()
        #: The parameters, by bucket number.
        self.params: dict[int, list[OwnedParam]] = {}
        #: True if every rank updates everything, as at stage 0.
        self.is_replicated = False
        self._kept: dict[int, dict[str, Tensor]] = {}
        # Buckets that wait for their exchange, by number, with their gradients: [chunk elements].
        self._waiting: dict[int, tuple[Bucket, Tensor]] = {}
        self._steps: list[float] = []
        self._device = torch.device("cpu")

    def check_hyper(self, group: Group, index: int, device: torch.device) -> None:
        check_rate(group, index, device)
        check_positive(group, index, "weight_decay")
        if not _is_number(group["beta2_decay"]) or group["beta2_decay"] > 0:
            fail(index, "beta2_decay", "a number <= 0", group["beta2_decay"])
        if not _is_number(group["d"]) or group["d"] < 1:
            fail(index, "d", "a number >= 1", group["d"])
        eps = group["eps"]
        pair = isinstance(eps, (tuple, list)) and len(eps) == 2
        if not pair or not all(_is_number(each) and each >= 0 for each in (eps[0] or 0, eps[1])):
            fail(index, "eps", "two numbers >= 0, of which the first may be None", eps)
        self._device = device
        for called, param in params_of(group["params"]):
            if is_divided(param):
                raise UnsupportedError(
                    f"param group {index}, {called}: each rank of the mesh has a part of it, but "
                    "Adafactor needs sums over whole parameters; step it with AdamW"
                )

    def replaced(self, group: Group) -> dict[str, Any]:
        return {"eps": numbers(group["eps"])}

    def names(self, groups: Sequence[Group]) -> tuple[str, ...]:
        return ()

    def misfit(self, names: Sequence[str], groups: Sequence[Group]) -> str:
        return "no tensors of the parameters' shapes" if names else ""

    def backend(
        self, comm: Communicator | None, options: AdamWOptions, table: StepTable
    ) -> Backend:
        refuse_other_options(self.name, options)
        return TensorBackend(comm, options, table, self)

    def bind(
        self,
        layout: ShardLayout,
        groups: Sequence[Group],
        buckets: Buckets,
        chunks: int,
        states: Sequence[ParamState | None] = (),
    ) -> None:
        self.groups = groups
        self.is_replicated = chunks == 1
        self.params = {
            number: [
                OwnedParam(param, number, begin, end, layout.params[param])
                for begin, end, param in bucket.segments
            ]
            for number, bucket in enumerate(layout.buckets)
        }
        self._kept = {
            index: self._kept.get(index) or kept_of(spec, self._device)
            for index, spec in enumerate(layout.params)
            if spec.trainable and spec.tied_to is None
        }

    def kept_whole(self, index: int) -> Mapping[str, Tensor]:
        return self._kept.get(index, {})

    def from_torch(self, entry: Mapping[str, Any], group: Group) -> ParamState | None:
        try:
            return ParamState({"step": float(entry["step"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"expected step, {ROWS}, {COLUMNS}, got {error!r}") from error

    def begin_updates(self, run: TensorBackend) -> None:
        self._waiting.clear()
        self._steps = run.table.step.tolist()

    def update(self, run: TensorBackend, bucket: Bucket, grad: Tensor) -> None:
        self._waiting[bucket.number] = (bucket, grad)
        owning = self._owning(run)
        if len(self._waiting) == (1 if owning is None else owning.world_size):
            self._update_waiting(run)

    def end_updates(self, run: TensorBackend) -> None:
        if self._waiting:
            self._update_waiting(run)

    def _owning(self, run: TensorBackend) -> Communicator | None:
        """Returns the ranks that divide all updates; None if each rank makes all, as at stage 0."""
        return None if self.is_replicated else run.sharers

    def _update_waiting(self, run: TensorBackend) -> None:
        control = run.control
        buckets = {number: bucket for number, (bucket, _) in self._waiting.items()}
        grads = {number: control.scaled(grad) for number, (_, grad) in self._waiting.items()}
        values = {number: _values_of(bucket) for number, bucket in buckets.items()}
        params = [
            param
            for number in buckets
            for param in self.params[number]
            if control.active[param.index]
        ]
        costs = [param.spec.elems for param in params]
        owning = self._owning(run)
        exchange = OwnerExchange(params, costs, buckets, owning, False, torch.float32)
        given = exchange.to_owners([_piece(param, buckets, grads) for param in params])
        pieces = {number: _piece(param, buckets, values) for number, param in enumerate(params)}
        wholes = exchange.to_owners(list(pieces.values()))
        for number, whole in wholes.items():
            param = params[number]
            take_step(
                param.spec.view(whole),
                param.spec.view(given[number]),
                self.kept_whole(param.index),
                self._steps[param.index],
                self.groups[param.spec.group],
            )
        room = {number: piece for number, piece in pieces.items() if piece is not None}
        kept = [list(self.kept_whole(param.index).values()) for param in params]
        exchange.from_owners(wholes, room, kept)
        for number, bucket in buckets.items():
            with bucket.params_here(write=True):
                bucket.own_params.copy_(values[number])
            _keep_masters(bucket, values[number])
        run.publish(buckets.values())
        self._waiting.clear()


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def _values_of(bucket: Bucket) -> Tensor:
    """Returns the masters of this rank's chunk, else its parameters: float32 [chunk elements]."""
    if bucket.state.master is None:
        with bucket.params_here():
            return bucket.own_params.to(torch.float32, copy=bucket.may_be_away)
    return bucket.state.whole_master()


def _keep_masters(bucket: Bucket, values: Tensor) -> None:
    """Writes updated values of :func:`_values_of` back to the masters, if there are any."""
    if bucket.state.master is not None:
        bucket.state.take({"master": values})


def _piece(
    param: OwnedParam, buckets: Mapping[int, Bucket], flat: Mapping[int, Tensor]
) -> Tensor | None:
    return param.piece_in(flat[param.bucket], buckets[param.bucket].chunk)


class Adafactor(ShardedOptimizer):
    """Adafactor, which keeps one row and one column of moments per matrix; ranks share the work.

    Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", ICML 2018,
    as in ``torch.optim.Adafactor``. It takes ``comm``, ``options``, ``loss_scaler`` and ``mesh``
    like :class:`ringcomm.optim.AdamW`.

    Args:
        params: as torch takes them; of any shape.
        lr: upper bound of the relative step.
        beta2_decay: exponent of the step number in the second moment's weight.
        eps: two lower bounds: of the second moment's root (None means the machine precision of
            float32), and of a parameter's root mean square, by which its step is scaled.
        d: root mean square above which an update is scaled down.
        weight_decay: a step multiplies each parameter by 1 - lr * weight_decay.
        foreach: accepted and ignored: the results have the bits of foreach=False.
        maximize: maximize the objective.
        comm: see :class:`ringcomm.optim.AdamW`.
        options: see there; master weights are FP32, rounding is to nearest, kernels are native.
        loss_scaler: see there.
        mesh: see there.

    Raises:
        ArgumentError: see there.
        UnsupportedError: Adafactor does not support an option; or a parameter is sharded over a
            mesh.
    """

    def __init__(  # noqa: PLR0913 -- torch's signature
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        comm: CommArgument = None,
        options: AdamWOptions | None = None,
        loss_scaler: LossScaler | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "foreach": foreach,
            "maximize": maximize,
        }
        sharing = Sharing(comm, options, loss_scaler, mesh)
        super().__init__(params, defaults, sharing, AdafactorRule())
