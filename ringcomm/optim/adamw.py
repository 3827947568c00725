# SPDX-License-Identifier: Apache-2.0
"""AdamW, with FP32 or 8-bit state, Adam, SGD and Lion, sharded over a communicator."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from ringcomm.c10d.comm_argument import CommArgument
from ringcomm.optim.options import AdamWOptions
from ringcomm.optim.rules import AdamW8bitRule, AdamWRule, LionRule, SgdRule
from ringcomm.optim.setting import LossScaler
from ringcomm.optim.sharded import Params, ShardedOptimizer, Sharing

Tensor = torch.Tensor


class AdamW(ShardedOptimizer):
    """AdamW (decoupled weight decay) with FP32 state, sharded over a communicator.

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019. It has the arguments
    of ``torch.optim.AdamW`` and takes the same steps; on replicated parameters it is ZeRO stage 1.
    ``docs/optimizer.md`` says which results are exact.

    Args:
        params: as torch takes them; float32, bfloat16 or float16, equal on all ranks. DTensors of
            tensor parallelism must have equal local tensors on the ranks of ``comm``.
        lr: learning rate; a tensor of one element is read on its device at each step.
        betas: decay of the two moments.
        eps: added to the denominator.
        weight_decay: a step multiplies each parameter by 1 - lr * weight_decay.
        amsgrad: divide by the largest second moment so far.
        maximize: maximize the objective.
        foreach: accepted and ignored, as are ``capturable`` and ``fused``: every step is fused.
        capturable: see ``foreach``.
        differentiable: must be False.
        fused: see ``foreach``.
        comm: the ranks that share the work: a Communicator, a ProcessGroup of
            ``torch.distributed`` or a one-dimensional DeviceMesh. None means ringcomm's default
            group, else the default group of ``torch.distributed``, else this rank alone. "alone"
            means this rank alone even if groups exist: use it with DDP, which reduces gradients.
        options: options that torch's optimizer does not have.
        loss_scaler: the loss scaler, whose scale each step updates.
        mesh: instead of ``comm``, the DeviceMesh of all ranks that train the model. Its axis "dp"
            replaces ``comm``; norms are taken over all axes, including all stages of "pp".

    Raises:
        ArgumentError: a hyper-parameter or parameter cannot be used; ``comm`` does not contain this
            rank; a launcher started several ranks but there is no group; ``mesh`` has no axis "dp".
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
        mesh: DeviceMesh | None = None,
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
        sharing = Sharing(comm, options, loss_scaler, mesh)
        super().__init__(params, defaults, sharing, AdamWRule())


class Adam(ShardedOptimizer):
    """Adam, which adds weight decay to the gradient (L2); otherwise equal to :class:`AdamW`.

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
        mesh: DeviceMesh | None = None,
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
        sharing = Sharing(comm, options, loss_scaler, mesh)
        super().__init__(params, defaults, sharing, AdamWRule())


class AdamW8bit(ShardedOptimizer):
    """AdamW whose moments are quantized to 8 bits; otherwise equal to :class:`AdamW`.

    The moments take 2.03 bytes per parameter instead of 8; masters, if any, take additional memory.
    The method follows Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022,
    but stores 8-bit floats, which a step rounds stochastically with ``options.seed``.
    ``docs/optimizer.md`` states the accuracy. Saved moments are FP32, so AdamW and AdamW8bit load
    each other's state.

    Args:
        params: see :class:`AdamW`.
        lr: see :class:`AdamW`.
        betas: see :class:`AdamW`.
        eps: see :class:`AdamW`.
        weight_decay: see :class:`AdamW`.
        maximize: see :class:`AdamW`.
        comm: see :class:`AdamW`.
        options: see :class:`AdamW`.
        loss_scaler: see :class:`AdamW`.
        mesh: see :class:`AdamW`.

    Raises:
        ArgumentError: see :class:`AdamW`.
    """

    def __init__(  # noqa: PLR0913 -- torch's signature
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
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
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": False,
            "maximize": maximize,
            "decoupled_weight_decay": True,
        }
        sharing = Sharing(comm, options, loss_scaler, mesh)
        super().__init__(params, defaults, sharing, AdamW8bitRule())


# ---- SGD, which takes torch's arguments, and Lion ------------------------------------------------


class SGD(ShardedOptimizer):
    """SGD with FP32 momentum, sharded over a communicator.

    Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML
    2013. The results have the bits of ``torch.optim.SGD`` with ``foreach=False`` on a CPU with
    AVX2. It takes ``comm``, ``options``, ``loss_scaler`` and ``mesh`` like
    :class:`ringcomm.optim.AdamW`.

    Args:
        params: as torch takes them; float32, bfloat16 or float16, equal on all ranks.
        lr: learning rate; a tensor of one element is read on its device at each step.
        momentum: decay of the momentum; 0 for no momentum, which takes no memory.
        dampening: fraction of a gradient that the momentum leaves out, except at the first step.
        weight_decay: a step adds weight_decay times the parameter to the gradient.
        nesterov: use Nesterov's momentum.
        maximize: maximize the objective.
        foreach: accepted and ignored, as is ``fused``: every step is fused.
        differentiable: must be False.
        fused: see ``foreach``.
        comm: see :class:`ringcomm.optim.AdamW`.
        options: see there.
        loss_scaler: see there.
        mesh: see there.

    Raises:
        ArgumentError: see there; or ``nesterov`` is used without momentum or with dampening.
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
    moves each element by lr, however large its gradient is. Compared to AdamW, the paper divides lr
    by 3 to 10, and multiplies weight decay by 3 to 10. It takes ``comm``, ``options``,
    ``loss_scaler`` and ``mesh`` like :class:`ringcomm.optim.AdamW`.

    Args:
        params: as torch takes them; float32, bfloat16 or float16, equal on all ranks.
        lr: learning rate; a tensor of one element is read on its device at each step.
        betas: the weight of the moment in a step's direction, and the decay of the moment.
        weight_decay: a step multiplies each parameter by 1 - lr * weight_decay.
        maximize: maximize the objective.
        comm: see :class:`ringcomm.optim.AdamW`.
        options: see there.
        loss_scaler: see there.
        mesh: see there.

    Raises:
        ArgumentError: see there.
    """

    def __init__(  # noqa: PLR0913 -- the paper's arguments, and ringcomm's
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
