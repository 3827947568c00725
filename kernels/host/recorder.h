// SPDX-License-Identifier: Apache-2.0

// The flight recorder of one rank of a communicator: its last collectives and messages, in the heap
// after the region. Peers and `ringcomm trace --pid` read them there, even after the rank was
// killed. docs/protocol.md lists the words, docs/trace.md explains the use.
//
// Only the owner writes. A reader has a whole record if the version was even, and the same before
// and after the read; ringcomm/comm/recorder/records.py reads the same bytes in Python.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ringcomm/protocol/call.h"

namespace ringcomm::host {

// "file.py:12", the line of the user's call; cut at the left end to fit, and ended by a zero byte.
struct CallSite {
  static constexpr int kBytes = 112;
  uint32_t words = 0;  // number of 8-byte words, including the word of the zero byte
  alignas(8) char text[kBytes] = {};
};
// The user's line of the call that this thread is about to make; null: unknown.
extern thread_local constinit const CallSite* call_site;

enum class RecordState : uint32_t {
  kNone = 0,
  kRunning = 1,
  kDone = 2,
  kFailed = 3,
  // The host knows less about calls on a device: they begin when they are enqueued, and end when
  // the host notices their end.
  kEnqueued = 4,
  kBegun = 5,
  kCompleted = 6,
  kCaptured = 7  // a graph makes the call; only the device knows when and how often
};

// Totals of one rank's calls of one collective, or of its sends or receives, since the communicator
// was made. No word ever decreases, so a reader needs no version.
struct CallTotals {
  uint64_t calls, bytes, failures;
  uint64_t ns;  // sum of the times of the calls that have ended; not used on devices
};

// Collectives and messages keep no order with each other, so each kind has its own records.
enum class Track : uint32_t { kCollectives = 0, kMessages = 1, kCount = 2 };

struct Record {
  uint32_t version;  // odd while the owner writes
  RecordState state;
  CallId id;  // for a message: its number as sequence, its tag as root
  uint64_t bytes;
  uint64_t begin_ticks, end_ticks;  // times on the clock of clock_pair()
  int32_t status, peer;             // peer of a message, or awaited by a failed collective; else -1
  char site[CallSite::kBytes];
};
static_assert(sizeof(Record) == 192 && offsetof(Record, site) == 80);

// The header before the records. All fields are set before peers know the region, except world_id
// and, in a snapshot, waits_for.
struct RecorderHeader {
  uint64_t magic;
  uint32_t version, record_bytes;
  uint32_t capacity;  // records per track
  int32_t rank, world, pid;
  uint64_t created_ns;     // by CLOCK_MONOTONIC; created_ticks is the same time in ticks
  uint64_t world_id;       // the same on all ranks of this communicator only; 0: not connected
  uint64_t control_bytes;  // bytes from the control page to this header
  int32_t waits_for;       // in a snapshot: 1 + the awaited rank, 0: none
  uint32_t on_device;      // 1: the communicator is on a device
  uint64_t created_ticks;
  char name[176];
  uint64_t totals;  // number of CallTotals after the records, by Collective; 0 in a snapshot
};
static_assert(sizeof(RecorderHeader) == 256);

constexpr uint64_t kRecorderMagic = 0x31434552474e4952;  // "RINGREC1"
constexpr uint32_t kRecorderVersion = 1;
constexpr uint32_t kMaxRecords = 1 << 16;

// One moment on the clock of the records and on CLOCK_MONOTONIC, in ns. Two such moments some time
// apart convert ticks into ns.
struct ClockPair {
  uint64_t ticks, ns;
};
ClockPair clock_pair();

class Recorder {
 public:
  static uint64_t memory_bytes(uint32_t capacity);

  // `capacity` 0: records nothing and has no memory. The memory need not be cleared.
  void open(char* memory, uint32_t capacity, int rank, int world, uint64_t control_bytes,
            const std::string& name);
  // Called after open(), before any other process knows the memory.
  void say_on_device();
  void set_world_id(uint64_t id);
  uint64_t world_id() const { return world_id_; }
  bool on() const { return capacity_ != 0; }
  uint32_t capacity() const { return capacity_; }

  // One thread at a time may call it for a track. `id.sequence` counts the calls of the track.
  void begin(Track track, const CallId& id, uint64_t bytes, int peer,
             RecordState state = RecordState::kRunning);
  void end(Track track, uint64_t sequence, Status status, int peer);
  // Returns the state of a call by its number; kNone: never made, or its record was overwritten.
  RecordState state(Track track, uint64_t sequence) const;
  // For calls on a device: sets the state to kBegun, or to kCompleted with the present time.
  void advance(Track track, uint64_t sequence, RecordState state);

  // Copies the record of the call with this number from a recorder's memory; false: the call was
  // never made, or its record was overwritten.
  static bool find(const char* memory, uint32_t capacity, Track track, uint64_t sequence,
                   Record* out);
  // Copies the header, and each record in a consistent state; a record whose owner keeps writing
  // has an odd version in the copy. Copies only the newest `most` records per track, and writes
  // their number into the copy's header.
  static std::vector<char> snapshot(const char* memory, uint32_t capacity, uint32_t waits_for,
                                    uint32_t most = kMaxRecords);
  // Replaces layout, rank and world in a snapshot's header by the reader's values: a damaged header
  // must not hide the records.
  struct Known {
    int rank, world;
    uint64_t world_id;
    bool on_device;
  };
  static void correct(std::vector<char>& snapshot, const Known& known);

 private:
  Record* at(Track track, uint64_t sequence) const;
  CallTotals* totals(Collective kind) const;
  char* memory_ = nullptr;
  uint32_t capacity_ = 0;
  uint64_t world_id_ = 0;
};

}  // namespace ringcomm::host
