// SPDX-License-Identifier: Apache-2.0

// Quantization (quantization.h) by the lanes of a block, with the host's bits. N numbers of E
// bytes: quantizing loads N * E bytes and stores N or N / 2 bytes of values and 4 bytes per 128
// numbers.
//
// A warp processes a quantization block of 128 numbers, four per lane; a lane's values are one
// word. Shuffles find the largest magnitude, and bring the high nibbles of 4-bit values from the
// lane half a warp away. On the host one lane has all 128 numbers.
//
// Each lane has four blocks in flight: 64 bytes for FP32, and 16 bytes from each of two sources for
// a sum. Chosen by the estimate of ops.h, not measured. A shorter last block, and all blocks of
// unaligned pointers, are processed number by number.
#pragma once

#include "kernels/cuda/loops.h"
#include "ringcomm/core/quantization.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {

#if RC_CUDA
constexpr int kQuantLanes = 32, kQuantBlocks = 4;
#else
constexpr int kQuantLanes = 1, kQuantBlocks = 1;
#endif
constexpr int kQuantElems = int(kQuantBlock) / kQuantLanes, kQuantWords = kQuantElems / 4;
// Words of a block's values: four numbers per word, or eight for int4.
template <class Format>
constexpr int kValueWords = int(kQuantBlock) / (Format::format == QuantFormat::kInt4 ? 8 : 4);
template <class Format>
constexpr uint64_t kValueBytes = uint64_t(kValueWords<Format>) * 4;

// Packs two 4-bit values per byte: the block's upper half goes into the high nibbles.
RC_TEAM_FN void fold_halves(uint32_t (&word)[kQuantWords]) {
#if RC_CUDA
  // The upper lanes' results are not stored.
  word[0] |= __shfl_xor_sync(0xffffffffu, word[0], kQuantLanes / 2) << 4;
#else
  for (int k = 0; k < kQuantWords / 2; ++k) word[k] |= word[k + kQuantWords / 2] << 4;
#endif
}

// Load or store four numbers, at a multiple of their size.
template <class T>
RC_TEAM_FN void load_four(float* x, const T* from) {
  T four[4];
  if constexpr (sizeof(T) == 4) {
    const Vec16 v = load16(from);
    memcpy(four, &v, sizeof(v));
  } else {
    const Vec8 v = load8(from);
    memcpy(four, &v, sizeof(v));
  }
  RC_UNROLL
  for (int k = 0; k < 4; ++k) x[k] = Traits<T>::load(four[k]);
}
template <class T>
RC_TEAM_FN void store_four(T* to, const float* x) {
  T four[4];
  RC_UNROLL
  for (int k = 0; k < 4; ++k) four[k] = Traits<T>::store(x[k]);
  if constexpr (sizeof(T) == 4) {
    Vec16 v;
    memcpy(&v, four, sizeof(v));
    store16(to, v);
  } else {
    Vec8 v;
    memcpy(&v, four, sizeof(v));
    store8(to, v);
  }
}

// Returns the larger of `most` and the magnitude of x. finite: ignores infinities and NaNs.
RC_TEAM_FN uint32_t with_magnitude(uint32_t most, float x, bool finite) {
  const uint32_t magnitude = bits_of(x) & kMagnitude;
  if (finite && magnitude >= kInfinityBits) return most;
  return magnitude > most ? magnitude : most;
}

// A run of numbers, split into quantization blocks that a warp reads or writes.
template <class T>
struct QuantRun {
  T* numbers;
  uint64_t elems;

  RC_TEAM_FN bool has_vectors(const void* values) const {
    return (misalignment(numbers) & uint32_t(4 * sizeof(T) - 1)) == 0 &&
           (misalignment(values) & 3u) == 0;
  }
  RC_TEAM_FN uint64_t whole() const { return elems / kQuantBlock; }
  // Returns the numbers in a block; the last block may be shorter.
  RC_TEAM_FN uint64_t count_of(uint64_t block) const {
    return block < whole() ? kQuantBlock : elems % kQuantBlock;
  }
};

template <class Format, class T>
struct Quantizer {
  QuantRun<const T> run;
  uint8_t* out;
  int lane;

  RC_TEAM_FN void put_scale(uint64_t block, BlockScale scale) const {
    uint8_t* const to = out + values_bytes(Format::format, run.elems) + block * kWordBytes;
    if constexpr (kQuantLanes == 1)
      scale.write(to);
    else if (lane < int(kWordBytes))
      to[lane] = uint8_t(scale.word >> 8 * lane);
  }

  // Returns the scale of a block; number i of this lane's `count` numbers is x(i).
  template <class Numbers>
  RC_TEAM_FN static BlockScale scale_of(int count, Numbers x) {
    uint32_t most = 0;
    RC_UNROLL
    for (int i = 0; i < count; ++i) most = with_magnitude(most, x(i), false);
    most = largest_of_lanes<kQuantLanes>(most);
    if (most < kInfinityBits) return BlockScale::of<Format>(most, false);
    most = 0;
    RC_UNROLL
    for (int i = 0; i < count; ++i) most = with_magnitude(most, x(i), true);
    return BlockScale::of<Format>(largest_of_lanes<kQuantLanes>(most), true);
  }

