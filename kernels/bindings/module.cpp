// SPDX-License-Identifier: Apache-2.0

// Binds ringcomm._native, the host backend: it takes addresses and sizes, returns status codes, and
// needs no torch. `make native` writes ringcomm/_native.pyi from the signatures of the bindings.
#include <nanobind/stl/variant.h>

#include "kernels/bindings/collectives.h"
#include "kernels/bindings/fast_calls.h"
#include "kernels/bindings/gil.h"
#include "kernels/bindings/torch_options.h"
#include "kernels/host/describe.h"

namespace nb = nanobind;
using namespace ringcomm;
using namespace ringcomm::host;

namespace {

// A rank's heap as mapped in this process: its own heap, or a peer's.
using MappedHeap = std::variant<std::shared_ptr<Heap>, std::shared_ptr<Mapping>>;

struct NativeRequest {
  std::shared_ptr<NativeComm> comm;
  RequestPtr request;
};

int interrupted() {
  const WithGil gil;
  const bool raised = PyErr_Occurred() != nullptr || PyErr_CheckSignals() != 0;
  if (raised) signal_raised() = true;
  return raised;
}

Reduction reduction(int dtype, int op, double factor, int algorithm) {
  return {DType(dtype), RedOp(op), factor, chosen(Algorithm(algorithm))};
}

// The Calls of bind_collectives() (collectives.h) for the host's communicator.
struct HostCalls {
  using Comm = NativeComm;
  static int world(const NativeComm& n) { return n.comm.view().world; }
  static Reduction reduction(int dtype, int op, double factor, int algorithm, uint64_t*) {
    return {DType(dtype), RedOp(op), factor, chosen(Algorithm(algorithm))};
  }
  static Algorithm algorithm(int code) { return chosen(Algorithm(code)); }
  template <class Call>
  static int run(NativeComm& n, Call call) {
    return recorded(n, [&] { return call(n.comm); });
  }
};

std::optional<FaultWords> fault_of(const Comm& comm) {
  FaultReport report;
  if (!comm.faulted(&report)) return std::nullopt;
  FaultWords found = fault_dict(report.fault, report.reason);
  // If the lost peer is a thread, it has left the function of LocalWorld.run(), since a thread
  // cannot die without its process.
  const int peer = report.fault.peer;
  if (report.fault.status == Status::kPeerLost && peer >= 0 && comm.waiter().is_thread(peer))
    found["kind"] = "peer_left";
  return found;
}

nb::dict algorithms_by_name(Collective collective) {
  nb::dict codes;
  for (int i = 0; i < int(Algorithm::kCount); ++i) codes[name_of(Algorithm(i), collective)] = i;
  return codes;
}

// The most frequent calls, on tensors: see kNotFast.
const auto in_turn = [](NativeComm& n, auto call) { return recorded_in_turn(n, call); };

int all_reduce_fast(NativeComm& n, nb::handle tensor, nb::handle op, nb::handle algorithm) {
  TensorMemory t;
  const int code = op_code(op), named = algorithm_code(algorithm, Collective::kAllReduce);
  if (code < 0 || named < 0 || !read_memory(tensor, &t)) return kNotFast;
  return all_reduce_memory(n, t, code, named, in_turn);
}

int reduce_scatter_fast(NativeComm& n, nb::handle output, nb::handle input, nb::handle op,
                        nb::handle algorithm) {
  TensorMemory out, in;
  const int code = op_code(op), named = algorithm_code(algorithm, Collective::kReduceScatter);
  if (code < 0 || named < 0 || !read_memory(output, &out) || !read_memory(input, &in))
    return kNotFast;
  return reduce_scatter_memory(n, out, in, code, named, in_turn);
}

int all_gather_fast(NativeComm& n, nb::handle output, nb::handle input, nb::handle algorithm) {
  TensorMemory out, in;
  const int named = algorithm_code(algorithm, Collective::kAllGather);
  if (named < 0 || !read_memory(output, &out) || !read_memory(input, &in)) return kNotFast;
  return all_gather_memory(n, out, in, named, in_turn);
}

int broadcast_fast(NativeComm& n, nb::handle tensor, nb::handle source) {
  TensorMemory t;
  const int root = rank_of(source, n.comm.view().world);
  if (root < 0 || !read_memory(tensor, &t)) return kNotFast;
  return recorded_in_turn(n, [&] { return n.comm.broadcast(t.ptr, t.bytes(), t.dtype, root); });
}

void bind_turn(nb::module_& m, nb::class_<NativeComm>& c) {
  nb::class_<CallLock>(m, "CallLock",
                       "Held by whoever runs a call; not reentrant. Ctrl-C ends the wait for it.")
      .def("__enter__",
           [](CallLock& turn) {
             bool taken;
             {
               const WithoutGil nogil;
               taken = turn.take();
             }
             if (!taken) throw nb::python_error();
           })
      .def(
          "__exit__", [](CallLock& turn, nb::args) { turn.unlock(); },
          nb::sig("def __exit__(self, *error: object) -> None"))
      .def(
          "acquire",
          [](CallLock& turn, double timeout) {
            const WithoutGil nogil;
            return turn.take_within(timeout);
          },
          nb::arg("timeout"))
      .def("release", &CallLock::unlock)
      .def("set_queued", &CallLock::set_queued, nb::arg("calls"),
           "Says how many calls are queued; a caller without Python makes none meanwhile.")
      .def("shut", &CallLock::shut, "From here on callers without Python make no call.");
  c.def_prop_ro(
      "turn", [](const NativeComm& n) { return n.turn; },
      "Fast calls take it themselves, all others are made by who holds it.");
}

struct HostFast {
  using Calls = NativeComm;
  static constexpr auto all_reduce = all_reduce_fast;
  static constexpr auto reduce_scatter = reduce_scatter_fast;
  static constexpr auto all_gather = all_gather_fast;
};

void bind_fast(nb::class_<NativeComm>& c) {
  const auto any = [] { return nb::arg().none(); };  // accepts None: Python raises the error
  c.def("all_reduce_fast", all_reduce_fast,
        nb::sig("def all_reduce_fast(self, tensor: object, op: object, algorithm: object, "
                "/) -> int"),
        any(), any(), any(),
        "Reduces a tensor that takes the fast path; returns `NOT_FAST`, and communicates nothing, "
        "for "
        "another.")
      .def("reduce_scatter_fast", reduce_scatter_fast,
           nb::sig("def reduce_scatter_fast(self, output: object, input: object, op: object, "
                   "algorithm: object, /) -> int"),
           any(), any(), any(), any())
      .def("all_gather_fast", all_gather_fast,
           nb::sig("def all_gather_fast(self, output: object, input: object, "
                   "algorithm: object, /) -> int"),
           any(), any(), any())
      .def("broadcast_fast", broadcast_fast,
           nb::sig("def broadcast_fast(self, tensor: object, source: object, /) -> int"), any(),
           any())
      .def("barrier_fast", [](NativeComm& n) {
        if (intercepting_keys() != 0 || is_profiled()) return kNotFast;
        return recorded_in_turn(n, [&] { return n.comm.barrier(); });
      });
}

void combine(const Addresses& in, std::pair<int, int> dtypes, uintptr_t out, uint64_t elems, int op,
             int divide_by) {
  const DType results = DType(dtypes.second);
  const bool streaming = elems * uint64_t(size_of(results)) >= kStreamingMinBytes;
  std::vector<const void*> sources;
  for (const uintptr_t ptr : in) sources.push_back(at(ptr));
  bool known;
  {
    const WithoutGil nogil;
    known = !in.empty() &&
            combine_partials(sources, at(out), elems,
                             {DType(dtypes.first), results, RedOp(op), divide_by, streaming});
  }
  if (!known)
    throw nb::value_error(
        "combine_partials: expected one array or more, dtypes that are equal or of which one is "
        "the accumulator's type of the other, and an op that they have (one that adds, to divide)");
}

void bind_partials(nb::module_& m, nb::class_<NativeComm>& c) {
  m.def(
      "accumulator", [](int dtype) { return int(accumulator_of(DType(dtype))); }, nb::arg("dtype"),
      "Returns the dtype in which reductions of `dtype` accumulate, that of partial results.");
  m.def(
      "combine_partials",
      [](const Addresses& in, int in_dtype, uintptr_t out, int out_dtype, uint64_t elems, int op,
         int divide_by) { combine(in, {in_dtype, out_dtype}, out, elems, op, divide_by); },
      nb::arg("in_ptrs"), nb::arg("in_dtype"), nb::arg("out_ptr"), nb::arg("out_dtype"),
      nb::arg("elems"), nb::arg("op"), nb::arg("divide_by") = 0,
      "Combines local arrays element by element, in list order, and rounds once to `out_dtype`.\n\n"
      "Its arithmetic is that of the collectives, in the accumulator's type: of `reduce_partial`\n"
      "of groups of ranks it makes what a communicator with `sum_group_size` makes of all ranks.\n"
      "PREMUL_SUM adds, as its factors are applied already. `divide_by` > 0 divides the sum,\n"
      "whichever op that adds is named. The dtypes are equal, or one is the other's accumulator;\n"
      "with one array this narrows or widens. `out_ptr` may be an input of its own dtype exactly,\n"
      "and else lies apart.\n\n"
      "Raises:\n"
      "    ValueError: no array, or the dtypes and the op do not fit.");
  c.def(
       "reduce_scatter_partial",
       [](NativeComm& n, const Addresses& in, Sizes elems, uintptr_t out, int dtype, int op,
          double factor) {
         const Reduction r = reduction(dtype, op, factor, 0);
         for (uint64_t& e : elems) e *= uint64_t(size_of(r.dtype));
         return recorded(
             n, [&] { return n.comm.reduce_scatter_partial(spans(in, elems), at(out), r); });
       },
       nb::sig("def reduce_scatter_partial(self, in_ptrs: Sequence[int], "
               "in_elems: Sequence[int], out_ptr: int, dtype: int, op: int, factor: float, "
               "/) -> int"),
       "As `reduce_scatter_list`, but results are of type `accumulator(dtype)`, and unfinished.\n\n"
       "PREMUL_SUM has its factors applied, AVG is not divided. `out_ptr` lies apart from the\n"
       "inputs unless both have one dtype.")
      .def(
          "reduce_partial",
          [](NativeComm& n, uintptr_t in, uintptr_t out, uint64_t elems, int dtype, int op,
             double factor, int root) {
            const Reduction r = reduction(dtype, op, factor, 0);
            return recorded(n,
                            [&] { return n.comm.reduce_partial(at(in), at(out), elems, r, root); });
          },
          nb::sig("def reduce_partial(self, in_ptr: int, out_ptr: int, elems: int, dtype: int, "
                  "op: int, factor: float, root: int, /) -> int"),
          "As `reduce_scatter_partial`, for one receiver; other ranks' `out_ptr` is not touched.");
}

void bind_messages(nb::module_& m, nb::class_<NativeComm>& c) {
  using Shared = std::shared_ptr<NativeComm>;
  c.def(
       "post_send",
       [](const Shared& n, uintptr_t ptr, uint64_t bytes, int peer, int tag, int dtype) {
         if (n->comm.recorder().on()) take_call_site();
         const WithoutGil nogil;
         return NativeRequest{n, n->messenger.post_send(at(ptr), bytes, peer, tag, DType(dtype))};
       },
       nb::sig("def post_send(self, ptr: int, size_bytes: int, peer: int, tag: int, dtype: int, "
               "/) -> Request"))
      .def(
          "post_recv",
          [](const Shared& n, uintptr_t ptr, uint64_t bytes, int peer, int tag, int dtype) {
            if (n->comm.recorder().on()) take_call_site();
            const WithoutGil nogil;
            return NativeRequest{
                n, n->messenger.post_receive(at(ptr), bytes, peer, tag, DType(dtype))};
          },
          nb::sig("def post_recv(self, ptr: int, size_bytes: int, peer: int, tag: int, "
                  "dtype: int, /) -> Request"),
          "`peer` -1 receives from any rank; -2, too, and goes on when all of them have gone.\n\n"
          "The latter is for a message that may also come by another engine: see\n"
          "`Request.withdraw`.")
      .def(
          "drive_in_background", [](NativeComm& n) { n.messenger.drive_in_background(); },
          nb::call_guard<WithoutGil>(),
          "From here on a thread drives requests that nobody waits for (isend, irecv).");
  nb::class_<NativeRequest>(
      m, "Request", "A posted send or receive. Its buffer must stay alive until it is done.")
      .def(
          "wait",
          [](NativeRequest& r, int64_t timeout_ms) {
            const uint64_t ns = timeout_ms < 0 ? UINT64_MAX : uint64_t(timeout_ms) * 1'000'000;
            return blocking([&] { return r.comm->messenger.wait(r.request, ns); });
          },
          nb::arg("timeout_ms") = -1,
          "Status; after `timeout_ms` that of a timeout, with the message still under way.\n\n"
          "Negative: until the communicator's own timeout, which is a fault.")
      .def(
          "withdraw", [](NativeRequest& r) { return r.comm->messenger.withdraw(r.request); },
          nb::call_guard<nb::gil_scoped_release>(),
          "Takes a receive back, unless a message has matched it.\n\n"
          "True: it is done now, without a source, and nothing comes into its buffer.")
      .def("done", [](const NativeRequest& r) { return r.request->done(); })
      .def("status", [](const NativeRequest& r) { return int(r.request->status); })
      .def_prop_ro(
          "source", [](const NativeRequest& r) { return r.request->source; },
          "A finished receive: the rank that sent.")
      .def_prop_ro(
          "dtype", [](const NativeRequest& r) { return name_of(r.request->message_dtype); },
          "A finished receive: the type of the message's elements.")
      .def_prop_ro(
          "size_bytes", [](const NativeRequest& r) { return r.request->message_bytes; },
          "A finished receive: the size of the message.");
}

std::optional<SingleCopyGain> gain_of(std::optional<std::pair<bool, bool>> gain) {
  if (!gain) return std::nullopt;
  return SingleCopyGain{gain->first, gain->second};
}

void bind_comm(nb::module_& m) {
  m.def(
      "single_copy_gain",
      [] {
        const SingleCopyGain gain = SingleCopyGain::measured();
        return std::pair(gain.over_two_copies, gain.over_one_copy);
      },
      "Returns whether single copies are faster than staging: if all ranks share data, and if one\n"
      "rank shares data. The first call in a process measures it in about 2 ms.");
  nb::class_<NativeComm> c(
      m, "Comm",
      "One rank's end of a communicator: a region of the heap, connected to the peers' regions.\n\n"
      "In a forked child it is the parent's: it does nothing there.");
  c.def(
       "__init__",
       [](NativeComm* self, const std::shared_ptr<Heap>& heap, int rank, int world,
          uint32_t segment_bytes, int slots, uint64_t timeout_ms, uint32_t records,
          const std::string& name, std::optional<std::pair<bool, bool>> single_copy,
          int sum_group_size, int channels) {
         if (world < 1 || rank < 0 || rank >= world)
           throw nb::value_error("rank must be in [0, world)");
         const uint32_t segment =
             segment_bytes == 0 ? default_segment_bytes(world, channels) : segment_bytes;
         if (!is_segment(segment))
           throw nb::value_error("segment_bytes must be a power of two, at least 64");
         if (slots < 2 || (slots & (slots - 1)) != 0)
           throw nb::value_error("slots must be a power of two, at least 2");
         if (sum_group_size < 0) throw nb::value_error("sum_group_size must be at least 0");
         if (channels < 1 || channels > kMostChannels)
           throw nb::value_error("channels must be 1 to MOST_CHANNELS");
         if (records > kMaxRecords) throw nb::value_error("records must be at most MAX_RECORDS");
         try {
           new (self) NativeComm(
               heap, CommConfig{rank, world, slots, segment, timeout_ms * 1'000'000, records, name,
                                gain_of(single_copy), sum_group_size, channels});
         } catch (const HeapError& e) {
           raise_os_error(e);
         }
       },
       nb::arg("heap"), nb::arg("rank"), nb::arg("world"), nb::arg("segment_bytes") = 0,
       nb::arg("slots") = 4, nb::arg("timeout_ms") = 1'800'000, nb::arg("records") = 0,
       nb::arg("name") = "", nb::arg("single_copy") = nb::none(), nb::arg("sum_group_size") = 0,
       nb::arg("channels") = 1,
       "`records`: how many calls the flight recorder keeps, under `name`. `sum_group_size`: the\n"
       "ranks of a group in which reductions are made, 0: all in rank order. `channels`: the most\n"
       "threads of a rank that take part in a collective.")
      .def(
          "use_threads",
          [](NativeComm& n, int most, bool is_exact, int channels, bool is_crowded) {
            if (most < 1 || channels < 1 || channels > n.comm.view().layout.channels)
              throw nb::value_error(
                  "most and channels must be 1 or more, channels at most its own");
            n.comm.use_threads(most, is_exact, channels, is_crowded);
          },
          nb::arg("most"), nb::arg("is_exact"), nb::arg("channels"), nb::arg("is_crowded") = false,
          "Large calls use `channels`, on all ranks alike, and up to `most` threads.\n\n"
          "Fewer where torch's operators use fewer, unless `is_exact`. Raises RuntimeError, "
          "naming\n"
          "the limits, when the system starts no more threads.")
      .def(
          "sum_in_levels", [](NativeComm& n) { n.comm.sum_in_levels(); },
          "Large sums in groups are made in two levels, on all ranks alike, where it pays: the\n"
          "groups lie on different NUMA nodes.")
      .def_prop_ro("sums_in_levels", [](const NativeComm& n) { return n.comm.sums_in_levels(); })
      .def_prop_ro("channels", [](const NativeComm& n) { return n.comm.view().layout.channels; })
      .def_prop_ro(
          "threads", [](const NativeComm& n) { return n.comm.threads(); },
          "Threads that the next large call uses.")
      .def_prop_ro(
          "used_channels", [](const NativeComm& n) { return n.comm.used_channels(); },
          "Parts into which the largest calls are cut, each for one thread.")
      .def_prop_ro(
          "single_copy", [](const NativeComm& n) { return n.comm.waiter().reads_processes(); },
          "True where all ranks want to copy out of each other's processes, and may.")
      .def_prop_ro("region_offset_bytes",
                   [](const NativeComm& n) { return n.comm.region_offset(); })
      .def_prop_ro("region_bytes", [](const NativeComm& n) { return n.comm.region_bytes(); })
      .def_prop_ro("segment_bytes",
                   [](const NativeComm& n) { return n.comm.view().layout.segment_bytes; })
      .def_prop_ro("slots", [](const NativeComm& n) { return n.comm.view().layout.slots; })
      .def(
          "connect",
          [](NativeComm& n,
             const std::vector<std::tuple<MappedHeap, uint64_t, int, uint64_t>>& peers) {
            if (int(peers.size()) != n.comm.view().world)
              throw nb::value_error("one entry per rank is needed");
            std::vector<PeerAddress> addresses;
            for (const auto& [heap, offset, pid, proof] : peers) {
              if (const auto* own = std::get_if<std::shared_ptr<Heap>>(&heap)) {
                addresses.push_back(
                    {*own, (*own)->base(), (*own)->capacity_bytes(), offset, pid, proof});
              } else {
                const auto& mapping = std::get<std::shared_ptr<Mapping>>(heap);
                addresses.push_back(
                    {mapping, mapping->base(), mapping->bytes(), offset, pid, proof});
              }
            }
            try {
              n.comm.connect(addresses);
            } catch (const HeapError& e) {
              raise_os_error(e);
            } catch (const RegionError& e) {
              throw nb::value_error(e.what());
            }
          },
          nb::arg("peers"),
          "Per rank: its heap as mapped here, region offset in it, pid (0: a thread of ours), "
          "proof.\n\n"
          "The heaps stay mapped until close(). Raises OSError when no descriptor is left, and\n"
          "ValueError, naming the rank, when no region of that rank lies there.")
      .def_prop_ro(
          "proof", [](const NativeComm& n) { return n.comm.proof(); },
          "Random; stands in the region, and in this rank's handle.")
      .def(
          "publish_members",
          [](NativeComm& n, uint64_t members) { n.comm.publish_members(members); },
          nb::arg("members"),
          "Says in the region whom this rank has met; `members`, not 0, stands for all handles.")
      .def(
          "activate",
          [](NativeComm& n) {
            try {
              n.comm.activate();
            } catch (const RegionError& e) {
              throw nb::value_error(e.what());
            }
          },
          "All ranks are connected: collectives may run.\n\n"
          "Raises ValueError, naming the rank, when a peer has other members.")
      .def(
          "chosen", [](const NativeComm&, int asked) { return int(chosen(Algorithm(asked))); },
          nb::arg("algorithm"), "Code of the algorithm that a large call runs: `auto` is resolved.")
      .def_prop_ro(
          "geometry", [](const NativeComm& n) { return geometry_of(n.comm.view().layout); },
          "The region's layout: world, channels, slots, segment_bytes, staging_bytes.")
      .def(
          "rank_table",
          [](const NativeComm& n, uintptr_t scratch) { return rank_table_of(n.comm, scratch); },
          nb::arg("scratch"),
          "Returns the RankTable of a kernel in Triton's interpreter, with `scratch` for its "
          "state.\n\n"
          "Raises ValueError for more than 64 ranks.")
      .def(
          "health", [](const NativeComm& n, int peer) { return int(n.comm.waiter().health(peer)); },
          nb::arg("peer"), "Status of the peer's process: 0 while it lives.")
      .def_prop_rw(
          "timeout_ms", [](const NativeComm& n) { return n.comm.timeout_ns() / 1'000'000; },
          [](NativeComm& n, uint64_t ms) { n.comm.set_timeout_ns(ms * 1'000'000); })
      .def(
          "fault", [](const NativeComm& n) { return fault_of(n.comm); },
          "Returns the origin of this communicator's fault, or None.\n\n"
          "kind (`timeout`, `peer_lost`, `peer_closed`, `mismatch`, `aborted`, `interrupted`),\n"
          "op, rank (who reports), peer (about whom; -1: none), item, wanted, seen, waiting_for,\n"
          "waited_ms, mine, theirs, reason; sequence and their_sequence, the numbers of the two\n"
          "calls (0: none), and message, whether they count messages; my_call and their_call:\n"
          "collective, dtype, op, root, algorithm and kernels by their codes, and match_bytes.")
      .def(
          "abort", [](NativeComm& n, const nb::str& reason) { n.comm.abort(utf8_of(reason)); },
          nb::arg("reason"))
      .def_prop_ro("aborted", [](const NativeComm& n) { return n.comm.has_failed(); })
      .def(
          "has_closed", [](const NativeComm& n, int peer) { return n.comm.has_closed(peer); },
          nb::arg("peer"), "True once the peer has closed the communicator.")
      .def(
          "is_thread",
          [](const NativeComm& n, int peer) { return n.comm.waiter().is_thread(peer); },
          nb::arg("peer"),
          "True when the peer is a thread of this process, until this rank closes.")
      .def(
          "set_left", [](NativeComm& n, bool left) { n.comm.set_left(left); }, nb::arg("left"),
          "Ends the waits of ranks that are threads of this process for this one, while true.")
      .def_prop_ro(
          "awaited", [](const NativeComm& n) { return n.comm.awaited(); },
          "The rank that a call of this one has waited for, for a while, or -1; a hint.")
      .def_prop_ro(
          "has_messages", [](NativeComm& n) { return !n.messenger.idle(); },
          "True while a send or a receive of this rank is under way.")
      .def_prop_ro(
          "arrivals", [](const NativeComm& n) { return n.comm.arrivals(); },
          "A number that changes when a peer publishes something to this rank, or acknowledges.")
      .def("close", &NativeComm::close, nb::call_guard<WithoutGil>());
  bind_tensors(m);
  bind_torch_options(m);
  bind_fast(c);
  bind_direct_calls(c);
  bind_for_torch<HostFast>(c);
  bind_turn(m, c);
  bind_collectives<HostCalls>(c);
  bind_partials(m, c);
  bind_messages(m, c);
  bind_graph_calls(m);
  bind_optimizer(m, c);
  bind_recorder(m, c);
}

}  // namespace

