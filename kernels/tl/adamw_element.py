"""The update of one element, and how the result is stored.

The Triton twin of ringcomm/optimizer/adamw_element.h, whose comments say why each operation
is what it is: the same bits. It counts on kernels compiled with ``enable_fp_fusion=False``, so that
a product and a sum become one fused multiply-add where this says so, and nowhere else.
"""

import triton
import triton.language as tl

from ringcomm._native import ADAMW_FLAGS, OPTIMIZER_STRUCTURES

from .hooks import IS_INTERPRETED
from .moving import round_to
from .words import word32

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
        """a * b + c, rounded once: the sum is rounded to odd in double precision, as
        fused_multiply_add() of platform.h does where there is no instruction."""
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
        """a * b + c, rounded once."""
        return tl.fma(a, b, c)


@triton.jit
def flags_of(factors, param):
    """The flags of parameter ``param``, from the address of the factors."""
    return tl.load(word32(factors + param * FACTORS_BYTES + FLAGS))


@triton.jit
def load_factors(factors, param):
    """Step number, flags and the ten factors of a parameter, in the order of AdamWFactors."""
    here = factors + param * FACTORS_BYTES
    found = (tl.load(word32(here + STEP)), tl.load(word32(here + FLAGS)))
    floats = (here + FIRST).to(tl.pointer_type(tl.float32), bitcast=True)
    for k in tl.static_range(COUNT):
        found = found + (tl.load(floats + k),)
    return found


@triton.jit
def adamw_element(p, g, m, v, v_max, factors, KEEPS_MAX: tl.constexpr):
    """The update.

    Args:
        p, g, m, v: parameter, gradient as it was summed, exp_avg and exp_avg_sq; FP32.
        v_max: max_exp_avg_sq; of no meaning without KEEPS_MAX.
        factors: of :func:`load_factors`.
        KEEPS_MAX: some group uses amsgrad; whether this one does is in its flags.

    Returns:
        p, m, v and v_max.
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
        # As torch.maximum: a NaN of either wins.
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
    """A master copy as its bfloat16 parameter and the remainder."""
    bits = master.to(tl.uint32, bitcast=True)
    bits = tl.where(master != master, tl.full(bits.shape, 0x7FC00000, tl.uint32), bits)
    param = ((bits + 0x8000) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return param, (bits & 0xFFFF).to(tl.uint16)


@triton.jit
def join_master(param, remainder):
    """Undoes :func:`split_master`."""
    high = param.to(tl.uint16, bitcast=True).to(tl.uint32)
    low = remainder.to(tl.uint32)
    return (((high - (low >> 15)) << 16) | low).to(tl.float32, bitcast=True)


# ---- stochastic rounding -----------------------------------------------------------------------


@triton.jit
def philox(k0, k1, c0, c1, c2, c3):
    """Philox4x32-10: four words from a key and a counter, all uint32."""
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
    """The low half of an int64."""
    return (x & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def random_bits(seed, bucket, first, step, ELEMS: tl.constexpr):
    """The random words of elements ``first`` to ``first + ELEMS`` of a bucket, at a step.

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
    # Normal: 13 bits are cut off.
    normal = (magnitude + (random & 0x1FFF) - 0x38000000) >> 13
    # Subnormal: whole multiples of 2^-24, and a fraction to compare with 24 random bits.
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
    """FP32 to bfloat16 or float16, up with the probability of what is cut off."""
    if DTYPE == tl.float16:
        return _stochastic_float16(x, random)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        cut = ((bits + (random & 0xFFFF)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        is_finite = (bits & 0x7F800000) != 0x7F800000
        return tl.where(is_finite, cut, round_to(x, tl.bfloat16))
