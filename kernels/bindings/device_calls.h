// The calls of a rank on a device that take tensors as they are, and the order of all its calls on
// streams.
//
// NOTE [Device calls]
// A call runs behind the earlier work of the caller's current stream and before its later work.
// The calls of one communicator follow each other, whatever streams they are made on: `follow` puts
// the stream of a call behind that of the last one. An asynchronous call runs on a stream of the
// communicator's own, the side stream, between two events; its tensors are kept until a stream that
// their owner uses has been put behind the call, or the call is known to be done.
//
// The common call is one driver call, its launch. What is not common is left to the checked path in
// Python, which makes the same calls in the same order with `follow` and `keep`: tensors of other
// kinds, captures, a thread on which another device is current (the driver refuses the first call,
// and nothing was done), ranks that share a launch, and events that the pool does not have yet.
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

// A point on a stream behind calls, whose passing is noted in the records of the calls. It returns
// to its pool, so that its end calls no driver.
class DeviceEvent {
 public:
  // Calls [first, last] of a track have ended once the event has passed.
  struct Ends {
    std::shared_ptr<DeviceRecorder> records;  // or none
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
  // With the GIL, which both release while they ask the driver: another thread's launch may hold
  // the driver's lock while its queue is full.
  bool query();
  void synchronize();

 private:
  std::shared_ptr<const device::Driver> driver_;
  device::EventPool& pool_;
  void* handle_;
  Ends ends_;
};

class DeviceCalls;

// A call that was prepared once, to be launched many times with the same tensors.
class DevicePlan {
 public:
  struct Planned {
    nanobind::object tensor;
    TensorMemory memory;
  };

  // owner: the DeviceCalls, which this keeps alive, like the tensors.
  DevicePlan(nanobind::object owner, std::vector<Planned> tensors, device::Prepared call)
      : owner_(std::move(owner)), tensors_(std::move(tensors)), call_(std::move(call)) {}

  // Launches the call on the current stream; `kNotFast` or 0. `kNotFast` of a tensor that does not
  // take the fast path any more, or has other memory than when the call was prepared.
  int launch();

 private:
  nanobind::object owner_;
  std::vector<Planned> tensors_;
  device::Prepared call_;
};

class DeviceCalls {
 public:
  // What of torch and of the runtime this asks in Python.
  struct Asked {
    nanobind::object current_stream;  // of a device, as an address
    nanobind::object current_device;  // of the calling thread
    nanobind::object is_mine;         // of a tensor; None: its place says so
  };

  // comm: a DeviceComm, which this keeps alive.
  DeviceCalls(nanobind::object comm, TensorPlace place, int device, Asked asked,
              std::shared_ptr<DeviceRecorder> records);

  ~DeviceCalls() {
    if (behind_ != nullptr) pool_.give(behind_);
  }
  DeviceCalls(const DeviceCalls&) = delete;
  DeviceCalls& operator=(const DeviceCalls&) = delete;

  // Makes a collective that `prepare` prepares, on the calling thread's current stream; `kNotFast`
  // or 0.
  template <class Prepare>
  int make(Prepare prepare);
  // The same on the side stream, for tensors that are kept; null: nothing was done.
  template <class Prepare>
  std::shared_ptr<DeviceEvent> start(nanobind::object tensors, Prepare prepare);

  // Makes one launch of the calls of ranks that share it, all prepared by `prepare(rank)`, on the
  // first one's current stream; `kNotFast` or 0. The ranks are those of one communicator that this
  // process has on a device.
  template <class Prepare>
  static int make_together(const std::vector<DeviceCalls*>& ranks, Prepare prepare);
  // Prepares a call for a stream that is not capturing, and records it; the caller holds the turn
  // and the GIL. False: the checked path is to make the call.
  template <class Prepare>
  bool prepare(void* stream, Prepare prepare);

  // True of a tensor on the device that takes the fast path: see read_memory().
  bool read(nanobind::handle tensor, TensorMemory* result) const;
  device::DeviceComm& comm() const { return comm_; }

  // Puts `stream` behind the communicator's last call, and makes it that of the last call. The
  // caller holds the turn, and the device is current.
  void follow(void* stream);
  // The stream of the last call outside of captures; null pointer: there was none.
  void* const* last_stream() const { return has_last_ ? &last_ : nullptr; }
  bool has_captured() const { return has_captured_; }

  // Returns an event at the end of `stream`, of the current device. Collectives: an event behind
  // all that were launched so far.
  std::shared_ptr<DeviceEvent> mark(void* stream, DeviceEvent::Ends ends);
  DeviceEvent::Ends all_collectives() const;
  // Keeps tensors until the event has passed, or join() has put `stream` behind it.
  void keep(nanobind::object tensors, std::shared_ptr<DeviceEvent> event, void* stream);
  // Makes the current stream wait for the event; false, unless this is `checked`: a call may have
  // failed, or another device is current, and nothing waits.
  bool join(const DeviceEvent& event, bool checked);
  // Notes in the records what is done by now.
  void look();

  // Has calls be started on this stream. The device is current.
  void set_side(void* stream);
  // Ranks of this process share their launches: no call of one rank is made here.
  void set_shared(bool shared) { shared_ = shared; }
  // The blocks of a call, which run at once, take up to so many multiprocessors.
  void set_needed_multiprocessors(int number) { needed_multiprocessors_ = number; }
  // The communicator is unusable, or closed: join() leaves it to Python to say why.
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
  // True unless `stream` is the legacy default stream and another device is current: nullptr would
  // name that device's. Most calls fail then, but a wait for an event would order the wrong stream.
  bool names_here(void* stream) const;
  void* current_stream() const;
  void take_turn();
  // An event to record on the side stream.
  std::shared_ptr<DeviceEvent> take_event() const;
  // A stream of the call to come is capturing, as far as calls of this communicator were captured.
  bool captures(void* stream) const;
  void follow(void* stream, bool captures);
  // Throws DriverError if the stream is of a green context in which a call's blocks do not fit.
  void check_fits(void* stream);
  void drop_passed();

  nanobind::object owner_;
  device::DeviceComm& comm_;
  const device::Driver& driver_;
  device::EventPool& pool_;
  TensorPlace place_;
  nanobind::object device_;  // an int, as `current_stream` takes it
  Asked asked_;
  std::shared_ptr<DeviceRecorder> records_;
  bool shared_ = false, disabled_ = false;
  int needed_multiprocessors_ = 0;
  // The streams of the last call and of the last captured call. Neither waits for the other.
  bool has_last_ = false, has_captured_ = false;
  void *last_ = nullptr, *captured_ = nullptr, *side_ = nullptr;
  // check_fits() has let the side stream pass, and this one of the callers', its last.
  bool side_fits_ = false, has_fitting_ = false;
  void* fitting_ = nullptr;
  void* behind_ = nullptr;  // an event that every start() uses; null: there is no side stream
  std::deque<Kept> kept_;
  std::shared_ptr<DeviceEvent> newest_;  // of those that were kept
};

nanobind::class_<DeviceCalls> bind_device_calls(nanobind::module_& m);

template <class Prepare>
bool DeviceCalls::prepare(void* stream, Prepare prepare) {
  comm_.set_stream(stream, false);
  try {
    const device::DeviceComm::Preparing preparing(comm_);
    prepare();
  } catch (const std::invalid_argument&) {
    return false;  // Python says what is wrong, such as a kernel that is not there
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
    // Nothing was launched. Python makes the call again with the device current, and words what
    // then fails.
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
      // Behind this stream's work the side stream is behind the last call on it, too.
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
