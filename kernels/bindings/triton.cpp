// SPDX-License-Identifier: Apache-2.0

// The offsets of fields in the C++ structures, for the Triton kernels (kernels/tl).
#include "kernels/bindings/module.h"
#include "kernels/cuda/args.h"
#include "kernels/host/describe.h"
#include "ringcomm/optimizer/adamw.h"

namespace nb = nanobind;
using namespace ringcomm;

namespace ringcomm::host {
namespace {

using device::HostPage;
using device::RankTable;

// Offsets in bytes by "structure.field"; sizes in bytes by "structure".
nb::dict structures() {
  nb::dict d;
  d["table.rank"] = offsetof(RankTable, rank);
  d["table.heap_bytes"] = offsetof(RankTable, heap_bytes);
  d["table.rings"] = offsetof(RankTable, rings);
  d["table.host"] = offsetof(RankTable, host);
  d["table.scratch"] = offsetof(RankTable, scratch);
  d["table.regions"] = offsetof(RankTable, regions);
  d["table.heaps"] = offsetof(RankTable, heaps);
  d["table"] = sizeof(RankTable);
  d["page.claimed"] = offsetof(ControlPage, claimed);
  d["page.waits_for"] = offsetof(ControlPage, waits_for);
  d["page.aborted"] = offsetof(ControlPage, aborted);
  d["page.fault"] = offsetof(ControlPage, fault);
  d["fault.status"] = offsetof(Fault, status);
  d["fault.rank"] = offsetof(Fault, rank);
  d["fault.peer"] = offsetof(Fault, peer);
  d["fault.wanted"] = offsetof(Fault, wanted);
  d["fault.seen"] = offsetof(Fault, seen);
  d["fault.item"] = offsetof(Fault, item);
  d["fault.stream"] = offsetof(Fault, stream);
  d["fault.on_consumed"] = offsetof(Fault, on_consumed);
  d["fault.waited_ns"] = offsetof(Fault, waited_ns);
  d["fault.mine"] = offsetof(Fault, mine);
  d["fault.theirs"] = offsetof(Fault, theirs);
  d["fault"] = sizeof(Fault);
  d["header.sequence"] = offsetof(CallHeader, id.sequence);
  d["header.match_bytes"] = offsetof(CallHeader, id.match_bytes);
  d["header.collective"] = offsetof(CallHeader, id.collective);
  d["header.stream_bytes"] = offsetof(CallHeader, stream_bytes);
  d["header.item_bytes"] = offsetof(CallHeader, item_bytes);
  d["header.heap_offset"] = offsetof(CallHeader, heap_offset);
  d["header.factor"] = offsetof(CallHeader, factor);
  d["header.result_offset"] = offsetof(CallHeader, result_offset);
  d["header"] = sizeof(CallHeader);
  d["host.abort_requested"] = offsetof(HostPage, abort_requested);
  d["host.fault_raised"] = offsetof(HostPage, fault_raised);
  d["host.lost"] = offsetof(HostPage, lost);
  d["host.fault"] = offsetof(HostPage, fault);
  d["channel.sequence"] = offsetof(ChannelLine, sequence);
  d["signal.ready"] = offsetof(SignalLine, ready);
  d["signal.consumed"] = offsetof(SignalLine, consumed);
  d["signal.detached"] = offsetof(SignalLine, detached);
  d["epoch.sent"] = offsetof(EpochLine, sent);
  d["epoch.seen"] = offsetof(EpochLine, seen);
  d["line"] = kLineBytes;
  d["control_page"] = kPageBytes;
  d["header_stride"] = kHeaderBytes;
  d["scratch"] = 8 * device::kScratchWords;
  d["scratch_per_rank"] = 8 * device::kScratchWordsPerRank;
  return d;
}

// Returns the offsets and sizes of the structures of an AdamW step.
nb::dict optimizer_structures() {
  nb::dict d;
  d["shard.segments"] = offsetof(AdamWShard, segments);
  d["shard.factors"] = offsetof(AdamWShard, factors);
  d["shard.segment_count"] = offsetof(AdamWShard, segment_count);
  d["shard.bucket_elems"] = offsetof(AdamWShard, bucket_elems);
  d["shard.begin"] = offsetof(AdamWShard, begin);
  d["shard.elems"] = offsetof(AdamWShard, elems);
  d["shard.master"] = offsetof(AdamWShard, master);
  d["shard.remainder"] = offsetof(AdamWShard, remainder);
  d["shard.exp_avg"] = offsetof(AdamWShard, exp_avg);
  d["shard.exp_avg_sq"] = offsetof(AdamWShard, exp_avg_sq);
  d["shard.max_exp_avg_sq"] = offsetof(AdamWShard, max_exp_avg_sq);
  d["shard.params"] = offsetof(AdamWShard, params);
  d["shard.param_dtype"] = offsetof(AdamWShard, param_dtype);
  d["shard.rounding"] = offsetof(AdamWShard, rounding);
  d["shard.seed"] = offsetof(AdamWShard, seed);
  d["shard.bucket"] = offsetof(AdamWShard, bucket);
  d["shard"] = sizeof(AdamWShard);
  d["segment.begin"] = offsetof(AdamWSegment, begin);
  d["segment.end"] = offsetof(AdamWSegment, end);
  d["segment.param"] = offsetof(AdamWSegment, param);
  d["segment"] = sizeof(AdamWSegment);
  d["factors.flags"] = offsetof(AdamWFactors, flags);
  d["factors.step"] = offsetof(AdamWFactors, step);
  d["factors.decay"] = offsetof(AdamWFactors, decay);
  d["factors.weight_decay"] = offsetof(AdamWFactors, weight_decay);
  d["factors.one_minus_beta1"] = offsetof(AdamWFactors, one_minus_beta1);
  d["factors.beta2"] = offsetof(AdamWFactors, beta2);
  d["factors.one_minus_beta2"] = offsetof(AdamWFactors, one_minus_beta2);
  d["factors.negative_step_size"] = offsetof(AdamWFactors, negative_step_size);
  d["factors.bias_correction2_sqrt"] = offsetof(AdamWFactors, bias_correction2_sqrt);
  d["factors.eps"] = offsetof(AdamWFactors, eps);
  d["factors.grad_scale"] = offsetof(AdamWFactors, grad_scale);
  d["factors.clip"] = offsetof(AdamWFactors, clip);
  d["factors"] = sizeof(AdamWFactors);
  return d;
}

// Returns the call of a collective in words of 8 bytes, in the layout of CallId without its
// sequence number: a Triton kernel writes these words into its headers.
CallWords call_words(uint64_t match_bytes, int collective, int dtype, int redop, int algorithm,
                     int root) {
  const CallId id{0,     match_bytes, Collective(collective), dtype,
                  redop, root,        Algorithm(algorithm),   Kernels::kTriton};
  int64_t words[sizeof(CallId) / 8];
  static_assert(sizeof(words) == sizeof(CallId) && sizeof(CallId) == 40);
  std::memcpy(words, &id, sizeof(id));
  return {words[1], words[2], words[3], words[4]};
}

}  // namespace

Named<int> geometry_of(const Layout& layout) {
  nb::dict d;
  d["world"] = layout.world;
  d["channels"] = layout.channels;
  d["slots"] = layout.slots;
  d["segment_bytes"] = layout.segment_bytes;
  d["staging_bytes"] = layout.staging_offset();
  return d;
}

nb::bytes rank_table_of(const Comm& comm, uintptr_t scratch) {
  const View& v = comm.view();
  if (v.world > device::kMaxWorld) throw nb::value_error("a rank table has room for 64 ranks");
  RankTable t{};
  t.rank = v.rank;
  t.world = v.world;
  t.layout = v.layout;
  t.scratch = reinterpret_cast<char*>(scratch);
  for (int p = 0; p < v.world; ++p) {
    t.regions[p] = v.regions[p];
    t.heaps[p] = v.heaps[p];
    t.heap_bytes[p] = v.heap_bytes[p];
  }
  return nb::bytes(reinterpret_cast<const char*>(&t), sizeof(t));
}

void bind_triton(nb::module_& m) {
  add_constant(
      m, "STRUCTURES", structures(),
      "Offsets `structure.field` and sizes `structure`, in bytes, of what the Triton kernels "
      "touch.");
  add_constant(m, "OPTIMIZER_STRUCTURES", optimizer_structures(),
               "As `STRUCTURES`, of what an AdamW step works on (ringcomm/optimizer/adamw.h).");
  nb::dict collectives, statuses, streams;
  collectives["all_reduce"] = int(Collective::kAllReduce);
  collectives["reduce_scatter"] = int(Collective::kReduceScatter);
  collectives["all_gather"] = int(Collective::kAllGather);
  collectives["reduce_scatter_norm"] = int(Collective::kReduceScatterNorm);
  collectives["adamw_all_gather"] = int(Collective::kAdamWAllGather);
  collectives["reduce_scatter_adamw_all_gather"] = int(Collective::kReduceScatterAdamWAllGather);
  for (int i = int(Status::kOk) + 1; i < kStatuses; ++i) statuses[name_of(Status(i))] = i;
  streams["pair"] = int(Stream::kPair);
  streams["shared"] = int(Stream::kShared);
  add_constant(m, "COLLECTIVES", collectives,
               "Code of each collective that has Triton kernels, as headers carry it.");
  add_constant(m, "STATUSES", statuses,
               "Code of each way in which a wait can end other than well.");
  add_constant(m, "STREAMS", streams, "Code of each kind of traffic: pair, shared.");
  m.def("call_words", &call_words, nb::arg("match_bytes"), nb::arg("collective"), nb::arg("dtype"),
        nb::arg("redop"), nb::arg("algorithm"), nb::arg("root") = -1,
        "Returns the words of a Triton call's header behind its sequence number.");
  // For tests, which compare these offsets with the arithmetic of kernels/tl.
  m.def(
      "layout_offset",
      [](std::tuple<int, int, int, uint32_t> sizes, const std::string& what, int stream,
         int channel, int peer, uint32_t slot) -> uint64_t {
        const auto [world, channels, slots, segment_bytes] = sizes;
        const Layout l{world, channels, slots, segment_bytes, 0, 0};
        const Stream s = Stream(stream);
        if (what == "signal") return l.signal_offset(s, channel, peer);
        if (what == "epoch") return l.epoch_offset(s, channel, peer);
        if (what == "channel") return l.channel_offset(channel);
        if (what == "staging") return l.staging_offset();
        if (what == "header") return l.header_offset(s, channel, peer, slot);
        if (what == "slot") return l.slot_offset(s, channel, peer, slot);
        throw nb::value_error("expected signal, epoch, channel, staging, header or slot");
      },
      nb::arg("sizes"), nb::arg("what"), nb::arg("stream") = 0, nb::arg("channel") = 0,
      nb::arg("peer") = 0, nb::arg("slot") = 0,
      "Returns the offset in a region of a signal, epoch, channel line, header, slot or the "
      "staging.\n\n"
      "`sizes` are world, channels, slots and segment_bytes.");
}

}  // namespace ringcomm::host
