"""The share of a transformer that a rank has under tensor and pipeline parallelism.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022,
arXiv:2205.05198). In its symbols s, b, h, a, v, L, t, p are context, micro-batch, width, heads,
vocabulary, layers, tensor-parallel ranks and pipeline stages. In 16 bits a layer keeps

    s b h (10 + 24 / t + 5 a s / (h t))     under tensor parallelism (equation 2)
    s b h / t (34 + 5 a s / h)              under sequence parallelism, too (equation 4)
    2 s b h                                 checkpointed; / t where ranks divide checkpoints

and the first of p stages of a 1F1B schedule has up to p micro-batches of L / p layers under way.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringcomm.errors import ArgumentError
from ringcomm.zero.estimate_activations import (
    CHECKPOINTING,
    ActivationBytes,
    attention_core_bytes,
    layer_bytes,
)
from ringcomm.zero.estimate_model import ModelElems, Transformer, require_at_least


@dataclass(frozen=True)
class ModelParallel:
    """How one replica of a model is divided.

    Attributes:
        tp: ranks that share each matrix product.
        pp: pipeline stages.
        sequence: whether these ranks also share the tokens between the products.
        micro_batches: of a step, which run through the pipeline one after the other.
        partitioned: whether tensor-parallel ranks divide the inputs of checkpointed layers (P_a),
            as :func:`ringcomm.functional.partitioned_checkpoint` does.
    """

    tp: int = 1
    pp: int = 1
    sequence: bool = False
    micro_batches: int = 1
    partitioned: bool = False

    def __post_init__(self) -> None:
        require_at_least(
            "model parallelism", 1, tp=self.tp, pp=self.pp, micro_batches=self.micro_batches
        )
        for name in ("sequence", "partitioned"):
            if getattr(self, name) and self.tp == 1:
                raise ArgumentError(
                    f"model parallelism: {name}: expected tensor-parallel ranks (tp > 1) that have "
                    "the same activations; data-parallel ranks have different ones"
                )

        if self.sequence and self.partitioned:
            raise ArgumentError(
                "model parallelism: expected either sequence or partitioned: under sequence "
                "parallelism the inputs of layers are divided already"
            )

    @property
    def ranks(self) -> int:
        """The ranks of a replica."""
        return self.tp * self.pp

    def check(self, shape: Transformer) -> None:
        """Raises ArgumentError unless the transformer can be divided so."""
        for what, count, parts in (
            ("layers", shape.layers, self.pp),
            ("heads", shape.heads, self.tp),
        ):
            if count % parts:
                raise ArgumentError(
                    f"model parallelism: expected {what} that {parts} divides, got {count}"
                )


def stage_model(shape: Transformer, parallel: ModelParallel) -> ModelElems:
    """Returns the parameters of the rank that has most: the first or the last stage's.

    Matrices, and the biases of their outputs where these are divided, are shared by the
    tensor-parallel ranks, as is the vocabulary of the embedding; norms, positions and the other
    biases are on each. Of a tied embedding the first and the last stage have a copy each.
    """
    parallel.check(shape)
    width, tp = shape.width, parallel.tp
    layer = -(-12 * width**2 // tp) + -(-7 * width // tp) + 6 * width
    layers = shape.layers // parallel.pp
    embedding = -(-shape.vocab // tp) * width
    if parallel.pp == 1:
        ends = (1 if shape.tied else 2) * embedding + (shape.context + 2) * width
    else:
        ends = embedding + max(shape.context, 2) * width
    return ModelElems(
        trainable=layers * layer + ends,
        largest=max(-(-4 * width**2 // tp), embedding, shape.context * width),
        units=(layer,) * layers,
        root=ends,
    )


def stage_activations(
    shape: Transformer,
    micro_batch: int,
    parallel: ModelParallel,
    checkpointing: str = "none",
    every: int = 1,
    elem_bytes: int = 2,
) -> ActivationBytes:
    """Returns the activations of the rank that has most, at its peak in a 1F1B schedule.

    Args:
        shape: of the whole model.
        micro_batch: sequences of a forward.
        parallel: how the model is divided.
        checkpointing: "none"; "selective": all but the attention's core is kept (equation 6);
            "full": the input of every ``every``-th layer is kept, s b h elements each.
        every: layers between two checkpoints of "full" ("ci" in ZeRO-Infinity, equation 3).
        elem_bytes: of an activation.

    Raises:
        ArgumentError: there is no such checkpointing, or the model cannot be divided so.
    """
    parallel.check(shape)
    if checkpointing not in CHECKPOINTING:
        raise ArgumentError(
            f"checkpointing: expected one of {', '.join(CHECKPOINTING)}, got {checkpointing!r}"
        )
    require_at_least("activations", 1, micro_batch=micro_batch, every=every, elem_bytes=elem_bytes)
    plane = shape.context * micro_batch * shape.width  # s b h
    tp, layers = parallel.tp, shape.layers // parallel.pp
    shared = tp if parallel.sequence else 1
    core = attention_core_bytes(shape, micro_batch, elem_bytes) // tp
    layer = layer_bytes(shape, micro_batch, elem_bytes, tp, parallel.sequence)
    kept_of_checkpoint = elem_bytes * plane // (tp if parallel.partitioned else shared)
    kept, again = {
        "none": (layers * layer, 0),
        "selective": (layers * (layer - core), core),
        "full": (-(-layers // every) * kept_of_checkpoint, min(every, layers) * layer),
    }[checkpointing]
    mask = plane // shared
    logits = 2 * elem_bytes * plane // shared + 4 * shape.context * micro_batch * shape.vocab // tp
    found = []
    for stage in range(parallel.pp):
        # 1F1B: a stage has begun as many micro-batches as there are stages from it on.
        under_way = min(parallel.pp - stage, parallel.micro_batches)
        ends = (mask * under_way if stage == 0 else 0) + (logits if stage == parallel.pp - 1 else 0)
        found.append(ActivationBytes(kept * under_way, again, ends))
    return max(found, key=lambda each: each.total)
