// SPDX-License-Identifier: Apache-2.0

// Preloaded before the C library (LD_PRELOAD) in a process of test_numa.py: prints the calls of
// mbind, and answers them as a kernel with many nodes would.
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <cstdarg>
#include <cstdio>
#include <vector>

// Has the signature of the C library's function.
extern "C" long syscall(long number, ...) noexcept {
  long a[6];
  va_list list;
  va_start(list, number);
  for (long& each : a) each = va_arg(list, long);
  va_end(list);
  if (number != SYS_mbind) {
    using Call = long(long, long, long, long, long, long, long);
    static auto* const next = reinterpret_cast<Call*>(dlsym(RTLD_NEXT, "syscall"));
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  }
  std::vector<unsigned char> pages(size_t(a[1]) / 4096);
  long touched = mincore(reinterpret_cast<void*>(a[0]), size_t(a[1]), pages.data());
  for (const unsigned char page : pages) touched += page & 1;
  std::printf("%ld bytes, mode %d, nodes", a[1], int(a[2]));
  const auto* mask = reinterpret_cast<const unsigned long*>(a[3]);
  for (int bit = 0; bit < a[4] - 1; ++bit)
    if (mask[bit / 64] >> (bit % 64) & 1) std::printf(" %d", bit);
  std::printf(", flags %d, touched before %ld\n", int(a[5]), touched);
  std::fflush(stdout);
  return 0;
}
