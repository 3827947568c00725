// SPDX-License-Identifier: Apache-2.0

// The entry points of the CUDA driver that launches and events need. They are loaded at first use,
// so that the module builds and imports without CUDA. CuPy makes all other calls to the driver.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "ringcomm/core/platform.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

// A call that the driver refused; the text names the call and the driver's reason.
struct DriverError : std::runtime_error {
  int code;  // the driver's code; 0: no call was made

  explicit DriverError(const std::string& text, int code = 0)
      : std::runtime_error(text), code(code) {}
  // True if the calling thread has no context, or another device's: nothing was done, and the same
  // call succeeds when the stream's device is current.
  bool is_of_context() const;
};

// The unused events of one device. They are never destroyed, so that releasing an event makes no
// driver call.
class EventPool {
 public:
  void* take();  // nullptr: the pool is empty
  void give(void* event);

 private:
  std::mutex mutex_;
  std::vector<void*> idle_;
};

class Driver {
 public:
  // library: "libcuda.so.1", or the tests' emulator. Throws DriverError.
  explicit Driver(const std::string& library);

  // params: all parameters of the function, contiguous, of `bytes` bytes.
  void launch(void* function, unsigned grid_x, unsigned grid_y, unsigned threads, void* stream,
              const void* params, size_t bytes) const;
  // Launches a kernel whose parameters are not a LaunchParams. parameters: the address of each.
  struct Blocks {
    unsigned x, y, threads, shared_bytes;
  };
  void launch(void* function, const Blocks& blocks, void* stream, void** parameters) const;
  // Copies between device addresses, in the stream's order.
  void copy(unsigned long long dst, unsigned long long src, size_t bytes, void* stream) const;
  // True while the stream is capturing a graph. Also true if the driver cannot tell, because the
  // capture is broken or another device is current. False without a driver call for the legacy
  // default stream (nullptr), which never captures.
  bool is_capturing(void* stream) const;
  // Returns the multiprocessors of the stream's green context; -1: the stream or the driver has
  // none. The legacy default stream (nullptr) belongs to the current context.
  int multiprocessors_of(void* stream) const;
  // Makes an event without timing, on the current device.
  void* make_event() const;
  void record(void* event, void* stream) const;
  // Makes later work of `stream` wait for the event; does not block the host.
  void wait(void* stream, void* event) const;
  void synchronize(void* event) const;
  // Returns the pool of a device's unused events, which lives as long as this object.
  EventPool& events_of(int device) const;
  // True if an event, of this API or of the runtime API, has completed; allowed while another
  // thread captures. cudaEventQuery is not used: it records "not ready" as the thread's last error,
  // which torch reads after its next launch and attributes to that launch.
  bool has_passed(void* event) const;

 private:
  // Named and typed as in the CUDA driver API.
  int (*cuLaunchKernel_)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                         unsigned, void*, void**, void**);
  int (*cuMemcpyAsync_)(unsigned long long, unsigned long long, size_t, void*);
  int (*cuStreamIsCapturing_)(void*, int*);
  int (*cuEventQuery_)(void*);
  int (*cuEventCreate_)(void**, unsigned);
  int (*cuEventRecord_)(void*, void*);
  int (*cuEventSynchronize_)(void*);
  int (*cuStreamWaitEvent_)(void*, void*, unsigned);
  int (*cuThreadExchangeStreamCaptureMode_)(int*);
  int (*cuGetErrorString_)(int, const char**);
  // Since CUDA 12.4; null in older drivers.
  int (*cuStreamGetGreenCtx_)(void*, void**);
  int (*cuGreenCtxGetDevResource_)(void*, void*, int);
  void check(int result, const char* what) const;

  mutable std::mutex mutex_;
  mutable std::map<int, EventPool> events_;  // by device
};

}  // namespace device
RINGCOMM_NAMESPACE_END
