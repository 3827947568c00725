// SPDX-License-Identifier: Apache-2.0

// The waiting half of the messenger: which thread drives the requests, and when a wait ends without
// success.
#include <algorithm>
#include <chrono>

#include "kernels/host/messenger.h"

namespace ringcomm::host {
namespace {

// A waiter polls this long and then sleeps, as Waiter does (NOTE [Busy cores] in waiter.cpp), but
// longer: a peer takes more time in Python between two messages than between two words of a call.
// The background thread sleeps at once, since the thread that posted the request has other work for
// the core.
constexpr uint64_t kPollNs = 40'000;
constexpr int kYields = 200;

// NOTE [Requests in the background]
// Most requests are soon waited for by a thread that drives them itself. Waking the background
// thread for each would cost more than a small message, and take core and lock from the waiter. So
// the background thread leaves a receive to a waiter for this long, and looks once in this time
// until kIdleLooks looks have found nothing to do. It drives at once a send that was not done when
// it was posted: the send exceeds the slots, or its peer is late, so a peer may wait for it.
constexpr uint64_t kGraceNs = 100'000;
constexpr int kIdleLooks = 20;

// Calls of look_at_clock() on this thread's stack.
thread_local int looking_here = 0;

}  // namespace

// Wakes the thread that drives requests: there is a new request, or a waiter that can take over.
void Messenger::kick() {
  if (!driving_) return;
  store_relaxed_sys(&kick_, kick_ + 1);
  Waiter::wake(&kick_);
}

// Notes that a thread looks at the clock; the lock is held. See unwatched_ns() (signal.h).
void Messenger::note_look() {
  const uint64_t now_ns = Waiter::now_ns();
  if (driving_ || waiters_ > 0 || looking_ > 0) unwatched_ns_ += unwatched_ns(looked_ns_, now_ns);
  looked_ns_ = now_ns;
}

bool Messenger::idle_peer(int peer) const {
  const PeerQueue& q = peers_[size_t(peer)];
  return q.sends.empty() && q.unacknowledged.empty();
}

// Sleeps until a peer publishes or acknowledges, and keeps off `peer_core`, the core of the awaited
// peer if there is one (NOTE [Sleep apart]). The lock is held; it is released during the sleep.
void Messenger::sleep(uint64_t timeout_ns, const uint32_t* peer_core) {
  const View& v = comm_.view();
  std::vector<SleepOn> words;
  std::vector<uint32_t*> flags;
  words.push_back({&kick_, load_relaxed_sys(&kick_)});
  for (int p = 0; p < v.world; ++p) {
    if (p == v.rank) continue;
    const SignalLine* line = v.signals(v.rank, Stream::kMessage, 0, p);
    SleepLine* sleepers = v.sleepers(v.rank, Stream::kMessage, 0, p);
    words.push_back({&line->ready, load_relaxed_sys(&line->ready)});
    flags.push_back(&sleepers->on_ready);
    if (idle_peer(p)) continue;
    words.push_back({&line->consumed, load_relaxed_sys(&line->consumed)});
    flags.push_back(&sleepers->on_consumed);
  }
  for (uint32_t* flag : flags) store_relaxed_sys(flag, 1);
  comm_.waiter().fence_as_sleeper();  // raise the flags, then look again: see NOTE [signals]
  if (!progress()) {
    const SleepsApart apart = comm_.waiter().sleep_apart(peer_core);
    mutex_.unlock();
    sleep_on_any(words.data(), int(words.size()), timeout_ns);
    mutex_.lock();
  }
  for (uint32_t* flag : flags) store_relaxed_sys(flag, 0);
}

// Returns the reason why the wait for `request` must end, or kOk, and the rank concerned. The lock
// is not held: a signal handler may run in here and use the communicator.
std::pair<Status, int> Messenger::reason_to_end(const Request& r, uint64_t waited_ns) const {
  const View& v = comm_.view();
  SoloTeam team{{&comm_.waiter()}};
  int lost = 0;
  for (int p = 0; p < v.world; ++p) {
    if (p == v.rank || (r.peer != -1 && r.peer != p)) continue;
    const Status status = reason_to_give_up(team, v, p, 0);
    if (status == Status::kOk) continue;
    const bool gone = status == Status::kPeerLost || status == Status::kPeerClosed;
    // A receive from any rank continues while any rank lives, in this engine or another engine.
    if (r.peer == -1 && gone && (r.elsewhere || ++lost < v.world - 1)) continue;
    return {status, p};
  }
  return {waited_ns > comm_.timeout_ns() ? Status::kTimeout : Status::kOk, r.peer};
}

// If the wait for this request must end, ends all requests and leaves a fault record.
void Messenger::look_at_clock(std::unique_lock<std::mutex>& lock, const RequestPtr& r,
                              uint64_t started_ns) {
  note_look();
  if (stopping_ || r->done()) return;
  const uint64_t waited_ns = watched_ns() - started_ns;
  ++looking_;
  ++looking_here;
  lock.unlock();
  const View& v = comm_.view();
  if (r->peer >= 0) store_relaxed_sys(&v.control(v.rank)->waits_for, uint32_t(r->peer) + 1);
  const auto [status, peer] = reason_to_end(*r, waited_ns);
  lock.lock();
  waits_told_ = true;
  --looking_;
  --looking_here;
  changed_.notify_all();
  if (status == Status::kOk || stopping_) return;
  progress();  // items that the peer published before it ended are valid
  if (r->done()) return;
  SoloTeam team{{&comm_.waiter()}};
  if (Fault* record = claim_fault(comm_.view())) {
    *record = Fault{};
    record->status = status;
    record->rank = comm_.view().rank;
    record->peer = status == Status::kTimeout && peer >= 0 ? end_of_waiting(team, v, peer) : peer;
    record->stream = Stream::kMessage;
    record->on_consumed = r->is_send;
    record->item = r->next_item;
    record->waited_ns = waited_ns;
    record->mine = header_of(*r, false);
    raise_fault(team, comm_.view());
  } else {
    await_raised(team, comm_.view());
  }
  fail_all(status);
}

// Polls until `request` is done or `give_up_ns` have passed since the start; look_at_clock() ends a
// request that cannot be done.
void Messenger::drive(std::unique_lock<std::mutex>& lock, const RequestPtr& r, uint64_t started_ns,
                      uint64_t give_up_ns, bool in_background) {
  note_look();
  driving_ = true;
  const bool is_known = r->peer >= 0;
  const uint32_t* const peer_core = is_known ? &comm_.view().control(r->peer)->core : nullptr;
  const bool core_shared = is_known && HostTeam::shares_core(comm_.view(), r->peer);
  const uint64_t poll_ns = in_background || core_shared ? 0 : kPollNs;
  uint64_t idle_since_ns = Waiter::now_ns();
  int yields = 0;
  while (!r->done() && !stopping_) {
    if (in_background && waiters_ > 0) break;
    if (progress()) {
      looked_ns_ = idle_since_ns = Waiter::now_ns();
      yields = 0;
      continue;
    }
    lock.unlock();
    const bool awake = Waiter::now_ns() - idle_since_ns < poll_ns ||
                       (yields++ < kYields && comm_.waiter().yield(r->bytes));
    lock.lock();
    if (awake) continue;
    sleep(std::min(Waiter::kSleepNs, give_up_ns), peer_core);
    // Stops driving while a signal handler may run: the handler may wait for a message.
    note_look();
    driving_ = false;
    look_at_clock(lock, r, started_ns);
    if (driving_) return;
    if (watched_ns() - started_ns >= give_up_ns) break;
    driving_ = true;
  }
  driving_ = false;
  changed_.notify_all();
}

// Returns kTimeout after `give_up_ns`; the request continues until the communicator's timeout.
Status Messenger::wait(const RequestPtr& r, uint64_t give_up_ns) {
  SoloTeam::passing(Point::kAwait, comm_.view(), Stream::kMessage);
  std::unique_lock lock(mutex_);
  note_look();
  const uint64_t started_ns = watched_ns();
  Status status = Status::kOk;
  ++waiters_;
  if (!r->done()) kick();
  while (!r->done() && !stopping_) {
    if (!driving_) {
      drive(lock, r, started_ns, give_up_ns, false);
    } else {
      changed_.wait_for(lock, std::chrono::nanoseconds(std::min(Waiter::kSleepNs, give_up_ns)));
      look_at_clock(lock, r, started_ns);
    }
    if (!r->done() && watched_ns() - started_ns >= give_up_ns) {
      status = Status::kTimeout;
      break;
    }
  }
  if (waits_told_) store_relaxed_sys(&comm_.view().control(comm_.view().rank)->waits_for, 0);
  waits_told_ = false;
  --waiters_;
  changed_.notify_all();
  if (waiters_ == 0 && next_outstanding() != nullptr) rouse();
  if (r->done()) return r->status;
  return status == Status::kOk ? Status::kAborted : status;
}

RequestPtr Messenger::next_outstanding() {
  for (const PeerQueue& q : peers_) {
    if (!q.sends.empty()) return q.sends.front();
    if (!q.unacknowledged.empty()) return q.unacknowledged.front().first;
    if (q.incoming && q.incoming->request) return q.incoming->request;
  }
  return posted_.empty() ? nullptr : posted_.front();
}

bool Messenger::idle() {
  const std::lock_guard lock(mutex_);
  return next_outstanding() == nullptr;
}

// See NOTE [Requests in the background].
void Messenger::run_background() {
  std::unique_lock lock(mutex_);
  int idle = 0;
  while (!stopping_) {
    const RequestPtr r = driving_ || waiters_ > 0 ? nullptr : next_outstanding();
    if (r != nullptr && (urgent_ || watched_ns() - r->posted_ns >= kGraceNs)) {
      idle = 0;
      drive(lock, r, r->posted_ns, UINT64_MAX, true);
      continue;
    }
    idle = r == nullptr ? idle + 1 : 0;
    urgent_ &= next_outstanding() != nullptr;
    if (idle <= kIdleLooks) {
      to_drive_.wait_for(lock, std::chrono::nanoseconds(kGraceNs));
      continue;
    }
    resting_ = true;
    to_drive_.wait(lock, [this] { return !resting_ || stopping_; });
    idle = 0;
  }
}

// Makes a resting background thread look for work.
void Messenger::rouse() {
  if (!resting_) return;
  resting_ = false;
  to_drive_.notify_one();
}

void Messenger::drive_in_background() {
  const std::lock_guard lock(mutex_);
  if (!background_ && !stopping_) {
    thread_ = std::thread([this] { run_background(); });
    background_ = true;
  }
  const bool sends = std::any_of(peers_.begin(), peers_.end(),
                                 [](const PeerQueue& q) { return !q.sends.empty(); });
  if (sends && !urgent_) {
    urgent_ = true;
    to_drive_.notify_one();
  }
  rouse();
}

// Stops the messenger: afterwards no thread is in it, and none touches the region.
void Messenger::stop() {
  {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    // A buffer that a peer may still read returns to its user now: see verify_peer_buffers().
    const bool lends = std::any_of(peers_.begin(), peers_.end(),
                                   [](const PeerQueue& q) { return !q.unacknowledged.empty(); });
    if (lends) comm_.abort("closed before a peer had read a message");
    fail_all(Status::kAborted);
    kick();
    changed_.notify_all();
    to_drive_.notify_all();
    // A signal handler that closes the communicator runs inside a wait of this very thread. That
    // wait will not touch the region again either.
    while (waiters_ > looking_here || driving_ || looking_ > looking_here) {
      changed_.wait_for(lock, std::chrono::nanoseconds(Waiter::kSleepNs));
      kick();
    }
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace ringcomm::host
