// SPDX-License-Identifier: Apache-2.0

// Data movement and conversions as PTX instructions; ringcomm/core/atomics.h has memory orders. For
// the host, which runs the same loops under ThreadSanitizer and in the emulator, equivalent C++
// follows.
#pragma once

#include "ringcomm/core/dtypes.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

struct alignas(16) Vec16 {
  uint32_t word[4];
};
struct alignas(8) Vec8 {
  uint32_t word[2];
};

// True if vectors of T are added in T, with the same bits as sums in Traits<T>::Acc.
template <class T>
constexpr bool kAddsPacked = false;

#if RC_CUDA

// Weak loads and stores, ordered by an acquire before them and a release after them (NOTE
// [signals]). Never ld.global.nc, which may return a cached line from before the peer's write.
// no_allocate: every byte is used once.
__device__ __forceinline__ Vec16 load16(const void* from) {
  Vec16 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ void store16(void* to, const Vec16& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.word[0]), "r"(v.word[1]),
               "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

// Returns the address of the vector `count` vectors behind; one instruction on a pair of registers.
template <class Char>
__device__ __forceinline__ Char* behind(Char* vector, uint32_t count) {
  uint64_t address = reinterpret_cast<uint64_t>(vector);
  asm("mad.wide.u32 %0, %1, 16, %0;" : "+l"(address) : "r"(count));
  return reinterpret_cast<Char*>(address);
}

// Weak loads and stores of 8 and of 4 bytes.
__device__ __forceinline__ Vec8 load8(const void* from) {
  Vec8 v;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.word[0]), "=r"(v.word[1])
               : "l"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ void store8(void* to, const Vec8& v) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(v.word[0]), "r"(v.word[1])
               : "memory");
}
__device__ __forceinline__ uint32_t load4(const void* from) {
  uint32_t word;
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  return word;
}
__device__ __forceinline__ void store4(void* to, uint32_t word) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

// Stores if `yes`, without a branch.
__device__ __forceinline__ void store16_if(bool yes, void* to, const Vec16& v) {
  asm volatile(
      "{\n"
      ".reg .pred yes;\n"
      "setp.ne.u32 yes, %5, 0;\n"
      "@yes st.global.v4.u32 [%0], {%1, %2, %3, %4};\n"
      "}" ::"l"(to),
      "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3]), "r"(uint32_t(yes))
      : "memory");
}

// Return 1 / x within an ulp, and 1 / sqrt(x) with a relative error of at most 2^-22.9. Both treat
// a subnormal x as zero.
__device__ __forceinline__ float near_reciprocal(float x) {
  float near;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(x));
  return near;
}
__device__ __forceinline__ float near_inverse_root(float x) {
  float near;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(x));
  return near;
}

// Widens one of the two numbers in a word, which must not be NaN. gate: zero (grad_sum.h).
__device__ __forceinline__ float widened(uint32_t both, bool high, uint32_t gate, BFloat16*) {
  return float_of(high ? (both & 0xffff0000u) | gate : (both << 16) + gate);
}
__device__ __forceinline__ float widened(uint32_t both, bool high, uint32_t gate, Float16*) {
  float wide;
  if (high)
    asm("{.reg .f16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, high;}"
        : "=f"(wide)
        : "r"(both | gate));
  else
    asm("{.reg .f16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;}"
        : "=f"(wide)
        : "r"(both | gate));
  return wide;
}

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= 0x1.fffffep127f; }

// Rounds two numbers that are not NaN to nearest; the first goes into the lower half.
__device__ __forceinline__ uint32_t packed(float low, float high, BFloat16*) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ uint32_t packed(float low, float high, Float16*) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// Returns the sum, element by element, over all memory bound at a multicast address. The switch
// rounds once and adds in an unspecified order. sm_90 and later (docs/cuda.md).
template <class T>
__device__ Vec16 multicast_sum16(const void* from);

#define RC_MULTICAST_SUM16(type, kind)                                                    \
  template <>                                                                             \
  __device__ __forceinline__ Vec16 multicast_sum16<type>(const void* from) {              \
    Vec16 v;                                                                              \
    asm volatile("multimem.ld_reduce.relaxed.sys.global." kind " {%0, %1, %2, %3}, [%4];" \
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])     \
                 : "l"(from)                                                              \
                 : "memory");                                                             \
    return v;                                                                             \
  }
