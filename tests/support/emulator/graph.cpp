// SPDX-License-Identifier: Apache-2.0

// Capture of streams into graphs, with the driver's rules, and replay.
#include <algorithm>
#include <thread>

#include "tests/ptx_interpreter/source/interpreter.h"
#include "tests/support/emulator/device.h"

namespace emulator {

int Graph::add(Work run, std::vector<int> after) {
  nodes.push_back({std::move(run), std::move(after)});
  return int(nodes.size()) - 1;
}

// True if a wait for the nodes `end` includes the nodes `wanted`.
bool Graph::covers(const std::vector<int>& end, const std::vector<int>& wanted) const {
  std::vector<bool> reached(nodes.size());
  for (const int node : end) reached[node] = true;
  for (int node = int(nodes.size()) - 1; node >= 0; --node)  // a node depends on smaller ones only
    if (reached[node])
      for (const int earlier : nodes[node].after) reached[earlier] = true;
  return std::all_of(wanted.begin(), wanted.end(), [&](int node) { return reached[node]; });
}

void Graph::run() const {
  std::vector<std::shared_ptr<Completion>> done;
  for (size_t i = 0; i < nodes.size(); ++i) done.push_back(std::make_shared<Completion>());
  // A chain needs no threads; branches run concurrently.
  bool chain = true;
  for (size_t i = 0; i < nodes.size(); ++i)
    chain &= i == 0 ? nodes[i].after.empty() : nodes[i].after == std::vector<int>{int(i) - 1};
  const auto run_node = [&](size_t i) {
    {
      std::unique_lock lock(world().mutex);
      for (const int earlier : nodes[i].after)
        world().changed.wait(lock, [&] { return done[earlier]->done; });
    }
    if (!chain) ptx_stream_waited();  // this thread does not belong to the stream
    nodes[i].run();
    const std::lock_guard lock(world().mutex);
    done[i]->done = true;
    world().changed.notify_all();
  };
  std::vector<std::thread> threads;
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (chain)
      run_node(i);
    else
      threads.emplace_back(run_node, i);
  }
  for (std::thread& thread : threads) thread.join();
}

int begin_capture(Stream& stream) {
  const std::lock_guard lock(world().mutex);
  if (&stream == stream.device->legacy) return kCaptureUnsupported;
  if (stream.capture) return kInvalidValue;
  stream.capture = std::make_shared<Graph>();
  stream.capture->members = {&stream};
  stream.frontier.clear();
  return kSuccess;
}

int end_capture(Stream& stream, std::shared_ptr<Graph>& graph) {
  const std::lock_guard lock(world().mutex);
  if (!stream.capture || stream.capture->members.front() != &stream) return kInvalidValue;
  graph = stream.capture;
  bool joined = true;
  for (Stream* member : graph->members) {
    joined &= graph->covers(stream.frontier, member->frontier);
    member->capture = nullptr;
  }
  graph->members.clear();
  if (graph->broken) return kCaptureInvalidated;
  return joined ? kSuccess : kCaptureUnjoined;
}

bool capturing(Stream& stream) {
  const std::lock_guard lock(world().mutex);
  return stream.capture != nullptr;
}

}  // namespace emulator
