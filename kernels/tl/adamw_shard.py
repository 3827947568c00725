"""AdamW on a run of a shard, and the kernel that does a whole shard of one rank.

The Triton twin of the update in kernels/host/isa_adamw.h. A *turn* is what the block's lanes do at
once. Turns that lie inside one parameter move 16 bytes a lane; those at the ends of parameters, and
all of them in memory that is not aligned, go element by element.
"""

import triton
import triton.language as tl

from ringcomm._native import OPTIMIZER_STRUCTURES

from .adamw_element import (
    ACTIVE,
    adamw_element,
    flags_of,
    join_master,
    load_factors,
    random_bits,
    round_stochastically,
    split_master,
)
from .moving import is_aligned, pointer, round_to, sum_of, widen
from .words import word64

BLOCK_ELEMS = tl.constexpr(512)
# 256 lanes with an FP32 vector each. A turn of 16-bit elements moves 8 bytes a lane, so that all of
# a turn's arrays have one layout.
TURN = tl.constexpr(1024)

SEGMENT_BYTES = tl.constexpr(OPTIMIZER_STRUCTURES["segment"])
SEGMENT_END = tl.constexpr(OPTIMIZER_STRUCTURES["segment.end"])
SEGMENT_PARAM = tl.constexpr(OPTIMIZER_STRUCTURES["segment.param"])
SEGMENTS = tl.constexpr(OPTIMIZER_STRUCTURES["shard.segments"])
FACTORS = tl.constexpr(OPTIMIZER_STRUCTURES["shard.factors"])
SEGMENT_COUNT = tl.constexpr(OPTIMIZER_STRUCTURES["shard.segment_count"])
BEGIN = tl.constexpr(OPTIMIZER_STRUCTURES["shard.begin"])
MASTER = tl.constexpr(OPTIMIZER_STRUCTURES["shard.master"])
REMAINDER = tl.constexpr(OPTIMIZER_STRUCTURES["shard.remainder"])
EXP_AVG = tl.constexpr(OPTIMIZER_STRUCTURES["shard.exp_avg"])
EXP_AVG_SQ = tl.constexpr(OPTIMIZER_STRUCTURES["shard.exp_avg_sq"])
MAX_EXP_AVG_SQ = tl.constexpr(OPTIMIZER_STRUCTURES["shard.max_exp_avg_sq"])
PARAMS = tl.constexpr(OPTIMIZER_STRUCTURES["shard.params"])
SEED = tl.constexpr(OPTIMIZER_STRUCTURES["shard.seed"])
BUCKET = tl.constexpr(OPTIMIZER_STRUCTURES["shard.bucket"])


@triton.jit
def shard_word(shard, offset):
    """A word of the AdamWShard at address ``shard``."""
    return tl.load(word64(shard + offset))


@triton.jit
def own_params(shard, KIND: tl.constexpr):
    """Returns the address of this rank's chunk of the parameters."""
    ITEM: tl.constexpr = KIND.param.primitive_bitwidth // 8
    return shard_word(shard, PARAMS) + shard_word(shard, BEGIN) * ITEM


@triton.jit
def _state_of(shard):
    """Addresses of the FP32 state and of the remainder, for element 0 of the chunk."""
    return (
        shard_word(shard, EXP_AVG),
        shard_word(shard, EXP_AVG_SQ),
        shard_word(shard, MAX_EXP_AVG_SQ),
        shard_word(shard, MASTER),
        shard_word(shard, REMAINDER),
    )


