// SPDX-License-Identifier: Apache-2.0

// A team: the lanes that execute one channel of a collective together. Every template in this
// directory gets its lane from the team and never from the machine. So the same source runs as one
// host thread, as several host threads (checked by ThreadSanitizer), and as a CUDA block.
//
// A Team has:
//
//   int lane(), num_lanes()          this lane, and the number of lanes of the channel
//   int channel(), num_channels()    this lane's channel, and the collective's number of channels
//   Portion portion()                this channel's portion of every chunk
//   static constexpr bool kDealsTiles   channels get tiles of each chunk (tiles.h), else one slice.
//                                    If true: Deal deal(), and Gaps* gaps(), which all lanes
//                                    share; the Gaps at gaps() + kNoGaps are empty
//   static constexpr bool kShareWaits   lanes wait for several peers at once, each for its own peer
//   static constexpr bool kReadsWhole   an item is read in one pass; else segment by segment, so
//                                    that data that are copied twice are still in the caches
//   static constexpr bool kSleeps       waiting lanes may sleep (host); else they only poll
//   static constexpr bool kReadsProcesses   the team copies from peers' processes (host); see
//                                    NOTE [Single copy] for reads_processes(), read_process(peer,
//                                    to, from, bytes), has_ended(peer) and
//                                    lends(ptr, bytes, all_share)
//   void sync()                      waits for all lanes of the team; orders their memory accesses
//   Status share(Status)             gives all lanes a failure of any lane; also a sync()
//   bool pause(Pause&)               called by a lane between two polls of a signal. True when it
//                                    is time to look at the clock (never on every poll: see
//                                    signal.h)
//   uint64_t now_ns()                a monotonic clock
//   Status health(int peer)          of a waiting lane, at clock time: kOk, kPeerLost, kAborted or
//                                    kInterrupted
//   const CallHeader* other_call_recorded(const CallId& mine, int peer)
//                                    at clock time: the call that the peer's flight recorder has
//                                    in place of mine; null: none
//   bool shares_core(const View&, int peer)   where lanes sleep: true if the peer last ran on this
//                                    thread's core, where it cannot run while this thread polls
//   void fence_as_writer()           where lanes sleep: orders a store before a load; pairs with
//                                    the fence of a thread that goes to sleep
//   void wake(uint32_t* word)        wakes threads that sleep on the word
//   void tell_host(const Fault&)     this rank's fault record is complete
//   void passing(Point, const View&, Stream)   called by one lane before the operation of the
//                                    point: tests inject faults here; does nothing on devices
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
  kCorrupt = 7,      // a peer's words point outside its heap, or at an item that does not exist
  kRefused = 8,      // the operating system no longer lets this rank read the peer's process
  kOverlap = 9,      // another call of this rank was under way on the same words
};
constexpr int kStatuses = 10;

// The events of every protocol between ranks at which tests inject faults.
enum class Point : int32_t { kPublish = 0, kAcknowledge = 1, kAwait = 2 };
constexpr int kPoints = 3;

// The arguments of a lane's pause: the polled word, the value seen there, the flag by which the
// word's writer knows that a thread sleeps on it, the number of polls, whether the writer needs
// this lane's core, and the bytes that the call moves.
struct Pause {
  const uint32_t* word;
  uint32_t seen;
  uint32_t* sleeping;
  uint32_t polls;
  bool core_shared = false;
  const uint32_t* peer_core = nullptr;  // ControlPage.core of the awaited rank; null: unknown
  uint64_t call_bytes = 0;
};

// Portion `index` of `count` equal portions, as fractions of the whole in units of 2^-32. A portion
// is computed once, and then applies to any number of bytes without a division, which takes a GPU
// about 100 instructions.
struct Portion {
  uint64_t begin = 0, end = uint64_t(1) << 32;

  // Returns `whole` times `fraction`, rounded down; `fraction` is in units of 2^-32.
  static RC_FN constexpr uint64_t times(uint64_t whole, uint64_t fraction) {
    return (whole >> 32) * fraction + ((whole & 0xffffffff) * fraction >> 32);
  }
};

// Returns index / count in units of 2^-32, rounded down, for count up to kMostPortions. It needs
// only one division of 32 bits. 2^32 is count * quotient + rest. Let x = index * rest; x is at most
// count^2. Then x * (quotient + 1) / 2^32 exceeds x / count by less than 1 / count, so that both
// rounded down are equal: x / count is (x * (quotient + 1)) >> 32.
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

// Returns a portion of `bytes` bytes: whole lines of 2^line_shift bytes, except the last line.
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
