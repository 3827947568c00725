# SPDX-License-Identifier: Apache-2.0
"""AdamW: the update of one element, of a run (a range of elements), and of a whole shard."""

import triton
import triton.language as tl

from ringcomm._native import ADAMW_FLAGS, OPTIMIZER_STRUCTURES

from .hooks import IS_INTERPRETED
from .moving import is_aligned, pointer, round_to, sum_of, widen
from .words import word32, word64

# --------------------------------------------------------------------------------------------------
# The update of one element, and how the result is stored.
#
# The Triton twin of ringcomm/optimizer/adamw_element.h, with the same bits; the comments there
# explain each operation. Kernels must be compiled with ``enable_fp_fusion=False``: then Triton
# fuses a product and a sum only where this code calls fused_multiply_add().
# --------------------------------------------------------------------------------------------------

ACTIVE = tl.constexpr(ADAMW_FLAGS["active"])
L2 = tl.constexpr(ADAMW_FLAGS["l2"])
AMSGRAD = tl.constexpr(ADAMW_FLAGS["amsgrad"])

# Floats of AdamWFactors, in the order in which load_factors() returns them.
_NAMES = (
    "decay",
    "weight_decay",
    "one_minus_beta1",
    "beta2",
    "one_minus_beta2",
    "negative_step_size",
    "bias_correction2_sqrt",
    "eps",
    "grad_scale",
    "clip",
)
FACTORS_BYTES = tl.constexpr(OPTIMIZER_STRUCTURES["factors"])
FLAGS = tl.constexpr(OPTIMIZER_STRUCTURES["factors.flags"])
STEP = tl.constexpr(OPTIMIZER_STRUCTURES["factors.step"])
FIRST = tl.constexpr(OPTIMIZER_STRUCTURES["factors.decay"])
COUNT = tl.constexpr(len(_NAMES))
assert [OPTIMIZER_STRUCTURES[f"factors.{name}"] for name in _NAMES] == [
    FIRST.value + 4 * k for k in range(COUNT.value)
], "load_factors() reads them in this order"


if IS_INTERPRETED:

    @triton.jit
    def fused_multiply_add(a, b, c):
        """Returns a * b + c, rounded once: it rounds the sum to odd in double precision, as
        fused_multiply_add() of platform.h does on machines without an instruction for it."""
        product = a.to(tl.float64) * b.to(tl.float64)
        addend = c.to(tl.float64)
        total = product + addend
        back = total - product
        error = (product - (total - back)) + (addend - back)
        bits = total.to(tl.int64, bitcast=True)
        outwards = tl.where((error > 0.0) == (total > 0.0), 1, -1)
        inexact = ((error < 0.0) | (error > 0.0)) & ((bits & 1) == 0)
        odd = bits + tl.where(inexact, outwards, 0)
        return odd.to(tl.float64, bitcast=True).to(tl.float32)

else:

    @triton.jit
    def fused_multiply_add(a, b, c):
        """Returns a * b + c, rounded once."""
        return tl.fma(a, b, c)


@triton.jit
def flags_of(factors, param):
    """Returns the flags of parameter ``param``, from the address of the factors."""
    return tl.load(word32(factors + param * FACTORS_BYTES + FLAGS))


@triton.jit
def load_factors(factors, param):
    """Returns step, flags and the ten factors of a parameter, in the order of AdamWFactors."""
    here = factors + param * FACTORS_BYTES
    found = (tl.load(word32(here + STEP)), tl.load(word32(here + FLAGS)))
    floats = (here + FIRST).to(tl.pointer_type(tl.float32), bitcast=True)
    for k in tl.static_range(COUNT):
        found = found + (tl.load(floats + k),)
    return found


@triton.jit
def adamw_element(p, g, m, v, v_max, factors, KEEPS_MAX: tl.constexpr):
    """Updates one element.

    Args:
        p, g, m, v: parameter, summed gradient, exp_avg and exp_avg_sq; FP32.
        v_max: max_exp_avg_sq; unused without KEEPS_MAX.
        factors: from :func:`load_factors`.
        KEEPS_MAX: some group uses amsgrad; the flags say whether this parameter's group does.

    Returns:
        The new p, m, v and v_max.
    """
    flags = factors[1]
    g = g * factors[10] * factors[11]
    decays_gradient = (flags & L2) != 0
    g = tl.where(decays_gradient, fused_multiply_add(factors[3], p, g), g)
    p = tl.where(decays_gradient, p, p * factors[2])
    to_go = g - m
    near = fused_multiply_add(factors[4], to_go, m)
    far = fused_multiply_add(-to_go, 1.0 - factors[4], g)
    m = tl.where(factors[4] < 0.5, near, far)
    v = fused_multiply_add(factors[6] * g, g, v * factors[5])
    root = v
    if KEEPS_MAX:
        # Like torch.maximum, it returns a NaN if either operand is a NaN.
        larger = tl.where((v_max > v) | (v_max != v_max), v_max, v)
        uses_max = (flags & AMSGRAD) != 0
        v_max = tl.where(uses_max, larger, v_max)
        root = tl.where(uses_max, larger, v)
    denominator = tl.div_rn(tl.sqrt_rn(root), factors[8]) + factors[9]
    p = p + tl.div_rn(factors[7] * m, denominator)
    return p, m, v, v_max


