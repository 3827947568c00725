// SPDX-License-Identifier: Apache-2.0

#include "kernels/host/recorder.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <utility>

#include "kernels/host/waiter.h"
#include "ringcomm/core/atomics.h"

namespace ringcomm::host {

thread_local constinit const CallSite* call_site = nullptr;

namespace {

constexpr int kReadTries = 64;

// Times of records are in ticks of one clock, the same for all processes of a machine.
#if defined(__x86_64__)
// If the kernel itself keeps time by the processor's counter, the counters of all cores agree and
// never stop. Every call reads the time twice: on Zen 4 in a virtual machine a read of the counter
// takes 27 ns, and a call of the kernel's clock 55 to 70 ns.
bool counts_time() {
  char name[16] = {};
  std::FILE* file =
      std::fopen("/sys/devices/system/clocksource/clocksource0/current_clocksource", "r");
  if (file == nullptr) return false;
  const bool read = std::fgets(name, sizeof(name), file) != nullptr;
  std::fclose(file);
  return read && std::strcmp(name, "tsc\n") == 0;
}

uint64_t ticks() {
  static const bool counter = counts_time();
  return counter ? __builtin_ia32_rdtsc() : Waiter::now_ns();
}
#else
uint64_t ticks() { return Waiter::now_ns(); }
#endif

// The rate is measured once, to a tenth of a percent. It must not change, since the recorded sums
// of times must not decrease.
double ns_per_tick() {
  constexpr uint64_t kMeasureNs = 200'000;
  static const double rate = [] {
    const ClockPair begin = clock_pair();
    ClockPair end = begin;
    while (end.ns - begin.ns < kMeasureNs) end = clock_pair();
    return double(end.ns - begin.ns) / double(std::max<uint64_t>(end.ticks - begin.ticks, 1));
  }();
  return rate;
}

uint64_t index_of(uint32_t capacity, Track track, uint64_t sequence) {
  return uint64_t(track) * capacity + uint32_t(sequence) % capacity;
}

const Record* record_at(const char* memory, uint64_t index) {
  return reinterpret_cast<const Record*>(memory + sizeof(RecorderHeader)) + index;
}

uint64_t records_bytes(uint32_t capacity) {
  return sizeof(RecorderHeader) + uint64_t(Track::kCount) * capacity * sizeof(Record);
}

void add(uint64_t* total, uint64_t more) {
  store_relaxed_sys(total, load_relaxed_sys(total) + more);
}

// Stores word by word: peers may read now, and detect changes by the versions around the stores.
void store_words(void* to, const void* from, size_t bytes) {
  for (size_t i = 0; i < bytes / 8; ++i) {
    uint64_t word;
    std::memcpy(&word, static_cast<const char*>(from) + 8 * i, 8);
    store_relaxed_sys(static_cast<uint64_t*>(to) + i, word);
  }
}

void load_words(void* to, const void* from, size_t bytes) {
  for (size_t i = 0; i < bytes / 8; ++i) {
    const uint64_t word = load_relaxed_sys(static_cast<const uint64_t*>(from) + i);
    std::memcpy(static_cast<char*>(to) + 8 * i, &word, 8);
  }
}

// Copies a consistent record; false if its owner kept writing, or died while it wrote.
bool read_whole(const Record* from, Record* to) {
  for (int tries = 0; tries < kReadTries; ++tries) {
    // Pairs with the release that ends begin() and end() of the owner.
    const uint32_t before = load_acquire_sys(&from->version);
    load_words(to, from, sizeof(*to));
    fence_acq_rel_sys();  // pairs with the fence after the store of the odd version
    if (before % 2 == 0 && load_relaxed_sys(&from->version) == before) return true;
  }
  to->version |= 1;
  return false;
}

// Returns the positions of the `most` newest records of a track, by the records' numbers alone: a
// reader cannot trust the recorder's own position.
std::vector<uint64_t> newest(const char* memory, uint32_t capacity, uint32_t track, uint32_t most) {
  std::vector<std::pair<uint64_t, uint64_t>> found(capacity);  // number and index
  for (uint32_t i = 0; i < capacity; ++i) {
    const uint64_t index = uint64_t(track) * capacity + i;
    found[i] = {load_relaxed_sys(&record_at(memory, index)->id.sequence), index};
  }
  if (most < capacity)
    std::nth_element(found.begin(), found.begin() + (most - 1), found.end(), std::greater<>());
  std::vector<uint64_t> indices(most);
  for (uint32_t i = 0; i < most; ++i) indices[i] = found[i].second;
  return indices;
}

// Makes the version odd during the stores to a record.
class Writing {
 public:
  explicit Writing(Record* r) : record_(r), version_(load_relaxed_sys(&r->version) & ~1u) {
    store_relaxed_sys(&r->version, version_ + 1);
    fence_acq_rel_sys();  // a reader that sees any new word also sees the odd version
  }
  ~Writing() { store_release_sys(&record_->version, version_ + 2); }  // pairs with read_whole()

