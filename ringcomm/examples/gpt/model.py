"""A small byte-level GPT: the model that ``ringcomm train`` and ``ringcomm demo`` train.

Pre-norm transformer decoder over the 256 byte values: RMSNorm without weights, rotary
positions, causal attention with normalised queries and keys, a squared-ReLU MLP.
Shapes in the comments: B sequences, T positions, D width, H heads, K = D / H.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringcomm.errors import ArgumentError
from ringcomm.examples.gpt.config import ModelConfig

VOCABULARY = 256
ROTARY_BASE = 10_000.0
INIT_STD = 0.02


def norm(x: Tensor) -> Tensor:
    """RMS-normalise the last dimension; any shape."""
    return F.rms_norm(x, (x.size(-1),))


def rotary_angles(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary positions, each (context, head_width / 2) in FP32."""
    channel = torch.arange(0, head_width, 2, dtype=torch.float32)
    frequency = ROTARY_BASE ** (-channel / head_width)  # (K/2,)
    angle = torch.outer(torch.arange(context, dtype=torch.float32), frequency)  # (T, K/2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each channel pair of x (B, H, T, K) by its position's angle (T, K/2)."""
    first, second = x.chunk(2, dim=-1)  # (B, H, T, K/2) each
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.project_in = nn.Linear(config.width, 3 * config.width, bias=False)
        self.project_out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map x (B, T, D) to (B, T, D)."""
        batch, length, width = x.shape
        heads = self.project_in(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, T, K) each
        query = norm(rotate(query, cos, sin))
        key = norm(rotate(key, cos, sin))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # (B, H, T, K)
        out: Tensor = self.project_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class MLP(nn.Module):
    """Two linear layers around a squared ReLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, 4 * config.width, bias=False)
        self.contract = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, T, D) to (B, T, D)."""
        out: Tensor = self.contract(F.relu(self.expand(x)).square())
        return out


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map x (B, T, D) to (B, T, D)."""
        x = x + self.attention(norm(x), cos, sin)
        out: Tensor = x + self.mlp(norm(x))
        return out


class GPT(nn.Module):
    """The whole model. Initialise under a fixed ``torch.manual_seed`` for a reproducible run.

    Attributes:
        checkpoints_activations: whether backward computes each layer again, so that forward keeps
            the inputs of the layers alone. Chen et al., "Training Deep Nets with Sublinear Memory
            Cost" (2016).
    """

    cos: Tensor  # (context, K/2)
    sin: Tensor  # (context, K/2)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpoints_activations = False
        self.embed = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        cos, sin = rotary_angles(config.context, config.width // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        residual_std = INIT_STD / math.sqrt(2 * self.config.depth)
        for name, parameter in self.named_parameters():
            into_residual = name.endswith(("project_out.weight", "contract.weight"))
            nn.init.normal_(parameter, std=residual_std if into_residual else INIT_STD)

    @property
    def parameter_elems(self) -> int:
        """Number of trained parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats (a scalar) of ``targets`` given ``tokens``, both (B, T) int64.

        Raises ArgumentError when T exceeds the model's context.
        """
        length = tokens.size(1)
        if length > self.config.context:
            raise ArgumentError(
                f"GPT: sequences hold {length} tokens, the context is {self.config.context}"
            )
        cos, sin = self.cos[:length], self.sin[:length]
        x = norm(self.embed(tokens))  # (B, T, D)
        for block in self.blocks:
            if self.checkpoints_activations and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, cos, sin)
        logits = self.head(norm(x))  # (B, T, 256)
        # Of 16-bit weights, too, the loss is FP32: its last digits tell runs apart.
        return F.cross_entropy(logits.float().view(-1, VOCABULARY), targets.reshape(-1))
