// A team: the lanes that execute one channel of a collective together. Every template in this
// directory takes its lane from the team and never from the machine, so the same text runs as one
// host thread, as several host threads (where ThreadSanitizer watches them), and as a CUDA block.
//
// A Team has:
//
//   int lane(), num_lanes()          this lane, and how many execute the channel
//   int channel(), num_channels()    this lane's channel, and how many share the collective
//   Portion portion()                this channel's portion of every chunk
//   static constexpr bool kShareWaits   the lanes wait for several peers at once, each for its own
//   static constexpr bool kReadsWhole   what one item brings is read in one pass; else segment by
//                                    segment, so that what is copied twice is in the caches still
//   static constexpr bool kSleeps       waiting lanes may sleep (host); else they only poll
//   static constexpr bool kReadsProcesses   it copies out of peers' processes (host); see
//                                    NOTE [Single copy] for reads_processes(), read_process(peer,
//                                    to, from, bytes), has_ended(peer) and
//                                    peers_can_read(ptr, bytes)
//   void sync()                      all lanes of the team; orders their memory accesses
//   Status share(Status)             to all lanes, one lane's failure if any has one; also a sync()
//   bool pause(Pause&)               called by a lane between two polls of a signal. True when it
//                                    is time to look at the clock (never on every poll: see
//                                    signal.h)
//   uint64_t now_ns()                a monotonic clock
//   Status health(int peer)          a waiting lane, at clock time: kOk, kPeerLost, kAborted or
//                                    kInterrupted
//   const CallHeader* other_call_recorded(const CallId& mine, int peer)
//                                    at clock time: what the peer's flight recorder says that it
//                                    called in place of mine; null: nothing
//   bool shares_core(const View&, int peer)   where lanes sleep: whether the peer was last seen on
//                                    this thread's core, where it cannot run while this one polls
//   void fence_as_writer()           where lanes sleep: orders a store before a load, against the
//                                    fence of who goes to sleep
//   void wake(uint32_t* word)        wakes who sleeps on the word
//   void tell_host(const Fault&)     this rank's fault record is complete
//   void passing(Point, const View&, Stream)   one lane, before it does what the point says: where
//                                    tests have faults happen; nothing on devices
//
// Copies of a Team are the same team.
#pragma once

#include "ringcomm/core/platform.h"

RINGCOMM_NAMESPACE_BEGIN

enum class Status : int32_t {
  kOk = 0,
  kTimeout = 1,      // the deadline of a wait passed
  kPeerLost = 2,     // the awaited process no longer exists
  kMismatch = 3,     // the peer runs another collective, or the same with other arguments
  kAborted = 4,      // some rank aborted the communicator
  kInterrupted = 5,  // a signal handler of the caller raised (Ctrl-C)
  kPeerClosed = 6,   // the awaited rank closed the communicator
  kCorrupt = 7,      // what a peer published points outside of its heap, or at no item of ours
  kRefused = 8,      // the operating system lets this rank no longer read the peer's process
  kOverlap = 9,      // another call of this rank was under way on the same words
};
constexpr int kStatuses = 10;

// The events of every protocol between ranks, at which tests inject faults.
enum class Point : int32_t { kPublish = 0, kAcknowledge = 1, kAwait = 2 };
constexpr int kPoints = 3;

// The arguments of a lane that pauses: the word it polls, the value it saw there, the flag that
// tells the writer of that word that somebody sleeps on it, whether that writer needs this lane's
// core, and how much the call moves.
struct Pause {
  const uint32_t* word;
  uint32_t seen;
  uint32_t* sleeping;
  uint32_t polls;
  bool core_shared = false;
  const uint32_t* peer_core = nullptr;  // ControlPage.core of the awaited rank; null: not known
  uint64_t call_bytes = 0;
};

// Portion `index` of `count` equal ones, as fractions of the whole in units of 2^-32: found once,
// it cuts any number of bytes without a division, which takes a GPU some hundred instructions.
struct Portion {
  uint64_t begin = 0, end = uint64_t(1) << 32;

  // The whole times `fraction`, rounded down.
  static RC_FN constexpr uint64_t times(uint64_t whole, uint64_t fraction) {
    return (whole >> 32) * fraction + ((whole & 0xffffffff) * fraction >> 32);
  }
};

// index / count in those units, rounded down, by one division of 32 bits, for up to kMostPortions.
// 2^32 is count * quotient + rest, and of x = index * rest, which is at most count^2, the quotient
// x / count is (x * (quotient + 1)) >> 32: what is too much stays below 1 / count.
constexpr int kMostPortions = 1024;
RC_FN constexpr uint64_t fraction_of(int index, int count) {
  const uint32_t i = uint32_t(index), quotient = 0xffffffffu / uint32_t(count);
  const uint32_t rest = 0xffffffffu - quotient * uint32_t(count) + 1;
  return uint64_t(i) * quotient + (uint64_t(i * rest) * (uint64_t(quotient) + 1) >> 32);
}

RC_FN constexpr Portion portion_of(int index, int count) {
  return {fraction_of(index, count), fraction_of(index + 1, count)};
}

struct Extent {
  uint64_t begin_bytes, end_bytes;
};

// A portion of `bytes` bytes, in whole lines of 2^line_shift except for the tail of the last.
RC_FN constexpr Extent extent_of(uint64_t bytes, const Portion& portion, int line_shift = 6) {
  const uint64_t lines = (bytes + (uint64_t(1) << line_shift) - 1) >> line_shift;
  const uint64_t begin = Portion::times(lines, portion.begin) << line_shift,
                 end = Portion::times(lines, portion.end) << line_shift;
  return {begin < bytes ? begin : bytes, end < bytes ? end : bytes};
}
RC_FN constexpr Extent extent_of(uint64_t bytes, int index, int count, int line_shift = 6) {
  return extent_of(bytes, portion_of(index, count), line_shift);
}

RINGCOMM_NAMESPACE_END
