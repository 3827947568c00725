// NOTE [signals]
//
// Publishing: all lanes store data; team.sync(); lane 0 stores the epoch with release at system
// scope. Awaiting:   lane 0 loads the epoch with acquire at system scope until it is reached;
// team.sync();
//             then all lanes load the data.
//
// A reader may sleep (host: futex). It raises its sleep flag, fences, and looks once more before it
// sleeps; the writer stores the epoch, fences, and then looks at the flag. Of two fenced
// store-then-load sequences at least one sees the other's store, so no wake-up is lost.
//
// Every wait has a deadline and watches the abort words. Both are looked at when team.pause() says
// that it is clock time, never on every poll, so a wait that is short costs no more than its polls.
#pragma once

#include "ringcomm/view.h"

RINGCOMM_NAMESPACE_BEGIN

// Epochs are compared modulo 2^32: reached when `seen` is `want` or up to 2^31 - 1 past it.
RC_FN constexpr bool reached(uint32_t seen, uint32_t want) { return int32_t(seen - want) >= 0; }

// Names the word that a wait is about.
struct Site {
  Stream stream;
  int peer;
  bool on_consumed;
  uint32_t step;
};

RC_FN const uint32_t* word_at(const View& v, int channel, const Site& site) {
  const SignalLine* line = v.signals(v.rank, site.stream, channel, site.peer);
  return site.on_consumed ? &line->consumed : &line->ready;
}

RC_FN uint32_t* sleep_flag_at(const View& v, int channel, const Site& site) {
  SleepLine* line = v.sleepers(v.rank, site.stream, channel, site.peer);
  return site.on_consumed ? &line->on_consumed : &line->on_ready;
}

// Leaves the fault record and raises this rank's abort word. The first fault stays.
inline Status fail(const View& v, Fault fault) {
  ControlPage* mine = v.control(v.rank);
  // Threads of one rank race for the record (collectives and send/recv have their own threads); no
  // other rank touches the claim, so its ordering pairs with nothing but itself.
  if (exchange_acq_rel_sys(&mine->claimed, 1) != 0) return fault.status;
  fault.rank = v.rank;
  mine->fault = fault;
  // Pairs with the acquire in abort_seen() on every other rank: the record is whole when the word
  // is.
  store_release_sys(&mine->aborted, 1);
  return fault.status;
}

inline bool abort_seen(const View& v) {
  for (int r = 0; r < v.world; ++r) {
    // Pairs with the release in fail().
    if (load_acquire_sys(&v.control(r)->aborted) != 0) return true;
  }
  return false;
}

// The peer closed the communicator: it will publish and acknowledge nothing more.
inline bool farewell_seen(const View& v, int peer) {
  // Pairs with the release with which the peer says farewell (kernels/host/comm.cpp).
  return load_acquire_sys(&v.signals(v.rank, Stream::kPair, 0, peer)->farewell) != 0;
}

// Why a wait for `peer` that began `waited_ns` ago must end, or kOk.
template <class Team>
Status reason_to_give_up(Team& team, const View& v, int peer, uint64_t waited_ns) {
  if (abort_seen(v)) return Status::kAborted;
  if (farewell_seen(v, peer)) return Status::kPeerClosed;
  const Status health = team.health(peer);
  if (health != Status::kOk) return health;
  return waited_ns > v.timeout_ns ? Status::kTimeout : Status::kOk;
}

// A peer that runs another collective may publish on a stream that I do not read in mine: its
// header lies there, of this call or of an earlier one. Called at clock time, and before a call
// begins.
inline bool other_call_seen(const View& v, int channel, int peer, const CallId& mine,
                            CallHeader* theirs) {
  for (int i = 0; i < 2; ++i) {
    const Stream s = i == 0 ? Stream::kPair : Stream::kShared;
    const uint32_t next = v.epochs(s, channel, peer)->seen + 1;
    // Pairs with the release in publish() of the peer.
    if (!reached(load_acquire_sys(&v.signals(v.rank, s, channel, peer)->ready), next)) continue;
    // An item that I have acknowledged in this call may be overwritten by now; one that I have not
    // stands still. (This word is mine to write: no ordering is needed.)
    if (reached(load_relaxed_sys(&v.signals(peer, s, channel, v.rank)->consumed), next)) continue;
    *theirs = *reinterpret_cast<const CallHeader*>(v.slot(peer, s, channel, v.rank, next));
    if (theirs->id.sequence <= mine.sequence && !same_call(theirs->id, mine)) return true;
  }
  return false;
}

