// ringcomm._native: the host backend as Python sees it. Addresses and sizes in, status codes out;
// no torch. ringcomm/_native.pyi documents every name.
#include "kernels/bindings/collectives.h"
#include "kernels/bindings/gil.h"
#include "kernels/bindings/native_comm.h"
#include "kernels/bindings/tensors.h"
#include "kernels/host/describe.h"

namespace nb = nanobind;
using namespace ringcomm;
using namespace ringcomm::host;

namespace {

struct NativeRequest {
  std::shared_ptr<NativeComm> comm;
  RequestPtr request;
};

int interrupted() {
  const WithGil gil;
  return PyErr_Occurred() != nullptr || PyErr_CheckSignals() != 0;
}

Reduction reduction(int dtype, int op, double factor, int algorithm) {
  return {DType(dtype), RedOp(op), factor, chosen(Algorithm(algorithm))};
}

// The host's communicator, as bind_collectives() needs it.
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

nb::object fault_of(const Comm& comm) {
  FaultReport report;
  if (!comm.faulted(&report)) return nb::none();
  nb::dict found = fault_dict(report.fault, report.reason);
  // Threads do not end alone: the one that is meant has left the function of LocalWorld.run().
  const int peer = report.fault.peer;
  if (report.fault.status == Status::kPeerLost && peer >= 0 && comm.waiter().is_thread(peer))
    found["kind"] = "peer_left";
  return found;
}

// The name of an algorithm that the host has; negative: it is none.
int host_algorithm(nb::handle name) {
  // Mostly the default, which Python interns.
  static PyObject* const usual = PyUnicode_InternFromString(name_of(Algorithm::kAuto));
  if (name.ptr() == usual) return int(Algorithm::kAuto);
  if (!PyUnicode_CheckExact(name.ptr())) return -1;
  for (const Algorithm each : {Algorithm::kAuto, Algorithm::kDirect, Algorithm::kRing})
    if (PyUnicode_CompareWithASCIIString(name.ptr(), name_of(each)) == 0) return int(each);
  return -1;
}

// False for what Python words an error of.
bool sums_by(const Comm& comm, int algorithm) {
  return comm.sum_blocks() == 0 || algorithm != int(Algorithm::kRing);
}

// The calls that most programs make, on tensors: see kNotPlain.
int all_reduce_plain(NativeComm& n, nb::handle tensor, nb::handle op, nb::handle algorithm) {
  PlainTensor t;
  const int code = op_code(op), named = host_algorithm(algorithm);
  if (code < 0 || named < 0 || !sums_by(n.comm, named) || !read_plain(tensor, &t) ||
      kernels().reduce[int(t.dtype)][code] == nullptr)
    return kNotPlain;
  const Reduction how = reduction(int(t.dtype), code, 1.0, named);
  return recorded_in_turn(n, [&] { return n.comm.all_reduce(t.ptr, t.ptr, t.elems, how); });
}

int reduce_scatter_plain(NativeComm& n, nb::handle output, nb::handle input, nb::handle op,
                         nb::handle algorithm) {
  PlainTensor out, in;
  const int code = op_code(op), named = host_algorithm(algorithm);
  const View& v = n.comm.view();
  if (code < 0 || named < 0 || !sums_by(n.comm, named) || !read_plain(output, &out) ||
      !read_plain(input, &in) || out.dtype != in.dtype ||
      in.elems != out.elems * uint64_t(v.world) ||
      kernels().reduce[int(out.dtype)][code] == nullptr || !is_chunk_or_apart(in, out, v.rank))
    return kNotPlain;
  const Reduction how = reduction(int(out.dtype), code, 1.0, named);
  return recorded_in_turn(n,
                          [&] { return n.comm.reduce_scatter(in.ptr, out.ptr, out.elems, how); });
}

int all_gather_plain(NativeComm& n, nb::handle output, nb::handle input, nb::handle algorithm) {
  PlainTensor out, in;
  const int named = host_algorithm(algorithm);
  const View& v = n.comm.view();
  if (named < 0 || !read_plain(output, &out) || !read_plain(input, &in) || out.dtype != in.dtype ||
      out.elems != in.elems * uint64_t(v.world) || !is_chunk_or_apart(out, in, v.rank))
    return kNotPlain;
  return recorded_in_turn(n, [&] {
    return n.comm.all_gather(in.ptr, out.ptr, in.bytes(), in.dtype, chosen(Algorithm(named)));
  });
}

void bind_turn(nb::module_& m, nb::class_<NativeComm>& c) {
  nb::class_<CallLock>(m, "CallLock")
      .def("__enter__",
           [](CallLock& turn) {
             bool taken;
             {
               const WithoutGil nogil;
               taken = turn.take();
             }
             if (!taken) throw nb::python_error();
           })
      .def("__exit__", [](CallLock& turn, nb::args) { turn.unlock(); })
      .def(
          "acquire",
          [](CallLock& turn, double timeout) {
            const WithoutGil nogil;
            return turn.take_within(timeout);
          },
          nb::arg("timeout"))
      .def("release", &CallLock::unlock);
  c.def_prop_ro("turn", [](const NativeComm& n) { return n.turn; });
}

void bind_plain(nb::class_<NativeComm>& c) {
  const auto any = [] { return nb::arg().none(); };  // also None: to complain is Python's part
  c.def("all_reduce_plain", all_reduce_plain, any(), any(), any())
      .def("reduce_scatter_plain", reduce_scatter_plain, any(), any(), any(), any())
      .def("all_gather_plain", all_gather_plain, any(), any(), any())
      .def("barrier_plain", [](NativeComm& n) {
        if (intercepting_keys() != 0) return kNotPlain;
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
      "accumulator", [](int dtype) { return int(accumulator_of(DType(dtype))); }, nb::arg("dtype"));
  m.def(
      "combine_partials",
      [](const Addresses& in, int in_dtype, uintptr_t out, int out_dtype, uint64_t elems, int op,
         int divide_by) { combine(in, {in_dtype, out_dtype}, out, elems, op, divide_by); },
      nb::arg("in_ptrs"), nb::arg("in_dtype"), nb::arg("out_ptr"), nb::arg("out_dtype"),
      nb::arg("elems"), nb::arg("op"), nb::arg("divide_by") = 0);
  c.def("reduce_scatter_partial",
        [](NativeComm& n, const Addresses& in, Sizes elems, uintptr_t out, int dtype, int op,
           double factor) {
          const Reduction r = reduction(dtype, op, factor, 0);
          for (uint64_t& e : elems) e *= uint64_t(size_of(r.dtype));
          return recorded(
              n, [&] { return n.comm.reduce_scatter_partial(spans(in, elems), at(out), r); });
        })
      .def("reduce_partial", [](NativeComm& n, uintptr_t in, uintptr_t out, uint64_t elems,
                                int dtype, int op, double factor, int root) {
        const Reduction r = reduction(dtype, op, factor, 0);
        return recorded(n, [&] { return n.comm.reduce_partial(at(in), at(out), elems, r, root); });
      });
}

void bind_messages(nb::module_& m, nb::class_<NativeComm>& c) {
  using Shared = std::shared_ptr<NativeComm>;
  c.def("post_send",
        [](const Shared& n, uintptr_t ptr, uint64_t bytes, int peer, int tag, int dtype) {
          if (n->comm.recorder().on()) take_call_site();
          const WithoutGil nogil;
          return NativeRequest{n, n->messenger.post_send(at(ptr), bytes, peer, tag, DType(dtype))};
        })
      .def("post_recv",
           [](const Shared& n, uintptr_t ptr, uint64_t bytes, int peer, int tag, int dtype) {
             if (n->comm.recorder().on()) take_call_site();
             const WithoutGil nogil;
             return NativeRequest{
                 n, n->messenger.post_receive(at(ptr), bytes, peer, tag, DType(dtype))};
           })
      .def(
          "drive_in_background", [](NativeComm& n) { n.messenger.drive_in_background(); },
          nb::call_guard<WithoutGil>());
  nb::class_<NativeRequest>(m, "Request")
      .def(
          "wait",
          [](NativeRequest& r, int64_t timeout_ms) {
            const uint64_t ns = timeout_ms < 0 ? UINT64_MAX : uint64_t(timeout_ms) * 1'000'000;
            return blocking([&] { return r.comm->messenger.wait(r.request, ns); });
          },
          nb::arg("timeout_ms") = -1)
      .def(
          "withdraw", [](NativeRequest& r) { return r.comm->messenger.withdraw(r.request); },
          nb::call_guard<nb::gil_scoped_release>())
      .def("done", [](const NativeRequest& r) { return r.request->done(); })
      .def("status", [](const NativeRequest& r) { return int(r.request->status); })
      .def_prop_ro("source", [](const NativeRequest& r) { return r.request->source; })
      .def_prop_ro("dtype",
                   [](const NativeRequest& r) { return name_of(r.request->message_dtype); })
      .def_prop_ro("size_bytes", [](const NativeRequest& r) { return r.request->message_bytes; });
}

void bind_comm(nb::module_& m) {
  nb::class_<NativeComm> c(m, "Comm");
  c.def(
       "__init__",
       [](NativeComm* self, const std::shared_ptr<Heap>& heap, int rank, int world,
          uint32_t segment_bytes, int slots, uint64_t timeout_ms, uint32_t records,
          const std::string& name, bool single_copy, int sum_blocks) {
         const uint32_t segment = segment_bytes == 0 ? default_segment_bytes(world) : segment_bytes;
         if (world < 1 || rank < 0 || rank >= world)
           throw nb::value_error("rank must be in [0, world)");
         if (!is_segment(segment))
           throw nb::value_error("segment_bytes must be a power of two, at least 64");
         if (slots < 2 || (slots & (slots - 1)) != 0)
           throw nb::value_error("slots must be a power of two, at least 2");
         if (sum_blocks < 0) throw nb::value_error("sum_blocks must be at least 0");
         if (records > kMaxRecords) throw nb::value_error("records must be at most MAX_RECORDS");
         try {
           new (self)
               NativeComm(heap, CommConfig{rank, world, slots, segment, timeout_ms * 1'000'000,
                                           records, name, single_copy, sum_blocks});
         } catch (const HeapError& e) {
           raise_os_error(e);
         }
       },
       nb::arg("heap"), nb::arg("rank"), nb::arg("world"), nb::arg("segment_bytes") = 0,
       nb::arg("slots") = 4, nb::arg("timeout_ms") = 1'800'000, nb::arg("records") = 0,
       nb::arg("name") = "", nb::arg("single_copy") = true, nb::arg("sum_blocks") = 0)
      .def_prop_ro("single_copy",
                   [](const NativeComm& n) { return n.comm.waiter().reads_processes(); })
      .def_prop_ro("region_offset_bytes",
                   [](const NativeComm& n) { return n.comm.region_offset(); })
      .def_prop_ro("region_bytes", [](const NativeComm& n) { return n.comm.region_bytes(); })
      .def_prop_ro("segment_bytes",
                   [](const NativeComm& n) { return n.comm.view().layout.segment_bytes; })
      .def_prop_ro("slots", [](const NativeComm& n) { return n.comm.view().layout.slots; })
      .def(
          "connect",
          [](NativeComm& n,
             const std::vector<std::tuple<nb::object, uint64_t, int, uint64_t>>& peers) {
            if (int(peers.size()) != n.comm.view().world)
              throw nb::value_error("one entry per rank is needed");
            std::vector<PeerAddress> addresses;
            for (const auto& [heap, offset, pid, proof] : peers) {
              if (nb::isinstance<Heap>(heap)) {
                const auto own = nb::cast<std::shared_ptr<Heap>>(heap);
                addresses.push_back({own, own->base(), own->capacity_bytes(), offset, pid, proof});
              } else {
                const auto mapping = nb::cast<std::shared_ptr<Mapping>>(heap);
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
          nb::arg("peers"))
      .def_prop_ro("proof", [](const NativeComm& n) { return n.comm.proof(); })
      .def(
          "meet", [](NativeComm& n, uint64_t members) { n.comm.meet(members); }, nb::arg("members"))
      .def("activate",
           [](NativeComm& n) {
             try {
               n.comm.activate();
             } catch (const RegionError& e) {
               throw nb::value_error(e.what());
             }
           })
      .def(
          "chosen", [](const NativeComm&, int asked) { return int(chosen(Algorithm(asked))); },
          nb::arg("algorithm"))
      .def_prop_ro("geometry",
                   [](const NativeComm& n) { return geometry_of(n.comm.view().layout); })
      .def(
          "rank_table",
          [](const NativeComm& n, uintptr_t scratch) { return rank_table_of(n.comm, scratch); },
          nb::arg("scratch"))
      .def(
          "health", [](const NativeComm& n, int peer) { return int(n.comm.waiter().health(peer)); },
          nb::arg("peer"))
      .def_prop_rw(
          "timeout_ms", [](const NativeComm& n) { return n.comm.timeout_ns() / 1'000'000; },
          [](NativeComm& n, uint64_t ms) { n.comm.set_timeout_ns(ms * 1'000'000); })
      .def("fault", [](const NativeComm& n) { return fault_of(n.comm); })
      .def(
          "abort", [](NativeComm& n, const nb::str& reason) { n.comm.abort(utf8_of(reason)); },
          nb::arg("reason"))
      .def_prop_ro("aborted", [](const NativeComm& n) { return n.comm.aborted(); })
      .def(
          "has_closed", [](const NativeComm& n, int peer) { return n.comm.has_closed(peer); },
          nb::arg("peer"))
      .def(
          "is_thread",
          [](const NativeComm& n, int peer) { return n.comm.waiter().is_thread(peer); },
          nb::arg("peer"))
      .def(
          "set_left", [](NativeComm& n, bool left) { n.comm.set_left(left); }, nb::arg("left"))
      .def_prop_ro("awaited", [](const NativeComm& n) { return n.comm.awaited(); })
      .def_prop_ro("has_messages", [](NativeComm& n) { return !n.messenger.idle(); })
      .def_prop_ro("arrivals", [](const NativeComm& n) { return n.comm.arrivals(); })
      .def("close", &NativeComm::close, nb::call_guard<WithoutGil>());
  bind_tensors(m);
  bind_plain(c);
  bind_turn(m, c);
  bind_collectives<HostCalls>(c);
  bind_partials(m, c);
  bind_messages(m, c);
  bind_optimizer(m, c);
  bind_recorder(m, c);
}

}  // namespace

NB_MODULE(_native, m) {
  // The process's heap lives as long as the process: what nanobind would report is meant.
  nb::set_leak_warnings(false);
  Waiter::interrupt_hook = &interrupted;
  nb::dict dtypes, ops, algorithms;
  for (int i = 0; i < int(DType::kCount); ++i) dtypes[name_of(DType(i))] = i;
  for (int i = 0; i < int(RedOp::kCount); ++i) ops[name_of(RedOp(i))] = i;
  for (const auto a : {Algorithm::kAuto, Algorithm::kDirect, Algorithm::kRing, Algorithm::kPacket,
                       Algorithm::kCopy, Algorithm::kMulticast})
    algorithms[name_of(a)] = int(a);
  m.attr("DTYPES") = dtypes;
  m.attr("OPS") = ops;
  m.attr("ALGORITHMS") = algorithms;
  m.attr("MISMATCH") = int(Status::kMismatch);
  m.def(
      "supports", [](int dtype, int op) { return kernels().reduce[dtype][op] != nullptr; },
      nb::arg("dtype"), nb::arg("op"));
  m.def("isa", [] { return kernels().isa; });
  m.def("wait_in_background", &wait_in_background);
  m.def("force_isa", &force_isa, nb::arg("name"));
  bind_faults(m);
  bind_heap(m);
  bind_comm(m);
  bind_device(m);
  bind_rows(m);
  bind_scratch(m);
  bind_wires(m);
  bind_triton(m);
}
