// SPDX-License-Identifier: Apache-2.0

// System calls for scratch_test: they replace pread and pwrite in the pool's sources.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

inline std::atomic<int> failing_moved{0}, failing_code{0};

// While `hanging`, the pool's system calls do not return; `calls` counts them.
inline std::atomic<bool> hanging{false};
inline std::atomic<int> calls{0};

// Makes later calls return `moved` (-1 with errno `code`); with 0 they move bytes again.
inline void fail_next_calls(int moved, int code) {
  failing_code = code;
  failing_moved = moved;
}

inline uint64_t next_drawn() {
  static std::atomic<uint64_t> seed{1};
  thread_local uint64_t drawn = seed++ * 0x9e3779b97f4a7c15;
  drawn ^= drawn << 13;
  drawn ^= drawn >> 7;
  return drawn ^= drawn << 17;
}

// Late by up to half a millisecond. One call in four is interrupted first, one in four moves only a
// page, and one in eight only some bytes. Direct I/O moves whole pages.
template <class Call>
ssize_t troubled(Call call, const void* memory, size_t bytes, off_t offset) {
  ++calls;
  do {
    usleep(unsigned(next_drawn() % 512));
  } while (hanging);
  if ((reinterpret_cast<uintptr_t>(memory) | bytes | size_t(offset)) % 4096 != 0) {
    errno = EINVAL;
    return -1;
  }
  const int moved = failing_moved;
  if (moved != 0) {
    errno = failing_code;
    return moved;
  }
  switch (next_drawn() % 8) {
    case 0:
    case 1:
      errno = EINTR;
      return -1;
    case 2:
    case 3:
      return call(bytes < 4096 ? bytes : 4096);
    case 4:
      return call(100);
    default:
      return call(bytes);
  }
}

inline ssize_t troubled_pread(int fd, void* memory, size_t bytes, off_t offset) {
  return troubled([&](size_t some) { return pread(fd, memory, some, offset); }, memory, bytes,
                  offset);
}

inline ssize_t troubled_pwrite(int fd, const void* memory, size_t bytes, off_t offset) {
  return troubled([&](size_t some) { return pwrite(fd, memory, some, offset); }, memory, bytes,
                  offset);
}
