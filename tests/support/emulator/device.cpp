// SPDX-License-Identifier: Apache-2.0

#include "tests/support/emulator/device.h"

#include <algorithm>
#include <thread>
#include <tuple>

#include "tests/ptx_interpreter/source/interpreter.h"

namespace emulator {
namespace {

using Lock = std::unique_lock<std::mutex>;

void await(Lock& lock, const std::shared_ptr<Completion>& completion) {
  world().changed.wait(lock, [&] { return completion->done; });
}

// The thread of a stream: runs the queue in order. A task starts when the tasks that it depends on
// are done and the tasks issued earlier to the same hardware queue have started.
void serve(Stream* stream) {
  Lock lock(world().mutex);
  for (;;) {
    stream->awake.wait(lock, [&] { return !stream->queue.empty(); });
    Task task = std::move(stream->queue.front());
    stream->queue.pop_front();
    for (const auto& completion : task.after) await(lock, completion);
    auto& issued = stream->hardware->issued;
    world().changed.wait(lock, [&] { return issued.front() == task.completion.get(); });
    issued.pop_front();
    if (!issued.empty()) world().changed.notify_all();
    ++world().running;
    lock.unlock();
    if (task.joins) ptx_stream_waited();
    if (task.run && ptx_failure() == nullptr) task.run();
    task.run = nullptr;  // destroy what it holds before others see that it is done
    lock.lock();
    --world().running;
    task.completion->done = true;
    world().changed.notify_all();
  }
}

// After a kernel has failed, every later query returns its error, as on a GPU. First all running
// work must end: ranks react to the error by freeing tensors that another stream may be using.
int outcome(Lock& lock) {
  if (ptx_failure() == nullptr) return kSuccess;
  world().changed.wait(lock, [] { return world().running == 0; });
  return kLaunchFailed;
}

int breaks(Graph& graph, int result) {
  graph.broken = true;
  return result;
}

// The mutex is held. An operation on the legacy stream waits for all earlier work of blocking
// streams, and their later work waits for the operation.
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

// Without `run`, enqueues a mark, which completes at once if the stream is idle.
int enqueue(Stream& stream, Work run, Completions after) {
  if (const int result = order_with_legacy(stream, after); result != kSuccess) return result;
  stream.joins |= !after.empty();
  auto& issued = stream.hardware->issued;
  if (!run && stream.last->done && issued.empty() && all_done(after)) return kSuccess;
  stream.last = std::make_shared<Completion>();
  issued.push_back(stream.last.get());
  stream.queue.push_back(
      {std::move(run), std::move(after), stream.last, std::exchange(stream.joins, false)});
  stream.awake.notify_one();
  return kSuccess;
}

// The mutex is held. Places as many of the remaining blocks as fit, each on the multiprocessor with
// the most free resources.
void assign(Device& device, int blocks, const Resources& each,
            std::vector<Resources*>& multiprocessors) {
  const auto less = [&](const Resources& a, const Resources& b) {
    return std::make_tuple(a.holds(each), a.registers, a.blocks) <
           std::make_tuple(b.holds(each), b.registers, b.blocks);
  };
  while (int(multiprocessors.size()) < blocks) {
    const auto most = std::max_element(device.free.begin(), device.free.end(), less);
    if (!most->holds(each)) return;
    most->take(each);
    multiprocessors.push_back(&*most);
  }
}

// Rounds up to a multiple of `unit`.
int whole(int value, int unit) { return (value + unit - 1) / unit * unit; }

// The mutex is held.
HardwareQueue* next_queue(Device& device, int priority) {
  auto& queues = device.queues[priority];
  while (int(queues.size()) < device.hardware_queues)
    queues.push_back(std::make_unique<HardwareQueue>());
  return queues[size_t(device.streams_made[priority]++ % device.hardware_queues)].get();
}

}  // namespace

World& world() {
  static World* const made = new World;
  return *made;
}

bool Resources::holds(const Resources& block) const {
  return registers >= block.registers && shared_bytes >= block.shared_bytes &&
         threads >= block.threads && blocks >= block.blocks;
}

void Resources::take(const Resources& block) {
  registers -= block.registers;
  shared_bytes -= block.shared_bytes;
  threads -= block.threads;
  blocks -= block.blocks;
}

void Resources::give(const Resources& block) {
  take({-block.registers, -block.shared_bytes, -block.threads, -block.blocks});
}

Device* make_device(int multiprocessors, int blocks_each, int hardware_queues) {
  const Resources idle = blocks_each == 0 ? kMultiprocessor : Resources{0, 0, 0, blocks_each};
  auto* device = new Device{multiprocessors, blocks_each,
                            std::vector<Resources>(size_t(multiprocessors), idle), hardware_queues};
  device->legacy = make_stream(device, true, 0);
  return device;
}

Stream* make_stream(Device* device, bool blocking, int priority) {
  auto* stream = new Stream{device, blocking, priority, nullptr};
  {
    const Lock lock(world().mutex);
    stream->hardware = next_queue(*device, priority);
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
    // A replay cannot wait for work outside the graph.
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
  Lock lock(world().mutex);
  if (event.graph) return kCapturedEvent;
  done = event.completion->done;
  if (done) ptx_host_waited();
  return outcome(lock);
}

int synchronize(const Event& event) {
  Lock lock(world().mutex);
  if (event.graph) return kCapturedEvent;
  await(lock, event.completion);
  ptx_host_waited();
  return outcome(lock);
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
  return outcome(lock);
}

void settle(Device& device) {
  Lock lock(world().mutex);
  Completions all;
  for (const Stream* stream : device.streams) all.push_back(stream->last);
  for (const auto& completion : all) await(lock, completion);
}

Resources resources_of(const Device& device, const Needs& block) {
  if (device.blocks_each != 0) return {0, 0, 0, 1};
  const int warps = (block.threads + 31) / 32;
  return {warps * whole(block.registers * 32, kRegisterUnit),
          whole(block.shared_bytes, kSharedUnitBytes) + kSystemSharedBytes, warps * 32, 1};
}

int blocks_each(const Device& device, const Resources& block) {
  if (block.shared_bytes > kLargestSharedBytes + kSystemSharedBytes) return 0;
  Resources left =
      device.blocks_each == 0 ? kMultiprocessor : Resources{0, 0, 0, device.blocks_each};
  int count = 0;
  for (; left.holds(block); ++count) left.take(block);
  return count;
}

void run_blocks(Device& device, int blocks, const Resources& each, int priority, const Work& work) {
  Lock lock(world().mutex);
  const std::pair mine(priority, device.tickets++);
  device.waiting.insert(mine);
  std::vector<Resources*> multiprocessors;
  world().changed.wait(lock, [&] {
    if (*device.waiting.begin() == mine) assign(device, blocks, each, multiprocessors);
    return int(multiprocessors.size()) == blocks;
  });
  device.waiting.erase(mine);
  world().changed.notify_all();
  lock.unlock();
  work();
  lock.lock();
  for (Resources* granted : multiprocessors) granted->give(each);
  world().changed.notify_all();
}

}  // namespace emulator
