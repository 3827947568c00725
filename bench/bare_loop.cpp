// SPDX-License-Identifier: Apache-2.0

// An upper bound for comparisons: collectives of two ranks, with sums of float or bfloat16, as
// plain loops over memory that both processes map. They have no checks, deadlines or handling of
// faults, so the additional time of a library is the library's overhead.

#include <immintrin.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kLineBytes = 64;
constexpr int64_t kControlBytes = 4096;
constexpr size_t kHugePageBytes = 2 << 20;
constexpr int kMadviseCollapse = 25;  // MADV_COLLAPSE, which older headers lack
constexpr uint64_t kSlots = 4;

// From this many bytes per call on, data in slots are written by streaming stores, past the caches:
// reading dirty lines from the other core's cache is several times slower than reading memory. EPYC
// (family 25 model 17, 2 cores that share no L3), sweep 1 KiB to 4 MiB: a reduce-scatter of 16 KiB
// takes 6.3 us with regular stores and 2.0 us with streaming stores; one of 1 MiB takes 235 us and
// 36 us.
constexpr int64_t kStreamSlotBytes = 4 << 10;

// Data that only the writing rank reads again are written by streaming stores if they are too large
// for a cache. A sweep of 32 KiB to 16 MiB on the same machine shows no difference up to 1 MiB.
constexpr int64_t kStreamOutputBytes = 2 << 20;

struct Word {
  alignas(kLineBytes) std::atomic<uint64_t> value;
};

// Control words of a rank, at the start of its half of the mapping, before the slots.
struct Control {
  Word entered, left, filled, drained;
};

// State of this rank in the process's only mapping.
Control *mine, *theirs;
char *my_slots, *their_slots;
int64_t rank, slot_bytes;
uint64_t epoch;   // calls so far
uint64_t pieces;  // segments of all calls so far

void WaitFor(const Word& word, uint64_t value) {
  constexpr int kPausesBeforeYield = 4096;  // about 50 us: only a peer without a core takes longer
  for (int pauses = 0; word.value.load(std::memory_order_acquire) < value; ++pauses) {
    if (pauses < kPausesBeforeYield) {
      _mm_pause();
    } else {
      sched_yield();
    }
  }
}

void Publish(Word& word, uint64_t value) {
  _mm_sfence();  // orders earlier streaming stores, which a release store does not
  word.value.store(value, std::memory_order_release);
}

// Publishes the number of this call in `word`, and returns when the other rank has also done so.
void Barrier(Word Control::* word) {
  if (word == &Control::entered) ++epoch;
  Publish(mine->*word, epoch);
  WaitFor(theirs->*word, epoch);
}

struct Float {
  using Type = float;
  static __m256 Load(const float* p) { return _mm256_loadu_ps(p); }
  static void Store(float* p, __m256 v, bool stream) {
    stream ? _mm256_stream_ps(p, v) : _mm256_storeu_ps(p, v);
  }
};

struct BFloat16 {
  using Type = uint16_t;
  static __m256 Load(const uint16_t* p) {
    const auto wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static void Store(uint16_t* p, __m256 v, bool stream) {  // rounds to nearest even; no NaN
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i high = _mm256_srli_epi32(up, 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    const __m128i out = _mm256_castsi256_si128(packed);
    auto* to = reinterpret_cast<__m128i*>(p);
    stream ? _mm_stream_si128(to, out) : _mm_storeu_si128(to, out);
  }
};

// Stores sums to `out` and, if not null, also to `copy`.
template <class T, bool kStream, bool kCopy>
void Add(typename T::Type* out, typename T::Type* copy, const typename T::Type* a,
         const typename T::Type* b, int64_t count) {
  constexpr int64_t kWidth = 8;
  for (int64_t i = 0; i < count; i += 2 * kWidth) {
    const __m256 low = T::Load(a + i) + T::Load(b + i);
    const __m256 high = T::Load(a + i + kWidth) + T::Load(b + i + kWidth);
    T::Store(out + i, low, kStream);
    T::Store(out + i + kWidth, high, kStream);
    if constexpr (kCopy) {
      T::Store(copy + i, low, kStream);
      T::Store(copy + i + kWidth, high, kStream);
    }
  }
}

template <class T>
void AddBytes(void* out, void* copy, const void* a, const void* b, int64_t bytes, bool stream) {
  using E = typename T::Type;
  auto* add = copy != nullptr ? (stream ? Add<T, true, true> : Add<T, false, true>)
                              : (stream ? Add<T, true, false> : Add<T, false, false>);
  add(static_cast<E*>(out), static_cast<E*>(copy), static_cast<const E*>(a),
      static_cast<const E*>(b), bytes / static_cast<int64_t>(sizeof(E)));
}

void Sum(int64_t bfloat16, void* out, void* copy, const void* a, const void* b, int64_t bytes,
         bool stream) {
  (bfloat16 ? AddBytes<BFloat16> : AddBytes<Float>)(out, copy, a, b, bytes, stream);
}

void Copy(void* to, const void* from, int64_t bytes, bool stream) {
  if (!stream) {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
    return;
  }
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
  for (int64_t i = 0; i < bytes; i += 2 * 32) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target + i), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target + i + 32), high);
  }
}

