"""Coded parameters after writes from outside of a step: their masters, and codes made anew.

See NOTE [Coded parameters] in ``optim/coded_params.py``.
"""

from __future__ import annotations

import torch

from ringcomm.optim.coded_params import following
from ringcomm.zero.buckets import ParamBucket, ReplicatedBucket, ShardedBucket
from ringcomm.zero.engine import ShardEngine

Tensor = torch.Tensor


def own_of(bucket: ParamBucket) -> Tensor:
    """Returns what a rank keeps state for in a bucket: [state chunk elements]."""
    if isinstance(bucket, ShardedBucket):
        return bucket.own
    assert isinstance(bucket, ReplicatedBucket)
    return bucket.flat[bucket.state_chunk.begin : bucket.state_chunk.end]


def follow_coded(engine: ShardEngine) -> None:
    """Sets masters that do not decode to their parameters to these; before :func:`recode`, once."""
    for bucket in engine.stored:
        if bucket.wire is not None:
            assert bucket.wide is not None
            bucket.wide.copy_(following(bucket.wide, own_of(bucket), bucket.wire))


def recode(engine: ShardEngine) -> bool:
    """Makes coded parameters what the codes of their masters decode to, everywhere; collective.

    No rank reads its peers' parameters meanwhile.

    Returns:
        True if there are any.
    """
    coded = [bucket for bucket in engine.stored if bucket.wire is not None]
    for bucket in coded:
        bucket.settle()
    if coded:
        engine.comm.barrier()
    return bool(coded)
