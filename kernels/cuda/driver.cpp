#include "kernels/cuda/driver.h"

#include <dlfcn.h>

RINGCOMM_NAMESPACE_BEGIN
namespace device {
namespace {

template <class Function>
void find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  if (function == nullptr)
    throw DriverError(std::string("the CUDA driver has no ") + name + "; it is too old");
}

}  // namespace

Driver::Driver(const std::string& library) {
  // Never closed: kernels that were launched may still run.
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr)
    throw DriverError("cannot load the CUDA driver: " + std::string(dlerror()));
  find(handle, "cuLaunchKernel", cuLaunchKernel_);
  find(handle, "cuMemcpyAsync", cuMemcpyAsync_);
  find(handle, "cuStreamIsCapturing", cuStreamIsCapturing_);
  find(handle, "cuEventQuery", cuEventQuery_);
  find(handle, "cuThreadExchangeStreamCaptureMode", cuThreadExchangeStreamCaptureMode_);
  find(handle, "cuGetErrorString", cuGetErrorString_);
}

void Driver::check(int result, const char* what) const {
  if (result == 0) return;
  const char* text = nullptr;
  cuGetErrorString_(result, &text);
  throw DriverError(std::string(what) + " failed: " + (text != nullptr ? text : "error") + " (" +
                    std::to_string(result) + ")");
}

void Driver::launch(void* function, unsigned grid_x, unsigned grid_y, unsigned threads,
                    void* stream, const void* params) const {
  void* arguments[] = {const_cast<void*>(params)};
  check(cuLaunchKernel_(function, grid_x, grid_y, 1, threads, 1, 1, 0, stream, arguments, nullptr),
        "launching a collective");
}

void Driver::copy(unsigned long long dst, unsigned long long src, size_t bytes,
                  void* stream) const {
  if (bytes > 0) check(cuMemcpyAsync_(dst, src, bytes, stream), "copying between devices");
}

bool Driver::is_capturing(void* stream) const {
  int status = 0;  // CUstreamCaptureStatus: 0 is none
  return cuStreamIsCapturing_(stream, &status) == 0 && status != 0;
}

bool Driver::has_passed(void* event) const {
  constexpr int kRelaxed = 2, kNotReady = 600;
  int mode = kRelaxed;
  check(cuThreadExchangeStreamCaptureMode_(&mode), "cuThreadExchangeStreamCaptureMode");
  const int result = cuEventQuery_(event);
  cuThreadExchangeStreamCaptureMode_(&mode);  // what was in force before
  if (result != kNotReady) check(result, "cuEventQuery");
  return result == 0;
}

}  // namespace device
RINGCOMM_NAMESPACE_END
