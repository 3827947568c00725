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

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019. Takes torch's
    arguments and steps as ``torch.optim.AdamW``; on replicated parameters it is ZeRO stage 1.
    ``docs/optimizer.md`` says what is exact.

    Args:
        params: as torch takes them; float32, bfloat16 or float16, equal on all ranks. DTensors of
            tensor parallelism have equal local tensors on the ranks of ``comm``.
        lr: learning rate; a tensor of one element is read on its device at each step.
        betas: decay of the two moments.
        eps: added to the denominator.
        weight_decay: times lr, the fraction that each parameter loses.
        amsgrad: divide by the largest second moment so far.
        maximize: maximize the objective.
        foreach: accepted and ignored, as are ``capturable`` and ``fused``: a step is fused.
        capturable: see ``foreach``.
        differentiable: must be False.
        fused: see ``foreach``.
        comm: the ranks that share the work: a Communicator, a ProcessGroup of
            ``torch.distributed`` or a one-dimensional DeviceMesh. None for ringcomm's default
            group, else that of ``torch.distributed``, else this rank, in a world of one. "alone"
            for this rank whatever groups there are, as under DDP, which reduces by itself.
        options: ringcomm's own choices.
        loss_scaler: the scaler of the losses, whose scale the steps update.
        mesh: in place of ``comm``, the DeviceMesh of all ranks that train the model. Its axis "dp"
            is the ``comm``; norms are taken over all axes, so those of all stages of "pp".

    Raises:
        ArgumentError: hyper-parameters or parameters that cannot be used; a ``comm`` that this rank
            is not in; ranks of a launcher that have no group; a ``mesh`` without an axis "dp".
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
    """Adam, which adds weight decay to the gradient (L2); otherwise as :class:`AdamW`.

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
    """AdamW with 8-bit state, in quantized moments; otherwise as :class:`AdamW`.

    The state is 2.03 bytes a parameter in place of 8, and masters where there are any. After
    Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022, with other numbers:
    small floats, which a step rounds stochastically by ``options.seed``. ``docs/optimizer.md`` says
    how exact that is. Saved moments are FP32, so that either optimizer loads the other's state.

    Args:
        params: see :class:`AdamW`.
        lr: see there, as are ``betas``, ``eps``, ``weight_decay`` and ``maximize``.
        betas: see there.
        eps: see there.
        weight_decay: see there.
        maximize: see there.
        comm: see there, as are ``options``, ``loss_scaler`` and ``mesh``.
        options: see there.
        loss_scaler: see there.
        mesh: see there.

    Raises:
        ArgumentError: see there.
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


# ---- SGD with torch's arguments, and Lion, sharded over a communicator --------------------------


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
