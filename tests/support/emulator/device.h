// Streams, events and room for blocks of an emulated GPU.
//
// One mutex guards everything and one condition variable tells of every change: launches are few,
// and a kernel runs without the mutex.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
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
  kLaunchFailed = 719,
  kLaunchTooLarge = 720,
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

struct Stream {
  Device* device;
  bool blocking;  // takes part in the legacy default stream's order
  int priority;   // smaller is served first
  std::deque<Task> queue{};
  std::shared_ptr<Completion> last = std::make_shared<Completion>(Completion{true});
  bool joins = false;                // other streams whose work was done already
  std::shared_ptr<Graph> capture{};  // the graph that this stream records now
  std::vector<int> frontier{};       // the nodes that its next node comes after
};

struct Event {
  std::shared_ptr<Completion> completion{};
  std::shared_ptr<Graph> graph{};  // recorded while capturing: a place in the graph
  std::vector<int> frontier{};
};

// As of the H100. A block takes what one of 256 threads does, however many lanes it is run with.
constexpr int kRegistersPerMultiprocessor = 65536;
constexpr int kThreadsPerMultiprocessor = 2048;
constexpr int kThreadsPerBlock = 256;

struct Device {
  const int multiprocessors;
  const int blocks_each;            // of any kernel on a multiprocessor; 0: as registers allow
  std::vector<int> free_registers;  // by multiprocessor
  uint64_t tickets = 0;
  std::set<std::pair<int, uint64_t>> waiting{};  // (priority, ticket) of launches without room
  Stream* legacy = nullptr;
  std::vector<Stream*> streams{};  // all, the legacy one too
};

// Devices and streams live for good.
Device* make_device(int multiprocessors, int blocks_each);
Stream* make_stream(Device* device, bool blocking, int priority);

// All following functions take the mutex themselves and return a Result.
int submit(Stream& stream, Work run);
int record(Stream& stream, Event& event);
int wait_for(Stream& stream, const Event& event);
int query(const Event& event, bool& done);
int synchronize(const Event& event);
int synchronize(Device& device);

int begin_capture(Stream& stream);
int end_capture(Stream& stream, std::shared_ptr<Graph>& graph);
bool capturing(Stream& stream);

// Registers of a multiprocessor that a block takes whose threads have `registers` each.
int block_registers(const Device& device, int registers);

// Runs `work` once the multiprocessors have room for `blocks` blocks whose threads have `registers`
// each; an idle device must have it. Launches get room in the order in which they came to the head
// of their streams, higher priorities first; one that does not fit holds back those behind it, as a
// GPU's block scheduler does.
void run_blocks(Device& device, int blocks, int registers, int priority, const Work& work);

}  // namespace emulator
