// The flight recorder of a rank on a device. Its records lie in the heap of the process on the
// host, where peers and `ringcomm trace --pid` read them without a driver, also after the process
// has been killed.
//
// The host enqueues calls and does not wait for them, so this knows of their ends only what the
// caller of seen_*() has seen. Nothing is added to a stream, and no kernel does more.
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
  // records: of each track, 1 or more. Throws HeapError.
  DeviceRecorder(std::shared_ptr<Heap> heap, int rank, int world, uint32_t records,
                 const std::string& name);
  ~DeviceRecorder() override;
  DeviceRecorder(const DeviceRecorder&) = delete;
  DeviceRecorder& operator=(const DeviceRecorder&) = delete;

  uint64_t offset() const { return offset_; }
  void set_world_id(uint64_t id) { recorder_.set_world_id(id); }
  // `ringcomm trace --pid` does not find it any more; peers may still read it.
  void unlist();
  // Gives its memory back. Nothing is recorded from here on.
  void release();

  void enqueues(const device::Prepared& call, bool captured) override;
  void withdraws() override;
  // The same of a collective of Triton's kernels, with the GIL.
  void enqueues_triton(const CallId& id, unsigned channels, bool captured);

  // The word by which a kernel of this rank says that it gave up. What has ended from then on, or
  // after stop(), need not have done its call: seen_completed() and seen_begun() note nothing more.
  void watch(const uint32_t* raised);
  void stop();

  // Calls enqueued so far. A collective that is several launches counts as many.
  uint64_t enqueued(Track track) const;

  // The calls from `first` to `last` are known to be done, those that failed before apart.
  void seen_completed(Track track, uint64_t first, uint64_t last);
  // The kernels' count of collectives was `sequence`.
  void seen_begun(uint64_t sequence);
  // The call failed, and with a collective all behind it did; those before it are done.
  void seen_failed(Track track, uint64_t number, Status status, int peer);

  // Collectives that can be the one which a kernel numbers `sequence`. Each block counts the calls
  // that it took part in, and a graph's replays, which nobody counts here.
  std::vector<uint64_t> numbers_of(uint64_t sequence) const;

 private:
  struct Launch {
    uint64_t number;             // of the call
    unsigned channels, repeats;  // blocks, and launches of them
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
  uint64_t last_messages_ = 0;     // how many the last launch of messages has
  bool last_is_message_ = false;   // of the last launch
  std::vector<Launch> launches_;   // by number
  std::vector<uint64_t> counted_;  // by channel, what its kernels count
  mutable std::mutex mutex_;
};

}  // namespace ringcomm::host
