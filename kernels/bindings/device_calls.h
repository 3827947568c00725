// SPDX-License-Identifier: Apache-2.0

// A rank's calls on a device that take tensors directly, and the order of all its calls on streams.
//
// NOTE [Device calls]
// A call runs after the earlier work of the caller's current stream and before its later work. The
// calls of one communicator run in order, whatever streams they are made on: `follow` makes a
// call's stream wait for the last call's stream. An asynchronous call runs on the side stream,
// which belongs to the communicator, between two events. Its tensors are kept until a stream that
// their owner uses waits for the call, or the call is known to be done.
//
// The common call is one driver call, its launch. Python's checked path handles the other cases,
// with the same calls in the same order through `follow` and `keep`: tensors of other kinds,
// captures, a thread with another current device (the driver refuses the first call, so nothing was
// done), ranks that share a launch, and events that the pool does not have yet.
#pragma once

#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/bindings/device_recorder.h"
#include "kernels/bindings/gil.h"
#include "kernels/bindings/native_comm.h"
#include "kernels/bindings/tensors.h"
#include "kernels/cuda/device_comm.h"

namespace ringcomm::host {

// A point on a stream after some calls. Once the stream has passed the event, the records of these
// calls note the calls' end. The destructor returns the event to its pool, and makes no driver
// call.
class DeviceEvent {
 public:
  // When the event has passed, calls [first, last] of a track have ended.
  struct Ends {
    std::shared_ptr<DeviceRecorder> records;  // null: no records
    Track track;
    uint64_t first, last;
  };

  DeviceEvent(std::shared_ptr<const device::Driver> driver, device::EventPool& pool, void* handle,
              Ends ends)
      : driver_(std::move(driver)), pool_(pool), handle_(handle), ends_(std::move(ends)) {}
  ~DeviceEvent() { pool_.give(handle_); }
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;

  void* handle() const { return handle_; }
  void ends_with(Ends ends) { ends_ = std::move(ends); }
  // Call them with the GIL. They release it during the driver call, since another thread's launch
  // may hold the driver's lock while its queue is full.
  bool query();
  void synchronize();

 private:
  std::shared_ptr<const device::Driver> driver_;
  device::EventPool& pool_;
  void* handle_;
  Ends ends_;
};

class DeviceCalls;

// A call prepared once, to be launched many times with the same tensors.
class DevicePlan {
 public:
  struct Planned {
    nanobind::object tensor;
    TensorMemory memory;
  };

  // owner: the DeviceCalls. The plan keeps it and the tensors alive.
  DevicePlan(nanobind::object owner, std::vector<Planned> tensors, device::Prepared call)
      : owner_(std::move(owner)), tensors_(std::move(tensors)), call_(std::move(call)) {}

  // Launches the call on the current stream; returns 0 or `kNotFast`: a tensor no longer takes the
  // fast path, or its memory has changed since the call was prepared.
  int launch();

 private:
  nanobind::object owner_;
  std::vector<Planned> tensors_;
  device::Prepared call_;
};

class DeviceCalls {
 public:
  // The functions of torch and of the runtime that this class calls in Python.
  struct Asked {
    nanobind::object current_stream;  // function: a device's current stream, as an address
    nanobind::object current_device;  // function: the calling thread's current device
    nanobind::object is_mine;         // function: true for own tensors; None: TensorPlace decides
  };

  // comm: a DeviceComm, which this object keeps alive.
  DeviceCalls(nanobind::object comm, TensorPlace place, int device, Asked asked,
              std::shared_ptr<DeviceRecorder> records);

  ~DeviceCalls() {
    if (behind_ != nullptr) pool_.give(behind_);
  }
  DeviceCalls(const DeviceCalls&) = delete;
  DeviceCalls& operator=(const DeviceCalls&) = delete;

  // Makes a collective that `prepare` prepares, on the calling thread's current stream; returns
  // `kNotFast` or 0.
  template <class Prepare>
  int make(Prepare prepare);
  // Starts the collective on the side stream and keeps `tensors`. Null: nothing was done.
  template <class Prepare>
  std::shared_ptr<DeviceEvent> start(nanobind::object tensors, Prepare prepare);

  // Makes the calls of ranks that share a launch, each prepared by `prepare(rank)`, in one launch
  // on the first rank's current stream; returns `kNotFast` or 0. The ranks are all ranks of one
  // communicator that this process has on one device.
  template <class Prepare>
  static int make_together(const std::vector<DeviceCalls*>& ranks, Prepare prepare);
  // Prepares and records a call for a stream that is not capturing; the caller holds the call lock
  // and the GIL. False: the checked path must make the call.
  template <class Prepare>
  bool prepare(void* stream, Prepare prepare);

  // True if a tensor on the device takes the fast path: see read_memory().
  bool read(nanobind::handle tensor, TensorMemory* result) const;
  device::DeviceComm& comm() const { return comm_; }

  // Makes `stream` wait for the communicator's last call, and from now on takes `stream` for the
  // last call's stream. The caller holds the call lock, and the device is current.
  void follow(void* stream);
  // Returns the stream of the last call outside captures; null pointer: there was no call.
  void* const* last_stream() const { return has_last_ ? &last_ : nullptr; }
  bool has_captured() const { return has_captured_; }

