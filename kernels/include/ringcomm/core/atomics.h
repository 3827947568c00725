// SPDX-License-Identifier: Apache-2.0

// The only file with memory orders. A function's name states its order and scope; each caller
// states next to the call which operation at the other end it pairs with.
//
// "sys" is system scope: another process on the CPU, another GPU or the host on CUDA. The CPU has
// one coherence domain, so there the scope costs nothing.
#pragma once

#include "ringcomm/core/platform.h"

RINGCOMM_NAMESPACE_BEGIN

// Two data words, each with a flag. Each half of 8 bytes is written and read in one access, so the
// data of a half have arrived when its flag has.
struct alignas(16) LLPacket {
  uint32_t first, first_flag, second, second_flag;
};

#if RC_CUDA

__device__ __forceinline__ uint32_t load_acquire_sys(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_relaxed_sys(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ uint64_t load_relaxed_sys(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ void store_release_sys(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed_sys(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed_sys(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ void fence_seq_cst_sys() { asm volatile("fence.sc.sys;" ::: "memory"); }

__device__ __forceinline__ uint32_t exchange_acq_rel_sys(uint32_t* word, uint32_t value) {
  uint32_t old;
  asm volatile("atom.acq_rel.sys.global.exch.b32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(word), "r"(value)
               : "memory");
  return old;
}

// Exchanges a word that only this device uses; orders no other access.
__device__ __forceinline__ uint32_t exchange_relaxed_sys(uint32_t* word, uint32_t value) {
  uint32_t old;
  asm volatile("atom.relaxed.sys.global.exch.b32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(word), "r"(value)
               : "memory");
  return old;
}

__device__ __forceinline__ void fence_acq_rel_sys() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// Relaxed: each element of the vector is one access of 8 bytes, and carries its own flag.
__device__ __forceinline__ void store_ll_packet_sys(LLPacket* to, uint32_t first, uint32_t second,
                                                    uint32_t flag) {
  const uint64_t low = uint64_t(flag) << 32 | first, high = uint64_t(flag) << 32 | second;
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(low), "l"(high)
               : "memory");
}

__device__ __forceinline__ LLPacket load_ll_packet_sys(const LLPacket* from) {
  uint64_t low, high;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(low), "=l"(high)
               : "l"(from)
               : "memory");
  return {uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32)};
}

// Change integers that many lanes of a launch change, in any order; no lane waits for the integers.
__device__ __forceinline__ void add_relaxed_sys(int64_t* word, int64_t value) {
  atomicAdd_system(reinterpret_cast<unsigned long long*>(word),
                   static_cast<unsigned long long>(value));
}
__device__ __forceinline__ void max_relaxed_sys(int64_t* word, int64_t value) {
  atomicMax_system(reinterpret_cast<long long*>(word), static_cast<long long>(value));
}

#else

RC_FN uint32_t load_acquire_sys(const uint32_t* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

RC_FN uint32_t load_relaxed_sys(const uint32_t* word) {
  return __atomic_load_n(word, __ATOMIC_RELAXED);
}

RC_FN uint64_t load_relaxed_sys(const uint64_t* word) {
  return __atomic_load_n(word, __ATOMIC_RELAXED);
}

RC_FN void store_release_sys(uint32_t* word, uint32_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

RC_FN void store_relaxed_sys(uint32_t* word, uint32_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
}

RC_FN void store_relaxed_sys(uint64_t* word, uint64_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
}

// model: fence_seq_cst_sys (tests/proof/model/lend.pml, sleep.pml)
RC_FN void fence_seq_cst_sys() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// Fences in the compiler only; another thread makes this thread's processor fence (membarrier).
inline void fence_seq_cst_compiler() { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

RC_FN uint32_t exchange_acq_rel_sys(uint32_t* word, uint32_t value) {
  return __atomic_exchange_n(word, value, __ATOMIC_ACQ_REL);
}

RC_FN uint32_t exchange_relaxed_sys(uint32_t* word, uint32_t value) {
  return __atomic_exchange_n(word, value, __ATOMIC_RELAXED);
}

RC_FN void fence_acq_rel_sys() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }

RC_FN void store_ll_packet_sys(LLPacket* to, uint32_t first, uint32_t second, uint32_t flag) {
  uint64_t* halves = reinterpret_cast<uint64_t*>(to);
  __atomic_store_n(halves, uint64_t(flag) << 32 | first, __ATOMIC_RELAXED);
  __atomic_store_n(halves + 1, uint64_t(flag) << 32 | second, __ATOMIC_RELAXED);
}

RC_FN LLPacket load_ll_packet_sys(const LLPacket* from) {
  const uint64_t* halves = reinterpret_cast<const uint64_t*>(from);
  const uint64_t low = __atomic_load_n(halves, __ATOMIC_RELAXED);
  const uint64_t high = __atomic_load_n(halves + 1, __ATOMIC_RELAXED);
  return {uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32)};
}

inline void add_relaxed_sys(int64_t* word, int64_t value) {
  __atomic_fetch_add(word, value, __ATOMIC_RELAXED);
}
inline void max_relaxed_sys(int64_t* word, int64_t value) {
  int64_t seen = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (seen < value && !__atomic_compare_exchange_n(word, &seen, value, true, __ATOMIC_RELAXED,
                                                      __ATOMIC_RELAXED)) {
  }
}

#endif

RINGCOMM_NAMESPACE_END
