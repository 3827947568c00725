// SPDX-License-Identifier: Apache-2.0

// A flight recorder whose owner writes as fast as it can while others read: the fields of every
// record that a reader takes for complete must belong together. Runs under ThreadSanitizer.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "kernels/host/recorder.h"
#include "tests/proof/races/recorder_turns.h"

using namespace ringcomm;
using namespace ringcomm::host;

namespace {

constexpr uint32_t kCapacity = 2;
constexpr uint64_t kCalls = 3'000, kLooks = 20;

std::atomic<uint64_t> looks{0};  // records that readers took for complete
std::atomic<bool> found_wrong{false};

std::string site_of(uint64_t number) { return "file.py:" + std::to_string(number); }

Status status_of(uint64_t number) { return number % 2 == 0 ? Status::kOk : Status::kTimeout; }

CallId id_of(uint64_t number) {
  return {number, 3 * number,          Collective::kBroadcast, int32_t(number % 5),
          -1,     int32_t(number % 7), Algorithm::kOneShot};
}

void write_all(Recorder& recorder, Track track) {
  CallSite site;
  call_site = &site;
  for (uint64_t number = 1; number <= kCalls || looks < kLooks; ++number) {
    if (found_wrong) return;
    const std::string text = site_of(number);
    std::memcpy(site.text, text.c_str(), text.size() + 1);
    site.words = uint32_t(text.size() / 8 + 1);
    recorder.begin(track, id_of(number), 5 * number, -1);
    recorder.end(track, number, status_of(number), int(number % 3));
  }
}

// Returns which field of a complete record does not belong to the others, or null.
const char* wrong_in(const Record& r) {
  const uint64_t number = r.id.sequence;
  if (number == 0 || !same_call(r.id, id_of(number))) return "call";
  if (r.bytes != 5 * number) return "bytes";
  if (r.site != site_of(number)) return "site";
  if (r.begin_ticks == 0) return "begin";
  if (r.state == RecordState::kRunning)
    return r.end_ticks == 0 && r.status == 0 && r.peer == -1 ? nullptr : "running";
  const bool ok = r.state == RecordState::kDone;
  if (!ok && r.state != RecordState::kFailed) return "state";
  if (r.end_ticks < r.begin_ticks || r.peer != int(number % 3)) return "end";
  return Status(r.status) == status_of(number) && ok == (r.status == 0) ? nullptr : "status";
}

struct Reader {
  const char* wrong = nullptr;

  void look(const Record& r) {
    if (r.version % 2 != 0 || r.state == RecordState::kNone) return;
    ++looks;
    if (wrong == nullptr) wrong = wrong_in(r);
    if (wrong != nullptr) found_wrong = true;
  }
  void read(const char* recorder, const std::atomic<bool>& stop) {
    for (uint64_t next = 1; !stop && wrong == nullptr; ++next) {
      const std::vector<char> copy = Recorder::snapshot(recorder, kCapacity, 0);
      const auto* records = reinterpret_cast<const Record*>(copy.data() + sizeof(RecorderHeader));
      for (uint32_t i = 0; i < uint32_t(Track::kCount) * kCapacity; ++i) look(records[i]);
      Record found;
      const uint64_t number = records[next % kCapacity].id.sequence;
      if (!Recorder::find(recorder, kCapacity, Track::kCollectives, number, &found)) continue;
      look(found);
      if (found.id.sequence != number) wrong = "find";
    }
  }
};

// Functions without arguments write in turns, so their data is global.
std::vector<uint64_t> turn_memory(Recorder::memory_bytes(kCapacity) / 8);
char* const turn_recorder = reinterpret_cast<char*>(turn_memory.data());
Recorder turned;
bool shown_half = false;

void make(uint64_t number) {
  CallSite site;
  std::snprintf(site.text, sizeof(site.text), "%s", site_of(number).c_str());
  site.words = uint32_t(std::strlen(site.text) / 8 + 1);
  call_site = &site;
  turned.begin(Track::kCollectives, id_of(number), 5 * number, -1);
  call_site = nullptr;
}

bool finds(uint64_t number, Record* found) {
  return Recorder::find(turn_recorder, kCapacity, Track::kCollectives, number, found);
}

void look_in_the_middle() {
  in_store = nullptr;
  Record found;
  for (const uint64_t number : {11, 13}) shown_half |= finds(number, &found);
}

void write_in_the_middle() {
  in_load = nullptr;
  make(13);
}

// Returns the first broken rule of the protocol, each tested at the worst moment; 0: all hold.
int first_broken_rule() {
  turned.open(turn_recorder, kCapacity, 0, 1, 0, "turns");
  Record found;
  make(11);
  if (!finds(11, &found) || wrong_in(found) != nullptr) return 2;
  in_load = write_in_the_middle;  // of a reader
  if (finds(11, &found)) return 3;
  if (!finds(13, &found) || wrong_in(found) != nullptr) return 4;
  make(11);
  in_store = look_in_the_middle;  // of the owner
  make(13);
  if (shown_half) return 5;
  turned.end(Track::kCollectives, 11, Status::kOk, -1);  // ignored: 13 has its place
  if (!finds(13, &found) || found.state != RecordState::kRunning) return 6;
  auto* second = reinterpret_cast<Record*>(turn_recorder + sizeof(RecorderHeader)) + 13 % kCapacity;
  second->version |= 1;  // its owner is killed while it writes
  const std::vector<char> copy = Recorder::snapshot(turn_recorder, kCapacity, 0);
  const auto* seen = reinterpret_cast<const Record*>(copy.data() + sizeof(RecorderHeader));
  return seen[13 % kCapacity].version % 2 == 0 || finds(13, &found) ? 7 : 0;
}

}  // namespace

int main() {
  if (const int broken = first_broken_rule(); broken != 0) return broken;
  std::vector<uint64_t> memory(Recorder::memory_bytes(kCapacity) / 8);
  char* begin = reinterpret_cast<char*>(memory.data());
  Recorder recorder;
  recorder.open(begin, kCapacity, 0, 1, 0, "test");
  std::atomic<bool> stop{false};
  Reader reader;
  std::thread reading([&] { reader.read(begin, stop); });
  std::thread messages([&] { write_all(recorder, Track::kMessages); });
  write_all(recorder, Track::kCollectives);
  recorder.set_world_id(7);
  messages.join();
  stop = true;
  reading.join();
  if (reader.wrong != nullptr) {
    std::fprintf(stderr, "a record whose %s does not fit was taken for whole\n", reader.wrong);
    return 1;
  }
  std::puts("ok");
  return 0;
}