  // mark(): records an event at the end of `stream`, on the current device, and returns it.
  // all_collectives(): the `ends` for an event that follows all collectives launched so far.
  std::shared_ptr<DeviceEvent> mark(void* stream, DeviceEvent::Ends ends);
  DeviceEvent::Ends all_collectives() const;
  // Keeps tensors until the event has passed, or join() has made `stream` wait for the event.
  void keep(nanobind::object tensors, std::shared_ptr<DeviceEvent> event, void* stream);
  // Makes the current stream wait for the event. Unless `checked`, returns false without a wait if
  // a call may have failed or another device is current.
  bool join(const DeviceEvent& event, bool checked);
  // Notes in the records which calls are done by now.
  void look();

  // Starts asynchronous calls on this stream from now on. The device is current.
  void set_side(void* stream);
  // shared: ranks of this process share launches, so this class makes no call of a single rank.
  void set_shared(bool shared) { shared_ = shared; }
  // Sets how many multiprocessors a call's blocks, which run at the same time, may need.
  void set_needed_multiprocessors(int number) { needed_multiprocessors_ = number; }
  // Called when the communicator is unusable or closed: join() then lets Python report the reason.
  void disable() { disabled_ = true; }

  struct Kept {
    nanobind::object tensors;
    std::shared_ptr<DeviceEvent> event;
    void* stream;
  };
  const std::deque<Kept>& kept() const { return kept_; }
  void forget_kept() { std::exchange(kept_, {}); }

  std::shared_ptr<CallLock> turn = std::make_shared<CallLock>();

 private:
  bool is_usable() const;
  bool has_failed() const;
  // False if `stream` is the legacy default stream and another device is current: nullptr then
  // names that device's stream. Most calls fail then, but a wait for an event would order the wrong
  // stream.
  bool names_here(void* stream) const;
  void* current_stream() const;
  void take_turn();
  // Returns an event to record on the side stream.
  std::shared_ptr<DeviceEvent> take_event() const;
  // True if `stream`, that of the next call, is capturing. Once a call has been captured, also true
  // if the side stream is capturing.
  bool captures(void* stream) const;
  void follow(void* stream, bool captures);
  // Throws DriverError if the stream's green context is too small for a call's blocks.
  void check_fits(void* stream);
  void drop_passed();

  nanobind::object owner_;
  device::DeviceComm& comm_;
  const device::Driver& driver_;
  device::EventPool& pool_;
  TensorPlace place_;
  nanobind::object device_;  // an int, as `current_stream` expects
  Asked asked_;
  std::shared_ptr<DeviceRecorder> records_;
  bool shared_ = false, disabled_ = false;
  int needed_multiprocessors_ = 0;
  // The streams of the last call and of the last captured call, which do not wait for each other.
  bool has_last_ = false, has_captured_ = false;
  void *last_ = nullptr, *captured_ = nullptr, *side_ = nullptr;
  // True if check_fits() has accepted the side stream, and true if it has accepted `fitting_`.
  bool side_fits_ = false, has_fitting_ = false;
  void* fitting_ = nullptr;
  void* behind_ = nullptr;  // the event that every start() uses; null: there is no side stream
  std::deque<Kept> kept_;
  std::shared_ptr<DeviceEvent> newest_;  // the newest kept event
};

nanobind::class_<DeviceCalls> bind_device_calls(nanobind::module_& m);

template <class Prepare>
bool DeviceCalls::prepare(void* stream, Prepare prepare) {
  comm_.set_stream(stream, false);
  try {
    const device::DeviceComm::Preparing preparing(comm_);
    prepare();
  } catch (const std::invalid_argument&) {
    return false;  // Python reports the error, for example a missing kernel
  }
  return comm_.next();
}

template <class Prepare>
int DeviceCalls::make(Prepare prepare_call) {
  if (shared_ || !is_usable()) return kNotFast;
  void* const stream = current_stream();
  take_turn();
  const std::lock_guard held(*turn, std::adopt_lock);
  const bool waits = has_last_ && last_ != stream;
  if ((waits && !names_here(stream)) || captures(stream) || !prepare(stream, prepare_call))
    return kNotFast;
  const WithoutGil nogil;
  try {
    follow(stream, false);
    comm_.launch_prepared();
    return 0;
  } catch (const device::DriverError&) {
    // Nothing was launched. Python makes the call again with the device current, and reports a
    // failure.
    comm_.withdraw();
    return kNotFast;
  }
}

template <class Prepare>
std::shared_ptr<DeviceEvent> DeviceCalls::start(nanobind::object tensors, Prepare prepare_call) {
  if (shared_ || behind_ == nullptr || !is_usable()) return nullptr;
  void* const stream = current_stream();
  take_turn();
  const std::lock_guard held(*turn, std::adopt_lock);
  if (captures(stream) || !prepare(side_, prepare_call)) return nullptr;
  std::shared_ptr<DeviceEvent> end;
  {
    const WithoutGil nogil;
    try {
      driver_.record(behind_, stream);
      driver_.wait(side_, behind_);
      end = take_event();
      // The side stream waits for this stream, and so also for the last call on it.
      if (has_last_ && last_ == stream) last_ = side_;
      follow(side_, false);
      comm_.launch_prepared();
    } catch (const device::DriverError&) {
      comm_.withdraw();
      return nullptr;
    }
    driver_.record(end->handle(), side_);
  }
  end->ends_with(all_collectives());
  keep(std::move(tensors), end, stream);
  return end;
}

}  // namespace ringcomm::host
