// The flight recorder of one rank of a communicator: its last collectives and messages, in memory
// of the heap behind the region, where peers and `ringcomm trace --pid` read them, also after the
// rank was killed. docs/protocol.md has the words, docs/trace.md the use.
//
// Only the owner writes. A record is whole when its version was even and the same before and after
// it was read; ringcomm/comm/recorder/records.py reads the same bytes in Python.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ringcomm/protocol/call.h"

namespace ringcomm::host {

// "file.py:12", where the user made a call; cut at its left end to fit, and ended by a zero byte.
struct CallSite {
  static constexpr int kBytes = 112;
  uint32_t words = 0;  // of 8 bytes, up to and with the zero byte
  alignas(8) char text[kBytes] = {};
};
// The call site of the call that this thread is about to make; null: unknown.
extern thread_local constinit const CallSite* call_site;

enum class RecordState : uint32_t {
  kNone = 0,
  kRunning = 1,
  kDone = 2,
  kFailed = 3,
  // On a device, of which its host knows less: its calls begin when they are enqueued, and end when
  // the host sees it.
  kEnqueued = 4,
  kBegun = 5,
  kCompleted = 6,
  kCaptured = 7  // a graph makes the call, when and how often only the device knows
};

// Collectives and messages keep no order with each other, so each kind has records of its own.
enum class Track : uint32_t { kCollectives = 0, kMessages = 1, kCount = 2 };

struct Record {
  uint32_t version;  // odd while the owner writes
  RecordState state;
  CallId id;  // of a message: its number as the sequence, its tag as the root
  uint64_t bytes;
  uint64_t begin_ticks, end_ticks;  // of clock_pair()
  int32_t status, peer;             // of a message, or awaited by a collective that failed; else -1
  char site[CallSite::kBytes];
};
static_assert(sizeof(Record) == 192 && offsetof(Record, site) == 80);

// Before the records; filled before peers know the region, but for world_id and, in a snapshot,
// waits_for.
struct RecorderHeader {
  uint64_t magic;
  uint32_t version, record_bytes;
  uint32_t capacity;  // records per track
  int32_t rank, world, pid;
  uint64_t created_ns;     // CLOCK_MONOTONIC; and in ticks, below
  uint64_t world_id;       // equal on all ranks and of no other communicator; 0: not connected yet
  uint64_t control_bytes;  // the control page lies this far before
  int32_t waits_for;       // in a snapshot: 1 + the awaited rank, 0: none
  uint32_t on_device;      // 1: of a communicator on a device
  uint64_t created_ticks;
  char name[184];
};
static_assert(sizeof(RecorderHeader) == 256);

constexpr uint64_t kRecorderMagic = 0x31434552474e4952;  // "RINGREC1"
constexpr uint32_t kRecorderVersion = 1;
constexpr uint32_t kMaxRecords = 1 << 16;

// One moment on the clock of the records and on CLOCK_MONOTONIC, in ns. Two such moments, with time
// between them, turn ticks into ns.
struct ClockPair {
  uint64_t ticks, ns;
};
ClockPair clock_pair();

class Recorder {
 public:
  static uint64_t memory_bytes(uint32_t capacity);

  // `capacity` 0: records nothing, and has no memory. It need not be cleared.
  void open(char* memory, uint32_t capacity, int rank, int world, uint64_t control_bytes,
            const std::string& name);
  // After open(), before anybody else knows of the memory.
  void say_on_device();
  void set_world_id(uint64_t id);
  uint64_t world_id() const { return world_id_; }
  bool on() const { return capacity_ != 0; }
  uint32_t capacity() const { return capacity_; }

  // One thread at a time per track. `id.sequence` counts the calls of the track.
  void begin(Track track, const CallId& id, uint64_t bytes, int peer,
             RecordState state = RecordState::kRunning);
  void end(Track track, uint64_t sequence, Status status, int peer);
  // The state of the call with this number; kNone: never made, or overwritten meanwhile.
  RecordState state(Track track, uint64_t sequence) const;
  // For calls on a device: kBegun, or kCompleted as of now.
  void advance(Track track, uint64_t sequence, RecordState state);

  // The call of `track` with this number in a recorder's memory; false: never made, or overwritten
  // meanwhile.
  static bool find(const char* memory, uint32_t capacity, Track track, uint64_t sequence,
                   Record* out);
  // Header and records as they are now, each whole; a record that is being written throughout is
  // left with an odd version. Of more than `most` records per track the newest, and the copy's
  // header then says how many.
  static std::vector<char> snapshot(const char* memory, uint32_t capacity, uint32_t waits_for,
                                    uint32_t most = kMaxRecords);
  // A snapshot's header says of layout, rank and world what the reader knows: a damaged one must
  // not hide the records.
  struct Known {
    int rank, world;
    uint64_t world_id;
    bool on_device;
  };
  static void correct(std::vector<char>& snapshot, const Known& known);

 private:
  Record* at(Track track, uint64_t sequence) const;
  char* memory_ = nullptr;
  uint32_t capacity_ = 0;
  uint64_t world_id_ = 0;
};

}  // namespace ringcomm::host