# ---- the master copy as a bfloat16 parameter and the 16 bits below it --------------------------


@triton.jit
def split_master(master):
    """Splits an FP32 master copy into its bfloat16 parameter and the remainder."""
    bits = master.to(tl.uint32, bitcast=True)
    bits = tl.where(master != master, tl.full(bits.shape, 0x7FC00000, tl.uint32), bits)
    param = ((bits + 0x8000) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return param, (bits & 0xFFFF).to(tl.uint16)


@triton.jit
def join_master(param, remainder):
    """Inverse of :func:`split_master`."""
    high = param.to(tl.uint16, bitcast=True).to(tl.uint32)
    low = remainder.to(tl.uint32)
    return (((high - (low >> 15)) << 16) | low).to(tl.float32, bitcast=True)


# ---- stochastic rounding -----------------------------------------------------------------------


@triton.jit
def philox(k0, k1, c0, c1, c2, c3):
    """Returns four random words from a key and a counter, all uint32, by Philox4x32-10."""
    for _ in tl.static_range(10):
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = (b & 0xFFFFFFFF).to(tl.uint32)
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = (a & 0xFFFFFFFF).to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def low_word(x):
    """Returns the low half of an int64."""
    return (x & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def random_bits(seed, bucket, first, step, ELEMS: tl.constexpr):
    """Returns random words for elements [first, first + ELEMS) of a bucket, at a step.

    ``first`` is a multiple of 4: one draw serves four elements.
    """
    QUADS: tl.constexpr = ELEMS // 4
    counter = first // 4 + tl.arange(0, QUADS)
    zero = tl.zeros([QUADS], tl.uint32)
    w0, w1, w2, w3 = philox(
        zero + low_word(seed),
        zero + low_word(seed >> 32),
        low_word(counter),
        low_word(counter >> 32),
        zero + step.to(tl.uint32, bitcast=True),
        zero + low_word(bucket),
    )
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [ELEMS])


@triton.jit
def _stochastic_float16(x, random):
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    sign = (bits >> 16) & 0x8000
    # Normal numbers: 13 bits are cut off.
    normal = (magnitude + (random & 0x1FFF) - 0x38000000) >> 13
    # Subnormal numbers: whole multiples of 2^-24, and a fraction to compare with 24 random bits.
    is_small = magnitude < 0x38800000
    small = tl.where(is_small, magnitude, tl.zeros(magnitude.shape, tl.uint32))
    scaled = small.to(tl.float32, bitcast=True) * 16777216.0
    whole = scaled.to(tl.int32)
    threshold = (random >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
    up = threshold < scaled - whole.to(tl.float32)
    subnormal = whole.to(tl.uint32) + up.to(tl.uint32)
    made = sign | tl.where(is_small, subnormal, normal)
    nearest = round_to(x, tl.float16)
    finite = magnitude < 0x477FE000  # below 65504
    return tl.where(finite, (made & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True), nearest)


@triton.jit
def round_stochastically(x, random, DTYPE: tl.constexpr):
    """Rounds FP32 to a 16-bit type, up with a probability equal to the fraction that is cut off."""
    if DTYPE == tl.float16:
        return _stochastic_float16(x, random)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        cut = ((bits + (random & 0xFFFF)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        is_finite = (bits & 0x7F800000) != 0x7F800000
        return tl.where(is_finite, cut, round_to(x, tl.bfloat16))


# --------------------------------------------------------------------------------------------------
# AdamW on a run of a shard, and the kernel that updates a whole shard of one rank.
#
# The Triton twin of the update in kernels/host/isa_adamw.h. A *turn* is the elements that a block's
# lanes update at once. Turns inside one parameter move 16 bytes per lane; turns at the ends of
# parameters, and all turns in unaligned memory, move single elements.
# --------------------------------------------------------------------------------------------------

TILE_ELEMS = tl.constexpr(512)
# 256 lanes with a vector of four FP32 elements each. A turn of 16-bit elements moves 8 bytes per
# lane, so that all of a turn's arrays have one layout.
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
    """Returns a word of the AdamWShard at address ``shard``."""
    return tl.load(word64(shard + offset))


@triton.jit
def own_params(shard, KIND: tl.constexpr):
    """Returns the address of this rank's chunk of the parameters."""
    ITEM: tl.constexpr = KIND.param.primitive_bitwidth // 8
    return shard_word(shard, PARAMS) + shard_word(shard, BEGIN) * ITEM


@triton.jit
def _state_of(shard):
    """Returns the addresses of state, master copy and remainder of the chunk's element 0."""
    return (
        shard_word(shard, EXP_AVG),
        shard_word(shard, EXP_AVG_SQ),
        shard_word(shard, MAX_EXP_AVG_SQ),
        shard_word(shard, MASTER),
        shard_word(shard, REMAINDER),
    )


@triton.jit
def _pointers(address, at, DTYPE: tl.constexpr, MASKED: tl.constexpr):
    """Returns pointers to the elements of the turn that begins with element ``at``."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    return pointer(address + at * ITEM, DTYPE, not MASKED) + tl.arange(0, TURN)


@triton.jit
def _load(address, at, mask, DTYPE: tl.constexpr, MASKED: tl.constexpr):
    pointers = _pointers(address, at, DTYPE, MASKED)
    if MASKED:
        return tl.load(pointers, mask=mask, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def _store(address, at, value, mask, DTYPE: tl.constexpr, MASKED: tl.constexpr):
    pointers = _pointers(address, at, DTYPE, MASKED)
    if MASKED:
        tl.store(pointers, value, mask=mask)
    else:
        tl.store(pointers, value)


@triton.jit
def gradient(
    sources, at, offsets, mask, DTYPE: tl.constexpr, DIVISOR: tl.constexpr, MASKED: tl.constexpr
):
    """Returns the gradients of elements ``at + offsets`` of the sources: the sum of the sources
    in FP32, or their mean; ``at`` is a multiple of TILE_ELEMS."""
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
    """Returns the FP32 parameters of a turn."""
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
    """Returns the parameters of a turn, rounded for storage."""
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
    """Updates the turn that begins with element ``at`` of the chunk; if MASKED, only its elements
    in [low, high). ``first`` is the element with which the sources begin."""
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
    """Updates elements [low, high) of the run, which all belong to one parameter."""
    begin = run[0]
    inner = begin + (low - begin + (TURN - 1)) // TURN * TURN
    end = begin + (high - begin) // TURN * TURN
    if aligned:
        for at in range(inner, end, TURN):
            _turn(dests, state, sources, random_of, factors, at, begin, low, high, KIND, False)
    # Only the first and the last turn can have elements outside [low, high).
    first = begin + (low - begin) // TURN * TURN
    last = begin + (high - 1 - begin) // TURN * TURN
    stride = tl.where(aligned, tl.maximum(last - first, TURN), TURN)
    for at in range(first, high, stride):
        if (at < low) | (at + TURN > high) | (not aligned):
            _turn(dests, state, sources, random_of, factors, at, begin, low, high, KIND, True)


@triton.jit
def segment_at(segments, count, element):
    """Returns the segment with element ``element`` of the bucket, or the first segment after it."""
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
        dests: addresses of the chunk's parameters: this rank's own, then the copies.
        sources: addresses of all versions of element ``begin``'s gradient, which are summed.
        begin: a multiple of TILE_ELEMS.
        end: index after the last element.
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
def extent_of(elems, index, count):
    """Returns [begin, end) of portion ``index`` of ``count``; only the last can split a tile."""
    tiles = (elems + (TILE_ELEMS - 1)) // TILE_ELEMS
    begin = tl.minimum(tiles * index // count * TILE_ELEMS, elems)
    end = tl.minimum(tiles * (index + 1) // count * TILE_ELEMS, elems)
    return begin, end


@triton.jit(do_not_specialize=["shard", "grad", "elems"])
def adamw_shard_kernel(shard, grad, elems, KIND: tl.constexpr):
    """Updates a shard. Grid: any number of blocks, which share the chunk.

    Args:
        shard: address of the AdamWShard.
        grad: address of the chunk's gradient.
        elems: elements of the chunk.
        KIND: a ShardKind with divisor 1.
    """
    zero = tl.full((), 0, tl.int64)
    begin, end = extent_of(elems + zero, tl.program_id(0), tl.num_programs(0))
    ITEM: tl.constexpr = KIND.grad.primitive_bitwidth // 8
    source = grad + zero + begin * ITEM
    update_run(shard + zero, (own_params(shard + zero, KIND),), (source,), begin, end, KIND)
