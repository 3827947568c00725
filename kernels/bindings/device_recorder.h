// SPDX-License-Identifier: Apache-2.0

// The flight recorder of a rank on a device. Its records are in the heap of the process on the
// host, where peers and `ringcomm trace --pid` read them without a driver, even after the process
// has been killed.
//
// The host enqueues calls and does not wait for them, so this class knows only the ends that the
// callers of seen_*() have seen. It adds nothing to a stream, and no work to a kernel.
#pragma once

#include <sys/types.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/cuda/device_comm.h"
#include "kernels/host/heap.h"
#include "kernels/host/recorder.h"

namespace ringcomm::host {

class DeviceRecorder final : public device::CallObserver {
 public:
  // records: the number per track, at least 1. Throws HeapError.
  DeviceRecorder(std::shared_ptr<Heap> heap, int rank, int world, uint32_t records,
                 const std::string& name);
  ~DeviceRecorder() override;
  DeviceRecorder(const DeviceRecorder&) = delete;
  DeviceRecorder& operator=(const DeviceRecorder&) = delete;

  uint64_t offset() const { return offset_; }
  void set_world_id(uint64_t id) { recorder_.set_world_id(id); }
  // Hides the recorder from `ringcomm trace --pid`; peers may still read it.
  void unlist();
  // Frees the memory. Nothing is recorded from now on.
  void release();

  void enqueues(const device::Prepared& call, bool captured) override;
  void withdraws() override;
  // Records an enqueued collective of Triton's kernels; called with the GIL.
  void enqueues_triton(const CallId& id, unsigned channels, bool captured);

  // raised: set by a kernel of this rank when it gives up. From then on, or after stop(), a kernel
  // may end without doing its call, so seen_completed() and seen_begun() note no more calls.
  void watch(const uint32_t* raised);
  void stop();

  // Calls enqueued so far. A collective of several launches counts as several calls.
  uint64_t enqueued(Track track) const;

  // Notes that calls `first` to `last` are done, except calls that failed before.
  void seen_completed(Track track, uint64_t first, uint64_t last);
  // Notes that the kernels' count of collectives has reached `sequence`.
  void seen_begun(uint64_t sequence);
  // Notes that a call failed. A failed collective fails all later ones; earlier ones are done.
  void seen_failed(Track track, uint64_t number, Status status, int peer);

  // Returns the numbers of the collectives to which a kernel's count `sequence` may belong. Blocks
  // count their calls, and also the replays of a graph, which the host does not count.
  std::vector<uint64_t> numbers_of(uint64_t sequence) const;

 private:
  struct Launch {
    uint64_t number;             // sequence number of the call
    unsigned channels, repeats;  // blocks per launch, and launches
  };
  static constexpr int kTracks = int(Track::kCount);

  bool is_whole() const;
  void record(const CallId& id, uint64_t bytes, unsigned channels, bool captured);
  void record_messages(const device::Prepared& call, bool captured);
  void complete(Track track, uint64_t first, uint64_t last);
  bool is_open(Track track, uint64_t number) const;
  uint64_t oldest(Track track) const;
  Launch& launch_of(uint64_t number) { return launches_[number % launches_.size()]; }

  std::shared_ptr<Heap> heap_;
  uint64_t offset_;
  int world_;
  pid_t pid_;
  bool listed_ = true, captured_ = false, stopped_ = false;
  const uint32_t* raised_ = nullptr;
  Recorder recorder_;
  uint64_t enqueued_[kTracks] = {}, settled_[kTracks] = {};
  uint64_t newest_ = 0;            // number of the last collective
  uint64_t last_messages_ = 0;     // number of calls in the last launch of messages
  bool last_is_message_ = false;   // true if the last launch made messages
  std::vector<Launch> launches_;   // by call number
  std::vector<uint64_t> counted_;  // [channel] calls that its kernels have counted
  mutable std::mutex mutex_;
};

}  // namespace ringcomm::host
