// SPDX-License-Identifier: Apache-2.0

// Streams, events and the occupancy of an emulated GPU.
//
// One mutex guards all state, and one condition variable signals every change: launches are few,
// and a kernel runs without the mutex. A process collects hundreds of idle streams; each sleeps on
// a condition variable of its own, so that a change does not wake it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace emulator {

// Result codes of the driver API.
enum Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kIllegalState = 401,
  kLaunchFailed = 719,
  kLaunchTooLarge = 720,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureUnjoined = 904,
  kCaptureIsolation = 905,
  kCaptureImplicit = 906,
  kCapturedEvent = 907,
};

using Work = std::function<void()>;

struct World {
  std::mutex mutex;
  std::condition_variable changed;
  int running = 0;  // running tasks of all streams
};
World& world();  // never destroyed: workers may outlive main()

// Its field is set once, when the work that it represents has ended.
struct Completion {
  bool done = false;
};
using Completions = std::vector<std::shared_ptr<Completion>>;

struct Task {
  Work run;
  Completions after;
  std::shared_ptr<Completion> completion;
  bool joins;  // depends on work of other streams
};

struct Graph {
  struct Node {
    Work run;
    std::vector<int> after;
  };
  std::vector<Node> nodes;
  std::vector<struct Stream*> members;  // streams that capture; the first began it
  bool broken = false;                  // by a call that is illegal in a capture

  int add(Work run, std::vector<int> after);
  bool covers(const std::vector<int>& end, const std::vector<int>& wanted) const;
  void run() const;  // without the mutex
};

struct Device;

// NOTE [Hardware queues]
//
// The host submits work to a device through queues, which streams share if there are more streams
// than queues. The work at the head of a queue starts once all that it depends on is done; until
// then it blocks the work behind it in the queue, even work of other streams that depends on
// nothing. Work that has started blocks nothing: kernels of two streams of one queue run
// concurrently.
//
// CUDA's documentation says that there are CUDA_DEVICE_MAX_CONNECTIONS queues, 1 to 32 and 8 by
// default, and that streams beyond this number share queues. The rest is assumed: streams get
// queues round robin when they are made, the legacy default stream first; streams of different
// priorities share no queue, since a hardware queue has one priority, and each priority has the
// full number of queues; event records, event waits, copies and calls of host functions take their
// turn like kernels; a graph is launched through its stream's queue, and its branches block
// nothing.
struct HardwareQueue {
  std::deque<const Completion*> issued{};  // work that has not started
};

struct Stream {
  Device* device;
  bool blocking;  // takes part in the legacy default stream's order
  int priority;   // smaller numbers are served first
  HardwareQueue* hardware;
  std::deque<Task> queue{};
  std::shared_ptr<Completion> last = std::make_shared<Completion>(Completion{true});
  std::condition_variable awake{};   // has work
  bool joins = false;                // its next task follows other streams' work
  std::shared_ptr<Graph> capture{};  // the graph that this stream is capturing
  std::vector<int> frontier{};       // the nodes that its next node depends on
};

struct Event {
  std::shared_ptr<Completion> completion{};
  std::shared_ptr<Graph> graph{};  // set if recorded in a capture
  std::vector<int> frontier{};
};

// The resources that a block takes of a multiprocessor, or that are free there.
struct Resources {
  int registers, shared_bytes, threads, blocks;

  bool holds(const Resources& block) const;
  void take(const Resources& block);
  void give(const Resources& block);
};
// The H100's resources (CUDA C++ Programming Guide, compute capability 9.0). The split of a
// multiprocessor's memory between L1 and shared memory is not modelled: for a kernel that needs
// another split, a real driver may wait until a multiprocessor is idle.
constexpr Resources kMultiprocessor{65536, 228 << 10, 2048, 32};
constexpr int kLargestSharedBytes = 227 << 10;  // of a block
constexpr int kSystemSharedBytes = 1 << 10;     // of each block, in addition to its own
constexpr int kSharedUnitBytes = 128;
constexpr int kRegisterUnit = 256;  // of a warp

struct Device {
  const int multiprocessors;
  const int blocks_each;        // blocks per multiprocessor; 0: as many as fit
  std::vector<Resources> free;  // by multiprocessor
  const int hardware_queues;
  std::map<int, std::vector<std::unique_ptr<HardwareQueue>>> queues{};  // by priority
  std::map<int, int> streams_made{};                                    // by priority
  uint64_t tickets = 0;
  std::set<std::pair<int, uint64_t>> waiting{};  // (priority, ticket) of launches that do not fit
  Stream* legacy = nullptr;
  std::vector<Stream*> streams{};  // all, including the legacy stream
};

// Devices and streams are never destroyed.
Device* make_device(int multiprocessors, int blocks_each, int hardware_queues);
Stream* make_stream(Device* device, bool blocking, int priority);

// All following functions take the mutex themselves and return a Result.
int submit(Stream& stream, Work run);
int record(Stream& stream, Event& event);
int wait_for(Stream& stream, const Event& event);
int query(const Event& event, bool& done);
int synchronize(const Event& event);
int synchronize(Device& device);
// Waits for all work of the device, as calls that manage its memory may. It does not break a
// capture.
void settle(Device& device);

int begin_capture(Stream& stream);
int end_capture(Stream& stream, std::shared_ptr<Graph>& graph);
bool capturing(Stream& stream);

// The resources of a kernel's block, and how many such blocks an idle multiprocessor runs at once.
struct Needs {
  int registers, shared_bytes, threads;  // registers per thread, the rest per block
};
Resources resources_of(const Device& device, const Needs& block);
int blocks_each(const Device& device, const Resources& block);

// Runs `work` once `blocks` blocks fit on the multiprocessors; on an idle device they must fit.
// Launches are placed in the order in which they reached the head of their streams, higher
// priorities first, block by block as on a GPU: a launch that does not fit keeps the places that it
// has got, and blocks the launches behind it.
void run_blocks(Device& device, int blocks, const Resources& each, int priority, const Work& work);

}  // namespace emulator
