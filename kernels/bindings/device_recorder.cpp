// SPDX-License-Identifier: Apache-2.0

#include "kernels/bindings/device_recorder.h"

#include <unistd.h>

#include <algorithm>

#include "kernels/bindings/call_site.h"
#include "kernels/bindings/gil.h"
#include "kernels/bindings/module.h"

namespace nb = nanobind;

namespace ringcomm::host {
namespace {

// Returns the bytes of a call's whole buffer, as the host's communicators record them.
uint64_t size_of_call(const device::Prepared& call) {
  const device::CallArgs& a = call.args;
  switch (a.collective) {
    case Collective::kAdamWAllGather:
    case Collective::kReduceScatterAdamWAllGather:
      return a.match_bytes * uint64_t(size_of(DType(a.root)));  // elements of parameters
    case Collective::kAllToAll:
      return sum_bytes(call.out);
    default:
      return a.total_bytes != 0 ? a.total_bytes : a.match_bytes;
  }
}

}  // namespace

DeviceRecorder::DeviceRecorder(std::shared_ptr<Heap> heap, int rank, int world, uint32_t records,
                               const std::string& name)
    : heap_(std::move(heap)),
      offset_(heap_->allocate(Recorder::memory_bytes(records), Heap::Purpose::kRegion)),
      world_(world),
      pid_(getpid()),
      launches_(records) {
  recorder_.open(heap_->base() + offset_, records, rank, world, 0, name);
  recorder_.say_on_device();
  heap_->list_recorder(offset_);
}

DeviceRecorder::~DeviceRecorder() { release(); }

void DeviceRecorder::release() {
  const std::lock_guard lock(mutex_);
  if (!recorder_.on() || getpid() != pid_) return;  // in a forked child the heap is the parent's
  unlist();
  recorder_ = Recorder();
  heap_->free(offset_);
}

void DeviceRecorder::unlist() {
  if (std::exchange(listed_, false)) heap_->unlist_recorder(offset_);
}

void DeviceRecorder::enqueues(const device::Prepared& call, bool captured) {
  {
    const WithGil gil;  // some callers do not hold the GIL
    take_call_site();
  }
  const std::lock_guard lock(mutex_);
  const device::CallArgs& a = call.args;
  last_is_message_ = a.collective == Collective::kSend;
  if (last_is_message_) return record_messages(call, captured);
  if (call.continues) {
    ++enqueued_[int(Track::kCollectives)];
    ++launch_of(newest_).repeats;
    if (!captured) ++counted_[0];
    return;
  }
  const Kernels kernels = call.triton != nullptr ? Kernels::kTriton : Kernels::kNative;
  const CallId id{0, a.match_bytes, a.collective, a.dtype, a.redop, a.root, a.algorithm, kernels};
  record(id, size_of_call(call), call.channels, captured);
}

void DeviceRecorder::enqueues_triton(const CallId& id, unsigned channels, bool captured) {
  take_call_site();
  const std::lock_guard lock(mutex_);
  last_is_message_ = false;
  record(id, id.match_bytes, channels, captured);
}

void DeviceRecorder::record(const CallId& asked, uint64_t bytes, unsigned channels, bool captured) {
  CallId id = asked;
  newest_ = id.sequence = ++enqueued_[int(Track::kCollectives)];
  launch_of(newest_) = {newest_, captured ? 0 : channels, 1};
  captured_ |= captured;
  if (counted_.size() < channels) counted_.resize(channels);
  for (unsigned c = 0; c < launch_of(newest_).channels; ++c) ++counted_[c];
  recorder_.begin(Track::kCollectives, id, bytes, -1,
                  captured ? RecordState::kCaptured : RecordState::kEnqueued);
}

void DeviceRecorder::record_messages(const device::Prepared& call, bool captured) {
  const device::CallArgs& a = call.args;
  const RecordState state = captured ? RecordState::kCaptured : RecordState::kEnqueued;
  last_messages_ = 0;
  const auto record_one = [&](Collective way, uint64_t bytes, int peer) {
    const uint64_t number = ++enqueued_[int(Track::kMessages)];
    recorder_.begin(Track::kMessages, {number, 0, way, a.dtype, a.redop, a.root, a.algorithm},
                    bytes, peer, state);
    ++last_messages_;
  };
  for (int p = 0; p < world_; ++p) {
    if (call.readers >> p & 1) record_one(Collective::kSend, call.in[size_t(p)].bytes, p);
    if (call.senders >> p & 1) record_one(Collective::kReceive, call.out[size_t(p)].bytes, p);
  }
}

// The record of a call that is withdrawn stays visible until the next call takes its number.
void DeviceRecorder::withdraws() {
  const std::lock_guard lock(mutex_);
  const Track track = last_is_message_ ? Track::kMessages : Track::kCollectives;
  for (uint64_t back = last_is_message_ ? last_messages_ : 1; back > 0; --back) {
    uint64_t& count = enqueued_[int(track)];
    if (is_open(track, count)) recorder_.end(track, count, Status::kAborted, -1);
    --count;
  }
  if (last_is_message_) return;
  Launch& last = launch_of(newest_);
  for (unsigned c = 0; c < last.channels; ++c) --counted_[c];
  if (--last.repeats == 0) last.channels = 0;
}

void DeviceRecorder::watch(const uint32_t* raised) {
  const std::lock_guard lock(mutex_);
  raised_ = raised;
}

void DeviceRecorder::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  raised_ = nullptr;
}

