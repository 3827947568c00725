// SPDX-License-Identifier: Apache-2.0

// Binds Allocator, Driver and DeviceComm of ringcomm._native: the host's half of the GPU backend.
#include <nanobind/stl/function.h>
#include <nanobind/stl/pair.h>

#include "kernels/bindings/collectives.h"
#include "kernels/bindings/device_calls.h"
#include "kernels/bindings/gil.h"
#include "kernels/cuda/device_comm.h"
#include "kernels/host/describe.h"

namespace nb = nanobind;
using namespace ringcomm;

namespace ringcomm::host {

using device::DeviceComm;
using device::HostPage;

namespace {
bool is_sum_like(RedOp op) {
  return op == RedOp::kSum || op == RedOp::kAvg || op == RedOp::kPremulSum;
}
}  // namespace

device::Reduction kernel_reduction(int dtype, int op, double factor, int algorithm,
                                   uint64_t* elems) {
  device::Reduction r{DType(dtype), RedOp(op), factor, Algorithm(algorithm)};
  if ((r.dtype == DType::kComplex64 || r.dtype == DType::kComplex128) && is_sum_like(r.op)) {
    r.dtype = r.dtype == DType::kComplex64 ? DType::kFloat32 : DType::kFloat64;
    *elems *= 2;
  }
  const bool twin = r.op == RedOp::kSum || r.op == RedOp::kProduct || r.op == RedOp::kBand ||
                    r.op == RedOp::kBor || r.op == RedOp::kBxor;
  if (twin && r.dtype == DType::kUInt16) r.dtype = DType::kInt16;
  if (twin && r.dtype == DType::kUInt32) r.dtype = DType::kInt32;
  if (twin && r.dtype == DType::kUInt64) r.dtype = DType::kInt64;
  return r;
}

namespace {

using device::TritonKernel;

void bind_triton_kernel(nb::module_& m) {
  nb::class_<TritonKernel>(m, "TritonKernel",
                           "A kernel that Triton has compiled, launched as the driver takes it.")
      .def(
          "__init__",
          [](TritonKernel* self, uint64_t function, unsigned threads, unsigned shared_bytes,
             const std::vector<std::pair<bool, bool>>& parameters, int scratch_pointers) {
            std::vector<TritonKernel::Parameter> all;
            for (const auto& [wide, specialized] : parameters) all.push_back({wide, specialized});
            new (self)
                TritonKernel(function, threads, shared_bytes, std::move(all), scratch_pointers);
          },
          nb::arg("function"), nb::arg("threads"), nb::arg("shared_bytes"), nb::arg("parameters"),
          nb::arg("scratch_pointers"),
          "`parameters`: of each whether it has 8 bytes, not 4, and whether Triton compiles other\n"
          "kernels for 1 and for multiples of 16. Null pointers follow them.")
      .def(
          "takes",
          [](const TritonKernel& kernel, const std::vector<int64_t>& values) {
            return kernel.takes(values.data(), values.size());
          },
          nb::arg("values"), "Tells whether Triton would launch this kernel for these numbers.")
      .def(
          "launch",
          [](const TritonKernel& kernel, const device::Driver& driver,
             std::pair<unsigned, unsigned> grid, uintptr_t stream,
             const std::vector<int64_t>& values) {
            if (!kernel.takes(values.data(), values.size()))
              throw nb::value_error("Triton compiles another kernel for these numbers");
            const WithoutGil nogil;  // as in launched()
            kernel.launch(driver, grid.first, grid.second, reinterpret_cast<void*>(stream),
                          values.data());
          },
          nb::arg("driver"), nb::arg("grid"), nb::arg("stream"), nb::arg("values"),
          "Launches it; the device is current.");
}

void bind_allocator(nb::module_& m) {
  nb::class_<Allocator>(
      m, "Allocator",
      "Offsets of allocations in one range: best fit, free neighbours merged at once.")
      .def(nb::init<uint64_t>(), nb::arg("size_bytes"))
      .def(
          "allocate",
          [](Allocator& a, uint64_t size_bytes, uint64_t align) {
            const uint64_t offset = a.allocate(size_bytes, align);
            return offset == Allocator::kNone ? std::nullopt : std::optional(offset);
          },
          nb::arg("size_bytes"), nb::arg("align"),
          "The offset of an allocation, or None when there is no room.")
      .def("free", &Allocator::free, nb::arg("offset"))
      .def_prop_ro("used_bytes", &Allocator::used_bytes)
      .def_prop_ro("largest_free_bytes", &Allocator::largest_free_bytes);
}

// The Calls of bind_collectives() (collectives.h) for a device's communicator.
struct OnDevice {
  using Comm = DeviceComm;
  static int world(const DeviceComm& d) { return d.config().world; }
  static device::Reduction reduction(int dtype, int op, double factor, int algorithm,
                                     uint64_t* elems) {
    return kernel_reduction(dtype, op, factor, algorithm, elems);
  }
  static Algorithm algorithm(int code) { return Algorithm(code); }
  template <class Call>
  static int run(DeviceComm& d, Call call) {
    call(d);
    return launched(d);
  }
};

void bind_calls(nb::class_<DeviceComm>& c) {
  bind_collectives<OnDevice>(c);
  c.def(
       "messages",
       [](DeviceComm& d, const Addresses& send, const Sizes& send_bytes, uint64_t readers,
          const Addresses& receive, const Sizes& receive_bytes, uint64_t senders, int tag) {
         d.messages(spans(send, send_bytes), readers, spans(receive, receive_bytes), senders, tag);
         return launched(d);
       },
       nb::sig("def messages(self, send_ptrs: Sequence[int], send_bytes: Sequence[int], "
               "readers: int, receive_ptrs: Sequence[int], receive_bytes: Sequence[int], "
               "senders: int, tag: int, /) -> int"),
       "Lists by rank; `readers` and `senders` say as bits which entries count.")
      .def(
          "all_gather_from",
          [](DeviceComm& d, uintptr_t in, uintptr_t out, uint64_t bytes, int dtype,
             const Sizes& inputs, int plan) {
            if (inputs.size() != size_t(d.config().world))
              throw nb::value_error("inputs: expected one address per rank");
            d.all_gather_from(at(in), at(out), bytes, DType(dtype), inputs, plan);
            return launched(d);
          },
          nb::sig("def all_gather_from(self, in_ptr: int, out_ptr: int, in_bytes: int, "
                  "dtype: int, input_ptrs: Sequence[int], plan: int, /) -> int"),
          "By the copy engines, from the inputs of all ranks, as this rank reaches them.")
      .def(
          "withdraw", &DeviceComm::withdraw,
          "The launch that was handed to `set_submit`'s function is not made, nor is what follows\n"
          "it in its call.");
}

nb::bytes to_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }

// Returns the first bytes of a new region, which contain all its nonzero words. The caller writes
// them before the rank connects.
nb::bytes words(const DeviceComm& d) {
  std::string bytes(d.words_bytes(), '\0');
  begin_page(reinterpret_cast<ControlPage*>(bytes.data()), d.config().rank, d.config().layout);
  return to_bytes(bytes);
}

// Returns the bytes that a rank's host writes into its control page before it raises the abort
// word. They exclude the fault record: only kernels write it, and a kernel may be about to do so.
nb::bytes abort_reason(const nb::str& reason) {
  ControlPage page{};
  std::snprintf(page.reason, sizeof(page.reason), "%s", utf8_of(reason).c_str());
  return nb::bytes(page.reason, sizeof(page.reason));
}

std::optional<FaultWords> fault_in_page(const nb::bytes& bytes, int owner, int world) {
  if (bytes.size() < sizeof(ControlPage)) throw nb::value_error("a control page is larger");
  ControlPage page;
  std::memcpy(&page, bytes.c_str(), sizeof(page));
  if (page.aborted == 0) return std::nullopt;
  if (page.fault.status == Status::kOk) page.fault.peer = -1;  // the host aborted: no kernel waited
  return fault_dict(trusted(page.fault, owner, world), reason_of(page));
}

void bind_state(nb::class_<DeviceComm>& c) {
  c.def_prop_ro("region_bytes", &DeviceComm::region_bytes,
                "The size of the rank's part of its device heap.")
      .def_prop_ro(
          "words_bytes", &DeviceComm::words_bytes,
          "The part of `region_bytes` that `words` initialises; behind it nothing needs to be.")
      .def_prop_ro("table_offset_bytes", &DeviceComm::table_offset)
      .def_prop_ro("table_ptr", &DeviceComm::table_address,
                   "The table's address on the device; 0 before `table` was called.")
      .def(
          "chosen", [](const DeviceComm& d, int asked) { return int(d.chosen(Algorithm(asked))); },
          nb::arg("algorithm"), "As `Comm.chosen`.")
      .def_prop_ro(
          "geometry", [](const DeviceComm& d) { return geometry_of(d.layout()); },
          "As `Comm.geometry`.")
      .def_prop_ro("segment_bytes", [](const DeviceComm& d) { return d.layout().segment_bytes; })
      .def_prop_ro("slots", [](const DeviceComm& d) { return d.layout().slots; })
      .def_prop_ro("channels", [](const DeviceComm& d) { return d.layout().channels; })
      .def("words", &words)
      .def(
          "set_window",
          [](DeviceComm& d, uint64_t own, uint64_t all, uint64_t bytes, uint64_t heaps) {
            return d.set_window({own, all, bytes, heaps});
          },
          nb::arg("own_ptr"), nb::arg("all_ptr"), nb::arg("size_bytes"), nb::arg("heaps_ptr"),
          "Gives the rank a multicast window, before `table`; False: it is too small for the\n"
          "world and its channels. `heaps_ptr`: where all ranks' heaps are bound; 0: nowhere.")
      .def("set_bound_heap_bytes", &DeviceComm::set_bound_heap_bytes, nb::arg("size_bytes"),
           "So much of the rank's heap, from its start, is bound to the multicast object.")
      .def(
          "table",
          [](DeviceComm& d, const Sizes& regions, const Sizes& heaps, const Sizes& heap_bytes,
             uint64_t host_page, const std::vector<std::vector<int>>& rings) {
            return to_bytes(d.table(regions, heaps, heap_bytes, host_page, rings));
          },
          nb::arg("regions"), nb::arg("heaps"), nb::arg("heap_bytes"), nb::arg("host_page"),
          nb::arg("rings"),
          "Returns the bytes for `table_offset_bytes`; from here on calls may be prepared.")
      .def("set_own_heap_bytes", &DeviceComm::set_own_heap_bytes, nb::arg("size_bytes"),
           "So much of the rank's heap is lent to peers by launches from here on. Those that read\n"
           "the table in memory need it at `own_heap_bytes_offset`, too.")
      .def_prop_ro("own_heap_bytes_offset", &DeviceComm::own_heap_bytes_offset)
      .def(
          "activate",
          [](DeviceComm& d, uintptr_t page) { d.activate(reinterpret_cast<HostPage*>(page)); },
          nb::arg("host_page"),
          "`host_page`: HOST_PAGE_BYTES of zeros that host and device share; 0 before they go.")
      .def(
          "detached_offset_bytes",
          [](const DeviceComm& d, int writer) {
            return d.layout().signal_offset(Stream::kPair, 0, writer) +
                   offsetof(SignalLine, detached);
          },
          nb::arg("writer"),
          "Returns the offset in a region of the detach word of `writer` (4 bytes).")
      .def_prop_rw(
          "stream", [](const DeviceComm& d) { return reinterpret_cast<uintptr_t>(d.stream()); },
          [](DeviceComm& d, uintptr_t stream) { d.set_stream(reinterpret_cast<void*>(stream)); })
      .def("set_submit", &DeviceComm::set_submit, nb::arg("submit").none(),
           "Has a function take over each launch, which is prepared while it runs: it makes the\n"
           "launch by `launch`, or raises. None: calls launch by themselves.")
      .def(
          "set_ledger",
          [](DeviceComm& d, std::shared_ptr<device::LaunchLedger> ledger, uint64_t owner) {
            d.set_ledger(std::move(ledger), owner);
          },
          nb::arg("ledger"), nb::arg("owner"),
          "Has launches wait for those of other communicators, and be noted for them.")
      .def_prop_ro(
          "prepared_kind",
          [](const DeviceComm& d) {
            return std::pair(reinterpret_cast<uintptr_t>(d.prepared().kernel.function),
                             d.prepared().channels);
          },
          "Kernel and blocks of the prepared call; calls of equal kinds can share a launch.")
      .def(
          "add_triton",
          [](DeviceComm& d, const CallWords& call, std::shared_ptr<TritonKernel> kernel) {
            d.add_triton(id_of(call), std::move(kernel));
          },
          nb::arg("call"), nb::arg("kernel"),
          "Has `TritonCalls` launch a kernel for one rank's calls that differ from `call_words` "
          "in\n"
          "their size alone.")
      .def(
          "limit_message_channels", [](DeviceComm& d, int most) { d.limit_message_channels(most); },
          nb::arg("most"), "Blocks of a message; equal on all ranks, before the first message.")
      .def_prop_ro(
          "message_channels", [](const DeviceComm& d) { return d.config().message_channels; },
          "Blocks of a message.")
      .def_prop_rw(
          "timeout_ms", [](const DeviceComm& d) { return d.config().timeout_ns / 1'000'000; },
          [](DeviceComm& d, uint64_t ms) { d.set_timeout_ns(ms * 1'000'000); })
      .def_prop_ro(
          "raised",
          [](const DeviceComm& d) {
            // Pairs with the release in tell_host().
            return d.page() != nullptr && load_acquire_sys(&d.page()->fault_raised) != 0;
          },
          "Tells whether a kernel of this rank gave up.")
      .def("fault",
           [](const DeviceComm& d) -> std::optional<FaultWords> {
             // Pairs with the release in tell_host().
             if (d.page() == nullptr || load_acquire_sys(&d.page()->fault_raised) == 0)
               return std::nullopt;
             return fault_dict(d.page()->fault, "");
           })
      .def("request_abort",
           [](DeviceComm& d) {
             if (d.page() != nullptr) store_relaxed_sys(&d.page()->abort_requested, 1);
           })
      .def(
          "mark_lost",
          [](DeviceComm& d, int peer, bool lost) {
            if (d.page() != nullptr) store_relaxed_sys(&d.page()->lost[peer], lost ? 1 : 0);
          },
          nb::arg("peer"), nb::arg("lost") = true);
}

}  // namespace

