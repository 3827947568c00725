// SPDX-License-Identifier: Apache-2.0

// Prints constants and tables of the code as Promela macros for the models. Each function becomes
// one integer; a macro with the function's name and arguments picks bits of it.
//
// The macros WORLD and EPOCHS (the number of the models' epochs, a power of two) are set by the
// build. The code's own functions compute every table. This program also checks that a smaller
// number of epochs is equivalent.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "ringcomm/protocol/endpoint.h"

#include "ll_flags.h"

using namespace ringcomm;

namespace {

constexpr int kSlots = 2;

void must(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

// Prints a table of `bits` per entry as a macro; the models' expression `index` selects an entry.
template <class Value>
void table(const char* head, const char* index, int entries, int bits, Value value) {
  uint64_t packed = 0;
  for (int i = 0; i < entries; ++i) packed |= uint64_t(value(i)) << (i * bits);
  must(entries * bits < 31, head);
  std::printf("#define %s (%llu >> (%d * (%s)) & %d)\n", head, (unsigned long long)packed, bits,
              index, (1 << bits) - 1);
}

constexpr Layout kLayout{WORLD, 1, kSlots, 64, 0, 0};

uint32_t slot_of(uint32_t epoch) {
  static char memory[1];
  char* regions[WORLD];
  for (char*& region : regions) region = memory;
  View v{};
  v.rank = 0;
  v.world = WORLD;
  v.layout = kLayout;
  v.regions = regions;
  const auto at = [&](uint32_t e) {
    return uint64_t(v.slot(1, Stream::kPair, 0, 0, e) - v.slot(1, Stream::kPair, 0, 0, 1));
  };
  return uint32_t(at(epoch) / v.layout.segment_bytes);
}

// A model's epoch is the code's epoch in units of 2^32 / EPOCHS.
bool reached_in_model(uint32_t seen, uint32_t want) {
  constexpr uint32_t unit = uint32_t((uint64_t(1) << 32) / EPOCHS);
  return reached(seen * unit, want * unit);
}

}  // namespace

int main() {
  std::printf(
      "#define SLOTS %d\n#define EPOCHS %d\n#define FLAG_COUNT %d\n#ifndef LOOKAHEAD\n#define "
      "LOOKAHEAD %u\n#endif\n",
      kSlots, EPOCHS, FLAGS, kLookahead);
  for (uint32_t i = 0; i < 4 * EPOCHS; ++i) {
    must(slot_of(i) == slot_of(i % EPOCHS) && slot_of(i) == slot_of(i - 4 * EPOCHS),
         "slot: epochs do not come around as the models' do");
    must(kLayout.held_before(i) - i == kLayout.held_before(0), "held_before: not by difference");
    for (uint32_t j = 0; j < EPOCHS; ++j)
      must(reached_in_model(i, j) == reached_in_model(i - j, 0), "reached: not by difference");
  }
  table("reached(seen, want)", "((seen) + EPOCHS - (want)) % EPOCHS", EPOCHS, 1,
        [](int i) { return reached_in_model(uint32_t(i), 0); });
  table("slot(epoch)", "epoch", EPOCHS, 1, [](int i) { return slot_of(uint32_t(i)); });
  table("held_before(epoch)", "epoch", EPOCHS, 3,
        [](int i) { return kLayout.held_before(uint32_t(i)) % EPOCHS; });
  const int world = WORLD;
  table("ring_next(rank)", "rank", world, 2, [&](int r) { return ring_next(r, world); });
  table("ring_prev(rank)", "rank", world, 2, [&](int r) { return ring_prev(r, world); });
  for (int r = 0; r < world; ++r)
    for (int s = 0; s < world; ++s) {
      must(rotated_peer(r, s, world) == rotated_peer(0, (r + s) % world, world) &&
               ring_reduce_chunk(r, s, world) ==
                   ring_reduce_chunk((r + world - s) % world, 0, world) &&
               ring_gather_chunk(r, s, world) ==
                   ring_gather_chunk((r + world - s) % world, 0, world),
           "the schedules are not rotations");
    }
  table("rotated_peer(rank, d)", "((rank) + (d)) % WORLD", world, 2,
        [&](int i) { return rotated_peer(0, i, world); });
  table("ring_reduce_chunk(rank, step)", "((rank) + WORLD - (step)) % WORLD", world, 2,
        [&](int i) { return ring_reduce_chunk(i, 0, world); });
  table("ring_gather_chunk(rank, step)", "((rank) + WORLD - (step)) % WORLD", world, 2,
        [&](int i) { return ring_gather_chunk(i, 0, world); });
  table("next_flag(last)", "last", FLAGS, 3,
        [](int i) { return next_flag(Flag(unsigned(i))).value; });
  table("clears_other_set(flag)", "flag", FLAGS, 1,
        [](int i) { return clears_other_set(Flag(unsigned(i))); });
  return 0;
}