RC_MULTICAST_SUM16(float, "add.v4.f32")
RC_MULTICAST_SUM16(BFloat16, "add.acc::f32.v4.bf16x2")
RC_MULTICAST_SUM16(Float16, "add.acc::f32.v4.f16x2")
#undef RC_MULTICAST_SUM16

// Stores any bits to all memory bound at a multicast address.
__device__ __forceinline__ void multicast_store16(void* to, const Vec16& v) {
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to),
               "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

// Orders accesses to the same memory by its own address and by a multicast address. Between two
// such accesses, a thread on the path that orders them must execute this fence (PTX ISA 9.0,
// section 8.6, "Proxies").
__device__ __forceinline__ void fence_proxy_alias() {
  asm volatile("fence.proxy.alias;" ::: "memory");
}

#if RC_HAS_HALF_SUMS
// Adds eight pairs with one rounding to nearest even. The bits equal a sum in FP32 that is then
// narrowed: FP32's 24 bits are at least twice the 8 or 11 bits of a 16-bit type, plus two
// (Figueroa, "When is double rounding innocuous?", SIGNUM Newsletter 30, 1995). A NaN becomes
// 0x7fff.
template <>
constexpr bool kAddsPacked<BFloat16> = true;
template <>
constexpr bool kAddsPacked<Float16> = true;

template <class T>
__device__ __forceinline__ Vec16 add_packed(Vec16 a, const Vec16& b) {
  RC_UNROLL
  for (int k = 0; k < 4; ++k) {
    if constexpr (kSame<T, Float16>)
      asm("add.rn.f16x2 %0, %0, %1;" : "+r"(a.word[k]) : "r"(b.word[k]));
    else
      asm("add.rn.bf16x2 %0, %0, %1;" : "+r"(a.word[k]) : "r"(b.word[k]));
  }
  return a;
}
#endif

#if RC_HAS_HALF_PAIRS
// These conversions turn every NaN into 0x7fff.
template <class T>
__device__ uint32_t narrow_pair(float low, float high);
template <>
__device__ __forceinline__ uint32_t narrow_pair<BFloat16>(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
template <>
__device__ __forceinline__ uint32_t narrow_pair<Float16>(float low, float high) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
#endif

// Keeps four narrow values in one register; the compiler would spread them over four.
__device__ __forceinline__ void keep_packed(uint32_t& word) { asm("" : "+r"(word)); }

// Tells the compiler that a pointer points to shared memory (LDS in place of LD).
__device__ __forceinline__ void assume_shared(const void* ptr) {
  __builtin_assume(__isShared(ptr));
}

// Returns the largest value of `lanes` adjacent lanes; called by all lanes of a warp.
template <int lanes>
__device__ __forceinline__ uint32_t largest_of_lanes(uint32_t most) {
  RC_UNROLL
  for (int mask = lanes / 2; mask > 0; mask /= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, most, mask);
    most = other > most ? other : most;
  }
  return most;
}

// Returns x of the lane whose number differs in the bits of `mask`; called by all lanes of a warp.
__device__ __forceinline__ float exchanged(float x, int mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}

// One value per lane of a warp (warp_sum.h).
struct WarpLanes {
  int lane;
  __device__ __forceinline__ double exchange(double x, int mask) const {
    return __shfl_xor_sync(0xffffffffu, x, mask);
  }
  __device__ __forceinline__ double pick(int bit, double zero, double one) const {
    return ((lane >> bit) & 1) != 0 ? one : zero;
  }
};

__device__ __forceinline__ uint64_t global_timer_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

#else

template <class Char>
Char* behind(Char* vector, uint32_t count) {
  return vector + uint64_t(count) * 16;
}

inline Vec16 load16(const void* from) {
  Vec16 v;
  memcpy(&v, from, sizeof(v));
  return v;
}

inline void store16(void* to, const Vec16& v) { memcpy(to, &v, sizeof(v)); }
inline void store16_if(bool yes, void* to, const Vec16& v) {
  if (yes) store16(to, v);
}

// Tests set the error of the approximations, in ulps.
inline thread_local int near_error_ulps = 0;

inline float near(float exact) {
  if (!(exact - exact == 0.0f) || exact == 0.0f) return exact;
  return float_of(bits_of(exact) + uint32_t(near_error_ulps));
}
inline float near_reciprocal(float x) { return near(1.0f / x); }
inline float near_inverse_root(float x) { return near(1.0f / square_root(x)); }