// At a timeout the awaited peer may be waiting itself: follows who waits for whom to the one that
// does not wait. Only a hint for people, so the words are read without order.
inline int end_of_waiting(const View& v, int peer) {
  for (int hops = 0; hops < v.world; ++hops) {
    const uint32_t next = load_relaxed_sys(&v.control(peer)->waits_for);
    if (next == 0 || next > uint32_t(v.world) || int(next) - 1 == v.rank) break;
    peer = int(next) - 1;
  }
  return peer;
}

template <class Team>
Status await_slowly(Team& team, const View& v, const Site& site, uint32_t want,
                    const CallHeader& mine) {
  const uint32_t* word = word_at(v, team.channel(), site);
  Pause pause{word, 0, sleep_flag_at(v, team.channel(), site), 0};
  uint64_t started = 0, now = 0;
  for (;; ++pause.polls) {
    // Pairs with the release in publish() (ready) or acknowledge() (consumed) of the peer.
    pause.seen = load_acquire_sys(word);
    if (reached(pause.seen, want)) {
      if (started != 0) store_relaxed_sys(&v.control(v.rank)->waits_for, 0);
      return Status::kOk;
    }
    if (!team.pause(pause)) continue;
    now = team.now_ns();
    if (started == 0) started = now;
    store_relaxed_sys(&v.control(v.rank)->waits_for, uint32_t(site.peer) + 1);
    Fault fault{};
    Status status = reason_to_give_up(team, v, site.peer, now - started);
    if (status != Status::kAborted && status != Status::kInterrupted &&
        other_call_seen(v, team.channel(), site.peer, mine.id, &fault.theirs))
      status = Status::kMismatch;
    if (status == Status::kOk) continue;
    // The peer may have published and then gone on, or gone; what it published counts.
    if (status != Status::kAborted && reached(load_acquire_sys(word), want)) {
      store_relaxed_sys(&v.control(v.rank)->waits_for, 0);
      return Status::kOk;
    }
    fault.status = status;
    fault.peer = status == Status::kTimeout ? end_of_waiting(v, site.peer) : site.peer;
    fault.wanted = want;
    fault.seen = pause.seen;
    fault.step = site.step;
    fault.stream = site.stream;
    fault.on_consumed = site.on_consumed;
    fault.waited_ns = now - started;
    fault.mine = mine;
    return fail(v, fault);
  }
}

// Waits until the word at `site` reaches `want`. All lanes call it; all get the same answer.
template <class Team>
RC_FN Status await(Team& team, const View& v, const Site& site, uint32_t want,
                   const CallHeader& mine) {
  Status status = Status::kOk;
  if (team.lane() == 0) {
    // Pairs with the release in publish() or acknowledge() of the peer.
    if (!reached(load_acquire_sys(word_at(v, team.channel(), site)), want))
      status = await_slowly(team, v, site, want, mine);
  }
  return team.share(status);
}

// Wakes the reader if it sleeps on `word`. Called after the store to `word`.
template <class Team>
RC_FN void wake(Team& team, uint32_t* word, const uint32_t* sleeping) {
  fence_seq_cst_sys();  // store the epoch, then look at the flag: see NOTE [signals]
  if (load_relaxed_sys(sleeping) != 0) team.wake(word);
}

// Lane 0, after a team.sync(): item `epoch` of mine is complete.
template <class Team>
RC_FN void publish(Team& team, const View& v, Stream s, int reader, uint32_t epoch) {
  uint32_t* word = &v.signals(reader, s, team.channel(), v.rank)->ready;
  store_release_sys(word, epoch);  // pairs with the acquire in await() of the reader
  wake(team, word, &v.sleepers(reader, s, team.channel(), v.rank)->on_ready);
}

// Lane 0, after a team.sync(): I have read the sender's items up to `epoch` to the end.
template <class Team>
RC_FN void acknowledge(Team& team, const View& v, Stream s, int sender, uint32_t epoch) {
  uint32_t* word = &v.signals(sender, s, team.channel(), v.rank)->consumed;
  store_release_sys(word, epoch);  // pairs with the acquire in await() of the sender
  wake(team, word, &v.sleepers(sender, s, team.channel(), v.rank)->on_consumed);
}

RINGCOMM_NAMESPACE_END