@triton.jit
def _place(address, at, DTYPE: tl.constexpr, MASKED: tl.constexpr):
    """Pointers to the elements of the turn that begins with element ``at``."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    return pointer(address + at * ITEM, DTYPE, not MASKED) + tl.arange(0, TURN)


@triton.jit
def _load(address, at, mask, DTYPE: tl.constexpr, MASKED: tl.constexpr):
    place = _place(address, at, DTYPE, MASKED)
    if MASKED:
        return tl.load(place, mask=mask, other=0)
    else:
        return tl.load(place)


@triton.jit
def _store(address, at, value, mask, DTYPE: tl.constexpr, MASKED: tl.constexpr):
    place = _place(address, at, DTYPE, MASKED)
    if MASKED:
        tl.store(place, value, mask=mask)
    else:
        tl.store(place, value)


@triton.jit
def gradient(
    sources, at, offsets, mask, DTYPE: tl.constexpr, DIVISOR: tl.constexpr, MASKED: tl.constexpr
):
    """The gradient of elements ``at + offsets`` behind the sources' first: their sum in FP32, or
    its mean; ``at`` is a multiple of BLOCK_ELEMS."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    COUNT: tl.constexpr = len(sources)
    here = ()
    for s in tl.static_range(COUNT):
        here = here + (sources[s] + at * ITEM,)
    total = sum_of(here, offsets, mask, DTYPE, not MASKED, MASKED)
    if DIVISOR > 1:
        total = tl.div_rn(total, tl.full(total.shape, DIVISOR, tl.float32))
    return total


@triton.jit
def _master(own, state, at, mask, KIND: tl.constexpr, MASKED: tl.constexpr):
    """The FP32 parameters of a turn."""
    if KIND.master == "fp32":
        return _load(state[3], at, mask, tl.float32, MASKED)
    else:
        param = _load(own, at, mask, KIND.param, MASKED)
        if KIND.master == "remainder":
            return join_master(param, _load(state[4], at, mask, tl.uint16, MASKED))
        else:
            return widen(param)


@triton.jit
def _rounded(p, random_of, at, step, KIND: tl.constexpr):
    """The parameters of a turn as they are stored."""
    if KIND.stochastic and KIND.master != "own":
        random = random_bits(random_of[0], random_of[1], random_of[2] + at, step, TURN)
        return round_stochastically(p, random, KIND.param)
    else:
        return round_to(p, KIND.param)


