"""SGD with torch's arguments, and Lion, sharded over a communicator."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.c10d.comm_argument import CommArgument
from ringcomm.optim.fused_rules import LionRule, SgdRule
from ringcomm.optim.loss_scaler import LossScaler
from ringcomm.optim.options import AdamWOptions
from ringcomm.optim.sharded import Params, ShardedOptimizer, Sharing

Tensor = torch.Tensor


class SGD(ShardedOptimizer):
    """SGD with FP32 momentum, sharded over a communicator.

    Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML
    2013, as ``torch.optim.SGD`` has it: the same bits as with ``foreach=False`` on a CPU with AVX2.
    Otherwise as :class:`ringcomm.optim.AdamW`, whose ``comm``, ``options``, ``loss_scaler`` and
    ``mesh`` it takes.

    Args:
        params: as torch takes them; float32, bfloat16 or float16, equal on all ranks.
        lr: learning rate; a tensor of one element is read on its device at each step.
        momentum: decay of the momentum; 0 for none, which then takes no memory.
        dampening: fraction of each gradient but the first that the momentum does not take.
        weight_decay: times the parameter, what is added to the gradient.
        nesterov: step along Nesterov's momentum.
        maximize: maximize the objective.
        foreach: accepted and ignored, as is ``fused``: a step is fused.
        differentiable: must be False.
        fused: see ``foreach``.
        comm: see :class:`ringcomm.optim.AdamW`.
        options: see there.
        loss_scaler: see there.
        mesh: see there.

    Raises:
        ArgumentError: see there; or ``nesterov`` without momentum, or with dampening.
        UnsupportedError: ``differentiable=True``.
    """

    def __init__(  # noqa: PLR0913 -- torch's signature
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        comm: CommArgument = None,
        options: AdamWOptions | None = None,
        loss_scaler: LossScaler | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
            "fused": fused,
        }
        sharing = Sharing(comm, options, loss_scaler, mesh)
        super().__init__(params, defaults, sharing, SgdRule())


class Lion(ShardedOptimizer):
    """Lion with an FP32 moment, sharded over a communicator.

    Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023, algorithm 2. A step
    moves each element by lr, whatever its gradient; the paper takes an lr of a third to a tenth
    of AdamW's, and as much more weight decay. Otherwise as :class:`ringcomm.optim.AdamW`, whose
    ``comm``, ``options``, ``loss_scaler`` and ``mesh`` it takes.

    Args:
        params: as torch takes them; float32, bfloat16 or float16, equal on all ranks.
        lr: learning rate; a tensor of one element is read on its device at each step.
        betas: the moment's share of a step's direction, and its decay.
        weight_decay: times lr, the fraction that each parameter loses.
        maximize: maximize the objective.
        comm: see :class:`ringcomm.optim.AdamW`.
        options: see there.
        loss_scaler: see there.
        mesh: see there.

    Raises:
        ArgumentError: see there.
    """

    def __init__(  # noqa: PLR0913 -- the paper's arguments, and those of all optimizers
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        comm: CommArgument = None,
        options: AdamWOptions | None = None,
        loss_scaler: LossScaler | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        sharing = Sharing(comm, options, loss_scaler, mesh)
        super().__init__(params, defaults, sharing, LionRule())
