// SPDX-License-Identifier: Apache-2.0

// Virtual memory and multicast objects of the emulated driver, with the driver's names and rules.
//
// Memory is an anonymous file, as in memory.cpp. A multicast object is one, too: its file says
// which memory each device has bound, and other processes read it through its descriptor. There is
// no memory at a multicast address: the PTX interpreter plays the switch, and its multimem
// instructions get the memory that is bound there from emu_multicast_find().
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tests/support/emulator/device.h"

extern "C" void* emu_device_get();

namespace emulator {
namespace {

constexpr uint64_t kGranularity = 2 << 20, kMulticastMagic = 0x52434d554c544943;
constexpr int kMostDevices = 64, kDeviceMemory = 1, kDescriptor = 1, kReadWrite = 3;
constexpr int kMostBound = 64;  // the most parts of an object that one device can bind
// Device attributes.
constexpr int kVirtualMemorySupported = 102, kDescriptorsSupported = 103, kMulticastSupported = 132;

// Memory that a device has bound to a part of an object.
struct Bound {
  int32_t pid, fd;
  uint64_t object_offset, memory_offset;
  // 0: nothing is bound. Written last, since other processes read while the device binds more.
  std::atomic<uint64_t> bytes;
};
struct ObjectFile {
  uint64_t magic, bytes;
  int32_t devices;
  std::atomic<int32_t> added;
  Bound bound[kMostDevices][kMostBound];
};

struct Allocation {
  int fd = -1;
  int device = -1;  // of memory that this process created
  uint64_t bytes = 0;
  ObjectFile* object = nullptr;  // of a multicast object
  std::map<int, int> slots;      // of devices that this process has added, by device
  // Memory that other processes have bound: its mapping here, and its size.
  std::map<const Bound*, std::pair<void*, uint64_t>> others_bound;
  // Memory that this process has bound, kept alive while it is bound.
  std::map<const Bound*, std::shared_ptr<Allocation>> own_bound;
  ~Allocation();
};

// A part of a range, to which one allocation is mapped in full.
struct Segment {
  uint64_t bytes;
  std::shared_ptr<Allocation> mapped;
  int device = -1;  // the first device that may use it; -1: none yet
};
// A reserved range of addresses.
struct Range {
  uint64_t bytes = 0;
  std::map<uint64_t, Segment> segments{};  // by address
};

struct Space {
  std::mutex mutex;
  uint64_t last_handle = 0;
  std::map<uint64_t, std::shared_ptr<Allocation>> handles;
  std::map<uint64_t, Range> ranges;  // by address
  std::vector<void*> devices;        // by CUdevice
  std::set<void*> without_multicast, without_memory;
  std::map<void*, uint64_t> used, room;  // bytes by device; no entry: unlimited
};
Space& space() {
  static auto* const made = new Space;
  return *made;
}

Allocation::~Allocation() {
  if (device >= 0) space().used[space().devices[size_t(device)]] -= bytes;
  for (const auto& [bound, mapped] : others_bound) munmap(mapped.first, mapped.second);
  if (object != nullptr) munmap(object, sizeof(ObjectFile));
  if (fd >= 0) close(fd);
}

int device_number(void* device) {
  auto& all = space().devices;
  const auto found = std::find(all.begin(), all.end(), device);
  if (found == all.end()) all.push_back(device);
  return int(std::find(all.begin(), all.end(), device) - all.begin());
}

bool is_device(int device) { return device >= 0 && size_t(device) < space().devices.size(); }

bool has_multicast(int device) {
  return is_device(device) && !space().without_multicast.contains(space().devices[size_t(device)]);
}

bool has_virtual_memory(int device) {
  return is_device(device) && !space().without_memory.contains(space().devices[size_t(device)]);
}

std::shared_ptr<Allocation> of_handle(uint64_t handle) {
  const auto found = space().handles.find(handle);
  return found == space().handles.end() ? nullptr : found->second;
}

uint64_t new_handle(std::shared_ptr<Allocation> made) {
  space().handles[++space().last_handle] = std::move(made);
  return space().last_handle;
}

void* map_all(int fd, uint64_t bytes) {
  void* ptr = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  return ptr == MAP_FAILED ? nullptr : ptr;
}

std::shared_ptr<Allocation> new_file(uint64_t bytes) {
  auto made = std::make_shared<Allocation>();
  made->fd = memfd_create("emulated-vmm", MFD_CLOEXEC);
  if (made->fd < 0 || ftruncate(made->fd, off_t(bytes)) != 0) return nullptr;
  made->bytes = bytes;
  return made;
}

bool whole(uint64_t bytes) { return bytes > 0 && bytes % kGranularity == 0; }

// Returns the address of bound memory in this process. If a rank of this process owns the memory,
// this is the owner's mapping, so that all ranks use one address per byte.
char* memory_of(Allocation& object, const Bound& bound) {
  if (bound.pid == getpid())
    for (auto& [begin, range] : space().ranges)
      for (auto& [address, segment] : range.segments)
        if (segment.mapped->fd == bound.fd && !segment.mapped->object)
          return reinterpret_cast<char*>(address);
  auto& [ptr, bytes] = object.others_bound[&bound];
  if (ptr == nullptr) {
    const std::string path = "/proc/" + std::to_string(bound.pid) + "/fd/";
    const int fd = open((path + std::to_string(bound.fd)).c_str(), O_RDWR | O_CLOEXEC);
    bytes = bound.memory_offset + bound.bytes;
    ptr = fd < 0 ? nullptr : map_all(fd, bytes);
    if (fd >= 0) close(fd);
  }
  return static_cast<char*>(ptr);
}

// Returns the entry of memory that a device has bound to all of these bytes, or nullptr.
Bound* bound_at(ObjectFile& object, int slot, uint64_t offset, uint64_t bytes) {
  for (Bound& each : object.bound[slot])
    if (each.bytes != 0 && each.object_offset <= offset &&
        offset + bytes <= each.object_offset + each.bytes)
      return &each;
  return nullptr;
}

// Returns a free entry for a binding to these bytes; nullptr if they overlap one or none is free.
Bound* room_for(ObjectFile& object, int slot, uint64_t offset, uint64_t bytes) {
  Bound* room = nullptr;
  for (Bound& each : object.bound[slot]) {
    if (each.bytes == 0)
      room = room == nullptr ? &each : room;
    else if (each.object_offset < offset + bytes && offset < each.object_offset + each.bytes)
      return nullptr;
  }
  return room;
}

// Returns the range that contains the bytes, or nullptr.
Range* range_at(uint64_t address, uint64_t bytes = 1) {
  auto found = space().ranges.upper_bound(address);
  if (found == space().ranges.begin()) return nullptr;
  --found;
  return address + bytes <= found->first + found->second.bytes ? &found->second : nullptr;
}

// Returns the segment that contains an address if a device may use it, else nullptr.
std::pair<const uint64_t, Segment>* segment_at(uint64_t address) {
  Range* const range = range_at(address);
  if (range == nullptr) return nullptr;
  auto found = range->segments.upper_bound(address);
  if (found == range->segments.begin()) return nullptr;
  --found;
  const bool inside = address < found->first + found->second.bytes;
  return inside && found->second.device >= 0 ? &*found : nullptr;
}

using Segments = std::map<uint64_t, Segment>;

// Returns the segments that exactly make up these bytes, without a gap; an empty pair if there are
// no such segments.
std::pair<Segments::iterator, Segments::iterator> whole_segments(Range* range, uint64_t address,
                                                                 uint64_t bytes) {
  if (range == nullptr) return {};
  const auto first = range->segments.find(address), none = range->segments.end();
  auto last = first;
  uint64_t end = address;
  for (; last != none && end < address + bytes && last->first == end; ++last)
    end += last->second.bytes;
  return end == address + bytes ? std::pair{first, last} : std::pair{none, none};
}

}  // namespace

extern "C" {

// The driver's structures, with the members used here.
struct CUmemLocation {
  int type, id;
};
struct CUmemAllocationProp {
  int type, requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;
  unsigned char allocFlags[8];
};
struct CUmemAccessDesc {
  CUmemLocation location;
  int flags;
};
struct CUmulticastObjectProp {
  unsigned numDevices;
  size_t size;
  unsigned long long handleTypes, flags;
};

int cuCtxGetDevice(int* device) {
  if (emu_device_get() == nullptr) return kInvalidContext;
  const std::lock_guard lock(space().mutex);
  *device = device_number(emu_device_get());
  return kSuccess;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  const std::lock_guard lock(space().mutex);
  if (attribute == kMulticastSupported)
    *value = has_multicast(device) ? 1 : 0;
  else if (attribute == kVirtualMemorySupported || attribute == kDescriptorsSupported)
    *value = has_virtual_memory(device) ? 1 : 0;
  else
    return kInvalidValue;
  return kSuccess;
}

int cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* prop,
                                  int option) {
  if (prop->type != 1 || prop->location.type != kDeviceMemory || (option != 0 && option != 1))
    return kInvalidValue;
  *granularity = kGranularity;
  return kSuccess;
}

int cuMulticastGetGranularity(size_t* granularity, const CUmulticastObjectProp*, int) {
  *granularity = kGranularity;
  return kSuccess;
}

int cuMulticastCreate(uint64_t* handle, const CUmulticastObjectProp* prop) {
  if (!whole(prop->size) || prop->numDevices < 1 || prop->numDevices > kMostDevices ||
      prop->handleTypes != kDescriptor || prop->flags != 0)
    return kInvalidValue;
  const std::lock_guard lock(space().mutex);
  auto made = new_file(sizeof(ObjectFile));
  void* ptr = made ? map_all(made->fd, sizeof(ObjectFile)) : nullptr;
  if (ptr == nullptr) return kOutOfMemory;
  made->object = static_cast<ObjectFile*>(ptr);
  made->object->magic = kMulticastMagic;
  made->object->bytes = made->bytes = prop->size;
  made->object->devices = int32_t(prop->numDevices);
  *handle = new_handle(std::move(made));
  return kSuccess;
}

int cuMulticastAddDevice(uint64_t handle, int device) {
  const std::lock_guard lock(space().mutex);
  const auto object = of_handle(handle);
  if (!object || !object->object || object->slots.contains(device)) return kInvalidValue;
  if (!has_multicast(device)) return kNotSupported;
  const int slot = object->object->added++;
  if (slot >= object->object->devices) return kInvalidValue;
  object->slots[device] = slot;
  return kSuccess;
}

// If devices were missing, the driver would wait for them; here this is an error.
int cuMulticastBindMem(uint64_t handle, size_t object_offset, uint64_t memory, size_t memory_offset,
                       size_t bytes, unsigned long long flags) {
  const std::lock_guard lock(space().mutex);
  const auto object = of_handle(handle), bound = of_handle(memory);
  if (!object || !object->object || !bound || bound->object || flags != 0 || !whole(bytes) ||
      object_offset % kGranularity != 0 || memory_offset % kGranularity != 0 ||
      object_offset + bytes > object->bytes || memory_offset + bytes > bound->bytes ||
      !object->slots.contains(bound->device))
    return kInvalidValue;
  if (object->object->added < object->object->devices) return kIllegalState;
  Bound* const room =
      room_for(*object->object, object->slots.at(bound->device), object_offset, bytes);
  if (room == nullptr) return kInvalidValue;
  room->pid = getpid();
  room->fd = bound->fd;
  room->object_offset = object_offset;
  room->memory_offset = memory_offset;
  room->bytes = bytes;
  object->own_bound[room] = bound;
  return kSuccess;
}

int cuMulticastUnbind(uint64_t handle, int device, size_t offset, size_t bytes) {
  const std::lock_guard lock(space().mutex);
  const auto object = of_handle(handle);
  if (!object || !object->object || !object->slots.contains(device)) return kInvalidValue;
  Bound* const found = bound_at(*object->object, object->slots.at(device), offset, bytes);
  if (found == nullptr || found->bytes != bytes) return kInvalidValue;
  found->bytes = 0;
  object->own_bound.erase(found);
  return kSuccess;
}

int cuMemCreate(uint64_t* handle, size_t bytes, const CUmemAllocationProp* prop,
                unsigned long long flags) {
  if (!whole(bytes) || prop->type != 1 || prop->location.type != kDeviceMemory || flags != 0)
    return kInvalidValue;
  const std::lock_guard lock(space().mutex);
  if (!is_device(prop->location.id)) return kInvalidValue;
  void* const device = space().devices[size_t(prop->location.id)];
  const auto room = space().room.find(device);
  if (room != space().room.end() && space().used[device] + bytes > room->second)
    return kOutOfMemory;
  auto made = new_file(bytes);
  if (!made) return kOutOfMemory;
  made->device = prop->location.id;
  space().used[device] += bytes;
  *handle = new_handle(std::move(made));
  return kSuccess;
}

int cuMemRelease(uint64_t handle) {
  const std::lock_guard lock(space().mutex);
  return space().handles.erase(handle) == 1 ? kSuccess : kInvalidValue;
}

int cuMemExportToShareableHandle(void* shared, uint64_t handle, int type, unsigned long long) {
  const std::lock_guard lock(space().mutex);
  const auto exported = of_handle(handle);
  if (!exported || type != kDescriptor) return kInvalidValue;
  *static_cast<int*>(shared) = fcntl(exported->fd, F_DUPFD_CLOEXEC, 0);
  return kSuccess;
}

int cuMemImportFromShareableHandle(uint64_t* handle, void* shared, int type) {
  if (type != kDescriptor) return kInvalidValue;
  const int fd = fcntl(int(reinterpret_cast<intptr_t>(shared)), F_DUPFD_CLOEXEC, 0);
  struct stat file{};
  if (fd < 0 || fstat(fd, &file) != 0) return kInvalidValue;
  const std::lock_guard lock(space().mutex);
  auto made = std::make_shared<Allocation>();
  made->fd = fd;
  made->bytes = uint64_t(file.st_size);
  uint64_t magic = 0;
  if (pread(fd, &magic, sizeof magic, 0) == sizeof magic && magic == kMulticastMagic) {
    void* ptr = map_all(fd, sizeof(ObjectFile));
    if (ptr == nullptr) return kOutOfMemory;
    made->object = static_cast<ObjectFile*>(ptr);
    made->bytes = made->object->bytes;
  }
  if (!whole(made->bytes)) return kInvalidValue;
  *handle = new_handle(std::move(made));
  return kSuccess;
}

int cuMemAddressReserve(uint64_t* address, size_t bytes, size_t, uint64_t, unsigned long long) {
  if (!whole(bytes)) return kInvalidValue;
  void* ptr = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (ptr == MAP_FAILED) return kOutOfMemory;
  const std::lock_guard lock(space().mutex);
  *address = reinterpret_cast<uint64_t>(ptr);
  space().ranges[*address] = Range{bytes};
  return kSuccess;
}

int cuMemAddressFree(uint64_t address, size_t bytes) {
  const std::lock_guard lock(space().mutex);
  const auto found = space().ranges.find(address);
  if (found == space().ranges.end() || found->second.bytes != bytes ||
      !found->second.segments.empty())
    return kInvalidValue;
  munmap(reinterpret_cast<void*>(address), bytes);
  space().ranges.erase(found);
  return kSuccess;
}

// Like the driver, maps memory only from its first byte.
int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long) {
  const std::lock_guard lock(space().mutex);
  Range* const range = range_at(address, bytes);
  const auto mapped = of_handle(handle);
  if (range == nullptr || !mapped || !whole(bytes) || address % 4096 != 0 || offset != 0 ||
      bytes > mapped->bytes)
    return kInvalidValue;
  const auto next = range->segments.lower_bound(address);
  if (next != range->segments.end() && next->first < address + bytes) return kInvalidValue;
  if (next != range->segments.begin() &&
      std::prev(next)->first + std::prev(next)->second.bytes > address)
    return kInvalidValue;
  if (mapped->object && mapped->object->added < mapped->object->devices) return kIllegalState;
  range->segments.insert({address, Segment{bytes, mapped}});
  return kSuccess;
}