@triton.jit
def _turn(
    dests, state, sources, random_of, factors, at, first, low, high, KIND: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Updates a turn that begins with element ``at`` of the chunk; if MASKED, of it only [low,
    high). ``first`` is the element where the sources begin."""
    lanes = tl.arange(0, TURN)
    mask = (at + lanes >= low) & (at + lanes < high)
    g = gradient(sources, at - first, lanes, mask, KIND.grad, KIND.divisor, MASKED)
    p = _master(dests[0], state, at, mask, KIND, MASKED)
    m = _load(state[0], at, mask, tl.float32, MASKED)
    v = _load(state[1], at, mask, tl.float32, MASKED)
    v_max = v
    if KIND.keeps_max:
        v_max = _load(state[2], at, mask, tl.float32, MASKED)
    p, m, v, v_max = adamw_element(p, g, m, v, v_max, factors, KIND.keeps_max)
    _store(state[0], at, m, mask, tl.float32, MASKED)
    _store(state[1], at, v, mask, tl.float32, MASKED)
    if KIND.keeps_max:
        _store(state[2], at, v_max, mask, tl.float32, MASKED)
    if KIND.master == "remainder":
        result, remainder = split_master(p)
        _store(state[4], at, remainder, mask, tl.uint16, MASKED)
    else:
        if KIND.master == "fp32":
            _store(state[3], at, p, mask, tl.float32, MASKED)
        result = _rounded(p, random_of, at, factors[0], KIND)
    COUNT: tl.constexpr = len(dests)
    for d in tl.static_range(COUNT):
        _store(dests[d], at, result, mask, KIND.param, MASKED)


@triton.jit
def _update_segment(
    dests, state, sources, random_of, factors, run, low, high, aligned, KIND: tl.constexpr
):
    """Elements [low, high) of the run, all of one parameter."""
    begin = run[0]
    inner = begin + (low - begin + (TURN - 1)) // TURN * TURN
    end = begin + (high - begin) // TURN * TURN
    if aligned:
        for at in range(inner, end, TURN):
            _turn(dests, state, sources, random_of, factors, at, begin, low, high, KIND, False)
    # Turns that hold other elements too: the first and the last at most.
    first = begin + (low - begin) // TURN * TURN
    last = begin + (high - 1 - begin) // TURN * TURN
    stride = tl.where(aligned, tl.maximum(last - first, TURN), TURN)
    for at in range(first, high, stride):
        if (at < low) | (at + TURN > high) | (not aligned):
            _turn(dests, state, sources, random_of, factors, at, begin, low, high, KIND, True)


@triton.jit
def segment_at(segments, count, element):
    """The segment that holds element ``element`` of the bucket, or the first behind it."""
    low = element * 0
    high = low + count
    while low < high:
        middle = (low + high) // 2
        if tl.load(word64(segments + middle * SEGMENT_BYTES + SEGMENT_END)) <= element:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def are_aligned(dests, state, sources, KIND: tl.constexpr):
    """True if lanes may move 16 bytes at once, in all arrays of an update."""
    aligned = is_aligned(dests) & is_aligned(sources) & is_aligned((state[0], state[1]))
    if KIND.keeps_max:
        aligned = aligned & is_aligned((state[2],))
    if KIND.master == "fp32":
        aligned = aligned & is_aligned((state[3],))
    if KIND.master == "remainder":
        aligned = aligned & is_aligned((state[4],))
    return aligned


@triton.jit
def update_run(shard, dests, sources, begin, end, KIND: tl.constexpr):
    """Updates elements [begin, end) of the chunk.

    Args:
        shard: address of the AdamWShard.
        dests: where the chunk's parameters begin: this rank's own, then the copies.
        sources: addresses of every version of the gradient of element ``begin``, which are summed.
        begin: a multiple of BLOCK_ELEMS.
        end: behind the last element.
        KIND: a ShardKind.
    """
    state = _state_of(shard)
    aligned = are_aligned(dests, state, sources, KIND)
    origin = shard_word(shard, BEGIN)
    random_of = (shard_word(shard, SEED), shard_word(shard, BUCKET), origin)
    segments = shard_word(shard, SEGMENTS)
    count = shard_word(shard, SEGMENT_COUNT)
    segment = segment_at(segments, count, origin + begin)
    going = (segment < count) & (begin < end)
    while going:
        here = segments + segment * SEGMENT_BYTES
        low = tl.maximum(tl.load(word64(here)) - origin, begin)
        behind = tl.load(word64(here + SEGMENT_END)) - origin
        high = tl.minimum(behind, end)
        if low < high:
            param = tl.load(word64(here + SEGMENT_PARAM))
            if (flags_of(shard_word(shard, FACTORS), param) & ACTIVE) != 0:
                factors = load_factors(shard_word(shard, FACTORS), param)
                _update_segment(
                    dests, state, sources, random_of, factors, (begin, end), low, high, aligned,
                    KIND,
                )  # fmt: skip
        segment += 1
        going = (segment < count) & (behind < end)


@triton.jit
def part_of(elems, part, parts):
    """The elements [begin, end) of part ``part``, in whole blocks except for the tail."""
    blocks = (elems + (BLOCK_ELEMS - 1)) // BLOCK_ELEMS
    begin = tl.minimum(blocks * part // parts * BLOCK_ELEMS, elems)
    end = tl.minimum(blocks * (part + 1) // parts * BLOCK_ELEMS, elems)
    return begin, end


@triton.jit(do_not_specialize=["shard", "grad", "elems"])
def adamw_shard_kernel(shard, grad, elems, KIND: tl.constexpr):
    """Grid: any number of blocks, which share the chunk.

    Args:
        shard: address of the AdamWShard.
        grad: address of the chunk's gradient.
        elems: of the chunk.
        KIND: a ShardKind, whose divisor is 1.
    """
    zero = tl.full((), 0, tl.int64)
    begin, end = part_of(elems + zero, tl.program_id(0), tl.num_programs(0))
    ITEM: tl.constexpr = KIND.grad.primitive_bitwidth // 8
    source = grad + zero + begin * ITEM
    update_run(shard + zero, (own_params(shard + zero, KIND),), (source,), begin, end, KIND)
