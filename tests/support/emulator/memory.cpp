// SPDX-License-Identifier: Apache-2.0

// Device memory of the emulated driver: anonymous files, which other processes map through
// /proc/<pid>/fd as CUDA maps memory through IPC handles.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "tests/support/emulator/device.h"

namespace emulator {
namespace {

constexpr uint64_t kMagic = 0x52434d4544484e44;

struct Handle {
  uint64_t magic;
  int64_t pid;
  int64_t fd;
  uint64_t bytes;
  char reserved[32];
};
static_assert(sizeof(Handle) == 64);  // as CUipcMemHandle

struct FileMapping {
  int fd;  // -1: another process's
  uint64_t bytes;
};

std::mutex& file_mappings_mutex() {
  static auto* const made = new std::mutex;
  return *made;
}
std::map<void*, FileMapping>& file_mappings() {
  static auto* const made = new std::map<void*, FileMapping>;
  return *made;
}

void* map_file(int fd, uint64_t bytes) {
  void* ptr = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  return ptr == MAP_FAILED ? nullptr : ptr;
}

// Unmaps memory that this process allocated (own) or opened from another process.
int drop(void* ptr, bool own) {
  const std::lock_guard lock(file_mappings_mutex());
  const auto found = file_mappings().find(ptr);
  if (found == file_mappings().end() || (found->second.fd >= 0) != own) return kInvalidValue;
  munmap(ptr, found->second.bytes);
  if (own) close(found->second.fd);
  file_mappings().erase(found);
  return kSuccess;
}

}  // namespace

extern "C" {

void* emu_memory_allocate(uint64_t bytes) {
  const int fd = memfd_create("emulated-device", MFD_CLOEXEC);
  if (fd < 0) return nullptr;
  void* ptr = ftruncate(fd, off_t(bytes)) == 0 ? map_file(fd, bytes) : nullptr;
  if (ptr == nullptr) {
    close(fd);
    return nullptr;
  }
  const std::lock_guard lock(file_mappings_mutex());
  file_mappings()[ptr] = {fd, bytes};
  return ptr;
}

int emu_memory_free(void* ptr) { return drop(ptr, true); }

int emu_memory_export(void* ptr, char* handle) {
  const std::lock_guard lock(file_mappings_mutex());
  const auto found = file_mappings().find(ptr);
  if (found == file_mappings().end() || found->second.fd < 0) return kInvalidValue;
  const Handle made{kMagic, getpid(), found->second.fd, found->second.bytes, {}};
  std::memcpy(handle, &made, sizeof(made));
  return kSuccess;
}

// Like CUDA, refuses a handle of the calling process.
int emu_memory_open(const char* handle, void** ptr) {
  Handle given;
  std::memcpy(&given, handle, sizeof(given));
  if (given.magic != kMagic) return kInvalidValue;
  if (given.pid == getpid()) return kInvalidContext;
  const std::string path = "/proc/" + std::to_string(given.pid) + "/fd/" + std::to_string(given.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return kInvalidHandle;
  *ptr = map_file(fd, given.bytes);
  close(fd);
  if (*ptr == nullptr) return kOutOfMemory;
  const std::lock_guard lock(file_mappings_mutex());
  file_mappings()[*ptr] = {-1, given.bytes};
  return kSuccess;
}

// Finds the device memory that contains an address, allocated or opened by this process.
int emu_memory_find(uint64_t address, uint64_t* begin, uint64_t* bytes) {
  const std::lock_guard lock(file_mappings_mutex());
  auto found = file_mappings().upper_bound(reinterpret_cast<void*>(address));
  if (found == file_mappings().begin()) return 0;
  --found;
  *begin = reinterpret_cast<uint64_t>(found->first);
  *bytes = found->second.bytes;
  return address < *begin + *bytes ? 1 : 0;
}

int emu_memory_close(void* ptr) { return drop(ptr, false); }

}  // extern "C"

}  // namespace emulator
