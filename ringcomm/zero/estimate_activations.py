"""Memory for a transformer's activations, with and without checkpointing.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022,
arXiv:2205.05198), sections 4 and 5, on one rank. In its symbols s, b, h, a, v are context,
micro-batch, width, heads and vocabulary, and a layer keeps s b h (34 + 5 a s / h) bytes in 16
bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringcomm.memory.scratch import Disk
from ringcomm.zero.estimate_model import Transformer, require_at_least

CHECKPOINTING = ("none", "selective", "full")


@dataclass(frozen=True)
class ActivationBytes:
    """The bytes that a rank holds between forward and backward.

    Attributes:
        layers: what the layers keep for the backward, or their checkpoints.
        recomputed: what the backward computes again and holds at a time.
        ends: embedding's dropout mask, inputs of last norm and output layer, FP32 logits.
        moved: what forward writes to a disk, and backward reads.
    """

    layers: int
    recomputed: int
    ends: int
    moved: int = 0

    @property
    def total(self) -> int:
        return self.layers + self.recomputed + self.ends

    def kept_on(self, disk: Disk, layer: int) -> ActivationBytes:
        """Returns them as they are within ``zero.activations_on``.

        ``layers`` is then the most that buffers, resident tensors, and one layer or the ends at
        their turn take of memory, and ``ends`` is 0.

        Args:
            disk: where they are kept.
            layer: bytes that one layer keeps without checkpoints.
        """
        kept = self.layers + self.ends
        at_work = max(self.ends, layer - self.recomputed)
        most = disk.buffer_bytes + disk.resident_bytes + at_work
        moved = max(0, kept - disk.resident_bytes)
        return ActivationBytes(min(kept, most), self.recomputed, 0, moved)


def attention_core_bytes(shape: Transformer, micro_batch: int, elem_bytes: int = 2) -> int:
    """Returns the part of a layer that grows with the square of the context: 5 a s^2 b in 16 bits.

    Softmax's output, dropout's mask of one byte, dropout's output. An attention kernel that stores
    no scores (FlashAttention) keeps none of it.
    """
    return (2 * elem_bytes + 1) * shape.heads * shape.context**2 * micro_batch


def layer_bytes(
    shape: Transformer, micro_batch: int, elem_bytes: int = 2, tp: int = 1, sequence: bool = False
) -> int:
    """Returns what a layer keeps for its backward: equation 1 in 16 bits, 2 and 4 if divided.

    34 s b h is 16 elements and 2 masks of one byte per channel and token, of which tensor-parallel
    ranks divide 12 elements, and all where they share the tokens, too.

    Args:
        shape: of the model.
        micro_batch: sequences of a forward.
        elem_bytes: of an activation.
        tp: ranks that share each matrix product.
        sequence: whether they share the tokens between the products.
    """
    plane = shape.context * micro_batch * shape.width
    whole = (4 * elem_bytes + 2) * plane // (tp if sequence else 1)
    core = attention_core_bytes(shape, micro_batch, elem_bytes)
    return whole + 12 * elem_bytes * plane // tp + core // tp


def checkpoint_working_bytes(shape: Transformer, micro_batch: int, every: int = 1) -> int:
    """Activations between two checkpoints as ZeRO-Infinity estimates them, in bytes.

    bsz seq ci (16 hd + 2 attn_heads seq), Rajbhandari et al. (SC'21), section 3: one copy of the
    scores, no masks. It is less than the ``recomputed`` of :class:`ActivationBytes`.

    Raises:
        ArgumentError: a size is not positive.
    """
    require_at_least("activations", 1, micro_batch=micro_batch, every=every)
    tokens = shape.context * micro_batch
    return tokens * every * (16 * shape.width + 2 * shape.heads * shape.context)