  RC_TEAM_FN void block_of(uint64_t block, const float (&x)[kQuantElems]) const {
    const BlockScale scale = scale_of(kQuantElems, [&](int i) { return x[i]; });
    put_scale(block, scale);
    uint32_t word[kQuantWords] = {};
    if (scale.special()) {
      RC_UNROLL
      for (int i = 0; i < kQuantElems; ++i)
        word[i / 4] |= scale.quantize<Format>(x[i]) << 8 * (i % 4);
    } else {
      const float before = scale.before(), inverse = scale.inverse();
      RC_UNROLL
      for (int i = 0; i < kQuantElems; ++i)
        word[i / 4] |= Format::quantize(x[i] * before * inverse) << 8 * (i % 4);
    }
    if constexpr (Format::format == QuantFormat::kInt4) fold_halves(word);
    uint8_t* const to = out + block * kValueBytes<Format>;
    RC_UNROLL
    for (int k = 0; k < kQuantWords; ++k) {
      const int at = lane * kQuantWords + k;
      if (at < kValueWords<Format>) store4(to + 4 * at, word[k]);
    }
  }

  template <int blocks>
  RC_TEAM_FN void whole_blocks(uint64_t first) const {
    float x[blocks][kQuantElems];
    RC_UNROLL
    for (int b = 0; b < blocks; ++b) {
      const T* const from = run.numbers + (first + b) * kQuantBlock + lane * kQuantElems;
      RC_UNROLL
      for (int k = 0; k < kQuantWords; ++k) load_four(x[b] + 4 * k, from + 4 * k);
    }
    RC_UNROLL
    for (int b = 0; b < blocks; ++b) block_of(first + b, x[b]);
  }

  // Quantizes a block of any length, at any address.
  RC_COLD static void any_block(Quantizer quantizer, uint64_t block) {
    const int n = int(quantizer.run.count_of(block)), lane = quantizer.lane;
    const T* const from = quantizer.run.numbers + block * kQuantBlock;
    const int mine = lane < n ? (n - lane + kQuantLanes - 1) / kQuantLanes : 0;
    const BlockScale scale =
        scale_of(mine, [&](int i) { return Traits<T>::load(from[lane + i * kQuantLanes]); });
    quantizer.put_scale(block, scale);
    uint8_t* const to = quantizer.out + block * kValueBytes<Format>;
    const int bytes = int(values_bytes(Format::format, uint64_t(n)));
    RC_ROLLED
    for (int i = lane; i < bytes; i += kQuantLanes) {
      uint32_t value = scale.quantize<Format>(Traits<T>::load(from[i]));
      if constexpr (Format::format == QuantFormat::kInt4)
        if (i + bytes < n) value |= scale.quantize<Format>(Traits<T>::load(from[i + bytes])) << 4;
      to[i] = uint8_t(value);
    }
  }
};

// A lane's part of a block's quantized values, and the block's scale.
template <class Format>
struct QuantizedBlock {
  uint32_t word[kQuantWords];
  BlockScale scale;

  RC_TEAM_FN void load(const uint8_t* values, const uint8_t* scale_word, int lane) {
    RC_UNROLL
    for (int k = 0; k < kQuantWords; ++k) {
      const int at = lane * kQuantWords + k;
      word[k] = load4(values + 4 * (at % kValueWords<Format>));
      if constexpr (Format::format == QuantFormat::kInt4)
        word[k] >>= at < kValueWords<Format> ? 0 : 4;
    }
    scale = BlockScale::read(scale_word);
  }
  RC_TEAM_FN uint32_t value(int i) const {
    return word[i / 4] >> 8 * (i % 4) & (Format::format == QuantFormat::kInt4 ? 0xfu : 0xffu);
  }
  // Sets the sum to the dequantized numbers (`first`), or adds them to it.
  RC_TEAM_FN void add_to(float (&sum)[kQuantElems], bool first) const {
    const float by = scale.scale(), after = scale.after();
    const bool special = scale.special();
    RC_UNROLL
    for (int i = 0; i < kQuantElems; ++i) {
      const float x =
          special ? scale.dequantize<Format>(value(i)) : Format::dequantize(value(i)) * by * after;
      sum[i] = first ? x : sum[i] + x;
    }
  }
};

template <class Format, class T>
struct DequantizedSum {
  const uint8_t* sources;  // `count` quantized runs, `stride` bytes apart
  uint64_t stride;
  int count, divide_by;
  QuantRun<T> run;
  int lane;

  RC_TEAM_FN bool has_vectors() const {
    return run.has_vectors(sources) && (count == 1 || stride % 4 == 0);
  }
  RC_TEAM_FN const uint8_t* values_of(int source, uint64_t block) const {
    return sources + uint64_t(source) * stride + block * kValueBytes<Format>;
  }
  RC_TEAM_FN const uint8_t* scale_of(int source, uint64_t block) const {
    return sources + uint64_t(source) * stride + values_bytes(Format::format, run.elems) +
           block * kWordBytes;
  }
  RC_TEAM_FN float finished(float sum) const { return finish<RedOp::kAvg>(sum, divide_by); }

