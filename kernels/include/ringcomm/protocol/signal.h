// SPDX-License-Identifier: Apache-2.0

// NOTE [signals]
//
// Publishing: all lanes store data; team.sync(); one lane stores the epoch with release at system
// scope. Awaiting: one lane loads the epoch with acquire at system scope until it is reached;
// team.sync(); then all lanes load the data. (A release covers other lanes' stores before the sync,
// and an acquire other lanes' loads after it: both are cumulative, in C++ and in PTX.)
//
// A reader may sleep (host: futex). It raises its sleep flag, fences, and looks once more before it
// sleeps; the writer stores the epoch, fences, and then looks at the flag. At least one
// of two fenced store-then-load sequences sees the other's store, so no wake-up is lost. If the
// kernel lets a sleeper, which has time, fence for all ranks at once (membarrier), writers need no
// fence.
//
// Every wait has a deadline and watches the abort words. Both are checked when team.pause() reports
// clock time, never on every poll, so a short wait costs no more than its polls.
#pragma once

#include "ringcomm/protocol/view.h"

RINGCOMM_NAMESPACE_BEGIN

// Epochs are compared modulo 2^32: reached when `seen` is `want` or up to 2^31 - 1 past it.
RC_FN constexpr bool reached(uint32_t seen, uint32_t want) { return int32_t(seen - want) >= 0; }

// The word that a wait polls.
struct Site {
  Stream stream;
  int peer;
  bool on_consumed;
  uint32_t item;
};

RC_FN const uint32_t* word_at(const View& v, int channel, const Site& site) {
  const SignalLine* line = v.signals(v.rank, site.stream, channel, site.peer);
  return site.on_consumed ? &line->consumed : &line->ready;
}

RC_FN uint32_t* sleep_flag_at(const View& v, int channel, const Site& site) {
  SleepLine* line = v.sleepers(v.rank, site.stream, channel, site.peer);
  return site.on_consumed ? &line->on_consumed : &line->on_ready;
}

// Returns this rank's fault record to the one lane or thread that may fill it, or null if it is
// taken. It never waits: the record's owner may be a lane of the caller's own warp, which a GPU may
// not advance while another lane of the warp spins.
// model: claim_fault (tests/proof/model/lend.pml)
RC_TEAM_FN Fault* claim_fault(const View& v) {
  ControlPage* mine = v.control(v.rank);
  // Lanes, channels and threads of one rank race for the record (a send may run on another thread);
  // no other rank touches the claim, so its ordering pairs with nothing but itself.
  return exchange_acq_rel_sys(&mine->claimed, 1) == 0 ? &mine->fault : nullptr;
}

// The longest time for which a host thread waits for the record's owner to raise the abort word.
// The owner only writes a few hundred bytes, so an owner that takes longer is not running. Chosen
// without measurements: an owner that lost its core for a while still raises the word itself.
constexpr uint64_t kLongestRecordNs = 1'000'000'000;

// One lane, once all lanes of its team know that the call has failed (by a share()): returns when
// the abort word is raised, so that the call may return a buffer that it has lent. The record's
// owner has passed this point, or is in another team or thread. An owner waits for nothing between
// claiming the record and raising the word. So on a device this wait ends: the owner is a lane of a
// running kernel, and a device fault that ended the owner would end the waiting lane, too. On a
// host the owner may never raise the word: it may be a kernel in Triton's interpreter, which an
// exception of a signal handler can end anywhere, or which needs the interpreter's lock that this
// thread holds. After a while a host thread therefore raises the word itself, without a record. The
// owner may still complete the record and raise the word later.
// model: await_raised (tests/proof/model/lend.pml)
template <class Team>
RC_TEAM_FN void await_raised(const Team& team, const View& v) {
  uint64_t started = 0;
  if constexpr (Team::kSleeps) started = team.now_ns();
  // Pairs with the release in raise_fault().
  while (load_acquire_sys(&v.control(v.rank)->aborted) == 0) {
    if constexpr (Team::kSleeps) {
      // Needs no release: no reader of this value reads the record. If the owner raises the word at
      // this moment, its record is lost.
      if (team.now_ns() - started > kLongestRecordNs)
        store_relaxed_sys(&v.control(v.rank)->aborted, kRaisedWithoutRecord);
    }
  }
  fence_seq_cst_sys();  // as in raise_fault()
}