 private:
  Record* record_;
  uint32_t version_;
};

}  // namespace

ClockPair clock_pair() {
  // The narrowest of several pairs: the thread may lose its core between reading the two clocks.
  constexpr int kTries = 8;
  ClockPair best{};
  uint64_t narrowest = ~uint64_t(0);
  for (int i = 0; i < kTries; ++i) {
    const uint64_t before = ticks(), ns = Waiter::now_ns(), width = ticks() - before;
    if (width >= narrowest) continue;
    narrowest = width;
    best = {before + width / 2, ns};
  }
  return best;
}

uint64_t Recorder::memory_bytes(uint32_t capacity) {
  constexpr uint64_t kTotalsBytes = uint64_t(Collective::kCount) * sizeof(CallTotals);
  return capacity == 0 ? 0 : records_bytes(capacity) + kTotalsBytes;
}

void Recorder::open(char* memory, uint32_t capacity, int rank, int world, uint64_t control_bytes,
                    const std::string& name) {
  if (capacity == 0) return;
  std::memset(memory, 0, memory_bytes(capacity));
  RecorderHeader h{};
  h.magic = kRecorderMagic;
  h.version = kRecorderVersion;
  h.record_bytes = sizeof(Record);
  h.capacity = capacity;
  h.rank = rank;
  h.world = world;
  h.pid = getpid();
  const ClockPair now = clock_pair();
  h.created_ns = now.ns;
  h.created_ticks = now.ticks;
  ns_per_tick();  // measured here, so that no call waits for it
  h.control_bytes = control_bytes;
  h.totals = uint64_t(Collective::kCount);
  ns_per_tick();  // measures here and not in the first call
  std::snprintf(h.name, sizeof(h.name), "%s", name.c_str());
  std::memcpy(memory, &h, sizeof(h));
  memory_ = memory;
  capacity_ = capacity;
}

void Recorder::say_on_device() {
  if (on()) store_relaxed_sys(&reinterpret_cast<RecorderHeader*>(memory_)->on_device, 1);
}

void Recorder::set_world_id(uint64_t id) {
  world_id_ = id;
  if (on()) store_relaxed_sys(&reinterpret_cast<RecorderHeader*>(memory_)->world_id, id);
}

Record* Recorder::at(Track track, uint64_t sequence) const {
  return const_cast<Record*>(record_at(memory_, index_of(capacity_, track, sequence)));
}

// Each total has one writer at a time, like the records of its track.
CallTotals* Recorder::totals(Collective kind) const {
  return reinterpret_cast<CallTotals*>(memory_ + records_bytes(capacity_)) + uint32_t(kind);
}

void Recorder::begin(Track track, const CallId& id, uint64_t bytes, int peer, RecordState state) {
  if (!on()) return;
  Record* r = at(track, id.sequence);
  constexpr size_t kBegin = offsetof(Record, id), kEnd = offsetof(Record, site);
  Record fresh;
  fresh.id = id;
  fresh.bytes = bytes;
  fresh.begin_ticks = ticks();
  fresh.end_ticks = 0;
  fresh.status = int32_t(Status::kOk);
  fresh.peer = peer;
  const Writing writing(r);
  store_relaxed_sys(reinterpret_cast<uint32_t*>(&r->state), uint32_t(state));
  store_words(&r->id, reinterpret_cast<const char*>(&fresh) + kBegin, kEnd - kBegin);
  static constexpr CallSite kUnknown{1, {}};
  const CallSite& site = call_site != nullptr ? *call_site : kUnknown;
  store_words(r->site, site.text, site.words * 8);
  CallTotals* const sum = totals(id.collective);
  add(&sum->calls, 1);
  add(&sum->bytes, bytes);
}

void Recorder::end(Track track, uint64_t sequence, Status status, int peer) {
  if (!on()) return;
  Record* r = at(track, sequence);
  if (r->id.sequence != sequence) return;  // a message that outlasted its record
  const bool ok = status == Status::kOk;
  const uint64_t now = ticks();
  const Writing writing(r);
  store_relaxed_sys(reinterpret_cast<uint32_t*>(&r->state),
                    uint32_t(ok ? RecordState::kDone : RecordState::kFailed));
  store_relaxed_sys(&r->end_ticks, now);
  store_relaxed_sys(reinterpret_cast<uint32_t*>(&r->status), uint32_t(status));
  store_relaxed_sys(reinterpret_cast<uint32_t*>(&r->peer), uint32_t(peer));
  CallTotals* const sum = totals(r->id.collective);
  add(&sum->ns, uint64_t(double(now - r->begin_ticks) * ns_per_tick()));
  if (!ok) add(&sum->failures, 1);
}

RecordState Recorder::state(Track track, uint64_t sequence) const {
  const Record* r = at(track, sequence);
  return r->id.sequence == sequence ? r->state : RecordState::kNone;
}

void Recorder::advance(Track track, uint64_t sequence, RecordState state) {
  Record* r = at(track, sequence);
  if (r->id.sequence != sequence) return;
  const uint64_t now = ticks();
  const Writing writing(r);
  store_relaxed_sys(reinterpret_cast<uint32_t*>(&r->state), uint32_t(state));
  if (state == RecordState::kCompleted) store_relaxed_sys(&r->end_ticks, now);
}

bool Recorder::find(const char* memory, uint32_t capacity, Track track, uint64_t sequence,
                    Record* out) {
  const Record* r = record_at(memory, index_of(capacity, track, sequence));
  return read_whole(r, out) && out->state != RecordState::kNone && out->id.sequence == sequence;
}

std::vector<char> Recorder::snapshot(const char* memory, uint32_t capacity, uint32_t waits_for,
                                     uint32_t most) {
  const uint32_t kept = std::clamp(most, 1u, capacity);
  std::vector<char> bytes(records_bytes(kept));
  auto* header = reinterpret_cast<RecorderHeader*>(bytes.data());
  load_words(header, memory, sizeof(*header));
  header->capacity = kept;
  header->totals = 0;
  header->waits_for = int32_t(waits_for);
  auto* to = const_cast<Record*>(record_at(bytes.data(), 0));
  for (uint32_t track = 0; track < uint32_t(Track::kCount); ++track)
    for (const uint64_t index : newest(memory, capacity, track, kept))
      read_whole(record_at(memory, index), to++);
  return bytes;
}

void Recorder::correct(std::vector<char>& snapshot, const Known& known) {
  auto* header = reinterpret_cast<RecorderHeader*>(snapshot.data());
  header->magic = kRecorderMagic;
  header->version = kRecorderVersion;
  header->record_bytes = sizeof(Record);
  header->rank = known.rank;
  header->world = known.world;
  header->world_id = known.world_id;
  header->on_device = known.on_device ? 1 : 0;
}

}  // namespace ringcomm::host