  // Loads the next source while it adds the current one.
  template <int blocks>
  RC_TEAM_FN void whole_blocks(uint64_t first) const {
    float sum[blocks][kQuantElems];
    QuantizedBlock<Format> now[blocks], next[blocks];
    RC_UNROLL
    for (int b = 0; b < blocks; ++b)
      now[b].load(values_of(0, first + b), scale_of(0, first + b), lane);
    RC_ROLLED
    for (int s = 0; s < count; ++s) {
      if (s + 1 < count) {
        RC_UNROLL
        for (int b = 0; b < blocks; ++b)
          next[b].load(values_of(s + 1, first + b), scale_of(s + 1, first + b), lane);
      }
      RC_UNROLL
      for (int b = 0; b < blocks; ++b) {
        now[b].add_to(sum[b], s == 0);
        if (s + 1 < count) now[b] = next[b];
      }
    }
    RC_UNROLL
    for (int b = 0; b < blocks; ++b) {
      T* const to = run.numbers + (first + b) * kQuantBlock + lane * kQuantElems;
      RC_UNROLL
      for (int i = 0; i < kQuantElems; ++i) sum[b][i] = finished(sum[b][i]);
      RC_UNROLL
      for (int k = 0; k < kQuantWords; ++k) store_four(to + 4 * k, sum[b] + 4 * k);
    }
  }

  RC_TEAM_FN float number(int source, uint64_t block, int i, int n) const {
    const uint8_t* const values = values_of(source, block);
    const BlockScale scale = BlockScale::read(scale_of(source, block));
    if constexpr (Format::format != QuantFormat::kInt4) return scale.dequantize<Format>(values[i]);
    const int half = (n + 1) / 2;
    return scale.dequantize<Format>(i < half ? values[i] & 0xfu : uint32_t(values[i - half]) >> 4);
  }
  // Sums a block of any length, at any address.
  RC_COLD static void any_block(DequantizedSum w, uint64_t block) {
    const int n = int(w.run.count_of(block));
    RC_ROLLED
    for (int i = w.lane; i < n; i += kQuantLanes) {
      float sum = w.number(0, block, i, n);
      RC_ROLLED
      for (int s = 1; s < w.count; ++s) sum += w.number(s, block, i, n);
      w.run.numbers[block * kQuantBlock + uint64_t(i)] = Traits<T>::store(w.finished(sum));
    }
  }
};

// Distributes the quantization blocks of work.run over the warps of all thread blocks. The loops
// stay rolled: to unroll them the compiler would divide to find the number of turns.
template <class Team, class Work>
RC_TEAM_FN void each_block(const Team& team, const Work& work, bool has_vectors) {
  const uint64_t lanes = uint64_t(team.num_lanes());
  const uint64_t warp = (uint64_t(team.channel()) * lanes + uint64_t(team.lane())) / kQuantLanes,
                 warps = uint64_t(team.num_channels()) * lanes / kQuantLanes;
  const uint64_t all = (work.run.elems + kQuantBlock - 1) / kQuantBlock;
  uint64_t done = 0;
  if (has_vectors) {
    done = work.run.whole();
    const uint64_t together = done / kQuantBlocks * kQuantBlocks;
    RC_ROLLED
    for (uint64_t b = warp * kQuantBlocks; b < together; b += warps * kQuantBlocks)
      work.template whole_blocks<kQuantBlocks>(b);
    RC_ROLLED
    for (uint64_t b = together + warp; b < done; b += warps) work.template whole_blocks<1>(b);
  }
  RC_ROLLED
  for (uint64_t b = done + warp; b < all; b += warps) Work::any_block(work, b);
}

// Quantizes args.total_bytes of numbers.
template <class Format, class T, class Team>
RC_TEAM_FN void quantize_kernel(Team team, const LaunchParams& p, int rank_in_launch, Workspace&) {
  const CallArgs& args = p.calls[rank_in_launch];
  const QuantRun<const T> run{reinterpret_cast<const T*>(args.in), args.total_bytes / sizeof(T)};
  const Quantizer<Format, T> quantizer{run, reinterpret_cast<uint8_t*>(args.out),
                                       team.lane() % kQuantLanes};
  each_block(team, quantizer, run.has_vectors(args.out));
}

// Stores args.total_bytes of numbers, the sum of dequantized runs.
template <class Format, class T, class Team>
RC_TEAM_FN void dequantize_and_sum_kernel(Team team, const LaunchParams& p, int rank_in_launch,
                                          Workspace&) {
  const CallArgs& args = p.calls[rank_in_launch];
  const QuantRun<T> run{reinterpret_cast<T*>(args.out), args.total_bytes / sizeof(T)};
  const DequantizedSum<Format, T> sum{reinterpret_cast<const uint8_t*>(args.in),
                                      args.chunk_bytes,
                                      args.runs.count,
                                      args.runs.divide_by,
                                      run,
                                      team.lane() % kQuantLanes};
  each_block(team, sum, sum.has_vectors());
}

}  // namespace device
RINGCOMM_NAMESPACE_END