// Called after the record was filled.
// model: raise_fault (tests/proof/model/lend.pml, signal.pml)
template <class Team>
RC_COLD void raise_fault(Team team, const View& v) {
  // Pairs with the acquire in abort_seen() on every other rank: a rank that sees the word sees the
  // whole record.
  store_release_sys(&v.control(v.rank)->aborted, kRaised);
  // The word must precede the user's later stores into a lent buffer, and a release orders only
  // earlier accesses. Pairs with the fence in verify_peer_buffers().
  fence_seq_cst_sys();
  team.tell_host(v.control(v.rank)->fault);
}

RC_COLD void fill_fault(Fault* record, const View& v, Status status, int peer) {
  record->status = status;
  record->rank = v.rank;
  record->peer = peer;
  record->wanted = record->seen = record->item = record->on_consumed = 0;
  record->stream = Stream::kPair;
  record->waited_ns = 0;
  record->mine = *v.mine;
}

// Leaves the fault record and raises this rank's abort word. An earlier fault's record stays.
template <class Team>
RC_COLD Status fail(Team team, const View& v, Status status, int peer, const CallHeader* theirs,
                    uint64_t expected_bytes) {
  Fault* record = claim_fault(v);
  if (record == nullptr) return status;
  fill_fault(record, v, status, peer);
  record->mine.stream_bytes = expected_bytes;
  if (theirs != nullptr) record->theirs = *theirs;
  raise_fault(team, v);
  return status;
}

RC_TEAM_FN bool aborted(const View& v, int rank) {
  // Pairs with the release in raise_fault().
  return load_acquire_sys(&v.control(rank)->aborted) != 0;
}

// model: abort_seen (tests/proof/model/signal.pml)
RC_TEAM_FN bool abort_seen(const View& v) {
  for (int r = 0; r < v.world; ++r)
    if (aborted(v, r)) return true;
  return false;
}

// True if the peer has closed the communicator: it will publish and acknowledge nothing more.
// model: has_detached (tests/proof/model/signal.pml)
RC_TEAM_FN bool has_detached(const View& v, int peer) {
  // Pairs with the release with which the peer detaches (kernels/host/comm.cpp).
  return load_acquire_sys(&v.signals(v.rank, Stream::kPair, 0, peer)->detached) != 0;
}

// Returns why a wait for `peer` that began `waited_ns` ago must end, or kOk.
// model: reason_to_give_up (tests/proof/model/signal.pml)
template <class Team>
RC_TEAM_FN Status reason_to_give_up(Team& team, const View& v, int peer, uint64_t waited_ns) {
  if (abort_seen(v)) return Status::kAborted;
  if (has_detached(v, peer)) return Status::kPeerClosed;
  const Status health = team.health(peer);
  if (health != Status::kOk) return health;
  return waited_ns > v.timeout_ns ? Status::kTimeout : Status::kOk;
}

// Returns the header of a peer's item `next` if it has arrived and belongs to another call than
// mine, with my sequence number or an earlier one; else null.
RC_COLD const CallHeader* other_call_in(const View& v, Stream s, int channel, int peer,
                                        uint32_t next) {
  const CallId& mine = v.mine->id;
  // Pairs with the release in publish() of the peer.
  if (!reached(load_acquire_sys(&v.signals(v.rank, s, channel, peer)->ready), next)) return nullptr;
  const CallHeader* theirs = v.header(v.rank, s, channel, peer, next);
  return theirs->id.sequence <= mine.sequence && !same_call(theirs->id, mine) ? theirs : nullptr;
}