inline float widened(uint32_t both, bool high, uint32_t, BFloat16*) {
  return widen(BFloat16{uint16_t(high ? both >> 16 : both)});
}
inline float widened(uint32_t both, bool high, uint32_t, Float16*) {
  return widen(Float16{uint16_t(high ? both >> 16 : both)});
}

inline bool is_finite(float x) { return x - x == 0.0f; }

inline uint32_t packed(float low, float high, BFloat16*) {
  return narrow_bfloat16(low).bits | uint32_t(narrow_bfloat16(high).bits) << 16;
}
inline uint32_t packed(float low, float high, Float16*) {
  return narrow_float16(low).bits | uint32_t(narrow_float16(high).bits) << 16;
}

inline Vec8 load8(const void* from) {
  Vec8 v;
  memcpy(&v, from, sizeof(v));
  return v;
}
inline void store8(void* to, const Vec8& v) { memcpy(to, &v, sizeof(v)); }
inline uint32_t load4(const void* from) {
  uint32_t word;
  memcpy(&word, from, sizeof(word));
  return word;
}
inline void store4(void* to, uint32_t word) { memcpy(to, &word, sizeof(word)); }

// On the host one lane does the work of several.
template <int lanes>
uint32_t largest_of_lanes(uint32_t most) {
  static_assert(lanes == 1);
  return most;
}

inline float exchanged(float x, int) { return x; }

inline void keep_packed(uint32_t&) {}
inline void assume_shared(const void*) {}

#endif

// Returns the bits of a vector after widening and narrowing, which change only NaNs. Each word has
// two elements, which are changed together.
template <class T>
RC_TEAM_FN Vec16 quieted(Vec16 v) {
  RC_UNROLL
  for (uint32_t& word : v.word) {
    if constexpr (kSame<T, BFloat16>) {
      const uint32_t nan = ((word & 0x7fff7fffu) + 0x007f007fu) & 0x80008000u;
      word |= nan >> 9;  // the quiet bit
    } else if constexpr (kSame<T, Float16>) {
      const uint32_t nan = ((word & 0x7fff7fffu) + 0x03ff03ffu) & 0x80008000u;
      const uint32_t all = nan | (nan - (nan >> 15));  // all bits of each NaN
      word = (word & (~all | 0x80008000u)) | (all & 0x7e007e00u);
    }
  }
  return v;
}

// Widens a vector's elements, two per word by one instruction each. Elements that are not NaN get
// the bits of Traits<T>::load().
template <class T, class Acc>
RC_TEAM_FN void widen_all(const Vec16& v, Acc (&x)[16 / sizeof(T)]) {
  if constexpr (kSame<T, BFloat16>) {
    RC_UNROLL
    for (int k = 0; k < 4; ++k) {
      x[2 * k] = float_of(v.word[k] << 16);
      x[2 * k + 1] = float_of(v.word[k] & 0xffff0000u);
    }
    return;
  }
#if RC_DEVICE_PASS
  if constexpr (kSame<T, Float16>) {
    RC_UNROLL
    for (int i = 0; i < 8; ++i) {
      const uint16_t half = uint16_t(v.word[i / 2] >> (i % 2 * 16));
      asm("cvt.f32.f16 %0, %1;" : "=f"(x[i]) : "h"(half));
    }
    return;
  }
#endif
  T elems[16 / sizeof(T)];
  memcpy(elems, &v, 16);
  RC_UNROLL
  for (int i = 0; i < int(16 / sizeof(T)); ++i) x[i] = Traits<T>::load(elems[i]);
}

// Narrows a vector of results. arithmetic: all of them come from additions or products, so that a
// NaN is the canonical one, which narrows to 0x7fff or 0x7e00.
template <class T, bool arithmetic, class Acc>
RC_TEAM_FN Vec16 narrow_all(const Acc (&acc)[16 / sizeof(T)]) {
  Vec16 v;
#if RC_HAS_HALF_PAIRS
  if constexpr (arithmetic && sizeof(T) == 2 && sizeof(Acc) == 4) {
    RC_UNROLL
    for (int k = 0; k < 4; ++k) v.word[k] = narrow_pair<T>(acc[2 * k], acc[2 * k + 1]);
    return kSame<T, Float16> ? quieted<T>(v) : v;
  }
#endif
  T elems[16 / sizeof(T)];
  RC_UNROLL
  for (int i = 0; i < int(16 / sizeof(T)); ++i) elems[i] = Traits<T>::store(acc[i]);
  memcpy(&v, elems, 16);
  return v;
}

}  // namespace device
RINGCOMM_NAMESPACE_END
