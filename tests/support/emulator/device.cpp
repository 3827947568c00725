#include "tests/support/emulator/device.h"

#include <algorithm>
#include <thread>

extern "C" const char* ptx_failure();
// What has ended comes before what this stream, or whatever the host begins, does from now on.
extern "C" void ptx_stream_waited();
extern "C" void ptx_host_waited();

namespace emulator {
namespace {

using Lock = std::unique_lock<std::mutex>;

void await(Lock& lock, const std::shared_ptr<Completion>& completion) {
  world().changed.wait(lock, [&] { return completion->done; });
}

// A stream's thread: its queue in order, each task when what it comes after is done.
void serve(Stream* stream) {
  Lock lock(world().mutex);
  for (;;) {
    world().changed.wait(lock, [&] { return !stream->queue.empty(); });
    Task task = std::move(stream->queue.front());
    stream->queue.pop_front();
    for (const auto& completion : task.after) await(lock, completion);
    lock.unlock();
    if (task.joins) ptx_stream_waited();
    if (task.run) task.run();
    task.run = nullptr;  // what it holds goes before anyone hears that it is done
    lock.lock();
    task.completion->done = true;
    world().changed.notify_all();
  }
}

// As on a GPU, an error of a kernel is told by whatever is asked next, for good.
int outcome() { return ptx_failure() == nullptr ? kSuccess : kLaunchFailed; }

int breaks(Graph& graph, int result) {
  graph.broken = true;
  return result;
}

// The mutex is held. An operation on the legacy stream comes after all that the blocking streams
// have, and what they get later comes after it.
int order_with_legacy(const Stream& stream, Completions& after) {
  const Device& device = *stream.device;
  if (&stream == device.legacy) {
    for (const Stream* other : device.streams) {
      if (!other->blocking) continue;
      if (other->capture) return breaks(*other->capture, kCaptureImplicit);
      after.push_back(other->last);
    }
  } else if (stream.blocking) {
    after.push_back(device.legacy->last);
  }
  return kSuccess;
}

bool all_done(const Completions& completions) {
  return std::all_of(completions.begin(), completions.end(),
                     [](const auto& completion) { return completion->done; });
}

// Without `run` it is a mark in the stream, which an idle stream passes at once.
int enqueue(Stream& stream, Work run, Completions after) {
  if (const int result = order_with_legacy(stream, after); result != kSuccess) return result;
  stream.joins |= !after.empty();
  if (!run && stream.last->done && all_done(after)) return kSuccess;
  stream.last = std::make_shared<Completion>();
  stream.queue.push_back(
      {std::move(run), std::move(after), stream.last, std::exchange(stream.joins, false)});
  world().changed.notify_all();
  return kSuccess;
}

// The mutex is held. Takes `each` registers per block of the multiprocessors that have most, and
// returns which these are; takes none and returns nothing where not all blocks have room.
std::vector<int> place(Device& device, int blocks, int each) {
  std::vector<int> free = device.free_registers, places;
  for (int block = 0; block < blocks; ++block) {
    const auto most = std::max_element(free.begin(), free.end());
    if (*most < each) return {};
    *most -= each;
    places.push_back(int(most - free.begin()));
  }
  device.free_registers = free;
  return places;
}

}  // namespace

World& world() {
  static World* const made = new World;
  return *made;
}

Device* make_device(int multiprocessors, int blocks_each) {
  auto* device = new Device{multiprocessors, blocks_each,
                            std::vector<int>(size_t(multiprocessors), kRegistersPerMultiprocessor)};
  device->legacy = make_stream(device, true, 0);
  return device;
}

Stream* make_stream(Device* device, bool blocking, int priority) {
  auto* stream = new Stream{device, blocking, priority};
  {
    const Lock lock(world().mutex);
    device->streams.push_back(stream);
  }
  std::thread(serve, stream).detach();
  return stream;
}

int submit(Stream& stream, Work run) {
  const Lock lock(world().mutex);
  if (!stream.capture) return enqueue(stream, std::move(run), {});
  stream.frontier = {stream.capture->add(std::move(run), std::move(stream.frontier))};
  return kSuccess;
}

int record(Stream& stream, Event& event) {
  const Lock lock(world().mutex);
  if (stream.capture) {
    event = {nullptr, stream.capture, stream.frontier};
    return kSuccess;
  }
  const int result = enqueue(stream, nullptr, {});
  event = {stream.last, nullptr, {}};
  return result;
}

int wait_for(Stream& stream, const Event& event) {
  const Lock lock(world().mutex);
  if (!event.graph) {
    // Work outside the graph cannot be waited for at replay.
    if (stream.capture) return breaks(*stream.capture, kCaptureIsolation);
    return enqueue(stream, nullptr, {event.completion});
  }
  if (stream.capture && stream.capture != event.graph)
    return breaks(*stream.capture, kCaptureIsolation);
  if (&stream == stream.device->legacy) return breaks(*event.graph, kCaptureImplicit);
  if (!stream.capture) {  // the stream joins the capture
    stream.capture = event.graph;
    stream.frontier.clear();
    event.graph->members.push_back(&stream);
  }
  stream.frontier.insert(stream.frontier.end(), event.frontier.begin(), event.frontier.end());
  return kSuccess;
}

int query(const Event& event, bool& done) {
  const Lock lock(world().mutex);
  if (event.graph) return kCapturedEvent;
  done = event.completion->done;
  if (done) ptx_host_waited();
  return outcome();
}

int synchronize(const Event& event) {
  Lock lock(world().mutex);
  if (event.graph) return kCapturedEvent;
  await(lock, event.completion);
  ptx_host_waited();
  return outcome();
}

int synchronize(Device& device) {
  Lock lock(world().mutex);
  Completions all;
  for (const Stream* stream : device.streams) {
    if (stream->capture) return breaks(*stream->capture, kCaptureUnsupported);
    all.push_back(stream->last);
  }
  for (const auto& completion : all) await(lock, completion);
  ptx_host_waited();
  return outcome();
}

int block_registers(const Device& device, int registers) {
  if (device.blocks_each != 0) return kRegistersPerMultiprocessor / device.blocks_each;
  // A warp gets them in units of 8 per thread; with few, threads run out first.
  const int rounded = (registers + 7) / 8 * 8;
  return kThreadsPerBlock *
         std::max(rounded, kRegistersPerMultiprocessor / kThreadsPerMultiprocessor);
}

void run_blocks(Device& device, int blocks, int registers, int priority, const Work& work) {
  Lock lock(world().mutex);
  const std::pair mine(priority, device.tickets++);
  const int each = block_registers(device, registers);
  device.waiting.insert(mine);
  std::vector<int> places;
  world().changed.wait(lock, [&] {
    if (*device.waiting.begin() == mine) places = place(device, blocks, each);
    return !places.empty();
  });
  device.waiting.erase(mine);
  world().changed.notify_all();
  lock.unlock();
  work();
  lock.lock();
  for (const int place : places) device.free_registers[size_t(place)] += each;
  world().changed.notify_all();
}

}  // namespace emulator
