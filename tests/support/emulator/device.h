// SPDX-License-Identifier: Apache-2.0

// Streams, events and the occupancy of an emulated GPU.
//
// One mutex guards everything, and one condition variable tells of every change: launches are few,
// and a kernel runs without the mutex. Idle streams, of which a process collects hundreds, sleep on
// a condition variable of their own, so that a change does not wake them.
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

// The driver API's own codes.
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
  int running = 0;  // tasks of all streams
};
World& world();  // never destroyed: workers may outlive main()

// Set once, when the work it stands for has ended.
struct Completion {
  bool done = false;
};
using Completions = std::vector<std::shared_ptr<Completion>>;

struct Task {
  Work run;
  Completions after;
  std::shared_ptr<Completion> completion;
  bool joins;  // comes after work of other streams
};

struct Graph {
  struct Node {
    Work run;
    std::vector<int> after;
  };
  std::vector<Node> nodes;
  std::vector<struct Stream*> members;  // the first one began the capture
  bool broken = false;                  // by a call that a capture does not allow

  int add(Work run, std::vector<int> after);
  bool covers(const std::vector<int>& end, const std::vector<int>& wanted) const;
  void run() const;  // without the mutex
};

struct Device;

// NOTE [Hardware queues]
//
// The host hands work to a device through queues, which streams share where there are more of them.
// What is at the head of a queue starts once all that it comes after is done; until then it holds
// back what other streams have behind it, though that may depend on nothing. What has started holds
// nobody back: kernels of two streams of one queue run side by side.
//
// CUDA's documentation says that there are CUDA_DEVICE_MAX_CONNECTIONS of them, 1 to 32 and 8 by
// default, and that streams beyond these share one. This much it does not say, and is assumed:
// streams are given queues round robin when they are made, the legacy default stream first; streams
// of different priorities share none, since a queue of the hardware has one priority, and each
// priority has its full number; records of events, waits for events, copies and calls of host
// functions take their turn in the queue like kernels; a graph is launched through that of its
// stream, and its branches hold up nobody.
struct HardwareQueue {
  std::deque<const Completion*> issued{};  // what has not started
};

struct Stream {
  Device* device;
  bool blocking;  // takes part in the legacy default stream's order
  int priority;   // smaller is served first
  HardwareQueue* hardware;
  std::deque<Task> queue{};
  std::shared_ptr<Completion> last = std::make_shared<Completion>(Completion{true});
  std::condition_variable awake{};   // has work
  bool joins = false;                // other streams whose work was done already
  std::shared_ptr<Graph> capture{};  // the graph that this stream is capturing
  std::vector<int> frontier{};       // the nodes that its next node comes after
};

struct Event {
  std::shared_ptr<Completion> completion{};
  std::shared_ptr<Graph> graph{};  // recorded while capturing: a node in the graph
  std::vector<int> frontier{};
};

// What a block takes of a multiprocessor, or what is free there.
struct Resources {
  int registers, shared_bytes, threads, blocks;

  bool holds(const Resources& block) const;
  void take(const Resources& block);
  void give(const Resources& block);
};
// As of the H100 (CUDA C++ Programming Guide, compute capability 9.0). How a multiprocessor divides
// its memory between the L1 cache and shared memory is not modelled: the driver may wait until one
// is idle before it changes that for a kernel that needs another division.
constexpr Resources kMultiprocessor{65536, 228 << 10, 2048, 32};
constexpr int kLargestSharedBytes = 227 << 10;  // of a block
constexpr int kSystemSharedBytes = 1 << 10;     // of each block, beside its own
constexpr int kSharedUnitBytes = 128;
constexpr int kRegisterUnit = 256;  // of a warp

struct Device {
  const int multiprocessors;
  const int blocks_each;        // of any kernel on a multiprocessor; 0: by a GPU's resources
  std::vector<Resources> free;  // by multiprocessor
  const int hardware_queues;
  std::map<int, std::vector<std::unique_ptr<HardwareQueue>>> queues{};  // by priority
  std::map<int, int> streams_made{};                                    // by priority
  uint64_t tickets = 0;
  std::set<std::pair<int, uint64_t>> waiting{};  // (priority, ticket) of launches that do not fit
  Stream* legacy = nullptr;
  std::vector<Stream*> streams{};  // all, the legacy one too
};

// Devices and streams live for good.
Device* make_device(int multiprocessors, int blocks_each, int hardware_queues);
Stream* make_stream(Device* device, bool blocking, int priority);

// All following functions take the mutex themselves and return a Result.
int submit(Stream& stream, Work run);
int record(Stream& stream, Event& event);
int wait_for(Stream& stream, const Event& event);
int query(const Event& event, bool& done);
int synchronize(const Event& event);
int synchronize(Device& device);
// Waits for all the work that the device has, as calls that manage its memory may; no capture
// breaks.
void settle(Device& device);

int begin_capture(Stream& stream);
int end_capture(Stream& stream, std::shared_ptr<Graph>& graph);
bool capturing(Stream& stream);

// What a block of a kernel takes, and how many of them an idle multiprocessor runs at once.
struct Needs {
  int registers, shared_bytes, threads;  // of a thread; of a block
};
Resources resources_of(const Device& device, const Needs& block);
int blocks_each(const Device& device, const Resources& block);

// Runs `work` once `blocks` blocks fit on the multiprocessors; on an idle device they must fit.
// Launches are placed in the order in which they came to the head of their streams, higher
// priorities first, and block by block: one that does not fit keeps what it has got, and holds back
// those behind it, as a GPU's block scheduler does.
void run_blocks(Device& device, int blocks, const Resources& each, int priority, const Work& work);

}  // namespace emulator
