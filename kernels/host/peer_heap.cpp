// SPDX-License-Identifier: Apache-2.0

// Opens the heap of another process, checks the file, and only then maps it.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "kernels/host/heap.h"

namespace ringcomm::host {
namespace {

// Returns the reason why the file that a peer announced cannot be its heap; empty: it can be.
std::string unlike_a_heap(int fd, uint64_t capacity_bytes) {
  struct stat st{};
  if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) return "it is no memory file";
  const int seals = fcntl(fd, F_GET_SEALS);
  // A new file in a tmpfs directory has the seal F_SEAL_SEAL alone, with or without a name.
  if (seals < 0) return "it is no memory file";
  if (seals != F_SEAL_SEAL && (seals & kSizeSeals) != kSizeSeals) return "its size is not sealed";
  if (st.st_uid != geteuid())
    return "it belongs to user " + std::to_string(st.st_uid) + ", not to user " +
           std::to_string(geteuid());
  if ((st.st_mode & 0077) != 0) return "other users may open it";
  if (uint64_t(st.st_size) != capacity_bytes)
    return "its size is " + std::to_string(st.st_size) + ", announced " +
           std::to_string(capacity_bytes);
  return "";
}

}  // namespace

std::unique_ptr<Mapping> map_peer_heap(int pid, int fd, uint64_t capacity_bytes, uint64_t token) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int peer = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (peer < 0) {
    const int code = errno;
    throw HeapError(
        code, "cannot open the peer's heap at " + path + ": " + std::strerror(code) +
                  " (another user's process, a separate PID namespace, or a peer that has ended)");
  }
  if (const std::string why = unlike_a_heap(peer, capacity_bytes); !why.empty()) {
    close(peer);
    throw HeapError(EINVAL, path + " is not the heap that the peer announced: " + why);
  }
  auto mapping = std::make_unique<Mapping>(peer, capacity_bytes);
  uint64_t found = 0;
  std::memcpy(&found, mapping->base(), sizeof(found));
  if (found != token)
    throw HeapError(EINVAL, path + " is not the heap that the peer announced: its token differs");
  return mapping;
}

}  // namespace ringcomm::host
