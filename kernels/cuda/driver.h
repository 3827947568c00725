// The few entry points of the CUDA driver that a collective costs, loaded when they are first
// needed: the module builds and imports where there is no CUDA. Everything else of the driver is
// CuPy's.
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

// A call that the driver refused; the text says which, and the driver's reason.
struct DriverError : std::runtime_error {
  int code;  // the driver's; 0: it was not asked

  explicit DriverError(const std::string& text, int code = 0)
      : std::runtime_error(text), code(code) {}
  // The calling thread has no context, or another device's: nothing was done, and the same call
  // succeeds where the stream's device is current.
  bool is_of_context() const;
};

// The events of one device that are not in use. They are never destroyed, so that the end of an
// event calls no driver.
class EventPool {
 public:
  void* take();  // nullptr: there is none
  void give(void* event);

 private:
  std::mutex mutex_;
  std::vector<void*> idle_;
};

class Driver {
 public:
  // library: "libcuda.so.1", or the emulator of the tests. Throws DriverError.
  explicit Driver(const std::string& library);

  // bytes: of all parameters of the function, as they lie behind each other.
  void launch(void* function, unsigned grid_x, unsigned grid_y, unsigned threads, void* stream,
              const void* params, size_t bytes) const;
  // The same of a kernel with other parameters than a LaunchParams: the addresses of all of them.
  struct Blocks {
    unsigned x, y, threads, shared_bytes;
  };
  void launch(void* function, const Blocks& blocks, void* stream, void** parameters) const;
  // Device to device, in the stream's order.
  void copy(unsigned long long dst, unsigned long long src, size_t bytes, void* stream) const;
  // True while the stream is capturing a graph, or cannot say: its capture is broken, or another
  // device is current. The driver is not asked about the legacy default stream (nullptr), which
  // never captures.
  bool is_capturing(void* stream) const;
  // How many multiprocessors the green context of a stream has; -1: it is of none, or the driver
  // has none. The legacy default stream (nullptr) is of the context that is current.
  int multiprocessors_of(void* stream) const;
  // An event without timing, on the current device.
  void* make_event() const;
  void record(void* event, void* stream) const;
  // Makes later work of `stream` wait for the event; the host goes on.
  void wait(void* stream, void* event) const;
  void synchronize(void* event) const;
  // Lives as long as this object.
  EventPool& events_of(int device) const;
  // True if an event, of this API or of the runtime API, has passed; allowed while another thread
  // captures. cudaEventQuery says "not ready" and also leaves it as the thread's last error, which
  // torch looks at after its next launch and takes for that launch's.
  bool has_passed(void* event) const;

 private:
  // Their names and signatures are those of the CUDA driver API.
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
  // Since CUDA 12.4; null before.
  int (*cuStreamGetGreenCtx_)(void*, void**);
  int (*cuGreenCtxGetDevResource_)(void*, void*, int);
  void check(int result, const char* what) const;

  mutable std::mutex mutex_;
  mutable std::map<int, EventPool> events_;  // by device
};

}  // namespace device
RINGCOMM_NAMESPACE_END