int launched(DeviceComm& d) {
  if (d.only_prepares()) return 0;
  if (!d.submit_to()) {
    // With a full queue the driver waits for kernels, which may wait for other threads' launches.
    const WithoutGil nogil;
    d.launch_all();
    return 0;
  }
  for (;;) {
    {
      const WithoutGil nogil;  // for the copies before a launch
      if (!d.next()) return 0;
    }
    try {
      d.submit_to()();
    } catch (...) {
      d.withdraw();
      throw;
    }
  }
}

void bind_device(nb::module_& m) {
  bind_allocator(m);
  bind_triton_kernel(m);
  nb::class_<device::Driver>(
      m, "Driver",
      "The CUDA driver's entry points for launches and copies; RuntimeError when there is none.")
      .def(nb::init<const std::string&>(), nb::arg("library"))
      .def(
          "has_passed",
          [](const device::Driver& d, uintptr_t event) {
            // Another thread's launch may hold the driver's lock while its queue is full.
            const WithoutGil nogil;
            return d.has_passed(reinterpret_cast<void*>(event));
          },
          nb::arg("event"),
          "True if the event has passed; allowed while another thread captures a graph.\n\n"
          "Raises:\n"
          "    RuntimeError: the driver reports an error.")
      .def(
          "copy_chunks",
          [](const device::Driver& d, uint64_t to, const Sizes& from, uint64_t bytes,
             uintptr_t stream) {
            const WithoutGil nogil;
            for (size_t i = 0; i < from.size(); ++i)
              d.copy(to + i * bytes, from[i], bytes, reinterpret_cast<void*>(stream));
          },
          nb::arg("to_ptr"), nb::arg("from_ptrs"), nb::arg("chunk_bytes"), nb::arg("stream"),
          "Copies chunks of equal size on a stream, which then lie one behind the other. The\n"
          "device is current.");
  nb::class_<DeviceComm> c(
      m, "DeviceComm",
      "One rank's end on a device: calls become launches on `stream`.\n\n"
      "The calls have the signatures of those of `Comm` and return 0 once they are launched. They\n"
      "raise ValueError for what the device cannot do, and RuntimeError with the driver's reason\n"
      "when it refuses a launch. Pointers are device addresses.");
  c.def(
      "__init__",
      [](DeviceComm* self, std::shared_ptr<device::Driver> driver, std::tuple<int, int> rank_of,
         std::tuple<int, int, uint32_t> staging, std::tuple<uint32_t, uint64_t> extra,
         uint64_t timeout_ms, int family, DeviceComm::FindKernel find) {
        const auto [rank, world] = rank_of;
        const auto [channels, slots, segment_bytes] = staging;
        const auto [ll_bytes, copy_engine_bytes] = extra;
        if (world < 1 || world > device::kMaxWorld || rank < 0 || rank >= world)
          throw nb::value_error("world must be in [1, 64] and rank in [0, world)");
        if (channels < 1 || slots < 2 || (slots & (slots - 1)) != 0)
          throw nb::value_error("channels must be >= 1, slots a power of two >= 2");
        if (!is_segment(segment_bytes) || ll_bytes % 64 || copy_engine_bytes % 64)
          throw nb::value_error("sizes must be multiples of 64, segments powers of two");
        const Layout layout{world, channels, slots, segment_bytes, ll_bytes, copy_engine_bytes};
        new (self) DeviceComm(std::move(driver),
                              {rank, world, layout, timeout_ms * 1'000'000, Algorithm(family),
                               layout.message_channels()},
                              std::move(find));
      },
      nb::arg("driver"), nb::arg("rank_of"), nb::arg("staging"), nb::arg("extra"),
      nb::arg("timeout_ms"), nb::arg("family"), nb::arg("find_kernel"),
      "`rank_of`: rank, world. `staging`: channels, slots, segment_bytes. `extra`: ll_bytes,\n"
      "copy_engine_bytes. `find_kernel(unit, name)` gives a loaded CUfunction, its threads,\n"
      "and True if its channels get slices in place of tiles.");
  bind_state(c);
  bind_calls(c);
  bind_device_recorder(m, c);
  nb::class_<DeviceCalls> calls = bind_device_calls(m);
  bind_device_optimizer(m, c, calls);
  bind_device_rows(c);
  bind_device_quantization(c);
  m.def(
      "launch",
      [](const std::vector<DeviceComm*>& ranks, uintptr_t stream) {
        const WithoutGil nogil;  // as in launched()
        DeviceComm::launch(ranks, reinterpret_cast<void*>(stream));
      },
      nb::arg("ranks"), nb::arg("stream"),
      "Launches the prepared calls of ranks on the current device, all in one grid.");
  m.def("abort_reason", &abort_reason, nb::arg("reason"),
        "Returns the bytes for REASON_OFFSET_BYTES of a control page that is to be aborted.");
  m.def("fault_in_page", &fault_in_page, nb::arg("page"), nb::arg("owner"), nb::arg("world"),
        "The fault record in the control page of rank `owner`; None while its abort word is down.");
  m.attr("CONTROL_PAGE_BYTES") = sizeof(ControlPage);
  m.attr("ABORTED_OFFSET_BYTES") = offsetof(ControlPage, aborted);
  m.attr("REASON_OFFSET_BYTES") = offsetof(ControlPage, reason);
  m.attr("HOST_PAGE_BYTES") = sizeof(HostPage);
  m.attr("MESSAGE_CHANNELS") = kMessageChannels;
  m.attr("MAX_RANKS_PER_LAUNCH") = device::kMaxRanksPerLaunch;
  m.attr("MAX_DEVICE_WORLD") = device::kMaxWorld;
}

}  // namespace ringcomm::host
