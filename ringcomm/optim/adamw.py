"""AdamW and Adam with torch's arguments, sharded over a communicator."""

from __future__ import annotations

import torch

from ringcomm.c10d.comm_argument import CommArgument
from ringcomm.optim.loss_scaler import LossScaler
from ringcomm.optim.options import AdamWOptions
from ringcomm.optim.sharded_adam import Params, ShardedAdam

Tensor = torch.Tensor


class AdamW(ShardedAdam):
    """AdamW (decoupled weight decay) with FP32 state, sharded over a communicator.

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019. Takes torch's
    arguments and steps as ``torch.optim.AdamW``; on replicated parameters it is ZeRO stage 1.
    ``docs/optimizer.md`` says what is exact.

    Args:
        params: as torch takes them; float32, bfloat16 or float16, equal on all ranks.
        lr: learning rate; a tensor of one element is read on its device at each step.
        betas: decay of the two moments.
        eps: added to the denominator.
        weight_decay: times lr, what each parameter loses.
        amsgrad: divide by the largest second moment so far.
        maximize: go up the gradient.
        foreach: accepted and ignored, as are ``capturable`` and ``fused``: a step is fused.
        capturable: see ``foreach``.
        differentiable: must be False.
        fused: see ``foreach``.
        comm: the ranks that share the work: a Communicator, a ProcessGroup of
            ``torch.distributed`` or a one-dimensional DeviceMesh. None for ringcomm's default
            group, else that of ``torch.distributed``, else this rank, in a world of one. "alone"
            for this rank whatever groups there are, as under DDP, which reduces by itself.
        options: ringcomm's own choices.
        loss_scaler: what multiplies the losses; its scale moves with the steps.

    Raises:
        ArgumentError: hyper-parameters or parameters that cannot be used; a ``comm`` that this rank
            is not in; ranks of a launcher that have no group.
        UnsupportedError: ``differentiable=True``.
    """

    def __init__(  # noqa: PLR0913 -- torch's signature
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        comm: CommArgument = None,
        options: AdamWOptions | None = None,
        loss_scaler: LossScaler | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": True,
        }
        super().__init__(params, defaults, comm, options, loss_scaler)


class Adam(ShardedAdam):
    """Adam, where weight decay is L2: added to the gradient. Else as :class:`AdamW`.

    Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015.
    """

    def __init__(  # noqa: PLR0913 -- torch's signature
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        comm: CommArgument = None,
        options: AdamWOptions | None = None,
        loss_scaler: LossScaler | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults, comm, options, loss_scaler)
