// SPDX-License-Identifier: Apache-2.0

// Preloaded before the C library (LD_PRELOAD) in the process of test_scratch_faults.py: the n-th
// call of a kind after arm() fails.
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>

namespace {

enum Kind { kRead, kWrite, kReserve, kKinds };
constexpr size_t kPageBytes = 4096;
std::atomic<long> until[kKinds], calls[kKinds];
std::atomic<int> trouble_code, trouble_bytes, delay_us;
std::atomic<bool> for_ever;

// True if this call must fail.
bool is_due(Kind kind) {
  ++calls[kind];
  if (const int us = delay_us) usleep(unsigned(us));
  const long left = --until[kind];
  return left == 0 || (left < 0 && for_ever);
}

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

template <class Call>
ssize_t moving(Kind kind, size_t bytes, Call call) {
  if (!is_due(kind)) return call(bytes);
  if (trouble_code != 0) {
    errno = trouble_code;
    return -1;
  }
  // Moves whole pages and reports part of one more page. The real call must not get part of a page:
  // it would fill the rest with zeros.
  const size_t whole = size_t(trouble_bytes) / kPageBytes * kPageBytes;
  if (whole > 0 && call(whole) != ssize_t(whole)) return -1;
  return trouble_bytes;
}

ssize_t read_some(int fd, void* memory, size_t bytes, off_t offset) {
  static auto* const real = next<ssize_t(int, void*, size_t, off_t)>("pread");
  return moving(kRead, bytes, [&](size_t some) { return real(fd, memory, some, offset); });
}

ssize_t write_some(int fd, const void* memory, size_t bytes, off_t offset) {
  static auto* const real = next<ssize_t(int, const void*, size_t, off_t)>("pwrite");
  return moving(kWrite, bytes, [&](size_t some) { return real(fd, memory, some, offset); });
}

int reserve(int fd, int mode, off_t offset, off_t bytes) {
  static auto* const real = next<int(int, int, off_t, off_t)>("fallocate");
  if (!is_due(kReserve)) return real(fd, mode, offset, bytes);
  errno = trouble_code;
  return -1;
}

}  // namespace

extern "C" {

// `code` is an errno, or 0 to move only `bytes`. With `n` = 0 no call fails.
void arm(int kind, long n, int code, int bytes, int ever, int us) {
  trouble_code = code;
  trouble_bytes = bytes;
  for_ever = false;
  for (int each = 0; each < kKinds; ++each) {
    until[each] = each == kind && n > 0 ? n : LONG_MAX;
    calls[each] = 0;
  }
  for_ever = ever != 0 && n > 0;
  delay_us = us;
}

long calls_of(int kind) { return calls[kind]; }

ssize_t pread(int fd, void* m, size_t n, off_t at) { return read_some(fd, m, n, at); }
ssize_t pread64(int fd, void* m, size_t n, off_t at) { return read_some(fd, m, n, at); }
ssize_t pwrite(int fd, const void* m, size_t n, off_t at) { return write_some(fd, m, n, at); }
ssize_t pwrite64(int fd, const void* m, size_t n, off_t at) { return write_some(fd, m, n, at); }
int fallocate(int fd, int mode, off_t at, off_t n) { return reserve(fd, mode, at, n); }
int fallocate64(int fd, int mode, off_t at, off_t n) { return reserve(fd, mode, at, n); }
}