bool DeviceRecorder::is_whole() const {
  // Pairs with the release in tell_host().
  return !stopped_ && raised_ != nullptr && load_acquire_sys(raised_) == 0;
}

uint64_t DeviceRecorder::enqueued(Track track) const {
  const std::lock_guard lock(mutex_);
  return enqueued_[int(track)];
}

bool DeviceRecorder::is_open(Track track, uint64_t number) const {
  if (!recorder_.on()) return false;
  const RecordState state = recorder_.state(track, number);
  return state == RecordState::kEnqueued || state == RecordState::kBegun;
}

// The smallest number whose record may still exist.
uint64_t DeviceRecorder::oldest(Track track) const {
  const uint64_t newest = enqueued_[int(track)];
  return newest > recorder_.capacity() ? newest - recorder_.capacity() + 1 : 1;
}

void DeviceRecorder::complete(Track track, uint64_t first, uint64_t last) {
  last = std::min(last, enqueued_[int(track)]);
  for (uint64_t n = std::max(first, oldest(track)); n <= last; ++n)
    if (is_open(track, n)) recorder_.advance(track, n, RecordState::kCompleted);
}

void DeviceRecorder::seen_completed(Track track, uint64_t first, uint64_t last) {
  const std::lock_guard lock(mutex_);
  if (!is_whole()) return;
  if (track == Track::kMessages) return complete(track, first, last);
  uint64_t& settled = settled_[int(track)];  // collectives follow each other
  complete(track, std::max(first, settled + 1), last);
  settled = std::max(settled, last);
}

void DeviceRecorder::seen_begun(uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  constexpr Track track = Track::kCollectives;
  if (!is_whole() || captured_) return;  // kernels also count replays, whose number is unknown here
  for (uint64_t n = std::min(sequence, enqueued_[int(track)]); n >= oldest(track); --n) {
    if (recorder_.state(track, n) == RecordState::kNone) continue;  // a later launch of a call
    complete(track, settled_[int(track)] + 1, n - 1);
    settled_[int(track)] = std::max(settled_[int(track)], n - 1);
    if (is_open(track, n)) recorder_.advance(track, n, RecordState::kBegun);
    return;
  }
}

void DeviceRecorder::seen_failed(Track track, uint64_t number, Status status, int peer) {
  const std::lock_guard lock(mutex_);
  if (!is_open(track, number)) return;
  recorder_.end(track, number, status, peer);
  if (track == Track::kMessages) return;
  complete(track, settled_[int(track)] + 1, number - 1);
  for (uint64_t n = number + 1; n <= enqueued_[int(track)]; ++n)
    if (is_open(track, n)) recorder_.end(track, n, Status::kAborted, -1);
}

std::vector<uint64_t> DeviceRecorder::numbers_of(uint64_t sequence) const {
  const std::lock_guard lock(mutex_);
  std::vector<uint64_t> found, counted = counted_;
  const uint64_t newest = enqueued_[int(Track::kCollectives)];
  for (uint64_t n = newest; n > 0 && n + launches_.size() > newest; --n) {
    const Launch& launch = launches_[n % launches_.size()];
    if (launch.number != n) continue;
    bool can_be = captured_;
    for (unsigned c = 0; c < launch.channels; ++c) {
      can_be |= sequence <= counted[c] && sequence > counted[c] - launch.repeats;
      counted[c] -= launch.repeats;
    }
    if (can_be) found.push_back(n);
  }
  return found;
}

