// SPDX-License-Identifier: Apache-2.0

// The exported functions: the driver's own entry points, and what EmulatedRuntime calls.
#include <cstring>
#include <memory>
#include <vector>

#include "tests/ptx_interpreter/source/interpreter.h"
#include "tests/support/emulator/device.h"
#include "tests/support/emulator/kernel.h"

using CUresult = int;
using CUdeviceptr = unsigned long long;
using CUfunction = void*;
using CUstream = void*;

namespace emulator {
namespace {

thread_local Device* current_device = nullptr;  // like a context, per thread

// Returns the stream of a handle on this thread's current device, or nullptr.
Stream* resolve(CUstream handle) {
  if (current_device == nullptr) return nullptr;
  if (handle == nullptr) return current_device->legacy;
  auto* stream = static_cast<Stream*>(handle);
  return stream->device == current_device ? stream : nullptr;
}

// The parameters that a launch passes as `extra`: one buffer, and its bytes.
struct Packed {
  const void* params;
  size_t bytes;

  // Returns false if `extra` is not such a list.
  static bool read(void* const* extra, Packed& found) {
    constexpr uintptr_t kPointer = 1, kSize = 2;
    if (extra == nullptr || reinterpret_cast<uintptr_t>(extra[0]) != kPointer ||
        reinterpret_cast<uintptr_t>(extra[2]) != kSize || extra[4] != nullptr)
      return false;
    found = {extra[1], *static_cast<const size_t*>(extra[3])};
    return true;
  }
};

// The resources of a block of this kernel with `dynamic_bytes` of dynamic shared memory.
Resources resources_of(const Device& device, const EmulatedKernel& kernel, int dynamic_bytes) {
  const int shared_bytes = kernel.shared_bytes + dynamic_bytes;
  return emulator::resources_of(device, Needs{kernel.registers, shared_bytes, kernel.threads});
}

// Returns the kernel's parameters laid out as a structure: each at a multiple of its size.
std::vector<char> laid_out(const EmulatedKernel& kernel, void** parameters) {
  std::vector<char> bytes;
  for (size_t i = 0; i < kernel.parameter_bytes.size(); ++i) {
    const size_t size = size_t(kernel.parameter_bytes[i]);
    bytes.resize((bytes.size() + size - 1) / size * size);
    const char* const from = static_cast<const char*>(parameters[i]);
    bytes.insert(bytes.end(), from, from + size);
  }
  return bytes;
}

int bad_stream() { return current_device == nullptr ? kInvalidContext : kInvalidHandle; }

const char* text_of(int result) {
  switch (result) {
    case kSuccess:
      return "no error";
    case kInvalidValue:
      return "invalid argument";
    case kOutOfMemory:
      return "out of memory";
    case kInvalidContext:
      return "invalid device context";
    case kInvalidHandle:
      return "invalid resource handle";
    case kIllegalState:
      return "the operation cannot be performed in the present state";
    case kNotSupported:
      return "operation not supported";
    case kLaunchFailed:
      return ptx_failure();
    case kLaunchTooLarge:
      return "too many blocks in cooperative launch";
    case kCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case kCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case kCaptureUnjoined:
      return "capturing stream has unjoined work";
    case kCaptureIsolation:
      return "dependency created on uncaptured work in another stream";
    case kCaptureImplicit:
      return "operation would make the legacy stream depend on a capturing blocking stream";
    case kCapturedEvent:
      return "operation not permitted on an event last recorded in a capturing stream";
  }
  return nullptr;
}

}  // namespace

extern "C" {

CUresult cuLaunchKernel(CUfunction f, unsigned gridDimX, unsigned gridDimY, unsigned gridDimZ,
                        unsigned blockDimX, unsigned blockDimY, unsigned blockDimZ,
                        unsigned sharedMemBytes, CUstream hStream, void** kernelParams,
                        void** extra) {
  Stream* stream = resolve(hStream);
  if (stream == nullptr) return bad_stream();
  if (f == nullptr || gridDimX == 0 || gridDimY == 0 || gridDimZ != 1 || blockDimX == 0 ||
      blockDimY != 1 || blockDimZ != 1 || (kernelParams == nullptr) == (extra == nullptr))
    return kInvalidValue;
  const int blocks = int(gridDimX * gridDimY);
  const auto* kernel = static_cast<const EmulatedKernel*>(f);
  // A launch may have at most the number of threads that the kernel was compiled for.
  if (kernel->run_with == nullptr && int(blockDimX) > kernel->threads) return kInvalidValue;
  Packed packed{};
  if (kernel->run_with != nullptr
          ? kernelParams == nullptr
          : !Packed::read(extra, packed) || packed.bytes != kernel->params_bytes)
    return kInvalidValue;
  Device& device = *stream->device;
  const Resources each = resources_of(device, *kernel, int(sharedMemBytes));
  // A GPU runs the blocks of a large grid in waves; blocks that wait for blocks of a later wave
  // would never end.
  const int at_once = kernel->waits ? blocks : 1;
  if (at_once > device.multiprocessors * blocks_each(device, each)) return kLaunchTooLarge;
  if (kernel->run_with != nullptr)
    return submit(*stream, [=, bytes = laid_out(*kernel, kernelParams)] {
      kernel->run_with(bytes.data(), int(bytes.size()), int(gridDimX), int(gridDimY),
                       int(blockDimX), int(sharedMemBytes));
    });
  const auto params = std::make_shared<ringcomm::device::ListParams>();  // the longest kind
  std::memcpy(static_cast<void*>(params.get()), packed.params, packed.bytes);
  return submit(*stream, [=, &device, priority = stream->priority] {
    run_blocks(device, at_once, each, priority,
               [&] { kernel->run(*params, int(gridDimX), int(gridDimY), int(blockDimX)); });
  });
}

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream) {
  Stream* stream = resolve(hStream);
  if (stream == nullptr) return bad_stream();
  return submit(*stream, [=] {
    std::memcpy(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), ByteCount);
  });
}

