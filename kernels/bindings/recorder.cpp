// SPDX-License-Identifier: Apache-2.0

// Binds the flight recorder for Python.
#include "kernels/host/recorder.h"

#include <cstring>

#include "kernels/bindings/call_site.h"
#include "kernels/bindings/native_comm.h"
#include "kernels/host/describe.h"

namespace nb = nanobind;

namespace ringcomm::host {
namespace {

template <class Name>
nb::list names(int count, Name name) {
  nb::list all;
  for (int i = 0; i < count; ++i) all.append(name(i));
  return all;
}

}  // namespace

CallId id_of(const CallWords& words) {
  const int64_t all[] = {0, std::get<0>(words), std::get<1>(words), std::get<2>(words),
                         std::get<3>(words)};
  CallId id;
  static_assert(sizeof(all) == sizeof(id));
  std::memcpy(&id, all, sizeof(id));
  return id;
}

void bind_recorder(nb::module_& m, nb::class_<NativeComm>& c) {
  nb::dict codes;
  codes["collectives"] =
      names(int(Collective::kCount), [](int i) { return name_of(Collective(i)); });
  codes["dtypes"] = names(int(DType::kCount), [](int i) { return name_of(DType(i)); });
  codes["ops"] = names(int(RedOp::kCount), [](int i) { return name_of(RedOp(i)); });
  add_constant(m, "RECORD_NAMES", codes,
               "Names by code, as records carry them: collectives, dtypes, ops.");
  m.def(
      "grad_tag",
      [](int module, int backward, int bucket) {
        return GradTag{module, backward, bucket}.packed();
      },
      nb::arg("module"), nb::arg("backward"), nb::arg("bucket"),
      "Tells reductions of gradients of one size apart; counts wrap around.");
  m.def("describe_tag", &describe_tag, nb::arg("tag"), "A tag that is not 0, in words.");
  m.def(
      "results_and_tag",
      [](int root) {
        const auto [results, tag] = ResultsAndTag::of_root(root);
        return std::pair(results, tag);
      },
      nb::arg("root"),
      "The dtype of its results and the tag, which an optimizer's call has in place of a root.");
  m.attr("MAX_RECORDS") = kMaxRecords;
  m.def(
      "clock_pair",
      [] {
        const ClockPair now = clock_pair();
        return std::pair(now.ticks, now.ns);
      },
      "Now, in ticks of the records' clock and in ns of CLOCK_MONOTONIC.");
  m.def("set_library_folders", &set_library_folders, nb::arg("library"), nb::arg("programs"),
        "Frames of files whose paths begin so are no call sites, but for those of `programs`.");
  m.def(
      "call_site", [] { return reinterpret_cast<uintptr_t>(find_call_site()); },
      "The innermost frame outside the library, for `hold_call_site`; 0: there is none.");
  m.def(
      "hold_call_site",
      [](uintptr_t site) { hold_call_site(reinterpret_cast<const CallSite*>(site)); },
      nb::arg("site"),
      "From here on calls of this thread count as made there; 0: where they are made.");
  c.def(
       "record_begin",
       [](NativeComm& n, const CallWords& words) {
         take_call_site();
         n.comm.record_begin(id_of(words));
       },
       nb::arg("words"),
       "Records a collective of another engine, which it is about to number; see `call_words`.")
      .def(
          "record_end", [](NativeComm& n, int status) { n.comm.record_end(Status(status)); },
          nb::arg("status"))
      .def(
          "record_around",
          [](NativeComm& n, const CallWords& words) {
            take_call_site();
            return n.comm.record_around(id_of(words));
          },
          nb::arg("words"),
          "Records a call that is made of the next ones here; returns its number.\n\n"
          "All ranks must do so alike, since it counts as a call.")
      .def(
          "record_around_end",
          [](NativeComm& n, uint64_t number, int status) {
            n.comm.record_around_end(number, Status(status));
          },
          nb::arg("number"), nb::arg("status"))
      .def(
          "recorded",
          [](const NativeComm& n, int rank, uint32_t most) {
            if (rank < 0 || rank >= n.comm.view().world)
              throw nb::value_error("rank must be in [0, world)");
            const std::vector<char> bytes = n.comm.recorded(rank, most);
            return nb::bytes(bytes.data(), bytes.size());
          },
          nb::arg("rank"), nb::arg("most") = kMaxRecords,
          "The flight recorder of a rank as it is now (ringcomm/comm/recorder/records.py reads "
          "it).\n\n"
          "Of more than ``most`` records of a kind the newest. The header's layout, rank and\n"
          "world are what this rank knows of them, whatever the other one's memory says. Empty\n"
          "when nothing is recorded, the rank is not connected, or this one has closed.");
}

}  // namespace ringcomm::host