namespace {

nb::bytes snapshot(uintptr_t memory, uint32_t records, std::tuple<int, int> rank_of,
                   uint64_t world_id, uint32_t most) {
  const auto [rank, world] = rank_of;
  std::vector<char> bytes = Recorder::snapshot(at(memory), records, 0, most);
  Recorder::correct(bytes, {rank, world, world_id, true});
  return nb::bytes(bytes.data(), bytes.size());
}

void bind_seen(nb::class_<DeviceRecorder>& c) {
  c.def(
       "enqueued", [](const DeviceRecorder& r, int track) { return r.enqueued(Track(track)); },
       nb::arg("track"), "The number of the last call.")
      .def(
          "seen_completed",
          [](DeviceRecorder& r, int track, uint64_t first, uint64_t last) {
            r.seen_completed(Track(track), first, last);
          },
          nb::arg("track"), nb::arg("first"), nb::arg("last"),
          "These calls are done now; those that have failed stay so.")
      .def("seen_begun", &DeviceRecorder::seen_begun, nb::arg("sequence"),
           "The kernels' count of collectives is this; says nothing once a graph was captured.")
      .def(
          "seen_failed",
          [](DeviceRecorder& r, int track, uint64_t number, int status, int peer) {
            r.seen_failed(Track(track), number, Status(status), peer);
          },
          nb::arg("track"), nb::arg("number"), nb::arg("status"), nb::arg("peer"),
          "A call failed; with a collective all behind it did, and those before are done.")
      .def("numbers_of", &DeviceRecorder::numbers_of, nb::arg("sequence"),
           "Collectives that a kernel may number so; newest first.");
}

}  // namespace

void bind_device_recorder(nb::module_& m, nb::class_<device::DeviceComm>& d) {
  nb::class_<DeviceRecorder> c(
      m, "DeviceRecorder",
      "The flight recorder of a rank on a device.\n\n"
      "Tracks are 0 for collectives and 1 for messages; numbers count the calls of a track from\n"
      "1, and a collective of several launches as many.");
  c.def(
       "__init__",
       [](DeviceRecorder* self, std::shared_ptr<Heap> heap, std::tuple<int, int> rank_of,
          uint32_t records, const std::string& name) {
         const auto [rank, world] = rank_of;
         if (records < 1 || records > kMaxRecords)
           throw nb::value_error("records must be in [1, 65536]");
         try {
           new (self) DeviceRecorder(std::move(heap), rank, world, records, name);
         } catch (const HeapError& e) {
           raise_os_error(e);
         }
       },
       nb::arg("heap"), nb::arg("rank_of"), nb::arg("records"), nb::arg("name"),
       "`rank_of`: rank, world. `records`: of each track, 1 or more. Raises OSError.")
      .def_prop_ro("offset_bytes", &DeviceRecorder::offset, "The offset in the heap.")
      .def("set_world_id", &DeviceRecorder::set_world_id, nb::arg("world_id"))
      .def("unlist", &DeviceRecorder::unlist, "`ringcomm trace --pid` does not find it any more.")
      .def("release", &DeviceRecorder::release,
           "Gives the memory back; nothing is recorded from here on.")
      .def(
          "watch",
          [](DeviceRecorder& r, uintptr_t page) {
            r.watch(&reinterpret_cast<const device::HostPage*>(page)->fault_raised);
          },
          nb::arg("host_page"),
          "Calls that end once a kernel has given up there, or after `stop`, may not be done.")
      .def("stop", &DeviceRecorder::stop)
      .def("withdraw", &DeviceRecorder::withdraws, "The last call was not launched.")
      .def(
          "enqueue_triton",
          [](DeviceRecorder& r, const CallWords& words, unsigned channels, bool captured) {
            r.enqueues_triton(id_of(words), channels, captured);
          },
          nb::arg("words"), nb::arg("channels"), nb::arg("captured"),
          "Records a collective of Triton's kernels; see `call_words`.");
  bind_seen(c);
  d.def(
       "set_recorder",
       [](device::DeviceComm& comm, std::shared_ptr<DeviceRecorder> recorder) {
         comm.set_observer(std::move(recorder));
       },
       nb::arg("recorder"), "Records all calls from here on.")
      .def_prop_ro(
          "sequence_offset_bytes",
          [](const device::DeviceComm& comm) {
            return comm.layout().channel_offset(0) + offsetof(ChannelLine, sequence);
          },
          "The offset in the region of the kernels' count of collectives (8 bytes).");
  m.def("recorder_bytes", &Recorder::memory_bytes, nb::arg("records"),
        "Returns the size of a flight recorder of so many records of each track.");
  m.def("recorder_snapshot", &snapshot, nb::arg("memory_ptr"), nb::arg("records"),
        nb::arg("rank_of"), nb::arg("world_id"), nb::arg("most") = kMaxRecords,
        "As `Comm.recorded`, of the recorder of a rank on a device at this address.");
}

}  // namespace ringcomm::host
