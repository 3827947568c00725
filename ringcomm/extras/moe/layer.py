"""A layer of experts that are divided over ranks: expert parallelism."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ringcomm.comm.groups import Group, communicator_of
from ringcomm.errors import ArgumentError, where
from ringcomm.extras.moe.dispatch import combine, dispatch
from ringcomm.extras.moe.routing import RoutingOptions, route
from ringcomm.functional import all_reduce

Tensor = torch.Tensor
_MOE = "moe.MoE"


class MoE(nn.Module):
    """A mixture of experts, of which each rank of a group has as many as the others.

    Each token goes to the experts that the router chooses, and the result is the sum of theirs,
    times the weights. The router's outputs are computed in FP32, whatever autocast says. Its
    parameters belong to all ranks alike, as those of other layers do; an expert's belong to the
    ranks that have this expert.

    Args:
        router: maps float32 [tokens, hidden] to float32 [tokens, num_experts]; its parameters are
            float32.
        experts: this rank's: an ``nn.ModuleList``, each of which maps its rows [n, hidden] to
            [n, ...], even if n is 0; or one module, which is called with all rows [n, hidden] and
            ``counts`` int64 [experts of this rank].
        group: the ranks that the experts are divided over: a Communicator, process group of the
            backend or one-dimensional mesh, such as ``mesh["ep"]``; None means the default group.
        num_experts: of all ranks; only needed where ``experts`` is no list.
        options: choices, equal on all ranks.
        counted_over: the ranks over whose tokens experts are kept busy alike, usually all that
            train the layer: ``auxiliary_loss`` takes the shares of all their tokens, after one
            small all-reduce, and its mean over them is the loss of all tokens together;
            :meth:`update_bias` adds up their counts. None: the loss is of this rank's tokens alone,
            and :meth:`update_bias` is over ``group``.

    Attributes:
        num_experts: of all ranks.
        auxiliary_loss: of the last forward; to be added to the loss, times a factor such as 0.01.
            None before the first.
        bias: float32 [num_experts], in the state dict; zeros without ``balance_bias``.
        tokens_by_expert: int64 [num_experts], how many of this rank's tokens went to each expert in
            training since the last :meth:`update_bias`.

    Raises:
        ArgumentError: the router's parameters are not float32, or the experts are not those of a
            rank.
    """

    auxiliary_loss: Tensor | None
    bias: Tensor
    tokens_by_expert: Tensor

    def __init__(
        self,
        router: nn.Module,
        experts: nn.Module,
        group: Group = None,
        *,
        num_experts: int | None = None,
        options: RoutingOptions | None = None,
        counted_over: Group = None,
    ) -> None:
        super().__init__()
        comm = communicator_of(group, _MOE)
        self._head = where(_MOE, comm.rank, comm.world_size)
        self.router = router
        # What zero keeps in FP32 it would cast back to the dtype of the parameters around it.
        router.returns_fp32 = True  # type: ignore[assignment]
        self.experts = experts
        self.group = group
        self.counted_over = counted_over
        self.options = RoutingOptions() if options is None else options
        if num_experts is not None:
            num_experts = comm.checks(_MOE).integer("num_experts", num_experts)
        self.num_experts = self._number(comm.world_size, num_experts)
        self._check_router()
        if self.options.top_k > self.num_experts:
            raise ArgumentError(
                f"{self._head}: top_k: expected at most the {self.num_experts} experts, got "
                f"{self.options.top_k}"
            )
        self.auxiliary_loss = None
        device = next((each.device for each in router.parameters()), torch.device("cpu"))
        numbers = torch.zeros(self.num_experts, device=device)
        self.register_buffer("bias", numbers.float())
        self.register_buffer("tokens_by_expert", numbers.long(), persistent=False)

    def _number(self, world_size: int, given: int | None) -> int:
        if not isinstance(self.experts, nn.ModuleList):
            if given is None:
                raise ArgumentError(
                    f"{self._head}: num_experts: expected the number of the experts of all ranks, "
                    f"since a {type(self.experts).__name__} does not tell"
                )
            return given
        found = len(self.experts) * world_size
        if given not in (None, found) or not found:
            raise ArgumentError(
                f"{self._head}: experts: expected this rank's of {given or 'all'} experts, got "
                f"{len(self.experts)} for a rank, of {world_size} ranks"
            )
        return found

    def _check_router(self) -> None:
        for name, param in self.router.named_parameters():
            if param.dtype is not torch.float32:
                raise ArgumentError(
                    f"{self._head}: router: expected float32 parameters, got {name} in "
                    f"{param.dtype}; leave the router out of casts (Precision.keep_fp32)"
                )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the experts' results for tokens.

        Args:
            x: [..., hidden] in float32, bfloat16 or float16.
        """
        if isinstance(x, DTensor):
            raise ArgumentError(
                f"{self._head}: x: expected this rank's tokens as a plain tensor, got a DTensor; "
                "pass x.to_local() where its rows are whole"
            )
        tokens = x.reshape(-1, x.size(-1))
        with torch.autocast(tokens.device.type, enabled=False):
            logits = self.router(tokens.float())
            self._check_logits(tokens, logits)
            biased = self.options.balance_bias > 0
            routing = route(logits, self.bias if biased else None, self.options, self.counted_over)
        self.auxiliary_loss = routing.auxiliary_loss
        if self.training:
            with torch.no_grad():
                self.tokens_by_expert += routing.counts
        rows, counts, handle = dispatch(
            tokens,
            routing.topk_idx,
            routing.topk_weights,
            self.num_experts,
            self.group,
            wire=self.options.wire,
            max_rows=self.options.max_rows,
        )
        out = combine(self._of_experts(rows, counts), handle)
        return out.reshape(*x.shape[:-1], out.size(-1))

    def _check_logits(self, tokens: Tensor, logits: Tensor) -> None:
        scored = logits.dim() == 2 and logits.size(1) == self.num_experts
        if scored and logits.dtype == torch.float32:
            return
        message = (
            f"{self._head}: router: expected float32 [tokens, {self.num_experts}], a number for "
            f"each expert of all ranks, got {logits.dtype} {tuple(logits.shape)}"
        )
        # Ranks with fewer experts, or another router, would wait for this one.
        if self.counted_over is not None:
            all_reduce(logits.new_zeros(logits.size(-1) + 1).long(), group=self.counted_over)
        nowhere = torch.full((len(tokens), 1), -1, device=tokens.device)
        try:
            dispatch(tokens, nowhere, None, 0, self.group)
        except ArgumentError as refusal:
            raise ArgumentError(message) from refusal

    def _of_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        if not isinstance(self.experts, nn.ModuleList):
            return self.experts(rows, counts)  # type: ignore[no-any-return]
        sizes = counts.tolist()
        parts = torch.split(rows, [*sizes, rows.size(0) - sum(sizes)])
        made = [expert(part) for expert, part in zip(self.experts, parts[:-1], strict=True)]
        made.append(made[0].new_zeros(len(parts[-1]), *made[0].shape[1:]))
        return torch.cat(made)

    @torch.no_grad()
    def update_bias(self, group: Group = None) -> None:
        """Moves the bias towards experts with few tokens, and begins to count anew; collective.

        To be called after each optimizer step, where ``balance_bias`` is above 0.

        Args:
            group: all ranks that train the layer; None for ``counted_over``, or else those that its
                experts are divided over.
        """
        ranks = next((each for each in (group, self.counted_over) if each is not None), self.group)
        comm = communicator_of(ranks, f"{_MOE}.update_bias")
        counts = self.tokens_by_expert.clone()
        comm.all_reduce(counts)
        missing = counts.float().mean() - counts
        self.bias += self.options.balance_bias * missing.sign()
        self.tokens_by_expert.zero_()

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, options={self.options}"