int cuMemSetAccess(uint64_t address, size_t bytes, const CUmemAccessDesc* access, size_t count) {
  const std::lock_guard lock(space().mutex);
  const auto [first, last] = whole_segments(range_at(address, bytes), address, bytes);
  if (first == last || count < 1) return kInvalidValue;
  for (size_t i = 0; i < count; ++i)
    if (access[i].location.type != kDeviceMemory || !is_device(access[i].location.id) ||
        access[i].flags != kReadWrite)
      return kInvalidValue;
  for (auto it = first; it != last; ++it) {
    Segment& segment = it->second;
    if (segment.device >= 0) continue;
    if (!segment.mapped->object &&
        mmap(reinterpret_cast<void*>(it->first), segment.bytes, PROT_READ | PROT_WRITE,
             MAP_SHARED | MAP_FIXED, segment.mapped->fd, 0) == MAP_FAILED)
      return kOutOfMemory;
    segment.device = access[0].location.id;
  }
  return kSuccess;
}

int cuMemUnmap(uint64_t address, size_t bytes) {
  const std::lock_guard lock(space().mutex);
  Range* const range = range_at(address, bytes);
  const auto [first, last] = whole_segments(range, address, bytes);
  if (first == last) return kInvalidValue;
  mmap(reinterpret_cast<void*>(address), bytes, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  range->segments.erase(first, last);
  return kSuccess;
}

// ---- for EmulatedRuntime and the PTX interpreter ----------------------------------------------

// Removes the device from its NVSwitch.
void emu_device_without_multicast(void* device) {
  const std::lock_guard lock(space().mutex);
  space().without_multicast.insert(device);
}

// Returns how many handles and address ranges this process holds.
int emu_vmm_in_use() {
  const std::lock_guard lock(space().mutex);
  return int(space().handles.size() + space().ranges.size());
}

// Disables the device's virtual memory management.
void emu_device_without_virtual_memory(void* device) {
  const std::lock_guard lock(space().mutex);
  space().without_memory.insert(device);
}

// Limits the bytes of memory that this module allocates on a device.
void emu_vmm_set_room(void* device, uint64_t bytes) {
  const std::lock_guard lock(space().mutex);
  space().room[device] = bytes;
}

uint64_t emu_vmm_used(void* device) {
  const std::lock_guard lock(space().mutex);
  return space().used[device];
}

// Returns the device that may use the memory at an address, or null.
void* emu_vmm_device_at(uint64_t address) {
  const std::lock_guard lock(space().mutex);
  const auto* found = segment_at(address);
  return found == nullptr ? nullptr : space().devices[size_t(found->second.device)];
}

// Writes to `begins` where a device's ranges begin to which memory of this process (`imported`: of
// another process) is mapped; at most `room`. Returns how many ranges there are.
int emu_vmm_ranges(void* device, int imported, uint64_t* begins, int room) {
  const std::lock_guard lock(space().mutex);
  int count = 0;
  for (const auto& [begin, range] : space().ranges) {
    const bool listed =
        std::any_of(range.segments.begin(), range.segments.end(), [&](const auto& each) {
          const Segment& segment = each.second;
          return segment.device >= 0 && !segment.mapped->object &&
                 (segment.mapped->device < 0) == (imported != 0) &&
                 space().devices[size_t(segment.device)] == device;
        });
    if (listed && count < room) begins[count] = begin;
    count += listed;
  }
  return count;
}

// Returns 1 if an address is in mapped memory; multicast addresses are not.
int emu_vmm_find(uint64_t address, uint64_t* begin, uint64_t* bytes) {
  const std::lock_guard lock(space().mutex);
  const auto* found = segment_at(address);
  if (found == nullptr || found->second.mapped->object) return 0;
  *begin = found->first;
  *bytes = found->second.bytes;
  return 1;
}

// Writes the addresses of all memory that is bound to `bytes` bytes at a multicast address; at most
// `room`. Returns their number; 0: not a multicast address; -1: a device has bound nothing there.
int emu_multicast_find(uint64_t address, uint64_t bytes, uint64_t* memory, int room) {
  const std::lock_guard lock(space().mutex);
  const auto* found = segment_at(address);
  if (found == nullptr || !found->second.mapped->object) return 0;
  if (address + bytes > found->first + found->second.bytes) return 0;
  Allocation& object = *found->second.mapped;
  const uint64_t at = address - found->first;
  const int devices = object.object->devices;
  for (int d = 0; d < devices && d < room; ++d) {
    const Bound* const bound = bound_at(*object.object, d, at, bytes);
    char* const base = bound == nullptr ? nullptr : memory_of(object, *bound);
    if (base == nullptr) return -1;
    memory[d] = reinterpret_cast<uint64_t>(base) + at - bound->object_offset + bound->memory_offset;
  }
  return devices;
}

}  // extern "C"

}  // namespace emulator