// Sends `bytes` of `send` through this rank's slots, and calls `take(offset, slot, bytes)` for each
// piece that the peer sends through its slots.
template <class Take>
void Exchange(const char* send, int64_t bytes, Take take) {
  const bool stream = bytes >= kStreamSlotBytes;
  const int64_t count = (bytes + slot_bytes - 1) / slot_bytes;
  const auto piece_bytes = [&](int64_t i) { return std::min(slot_bytes, bytes - i * slot_bytes); };
  const auto slot = [&](char* slots, uint64_t number) {
    return slots + static_cast<int64_t>(number % kSlots) * slot_bytes;
  };
  int64_t sent = 0;
  for (int64_t taken = 0; taken < count; ++taken) {
    for (; sent < count && sent < taken + static_cast<int64_t>(kSlots) - 1; ++sent) {
      const uint64_t number = pieces + static_cast<uint64_t>(sent);
      if (number >= kSlots) WaitFor(theirs->drained, number - kSlots + 1);
      Copy(slot(my_slots, number), send + sent * slot_bytes, piece_bytes(sent), stream);
      Publish(mine->filled, number + 1);
    }
    const uint64_t number = pieces + static_cast<uint64_t>(taken);
    WaitFor(theirs->filled, number + 1);
    take(taken * slot_bytes, slot(their_slots, number), piece_bytes(taken));
    Publish(mine->drained, number + 1);
  }
  pieces += static_cast<uint64_t>(count);
}

}  // namespace

extern "C" {

// Returns how many bytes at the start of a rank's half are reserved, so not available to tensors.
int64_t bare_control_bytes(int64_t slot) {
  return kControlBytes + static_cast<int64_t>(kSlots) * slot;
}

// Maps the shared memory at a huge page's boundary and touches this rank's half, in huge pages if
// the kernel provides them. Returns null on failure.
char* bare_open(int64_t descriptor, int64_t half_bytes, int64_t slot, int64_t own_rank) {
  const auto bytes = static_cast<size_t>(2 * half_bytes);
  void* room = mmap(nullptr, bytes + kHugePageBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED) return nullptr;
  const auto aligned = (reinterpret_cast<uintptr_t>(room) + kHugePageBytes - 1) &
                       ~static_cast<uintptr_t>(kHugePageBytes - 1);
  void* at = mmap(reinterpret_cast<void*>(aligned), bytes, PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_FIXED, static_cast<int>(descriptor), 0);
  if (at == MAP_FAILED) return nullptr;
  char* own = static_cast<char*>(at) + own_rank * half_bytes;
  char* other = static_cast<char*>(at) + (1 - own_rank) * half_bytes;
  std::memset(own, 0, static_cast<size_t>(half_bytes));
  // MADV_COLLAPSE works even if shmem_enabled is "never". Linux before 6.1 refuses it; pages then
  // stay small.
  (void)madvise(own, static_cast<size_t>(half_bytes), kMadviseCollapse);
  mine = reinterpret_cast<Control*>(own), theirs = reinterpret_cast<Control*>(other);
  my_slots = own + kControlBytes, their_slots = other + kControlBytes;
  rank = own_rank, slot_bytes = slot;
  return static_cast<char*>(at);
}

// `in` and `peer_in` are whole buffers of two chunks in memory that both ranks map.
void bare_reduce_scatter_mapped(const char* in, const char* peer_in, char* out, int64_t chunk,
                                int64_t bfloat16) {
  const int64_t at = rank * chunk;
  Barrier(&Control::entered);
  Sum(bfloat16, out, nullptr, in + at, peer_in + at, chunk, chunk >= kStreamOutputBytes);
  Barrier(&Control::left);
}

void bare_all_gather_mapped(const char* in, const char* peer_in, char* out, int64_t chunk) {
  const bool stream = chunk >= kStreamOutputBytes;
  if (in != out + rank * chunk) Copy(out + rank * chunk, in, chunk, stream);
  Barrier(&Control::entered);
  Copy(out + (1 - rank) * chunk, peer_in, chunk, stream);
  Barrier(&Control::left);
}

void bare_all_reduce_mapped(char* data, char* peer_data, int64_t chunk, int64_t bfloat16) {
  // Each rank adds its own chunk and writes both copies of the sums: one pass, no gather.
  const int64_t at = rank * chunk;
  Barrier(&Control::entered);
  Sum(bfloat16, data + at, peer_data + at, data + at, peer_data + at, chunk,
      chunk >= kStreamOutputBytes);
  Barrier(&Control::left);
}

void bare_reduce_scatter_staged(const char* in, char* out, int64_t chunk, int64_t bfloat16) {
  const bool stream = chunk >= kStreamOutputBytes;
  const char* own = in + rank * chunk;
  Exchange(in + (1 - rank) * chunk, chunk, [&](int64_t at, const char* slot, int64_t bytes) {
    Sum(bfloat16, out + at, nullptr, own + at, slot, bytes, stream);
  });
}

void bare_all_gather_staged(const char* in, char* out, int64_t chunk) {
  const bool stream = chunk >= kStreamOutputBytes;
  char* own = out + rank * chunk;
  char* other = out + (1 - rank) * chunk;
  Exchange(in, chunk, [&](int64_t at, const char* slot, int64_t bytes) {
    Copy(other + at, slot, bytes, stream);
    if (own != in) Copy(own + at, in + at, bytes, stream);
  });
}

void bare_all_reduce_staged(char* data, int64_t chunk, int64_t bfloat16) {
  char* own = data + rank * chunk;
  bare_reduce_scatter_staged(data, own, chunk, bfloat16);
  bare_all_gather_staged(own, data, chunk);
}

}  // extern "C"
