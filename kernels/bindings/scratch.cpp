// SPDX-License-Identifier: Apache-2.0

// Binds ScratchPool and ScratchRequest of ringcomm._native, and facts about a file's direct I/O.
#include "kernels/host/scratch.h"

#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "kernels/bindings/gil.h"
#include "kernels/bindings/module.h"

namespace nb = nanobind;

namespace ringcomm::host {
namespace {

// In a forked child the threads belong to the parent, and a thread may hold the lock, so the pool
// is never destroyed there, nor at the end of a process whose disk hangs.
struct NativeScratch {
  std::unique_ptr<ScratchPool> pool;
  pid_t pid = getpid();
  bool hangs = false;  // true if the last close() has left a transfer under way
  nb::object kept;     // objects that must live while a transfer hangs

  NativeScratch(int fd, int threads, uint64_t cut_bytes)
      : pool(std::make_unique<ScratchPool>(fd, threads, cut_bytes)) {}
  ~NativeScratch() {
    if (getpid() != pid || hangs) static_cast<void>(pool.release());
  }
};

struct NativeScratchRequest {
  std::shared_ptr<NativeScratch> scratch;
  ScratchRequestPtr request;
};

[[noreturn]] void raise_errno(int code) {
  errno = code;
  PyErr_SetFromErrno(PyExc_OSError);
  throw nb::python_error();
}

bool interrupted_on_main_thread() {
  return syscall(SYS_gettid) == getpid() && Waiter::interrupt_hook() != 0;
}

const char* name_of_end(ScratchEnd end) {
  switch (end) {
    case ScratchEnd::kDone:
      return "done";
    case ScratchEnd::kFailed:
      return "failed";
    case ScratchEnd::kTruncated:
      return "truncated";
    case ScratchEnd::kStalled:
      return "stalled";
    case ScratchEnd::kDamaged:
      return "damaged";
    case ScratchEnd::kClosed:
      return "closed";
    case ScratchEnd::kLate:
      return "late";
  }
  return "";
}

const char* words_of(ScratchPool::Refusal refusal) {
  switch (refusal) {
    case ScratchPool::Refusal::kNone:
      return "";
    case ScratchPool::Refusal::kClosed:
      return "expected a pool that is not closed";
    case ScratchPool::Refusal::kNoExtent:
      return "extent: expected one of add_extent()";
    case ScratchPool::Refusal::kUnaligned:
      return "memory: expected an address and a size that are multiples of 4096, and not 0";
    case ScratchPool::Refusal::kTooLong:
      return "memory: expected no more than the extent holds";
    case ScratchPool::Refusal::kOtherSize:
      return "memory: expected as many bytes as the extent's last write had";
  }
  return "";
}

NativeScratchRequest submit(const std::shared_ptr<NativeScratch>& s, bool is_write, uint32_t extent,
                            uintptr_t memory, uint64_t bytes) {
  NativeScratchRequest r{s, nullptr};
  ScratchPool::Refusal refusal;
  int code = 0;
  {
    const WithoutGil nogil;
    try {
      refusal = s->pool->submit({is_write, extent, at(memory), bytes}, &r.request);
    } catch (const std::system_error& e) {  // no thread could start
      code = e.code().value();
    }
  }
  if (code != 0) raise_errno(code);
  if (refusal != ScratchPool::Refusal::kNone) throw nb::value_error(words_of(refusal));
  return r;
}

std::optional<Named<nb::any>> result_of(const NativeScratchRequest& r) {
  const ScratchResult result = r.scratch->pool->result(*r.request);
  if (result.end == ScratchEnd::kDone) return std::nullopt;
  nb::dict d;
  d["end"] = name_of_end(result.end);
  d["operation"] = result.is_write ? "write" : "read";
  d["errno"] = result.code;
  d["offset_bytes"] = result.offset;
  d["size_bytes"] = result.bytes;
  d["wanted_sum"] = result.wanted_sum;
  d["seen_sum"] = result.seen_sum;
  return d;
}

// Returns the alignment that direct I/O requires of addresses and offsets; Linux reports it since
// 6.1. 0: no direct I/O for this file; -1: the alignment is unknown. The code contains the layout
// of struct statx, since older C libraries lack these fields.
int direct_alignment(int fd) {
  constexpr unsigned kDirectAlignment = 0x2000;  // STATX_DIOALIGN
  constexpr int kMaskAt = 0, kMemoryAt = 0x98, kOffsetAt = 0x9c;
  alignas(8) char status[256] = {};
  if (syscall(SYS_statx, fd, "", 0x1000 /* AT_EMPTY_PATH */, kDirectAlignment, status) != 0)
    return -1;
  uint32_t mask, memory, offset;
  std::memcpy(&mask, status + kMaskAt, 4);
  std::memcpy(&memory, status + kMemoryAt, 4);
  std::memcpy(&offset, status + kOffsetAt, 4);
  if ((mask & kDirectAlignment) == 0) return -1;
  return int(std::max(memory, offset));
}

// Returns the magic number of the file system, as in statfs(2).
uint64_t file_system_type(int fd) {
  struct statfs status;
  if (fstatfs(fd, &status) != 0) raise_errno(errno);
  return uint64_t(uint32_t(status.f_type));
}

}  // namespace

void bind_scratch(nb::module_& m) {
  m.def("direct_alignment", &direct_alignment, nb::arg("fd"),
        "What direct I/O of this file goes by; 0: it has none; -1: the kernel does not say.");
  m.def("file_system_type", &file_system_type, nb::arg("fd"),
        "The magic number of statfs(2). Raises OSError.");
  nb::class_<NativeScratch>(
      m, "ScratchPool",
      "A few threads that write and read a file open for direct I/O, in extents.\n\n"
      "The descriptor stays the caller's, and must be open until close(). Requests that share a\n"
      "extent or bytes of memory run in the order of their submission. Addresses and sizes are\n"
      "multiples of 4096. Each extent has in RAM the checksums of its last write; reads compare.\n"
      "In a forked child nothing of it may be called.")
      .def(
          "__init__",
          [](NativeScratch* self, int fd, int threads, uint64_t cut_bytes) {
            if (threads < 1) throw nb::value_error("threads must be at least 1");
            if (cut_bytes == 0 || cut_bytes % kScratchPageBytes != 0)
              throw nb::value_error("cut_bytes must be a multiple of 4096, and not 0");
            new (self) NativeScratch(fd, threads, cut_bytes);
          },
          nb::arg("fd"), nb::arg("threads") = kScratchThreads,
          nb::arg("cut_bytes") = kScratchCutBytes,
          "`threads` share a request in pieces of `cut_bytes`.")
      .def(
          "add_extent",
          [](NativeScratch& s, uint64_t bytes) {
            uint32_t extent = 0;
            int code;
            {
              const WithoutGil nogil;
              code = s.pool->add_extent(bytes, &extent);
            }
            if (code != 0) raise_errno(code);
            return extent;
          },
          nb::arg("size_bytes"), "Reserves space at the end of the file. Raises OSError.")
      .def(
          "write",
          [](const std::shared_ptr<NativeScratch>& s, uint32_t extent, uintptr_t ptr,
             uint64_t bytes) { return submit(s, true, extent, ptr, bytes); },
          nb::arg("extent"), nb::arg("ptr"), nb::arg("size_bytes"),
          "Raises ValueError for what does not fit, and OSError where no thread starts.")
      .def(
          "read",
          [](const std::shared_ptr<NativeScratch>& s, uint32_t extent, uintptr_t ptr,
             uint64_t bytes) { return submit(s, false, extent, ptr, bytes); },
          nb::arg("extent"), nb::arg("ptr"), nb::arg("size_bytes"),
          "Reads as many bytes as the last write had; of an extent without one, any number of "
          "zeros.\n\n"
          "Raises as write().")
      .def(
          "counters",
          [](const NativeScratch& s) -> Named<int> {
            const ScratchCounters now = s.pool->counters();
            nb::dict d;
            d["bytes_read"] = now.bytes_read;
            d["bytes_written"] = now.bytes_written;
            d["reading_ns"] = now.reading_ns;
            d["writing_ns"] = now.writing_ns;
            return d;
          },
          "bytes_read, bytes_written; reading_ns, writing_ns: while at least one was under way.")
      .def(
          "close",
          [](NativeScratch& s, double limit_s, nb::object kept) {
            {
              const WithoutGil nogil;
              s.hangs = !s.pool->close(ScratchPool::Limit(limit_s));
            }
            s.kept = s.hangs ? std::move(kept) : nb::object();
            return !s.hangs;
          },
          nb::arg("limit_s"), nb::arg("kept").none(),
          "What has not begun ends as `closed`; returns True when nothing is under way.\n\n"
          "Returns False after the limit. Then the pool keeps ``kept`` alive until a later call\n"
          "has returned True; the descriptor and all memory under transfer must stay as long.");
  nb::class_<NativeScratchRequest>(m, "ScratchRequest",
                                   "A read or write; its memory must stay until it is done.")
      .def("done", [](const NativeScratchRequest& r) { return r.request->done(); })
      .def(
          "wait",
          [](const NativeScratchRequest& r, double limit_s) {
            if (!r.request->done()) {
              ScratchPool::Waited waited;
              {
                const WithoutGil nogil;
                waited = r.scratch->pool->wait(*r.request, &interrupted_on_main_thread,
                                               ScratchPool::Limit(limit_s));
              }
              if (waited == ScratchPool::Waited::kInterrupted) throw nb::python_error();
            }
            return result_of(r);
          },
          nb::arg("limit_s"),
          "Returns None when it ended well, else how it did; a signal handler may raise.\n\n"
          "`end`: failed (a system call, with `errno`), truncated, stalled, damaged (with\n"
          "`wanted_sum` and `seen_sum`), closed, or late: the limit is over, and the transfer\n"
          "goes on. `operation` (read or write), `offset_bytes` and `size_bytes` say what of the\n"
          "file it is about; the fault may be an earlier request's of the extent.");
}

}  // namespace ringcomm::host
