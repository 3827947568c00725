// SPDX-License-Identifier: Apache-2.0

// A communicator reports its calls: their records, and the fault that ended them.
#include <cstdio>

#include "kernels/host/comm.h"
#include "kernels/host/describe.h"

namespace ringcomm::host {
namespace {

// Reports a rank whose abort word is raised but which has no fault record: the rank began the
// fault, or followed the fault of another rank.
FaultReport without_record(int rank) {
  Fault fault{};
  fault.status = Status::kAborted;
  fault.rank = rank;
  fault.peer = -1;
  return {fault, "the thread that gave up did not record the reason"};
}

}  // namespace

// Returns the peer's call of the same number if it differs from `mine`, else null. A peer records a
// call before it publishes anything for the call, so a difference is final.
const CallHeader* Comm::other_call(const CallId& mine, int peer) {
  Record theirs;
  if (!Recorder::find(recorder_of(peer), recorder_.capacity(), Track::kCollectives, mine.sequence,
                      &theirs) ||
      same_call(theirs.id, mine))
    return nullptr;
  // Several channels may call this at the same time.
  static thread_local CallHeader found;
  found = CallHeader{theirs.id, theirs.bytes, 0, kNotInHeap, 1.0, kNotInHeap};
  return &found;
}

void Comm::record_begin(CallId id) {
  const std::lock_guard lock(mutex_);
  if (!connected_) return;
  outside_call_ = id.sequence = view_.channel_line(0)->sequence + 1;
  recorder_.begin(Track::kCollectives, id, id.match_bytes, -1);
}

void Comm::record_end(Status status) {
  const std::lock_guard lock(mutex_);
  if (connected_) recorder_.end(Track::kCollectives, outside_call_, status, awaited());
}

uint64_t Comm::record_around(CallId id) {
  const std::lock_guard lock(mutex_);
  if (!connected_) return 0;
  id.kernels = Kernels::kNative;  // a call over several nodes consists of native calls
  id.sequence = ++view_.channel_line(0)->sequence;
  recorder_.begin(Track::kCollectives, id, id.match_bytes, -1);
  return id.sequence;
}

void Comm::record_around_end(uint64_t number, Status status) {
  const std::lock_guard lock(mutex_);
  if (connected_ && number != 0) recorder_.end(Track::kCollectives, number, status, -1);
}

// Takes no lock: a call that hangs holds the lock.
std::vector<char> Comm::recorded(int rank, uint32_t most) const {
  if (!recorder_.on() || regions_[rank] == nullptr) return {};
  const uint32_t waits_for = load_relaxed_sys(&view_.control(rank)->waits_for);
  std::vector<char> bytes =
      Recorder::snapshot(recorder_of(rank), recorder_.capacity(), waits_for, most);
  Recorder::correct(bytes, {rank, view_.world, recorder_.world_id(), false});
  return bytes;
}

// The fault record may belong to this rank's messenger or to a call of abort(). The owner of the
// record raises the abort word.
void Comm::settle(Status status) const {
  if (status != Status::kOk) await_raised(SoloTeam{{&waiter_}}, view_);
}

void Comm::look_for_interrupt() {
  if (waiter_.health(view_.rank) != Status::kInterrupted) return;
  SoloTeam team{{&waiter_}};
  fail(team, view_, Status::kInterrupted, -1, nullptr, 0);
}

void Comm::abort(const std::string& reason) {
  if (regions_[view_.rank] == nullptr) return;
  Fault* record = claim_fault(view_);
  if (record == nullptr) return await_own_word();
  ControlPage* mine = view_.control(view_.rank);
  std::snprintf(mine->reason, sizeof(mine->reason), "%s", reason.c_str());
  *record = Fault{};
  record->status = Status::kAborted;
  record->rank = view_.rank;
  record->peer = -1;
  SoloTeam team{{&waiter_}};
  raise_fault(team, view_);
}

void Comm::set_left(bool left) {
  char* mine = regions_[view_.rank];
  if (mine == nullptr) return;
  // Pairs with the acquire in Process::has_ended() of the peers.
  store_release_sys(&reinterpret_cast<ControlPage*>(mine)->left, left ? 1 : 0);
}

// Another thread may close the communicator meanwhile; the heap keeps the region's memory.
View Comm::own_region(std::vector<char*>* regions) const {
  regions->assign(size_t(view_.world), regions_[view_.rank]);
  View v = view_;
  v.regions = regions->data();
  return v;
}

void Comm::await_own_word() const {
  std::vector<char*> regions;
  const View v = own_region(&regions);
  if (regions[0] != nullptr) await_raised(SoloTeam{{&waiter_}}, v);
}

int Comm::awaited() const {
  const char* mine = regions_[view_.rank];
  if (mine == nullptr) return -1;
  return int(load_relaxed_sys(&reinterpret_cast<const ControlPage*>(mine)->waits_for)) - 1;
}

bool Comm::has_closed(int peer) const {
  std::vector<char*> regions;
  const View v = own_region(&regions);
  return regions[0] != nullptr && has_detached(v, peer);
}

uint64_t Comm::arrivals() const {
  std::vector<char*> regions;
  const View v = own_region(&regions);
  if (regions[0] == nullptr) return 0;
  uint64_t sum = 0;
  for (int c = 0; c < v.layout.channels; ++c) {
    for (int s = 0; s < int(Stream::kCount); ++s) {
      for (int p = 0; p < v.world; ++p) {
        const SignalLine* line = v.signals(v.rank, Stream(s), c, p);
        sum += load_relaxed_sys(&line->ready) + uint64_t(load_relaxed_sys(&line->consumed));
      }
    }
  }
  return sum;
}

bool Comm::aborted() const {
  if (regions_[view_.rank] == nullptr) return true;
  // Pairs with the release in fail() and abort(): another thread of this rank may have failed.
  return load_acquire_sys(&view_.control(view_.rank)->aborted) != 0;
}

bool Comm::has_failed() const {
  if (regions_[view_.rank] == nullptr) return true;
  // If this thread has seen a call fail, the call has claimed the record or has found it claimed.
  if (load_relaxed_sys(&view_.control(view_.rank)->claimed) == 0) return false;
  await_own_word();
  return true;
}

bool Comm::faulted(FaultReport* report) const {
  if (regions_[view_.rank] == nullptr) return false;
  bool any = false, unrecorded = false;
  for (int d = 0; d < view_.world; ++d) {
    const int r = rotated_peer(view_.rank, d, view_.world);
    if (regions_[r] == nullptr) continue;
    const ControlPage* control = view_.control(r);
    // Pairs with the release in raise_fault() of that rank.
    const uint32_t word = load_acquire_sys(&control->aborted);
    if (word == 0) continue;
    if (word == kRaisedWithoutRecord) {
      if (!unrecorded) *report = without_record(r);
      any = unrecorded = true;
      continue;
    }
    const Fault fault = trusted(control->fault, r, view_.world);
    const bool origin = fault.status != Status::kAborted || fault.peer < 0;
    // A kAborted record with a peer only names the rank where the fault began, so any other record
    // is reported instead.
    if (any && !origin) continue;
    *report = {fault, reason_of(*control)};
    any = true;
    if (origin) return true;
  }
  return any;
}

}  // namespace ringcomm::host