// A peer that runs another collective may publish on a stream that I do not read. Returns the
// header that it published there in this call or an earlier one, or null. Called at clock time.
RC_TEAM_FN const CallHeader* other_call_seen(const View& v, int channel, int peer) {
  const CallId& mine = v.mine->id;
  // Messages keep no order with the collectives: a collective may be moving these words now.
  if (mine.collective == Collective::kSend || mine.collective == Collective::kReceive)
    return nullptr;
  constexpr Stream streams[2] = {Stream::kPair, Stream::kShared};
  uint32_t first[2], seen[2];
  // Loaded together: an acquire would delay the next load, and usually no item is there.
  RC_UNROLL
  for (int i = 0; i < 2; ++i) {
    first[i] = v.epochs(streams[i], channel, peer)->seen + 1;
    seen[i] = load_relaxed_sys(&v.signals(v.rank, streams[i], channel, peer)->ready);
  }
  RC_UNROLL
  for (int i = 0; i < 2; ++i) {
    const Stream s = streams[i];
    const uint32_t next = first[i];
    if (!reached(seen[i], next)) continue;
    // An item that I have acknowledged in this call may be overwritten by now; any other item
    // stays. (Only I write the acknowledgement, so no ordering is needed.)
    if (reached(load_relaxed_sys(&v.signals(peer, s, channel, v.rank)->consumed), next)) continue;
    const CallHeader* theirs = other_call_in(v, s, channel, peer, next);
    if (theirs != nullptr) return theirs;
  }
  return nullptr;
}

// At a timeout the awaited peer may be waiting itself: follows the chain of awaited ranks to a rank
// that does not wait, or once around a circle. Only a hint for users, so it reads the words without
// order. A rank whose process is stopped ends the chain, even if it waited; only hosts detect this.
template <class Team>
RC_TEAM_FN int end_of_waiting(const Team& team, const View& v, int peer) {
  if constexpr (Team::kSleeps) {
    for (int r = 0; r < v.world; ++r)
      if (r != v.rank && team.is_stopped(r)) return r;
  }
  const int first = peer;
  for (int hops = 0; hops < v.world; ++hops) {
    const uint32_t next = load_relaxed_sys(&v.control(peer)->waits_for);
    const int rank = int(next) - 1;
    if (next == 0 || next > uint32_t(v.world) || rank == v.rank || rank == first) break;
    peer = rank;
  }
  return peer;
}

// model: give_up (tests/proof/model/lend.pml, signal.pml)
template <class Team>
RC_COLD Status give_up(Team team, const View& v, Site site, Status status, uint32_t want,
                       uint32_t seen, uint64_t waited_ns, const CallHeader* theirs) {
  const int peer = status == Status::kTimeout ? end_of_waiting(team, v, site.peer) : site.peer;
  Fault* record = claim_fault(v);
  if (record == nullptr) return status;
  fill_fault(record, v, status, peer);
  record->wanted = want;
  record->seen = seen;
  record->item = site.item;
  record->stream = site.stream;
  record->on_consumed = site.on_consumed;
  record->waited_ns = waited_ns;
  if (theirs != nullptr) record->theirs = *theirs;
  raise_fault(team, v);
  return status;
}

// A host that has not looked at the clock for this long did not run: its process was stopped, or
// the machine was suspended. A sleeper looks at the clock 100 times a second.
constexpr uint64_t kLongestLookNs = 250'000'000;

// Returns the part of the time since a waiter's last look at the clock that does not count as
// waiting. The peers were usually stopped with the waiter, so they had no chance to publish.
RC_FN constexpr uint64_t unwatched_ns(uint64_t looked_ns, uint64_t now_ns) {
  return now_ns - looked_ns > kLongestLookNs ? now_ns - looked_ns : 0;
}

