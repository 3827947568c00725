// SPDX-License-Identifier: Apache-2.0

// Measures the host's cost of single calls of the CUDA driver, with a loop over each entry point
// that a call of a communicator may use. Loops take turns, and the device finishes one loop before
// the next begins.

#include <dlfcn.h>

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr unsigned kNonBlocking = 1, kWithoutTiming = 2;
constexpr int kThreadLocal = 1;

void* open(const char* library) {
  void* const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw std::runtime_error(dlerror());
  return handle;
}

template <class Function>
void find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  if (function == nullptr) throw std::runtime_error(std::string("there is no ") + name);
}

void check(int result, const char* what) {
  if (result != 0)
    throw std::runtime_error(std::string(what) + ": error " + std::to_string(result));
}

// Names and signatures are those of the CUDA driver API, and for cudaSetDevice of the runtime API.
struct Cuda {
  int (*cuModuleLoadData)(void**, const void*);
  int (*cuModuleGetFunction)(void**, void*, const char*);
  int (*cuLaunchKernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        void*, void**, void**);
  int (*cuStreamCreate)(void**, unsigned);
  int (*cuStreamSynchronize)(void*);
  int (*cuStreamIsCapturing)(void*, int*);
  int (*cuStreamWaitEvent)(void*, void*, unsigned);
  int (*cuEventCreate)(void**, unsigned);
  int (*cuEventRecord)(void*, void*);
  int (*cuStreamBeginCapture)(void*, int);
  int (*cuStreamEndCapture)(void*, void**);
  int (*cuGraphInstantiate)(void**, void*, unsigned long long);
  int (*cuGraphLaunch)(void*, void*);
  int (*cudaSetDevice)(int);

  Cuda(const char* driver, const char* runtime) {
    void* const of_driver = open(driver);
    find(of_driver, "cuModuleLoadData", cuModuleLoadData);
    find(of_driver, "cuModuleGetFunction", cuModuleGetFunction);
    find(of_driver, "cuLaunchKernel", cuLaunchKernel);
    find(of_driver, "cuStreamCreate", cuStreamCreate);
    find(of_driver, "cuStreamSynchronize", cuStreamSynchronize);
    find(of_driver, "cuStreamIsCapturing", cuStreamIsCapturing);
    find(of_driver, "cuStreamWaitEvent", cuStreamWaitEvent);
    find(of_driver, "cuEventCreate", cuEventCreate);
    find(of_driver, "cuEventRecord", cuEventRecord);
    find(of_driver, "cuStreamBeginCapture_v2", cuStreamBeginCapture);
    find(of_driver, "cuStreamEndCapture", cuStreamEndCapture);
    find(of_driver, "cuGraphInstantiateWithFlags", cuGraphInstantiate);
    find(of_driver, "cuGraphLaunch", cuGraphLaunch);
    find(open(runtime), "cudaSetDevice", cudaSetDevice);
  }
};

// A kernel that does nothing, with `bytes` bytes of parameters.
void* empty_kernel(const Cuda& cuda, int bytes) {
  const std::string text =
      ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry empty(.param .align 8 .b8 "
      "params[" +
      std::to_string(bytes) + "]) { ret; }\n";
  void *module = nullptr, *function = nullptr;
  check(cuda.cuModuleLoadData(&module, text.c_str()), "cuModuleLoadData");
  check(cuda.cuModuleGetFunction(&function, module, "empty"), "cuModuleGetFunction");
  return function;
}

int launch(const Cuda& cuda, void* kernel, void* stream, const void* params) {
  void* arguments[] = {const_cast<void*>(params)};
  return cuda.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream, arguments, nullptr);
}

void measure(const Cuda& cuda, int device, const int* sizes_bytes, int sizes, int calls, int rounds,
             double* us) {
  check(cuda.cudaSetDevice(device), "cudaSetDevice");
  void *stream = nullptr, *other = nullptr, *event = nullptr, *graph = nullptr, *ready = nullptr;
  check(cuda.cuStreamCreate(&stream, kNonBlocking), "cuStreamCreate");
  check(cuda.cuStreamCreate(&other, kNonBlocking), "cuStreamCreate");
  check(cuda.cuEventCreate(&event, kWithoutTiming), "cuEventCreate");
  check(cuda.cuEventRecord(event, other), "cuEventRecord");

  std::vector<std::vector<char>> params;
  std::vector<void*> kernels;
  for (int i = 0; i < sizes; ++i) {
    params.emplace_back(size_t(sizes_bytes[i]));
    kernels.push_back(empty_kernel(cuda, sizes_bytes[i]));
  }
  check(cuda.cuStreamBeginCapture(stream, kThreadLocal), "cuStreamBeginCapture");
  check(launch(cuda, kernels[0], stream, params[0].data()), "cuLaunchKernel");
  check(cuda.cuStreamEndCapture(stream, &graph), "cuStreamEndCapture");
  check(cuda.cuGraphInstantiate(&ready, graph, 0), "cuGraphInstantiateWithFlags");

  std::vector<std::function<int()>> entries;
  for (int i = 0; i < sizes; ++i)
    entries.push_back([&, i] { return launch(cuda, kernels[i], stream, params[i].data()); });
  int status = 0;
  entries.push_back([&] { return cuda.cuEventRecord(event, other); });
  entries.push_back([&] { return cuda.cuStreamWaitEvent(stream, event, 0); });
  entries.push_back([&] { return cuda.cuStreamIsCapturing(stream, &status); });
  entries.push_back([&] { return cuda.cudaSetDevice(device); });
  entries.push_back([&] { return cuda.cuGraphLaunch(ready, stream); });

  using clock = std::chrono::steady_clock;
  for (int round = -1; round < rounds; ++round) {  // the first round is a warm-up
    for (size_t entry = 0; entry < entries.size(); ++entry) {
      check(cuda.cuStreamSynchronize(other), "cuStreamSynchronize");
      check(cuda.cuStreamSynchronize(stream), "cuStreamSynchronize");
      int result = 0;
      const auto begin = clock::now();
      for (int i = 0; i < calls; ++i) result |= entries[entry]();
      const std::chrono::duration<double, std::micro> took = clock::now() - begin;
      check(result, "a call that was timed");
      if (round >= 0) us[entry * size_t(rounds) + size_t(round)] = took.count() / calls;
    }
  }
  check(cuda.cuStreamSynchronize(other), "cuStreamSynchronize");
  check(cuda.cuStreamSynchronize(stream), "cuStreamSynchronize");
}

}  // namespace

// Fills us[entry][round] with microseconds per call. The entries are a launch with each of `sizes`
// sizes of parameters, event record, event wait, query of capture, set device, and the launch of a
// graph. The calling thread must have the device's context. Returns 0, or copies the failure's
// description into `why`.
extern "C" int driver_costs(const char* driver, const char* runtime, int device,
                            const int* sizes_bytes, int sizes, int calls, int rounds, double* us,
                            char* why, size_t why_bytes) {
  try {
    measure(Cuda(driver, runtime), device, sizes_bytes, sizes, calls, rounds, us);
    return 0;
  } catch (const std::exception& error) {
    why[std::string(error.what()).copy(why, why_bytes - 1)] = '\0';
    return 1;
  }
}
