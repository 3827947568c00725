// The few entry points of the CUDA driver that a collective costs, loaded when they are first
// needed: the module builds and imports where there is no CUDA. Everything else of the driver is
// CuPy's.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

#include "ringcomm/core/platform.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

// A call that the driver refused; the text says which, and the driver's reason.
struct DriverError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Driver {
 public:
  // library: "libcuda.so.1", or the emulator of the tests. Throws DriverError.
  explicit Driver(const std::string& library);

  void launch(void* function, unsigned grid_x, unsigned grid_y, unsigned threads, void* stream,
              const void* params) const;
  // Device to device, in the stream's order.
  void copy(unsigned long long dst, unsigned long long src, size_t bytes, void* stream) const;
  // True while the stream is capturing a graph. A stream that cannot say fails at the launch, whose
  // error says why.
  bool is_capturing(void* stream) const;
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
  int (*cuThreadExchangeStreamCaptureMode_)(int*);
  int (*cuGetErrorString_)(int, const char**);
  void check(int result, const char* what) const;
};

}  // namespace device
RINGCOMM_NAMESPACE_END