NB_MODULE(_native, m) {
  // The heap lives as long as the process, by design: nanobind would report it as a leak.
  nb::set_leak_warnings(false);
  Waiter::interrupt_hook = &interrupted;
  m.doc() =
      "The native host backend: addresses, sizes and codes in, status codes out.\n\n"
      "Every collective blocks without the GIL and returns 0, or a nonzero status after which\n"
      "`Comm.fault()` tells what happened. Ctrl-C inside a wait aborts the communicator and\n"
      "raises KeyboardInterrupt. Buffers are contiguous; a buffer that lies in the heap moves\n"
      "without a staging copy.";
  nb::dict dtypes, ops, algorithms_of;
  for (int i = 0; i < int(DType::kCount); ++i) dtypes[name_of(DType(i))] = i;
  for (int i = 0; i < int(RedOp::kCount); ++i) ops[name_of(RedOp(i))] = i;
  for (int i = int(Collective::kNone) + 1; i < int(Collective::kCount); ++i)
    algorithms_of[name_of(Collective(i))] = algorithms_by_name(Collective(i));
  add_constant(
      m, "DTYPES", dtypes,
      "Code of each element type, by torch's name (`float32`, `bfloat16`, `float8_e4m3fn`, ...).");
  add_constant(m, "OPS", ops,
               "Code of each operator: SUM AVG PREMUL_SUM PRODUCT MIN MAX BAND BOR BXOR.");
  add_constant(m, "ALGORITHMS", algorithms_by_name(Collective::kNone),
               "Code of each algorithm, by its name in options that hold for several collectives: "
               "auto, one_shot, ring; on devices also ll, copy_engine and multicast.");
  add_constant(m, "ALGORITHMS_OF", algorithms_of,
               "The same by the names that the calls of each collective have for them.");
  add_constant(
      m, "MISMATCH", int(Status::kMismatch),
      "Status of a receive whose message had another size; the communicator stays usable.");
  m.def(
      "supports", [](int dtype, int op) { return kernels().reduce[dtype][op] != nullptr; },
      nb::arg("dtype"), nb::arg("op"), "Tells whether `op` can reduce `dtype`.");
  m.def(
      "isa", [] { return kernels().isa; },
      "The instruction set in use: `avx512`, `avx2`, or `baseline` (SSE2 or NEON).");
  m.def(
      "ask_torch_for_threads",
      [](uintptr_t function) { ask_torch_for_threads(reinterpret_cast<int (*)()>(function)); },
      nb::arg("function_ptr"),
      "The address of at::get_num_threads, which caps the threads of calls.");
  add_constant(m, "SINGLE_COPY_RANKS", kSingleCopyRanks,
               "The number of ranks of a communicator whose ranks may read each other's process.");
  add_constant(m, "MOST_CHANNELS", kMostChannels,
               "The most channels, and threads, of a rank on the host.");
  m.def(
      "wake_workers",
      [](bool always) {
        bytes_to_wake_for = always ? 0 : kBytesToWakeFor;
        crowds = always;
      },
      nb::arg("always"),
      "A test knob: workers take part in all calls that are cut, however small and whatever else\n"
      "the cores have to do.");
  m.def(
      "always_sum_in_levels", [](bool always) { always_in_levels = always; }, nb::arg("always"),
      "A test knob: sums in groups are made in two levels, however small and on any machine.");
  m.def("limit_threads", &limit_threads_without_communicator, nb::arg("most"),
        "Threads of calls without a communicator while none exists; else its threads count.");
  m.def("threads", &threads_without_communicator,
        "Threads that the next large call without a communicator uses.");
  m.def("wait_in_background", &wait_in_background,
        "From here on the calling thread leaves the core at once when it must wait for a peer.");
  m.def("force_isa", &force_isa, nb::arg("name"),
        "Uses another instruction set from here on (a test knob); \"\" restores the best one.\n\n"
        "False when this CPU lacks it.");
  bind_faults(m);
  bind_heap(m);
  bind_comm(m);
  bind_device(m);
  bind_rows(m);
  bind_checksums(m);
  bind_scratch(m);
  bind_quantization(m);
  bind_triton(m);
}
