"""Which experts a token goes to, how much each counts, and how experts are kept busy alike.

* The auxiliary loss of Fedus et al., "Switch Transformers" (2021, arXiv:2101.03961), equation 4,
  for k experts a token as in Lepikhin et al., "GShard" (2020, arXiv:2006.16668): with E experts, of
  which expert i has the share f_i of a rank's assignments and the mean probability P_i over its
  tokens, E * sum of f_i P_i. It is 1 where all are alike.
* The bias of Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts"
  (2024, arXiv:2408.15664), algorithm 1, as in DeepSeek-V3: a number per expert is added to the
  scores by which experts are chosen, and not to the weights. After a step it grows by a constant
  for experts with less than the mean, and shrinks for those with more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ringcomm.comm.groups import Group, communicator_of
from ringcomm.errors import ArgumentError
from ringcomm.functional import all_reduce
from ringcomm.integers import integer

Tensor = torch.Tensor
_SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class RoutingOptions:
    """Choices of a layer of experts; equal on all ranks.

    Attributes:
        top_k: experts of a token.
        scores: what makes scores of the router's outputs, over all experts: "softmax", or
            "sigmoid" of each.
        normalized: the weights of a token's experts are divided by their sum.
        balance_bias: experts are chosen by score plus a bias, which ``update_bias()`` moves by so
            much; 0: no bias.
        wire: as for :func:`ringcomm.extras.moe.dispatch`.
        max_rows: as for :func:`ringcomm.extras.moe.dispatch`.
    """

    top_k: int = 2
    scores: str = "softmax"
    normalized: bool = True
    balance_bias: float = 0.0
    wire: str | None = None
    max_rows: int | None = None

    def __post_init__(self) -> None:
        top_k = integer(self.top_k)
        if top_k is None or top_k < 1:
            raise ArgumentError(
                f"top_k: expected an integer from 1 to 2^63 - 1, got {self.top_k!r}"
            )
        object.__setattr__(self, "top_k", top_k)
        if self.scores not in _SCORES:
            raise ArgumentError(
                f"scores: expected one of {', '.join(_SCORES)}, got {self.scores!r}"
            )
        if not 0 <= self.balance_bias < float("inf"):
            raise ArgumentError(f"balance_bias: expected a number >= 0, got {self.balance_bias!r}")


class Routing(NamedTuple):
    """The experts of tokens.

    Attributes:
        topk_idx: int64 [tokens, k].
        topk_weights: float32 [tokens, k].
        counts: int64 [experts], how many tokens go to each.
        auxiliary_loss: float32, a scalar; its gradient is one of this rank's tokens.
    """

    topk_idx: Tensor
    topk_weights: Tensor
    counts: Tensor
    auxiliary_loss: Tensor


def route(
    logits: Tensor, bias: Tensor | None, options: RoutingOptions, counted_over: Group = None
) -> Routing:
    """Chooses the experts of tokens; collective with ``counted_over``.

    Args:
        logits: float32 [tokens, experts].
        bias: float32 [experts], added to the scores by which experts are chosen, or None.
        options: choices.
        counted_over: the ranks whose tokens the auxiliary loss counts together; None for this one.
    """
    softmax = options.scores == "softmax"
    scores = logits.softmax(-1) if softmax else logits.sigmoid()
    ranked = scores if bias is None else scores + bias
    topk_idx = ranked.detach().topk(options.top_k, -1).indices
    topk_weights = scores.gather(-1, topk_idx)
    if options.normalized:
        topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
    experts = logits.size(-1)
    counts = torch.zeros(experts, dtype=torch.int64, device=logits.device)
    counts.scatter_add_(0, topk_idx.reshape(-1), torch.ones_like(topk_idx).reshape(-1))
    probabilities = scores if softmax else scores / scores.sum(-1, keepdim=True)
    of_all, ranks = torch.cat([counts, counts.new_tensor([logits.size(0)])]), 1
    if counted_over is not None:
        # Counts are whole numbers that no gradient reaches, so one sum of them is all.
        of_all = all_reduce(of_all, group=counted_over)
        ranks = communicator_of(counted_over, "moe.MoE").world_size
    # A rank without tokens has a loss of 0, which still reaches the router.
    share = of_all[:-1] / of_all[:-1].sum().clamp(min=1)
    mean = probabilities.sum(0) / of_all[-1].clamp(min=1)
    return Routing(topk_idx, topk_weights, counts, ranks * experts * (share * mean).sum())
