// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/driver.h"

#include <dlfcn.h>

RINGCOMM_NAMESPACE_BEGIN
namespace device {
namespace {

template <class Function>
Function* find_or_null(void* library, const char* name, Function*) {
  return reinterpret_cast<Function*>(dlsym(library, name));
}

template <class Function>
void find(void* library, const char* name, Function*& function) {
  function = find_or_null(library, name, function);
  if (function == nullptr)
    throw DriverError(std::string("the CUDA driver has no ") + name + "; it is too old");
}

}  // namespace

bool DriverError::is_of_context() const {
  constexpr int kNotInitialized = 3, kInvalidContext = 201, kInvalidHandle = 400;
  return code == kNotInitialized || code == kInvalidContext || code == kInvalidHandle;
}

void* EventPool::take() {
  const std::lock_guard lock(mutex_);
  if (idle_.empty()) return nullptr;
  void* const event = idle_.back();
  idle_.pop_back();
  return event;
}

void EventPool::give(void* event) {
  const std::lock_guard lock(mutex_);
  idle_.push_back(event);
}

Driver::Driver(const std::string& library) {
  // Never closed, since launched kernels may still run.
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr)
    throw DriverError("cannot load the CUDA driver: " + std::string(dlerror()));
  find(handle, "cuLaunchKernel", cuLaunchKernel_);
  find(handle, "cuMemcpyAsync", cuMemcpyAsync_);
  find(handle, "cuStreamIsCapturing", cuStreamIsCapturing_);
  find(handle, "cuEventQuery", cuEventQuery_);
  find(handle, "cuEventCreate", cuEventCreate_);
  find(handle, "cuEventRecord", cuEventRecord_);
  find(handle, "cuEventSynchronize", cuEventSynchronize_);
  find(handle, "cuStreamWaitEvent", cuStreamWaitEvent_);
  find(handle, "cuThreadExchangeStreamCaptureMode", cuThreadExchangeStreamCaptureMode_);
  find(handle, "cuGetErrorString", cuGetErrorString_);
  cuStreamGetGreenCtx_ = find_or_null(handle, "cuStreamGetGreenCtx", cuStreamGetGreenCtx_);
  cuGreenCtxGetDevResource_ =
      find_or_null(handle, "cuGreenCtxGetDevResource", cuGreenCtxGetDevResource_);
}

void Driver::check(int result, const char* what) const {
  if (result == 0) return;
  const char* text = nullptr;
  cuGetErrorString_(result, &text);
  throw DriverError(std::string(what) + " failed: " + (text != nullptr ? text : "error") + " (" +
                        std::to_string(result) + ")",
                    result);
}

void Driver::launch(void* function, unsigned grid_x, unsigned grid_y, unsigned threads,
                    void* stream, const void* params, size_t bytes) const {
  // CU_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE and _END: they pass the size of the parameters to
  // the driver, and to the tests' emulated driver.
  void* const pointer = reinterpret_cast<void*>(1);
  void* const size = reinterpret_cast<void*>(2);
  void* buffer[] = {pointer, const_cast<void*>(params), size, &bytes, nullptr};
  check(cuLaunchKernel_(function, grid_x, grid_y, 1, threads, 1, 1, 0, stream, nullptr, buffer),
        "launching a collective");
}

void Driver::launch(void* function, const Blocks& blocks, void* stream, void** parameters) const {
  check(cuLaunchKernel_(function, blocks.x, blocks.y, 1, blocks.threads, 1, 1, blocks.shared_bytes,
                        stream, parameters, nullptr),
        "launching a kernel of Triton's");
}

void Driver::copy(unsigned long long dst, unsigned long long src, size_t bytes,
                  void* stream) const {
  if (bytes > 0) check(cuMemcpyAsync_(dst, src, bytes, stream), "copying between devices");
}

bool Driver::is_capturing(void* stream) const {
  if (stream == nullptr) return false;
  int status = 0;  // a CUstreamCaptureStatus; 0: no capture
  return cuStreamIsCapturing_(stream, &status) != 0 || status != 0;
}

int Driver::multiprocessors_of(void* stream) const {
  if (cuStreamGetGreenCtx_ == nullptr || cuGreenCtxGetDevResource_ == nullptr) return -1;
  constexpr int kResourceOfSm = 1;
  struct {  // laid out as CUdevResource
    int type;
    unsigned char padding[92];
    unsigned sm_count;
    unsigned char rest[44];
  } resource{};
  void* context = nullptr;
  if (cuStreamGetGreenCtx_(stream, &context) != 0 || context == nullptr) return -1;
  if (cuGreenCtxGetDevResource_(context, &resource, kResourceOfSm) != 0) return -1;
  return int(resource.sm_count);
}

void* Driver::make_event() const {
  constexpr unsigned kDisableTiming = 2;
  void* event = nullptr;
  check(cuEventCreate_(&event, kDisableTiming), "cuEventCreate");
  return event;
}

void Driver::record(void* event, void* stream) const {
  check(cuEventRecord_(event, stream), "cuEventRecord");
}

void Driver::wait(void* stream, void* event) const {
  check(cuStreamWaitEvent_(stream, event, 0), "cuStreamWaitEvent");
}

EventPool& Driver::events_of(int device) const {
  const std::lock_guard lock(mutex_);
  return events_[device];
}

bool Driver::has_passed(void* event) const {
  constexpr int kRelaxed = 2, kNotReady = 600;
  int mode = kRelaxed;
  check(cuThreadExchangeStreamCaptureMode_(&mode), "cuThreadExchangeStreamCaptureMode");
  const int result = cuEventQuery_(event);
  cuThreadExchangeStreamCaptureMode_(&mode);  // restores the previous mode
  if (result != kNotReady) check(result, "cuEventQuery");
  return result == 0;
}

void Driver::synchronize(void* event) const {
  constexpr int kRelaxed = 2;
  int mode = kRelaxed;
  check(cuThreadExchangeStreamCaptureMode_(&mode), "cuThreadExchangeStreamCaptureMode");
  const int result = cuEventSynchronize_(event);
  cuThreadExchangeStreamCaptureMode_(&mode);
  check(result, "cuEventSynchronize");
}

}  // namespace device
RINGCOMM_NAMESPACE_END
