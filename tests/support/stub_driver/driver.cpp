// SPDX-License-Identifier: Apache-2.0

// A CUDA driver that does nothing: it counts the calls of a communicator, and records which streams
// wait for which events. Nothing runs, and the test decides when an event has passed.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

enum Call : int {
  kLaunch,
  kCopy,
  kIsCapturing,
  kQuery,
  kCreate,
  kRecord,
  kSynchronize,
  kWait,
  kExchangeMode,
  kSetDevice,
  kGraphLaunch,
  kGetGreenContext,
  kCalls
};
constexpr int kSuccess = 0, kNotReady = 600;

struct Event {
  bool passed = false;
};

struct Wait {
  void* stream;
  void* event;
};

std::mutex mutex;
uint64_t counts[kCalls];
std::set<void*> capturing;
std::vector<Wait> waits;
std::vector<void*> records;
std::map<void*, unsigned> green;  // multiprocessors of green contexts, by stream
std::vector<Event*> events;       // never freed
bool events_pass = true;          // events pass at once
int refusal = kSuccess;           // the code of further launches, records and waits
int refusals = 0;                 // how many of these it refuses
size_t params_bytes = 0;          // the most parameter bytes of a launch

int refused() {
  if (refusals == 0) return kSuccess;
  --refusals;
  return refusal;
}

}  // namespace

extern "C" {

int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   void*, void**, void** extra) {
  const std::lock_guard lock(mutex);
  ++counts[kLaunch];
  // CU_LAUNCH_PARAM_BUFFER_POINTER, the buffer, CU_LAUNCH_PARAM_BUFFER_SIZE, a pointer to the size.
  if (extra != nullptr)
    params_bytes = std::max(params_bytes, *static_cast<const size_t*>(extra[3]));
  return refused();
}
int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t bytes, void*) {
  const std::lock_guard lock(mutex);
  ++counts[kCopy];
  std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  return kSuccess;
}
int cuStreamIsCapturing(void* stream, int* status) {
  const std::lock_guard lock(mutex);
  ++counts[kIsCapturing];
  *status = int(capturing.count(stream));
  return kSuccess;
}
int cuEventCreate(void** event, unsigned) {
  const std::lock_guard lock(mutex);
  ++counts[kCreate];
  events.push_back(new Event{});
  *event = events.back();
  return kSuccess;
}
int cuEventRecord(void* event, void*) {
  const std::lock_guard lock(mutex);
  ++counts[kRecord];
  static_cast<Event*>(event)->passed = events_pass;
  records.push_back(event);
  return refused();
}
int cuEventQuery(void* event) {
  const std::lock_guard lock(mutex);
  ++counts[kQuery];
  return static_cast<Event*>(event)->passed ? kSuccess : kNotReady;
}
int cuEventSynchronize(void*) {
  const std::lock_guard lock(mutex);
  ++counts[kSynchronize];
  return kSuccess;
}
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  const std::lock_guard lock(mutex);
  ++counts[kWait];
  waits.push_back({stream, event});
  return refused();
}
int cuThreadExchangeStreamCaptureMode(int*) {
  const std::lock_guard lock(mutex);
  ++counts[kExchangeMode];
  return kSuccess;
}
// Further functions that bench/driver_costs.cpp calls, of the runtime, too.
int cudaSetDevice(int) {
  const std::lock_guard lock(mutex);
  ++counts[kSetDevice];
  return kSuccess;
}
int cuModuleLoadData(void** module, const void* text) {
  *module = const_cast<void*>(text);
  return kSuccess;
}
int cuModuleGetFunction(void** function, void* module, const char*) {
  *function = module;
  return kSuccess;
}
int cuStreamCreate(void** stream, unsigned) {
  *stream = new char;  // never freed
  return kSuccess;
}
int cuStreamSynchronize(void*) { return kSuccess; }
int cuStreamBeginCapture_v2(void*, int) { return kSuccess; }
int cuStreamEndCapture(void* stream, void** graph) {
  *graph = stream;
  return kSuccess;
}
int cuGraphInstantiateWithFlags(void** ready, void* graph, unsigned long long) {
  *ready = graph;
  return kSuccess;
}
int cuGraphLaunch(void*, void*) {
  const std::lock_guard lock(mutex);
  ++counts[kGraphLaunch];
  return kSuccess;
}
// A green context is identified by the number of multiprocessors of its only stream.
int cuStreamGetGreenCtx(void* stream, void** context) {
  const std::lock_guard lock(mutex);
  ++counts[kGetGreenContext];
  const auto found = green.find(stream);
  *context = found == green.end() ? nullptr : &found->second;
  return kSuccess;
}
int cuGreenCtxGetDevResource(void* context, void* resource, int type) {
  const std::lock_guard lock(mutex);
  std::memcpy(resource, &type, sizeof(type));
  std::memcpy(static_cast<char*>(resource) + 96, context, sizeof(unsigned));
  return kSuccess;
}
int cuGetErrorString(int, const char** text) {
  *text = "refused by the test";
  return kSuccess;
}

// ---- for the tests ----------------------------------------------------------------------------

// Resets everything except the events; these count as passed.
void stub_reset() {
  const std::lock_guard lock(mutex);
  std::memset(counts, 0, sizeof(counts));
  capturing.clear();
  green.clear();
  waits.clear();
  records.clear();
  events_pass = true;
  for (Event* each : events) each->passed = true;
  refusals = 0;
  params_bytes = 0;
}
uint64_t stub_params_bytes() {
  const std::lock_guard lock(mutex);
  return params_bytes;
}
uint64_t stub_count(int call) {
  const std::lock_guard lock(mutex);
  return counts[call];
}
void stub_set_capturing(void* stream, int captures) {
  const std::lock_guard lock(mutex);
  if (captures != 0)
    capturing.insert(stream);
  else
    capturing.erase(stream);
}
void stub_set_green(void* stream, unsigned multiprocessors) {
  const std::lock_guard lock(mutex);
  green[stream] = multiprocessors;
}
void stub_set_passing(int pass) {
  const std::lock_guard lock(mutex);
  events_pass = pass != 0;
}
void stub_pass(void* event) {
  const std::lock_guard lock(mutex);
  static_cast<Event*>(event)->passed = true;
}
// The next `times` launches, records and waits return `code`.
void stub_refuse(int code, int times) {
  const std::lock_guard lock(mutex);
  refusal = code;
  refusals = times;
}
// Copies and removes the next wait or recorded event since the last reset; returns 0 if none.
int stub_take_wait(void** stream, void** event) {
  const std::lock_guard lock(mutex);
  if (waits.empty()) return 0;
  *stream = waits.front().stream;
  *event = waits.front().event;
  waits.erase(waits.begin());
  return 1;
}
int stub_take_record(void** event) {
  const std::lock_guard lock(mutex);
  if (records.empty()) return 0;
  *event = records.front();
  records.erase(records.begin());
  return 1;
}
}