CUresult cuStreamIsCapturing(CUstream hStream, int* captureStatus) {
  Stream* stream = resolve(hStream);
  if (stream == nullptr) return bad_stream();
  *captureStatus = capturing(*stream) ? 1 : 0;
  return kSuccess;
}

CUresult cuEventQuery(void* event) {
  constexpr CUresult kNotReady = 600;
  bool done = false;
  const int result = query(*static_cast<Event*>(event), done);
  return result != kSuccess || done ? result : kNotReady;
}

CUresult cuEventCreate(void** event, unsigned /*flags*/) {
  if (current_device == nullptr) return kInvalidContext;
  *event = new Event{};
  return kSuccess;
}

CUresult cuEventRecord(void* event, CUstream hStream) {
  Stream* stream = resolve(hStream);
  return stream == nullptr ? bad_stream() : record(*stream, *static_cast<Event*>(event));
}

CUresult cuEventSynchronize(void* event) { return synchronize(*static_cast<Event*>(event)); }

CUresult cuStreamWaitEvent(CUstream hStream, void* event, unsigned /*flags*/) {
  Stream* stream = resolve(hStream);
  return stream == nullptr ? bad_stream() : wait_for(*stream, *static_cast<Event*>(event));
}

// A capture here restricts no other threads.
CUresult cuThreadExchangeStreamCaptureMode(int* /*mode*/) { return kSuccess; }

CUresult cuGetErrorString(CUresult error, const char** pStr) {
  *pStr = text_of(error);
  return *pStr == nullptr ? kInvalidValue : kSuccess;
}

// ---- for EmulatedRuntime ----------------------------------------------------------------------

uint64_t emu_params_bytes() { return sizeof(ringcomm::device::LaunchParams); }

void* emu_device_make(int multiprocessors, int blocks_each, int hardware_queues) {
  return make_device(multiprocessors, blocks_each, hardware_queues);
}
int emu_device_blocks_each(void* device, void* kernel) {
  const Device& on = *static_cast<Device*>(device);
  return blocks_each(on, resources_of(on, *static_cast<EmulatedKernel*>(kernel), 0));
}
int emu_device_blocks_of(void* device, int registers, int shared_bytes, int threads) {
  const Device& on = *static_cast<Device*>(device);
  return blocks_each(on, resources_of(on, Needs{registers, shared_bytes, threads}));
}
// Returns how many blocks fit now.
int emu_device_resident(void* device) {
  const Device& on = *static_cast<Device*>(device);
  const std::lock_guard lock(world().mutex);
  int count = 0;
  for (const Resources& free : on.free)
    count += (on.blocks_each == 0 ? kMultiprocessor.blocks : on.blocks_each) - free.blocks;
  return count;
}
void emu_device_set(void* device) { current_device = static_cast<Device*>(device); }
void* emu_device_get() { return current_device; }
int emu_device_synchronize(void* device) { return synchronize(*static_cast<Device*>(device)); }
void emu_device_settle(void* device) { settle(*static_cast<Device*>(device)); }

void* emu_stream_make(void* device, int blocking, int priority) {
  return make_stream(static_cast<Device*>(device), blocking != 0, priority);
}

// Streams below are handles: 0 is the legacy stream of the thread's current device.
int emu_stream_capturing(void* handle) {
  Stream* stream = resolve(handle);
  return stream != nullptr && capturing(*stream) ? 1 : 0;
}

int emu_stream_run(void* handle, void (*function)()) {
  Stream* stream = resolve(handle);
  return stream == nullptr ? bad_stream() : submit(*stream, function);
}

void* emu_event_make() { return new Event{}; }
void emu_event_destroy(void* event) { delete static_cast<Event*>(event); }

int emu_event_record(void* event, void* handle) { return cuEventRecord(event, handle); }

int emu_event_query(void* event, int* done) {
  bool is_done = false;
  const int result = query(*static_cast<Event*>(event), is_done);
  *done = is_done ? 1 : 0;
  return result;
}

// Returns when a copy that is issued to the stream now would be done.
int emu_stream_pass(void* handle) {
  Stream* stream = resolve(handle);
  if (stream == nullptr) return bad_stream();
  Event mark;
  const int result = record(*stream, mark);
  if (result == kSuccess) synchronize(mark);
  return result;
}

int emu_event_synchronize(void* event) { return cuEventSynchronize(event); }

int emu_stream_wait(void* handle, void* event) { return cuStreamWaitEvent(handle, event, 0); }

int emu_capture_begin(void* handle) {
  Stream* stream = resolve(handle);
  return stream == nullptr ? bad_stream() : begin_capture(*stream);
}

int emu_capture_end(void* handle, void** graph) {
  Stream* stream = resolve(handle);
  if (stream == nullptr) return bad_stream();
  std::shared_ptr<Graph> captured;
  const int result = end_capture(*stream, captured);
  *graph = result == kSuccess ? new std::shared_ptr<Graph>(captured) : nullptr;
  return result;
}

int emu_graph_launch(void* graph, void* handle) {
  Stream* stream = resolve(handle);
  if (stream == nullptr) return bad_stream();
  return submit(*stream,
                [captured = *static_cast<std::shared_ptr<Graph>*>(graph)] { captured->run(); });
}

void emu_graph_destroy(void* graph) { delete static_cast<std::shared_ptr<Graph>*>(graph); }

}  // extern "C"

}  // namespace emulator