// model: await_slowly (tests/proof/model/sleep.pml)
template <class Team>
RC_COLD Status await_slowly(Team team, const View& v, Site site, uint32_t want) {
  const uint32_t* word = word_at(v, team.channel(), site);
  Pause pause{word, 0, sleep_flag_at(v, team.channel(), site), 0};
  if constexpr (Team::kSleeps) {
    pause.core_shared = team.shares_core(v, site.peer);
    pause.peer_core = &v.control(site.peer)->core;
    pause.call_bytes = v.mine->id.match_bytes;
  }
  uint64_t started = 0, now = 0, looked = 0;
  for (;; ++pause.polls) {
    // Pairs with the release in publish() (ready) or acknowledge() (consumed) of the peer.
    pause.seen = load_acquire_sys(word);
    if (reached(pause.seen, want)) break;
    if (!team.pause(pause)) continue;
    now = team.now_ns();
    if (started == 0) started = looked = now;
    if constexpr (Team::kSleeps) started += unwatched_ns(looked, now);
    looked = now;
    store_relaxed_sys(&v.control(v.rank)->waits_for, uint32_t(site.peer) + 1);
    Status status = reason_to_give_up(team, v, site.peer, now - started);
    const CallHeader* theirs = nullptr;
    if (status != Status::kAborted && status != Status::kInterrupted) {
      theirs = other_call_seen(v, team.channel(), site.peer);
      if (theirs == nullptr) theirs = team.other_call_recorded(v.mine->id, site.peer);
      if (theirs != nullptr) status = Status::kMismatch;
    }
    if (status == Status::kOk) continue;
    // The peer may have published and then continued or ended; its published items are valid.
    if (status != Status::kAborted && reached(load_acquire_sys(word), want)) break;
    return give_up(team, v, site, status, want, pause.seen, now - started, theirs);
  }
  if (started != 0) store_relaxed_sys(&v.control(v.rank)->waits_for, 0);
  return Status::kOk;
}

// One lane waits until the word at `site` reaches `want`.
// model: await_alone (tests/proof/model/signal.pml)
template <class Team>
RC_TEAM_FN Status await_alone(Team& team, const View& v, const Site& site, uint32_t want) {
  team.passing(Point::kAwait, v, site.stream);
  // Pairs with the release in publish() or acknowledge() of the peer.
  if (reached(load_acquire_sys(word_at(v, team.channel(), site)), want)) return Status::kOk;
  return await_slowly(team, v, site, want);
}

// Waits until the word at `site` reaches `want`. All lanes call it and get the same result.
template <class Team>
RC_TEAM_FN Status await(Team& team, const View& v, const Site& site, uint32_t want) {
  Status status = Status::kOk;
  if (team.lane() == 0) status = await_alone(team, v, site, want);
  return team.share(status);
}

// Wakes the reader if it sleeps on `word`. Called after the store to `word`.
// model: wake (tests/proof/model/sleep.pml)
template <class Team>
RC_TEAM_FN void wake(Team& team, uint32_t* word, const uint32_t* sleeping) {
  if constexpr (Team::kSleeps) {  // else no thread sleeps
    // Store the epoch, then look at the flag: see NOTE [signals].
    team.fence_as_writer();
    if (load_relaxed_sys(sleeping) != 0) team.wake(word);
  }
}

// One lane, after a team.sync(): publishes my item `epoch`, which is complete.
// model: publish (tests/proof/model/signal.pml, sleep.pml)
template <class Team>
RC_TEAM_FN void publish(Team& team, const View& v, Stream s, int reader, uint32_t epoch) {
  team.passing(Point::kPublish, v, s);
  uint32_t* word = &v.signals(reader, s, team.channel(), v.rank)->ready;
  store_release_sys(word, epoch);  // pairs with the acquire in await() of the reader
  wake(team, word, &v.sleepers(reader, s, team.channel(), v.rank)->on_ready);
}

// One lane, after a team.sync(): acknowledges the sender's items up to `epoch`, read to the end.
// model: acknowledge (tests/proof/model/signal.pml, sleep.pml)
template <class Team>
RC_TEAM_FN void acknowledge(Team& team, const View& v, Stream s, int sender, uint32_t epoch) {
  team.passing(Point::kAcknowledge, v, s);
  uint32_t* word = &v.signals(sender, s, team.channel(), v.rank)->consumed;
  store_release_sys(word, epoch);  // pairs with the acquire in await() of the sender
  wake(team, word, &v.sleepers(sender, s, team.channel(), v.rank)->on_consumed);
}

RINGCOMM_NAMESPACE_END
