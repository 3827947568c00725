// The only file that spells memory orders. The names say order and scope; the callers say, beside
// each use, which operation at the other end it pairs with.
//
// "sys" is system scope: another process on the CPU, another GPU or the host on CUDA. The CPU has
// one coherence domain, so there the scope costs nothing.
#pragma once

#include "ringcomm/platform.h"

RINGCOMM_NAMESPACE_BEGIN

#if RC_DEVICE_PASS

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

__device__ __forceinline__ void store_release_sys(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed_sys(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
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

#else

RC_FN uint32_t load_acquire_sys(const uint32_t* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

RC_FN uint32_t load_relaxed_sys(const uint32_t* word) {
  return __atomic_load_n(word, __ATOMIC_RELAXED);
}

RC_FN void store_release_sys(uint32_t* word, uint32_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

RC_FN void store_relaxed_sys(uint32_t* word, uint32_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
}

RC_FN void fence_seq_cst_sys() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

RC_FN uint32_t exchange_acq_rel_sys(uint32_t* word, uint32_t value) {
  return __atomic_exchange_n(word, value, __ATOMIC_ACQ_REL);
}

#endif

RINGCOMM_NAMESPACE_END
