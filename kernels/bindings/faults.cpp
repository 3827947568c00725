// SPDX-License-Identifier: Apache-2.0

// Binds fault injection, which tests use from Python.
#include "kernels/host/fault_injection.h"

#include "kernels/bindings/gil.h"
#include "kernels/bindings/module.h"

namespace nb = nanobind;

namespace ringcomm::host {
namespace {

FaultAction fault_named(const std::string& name) {
  if (name == "none") return FaultAction::kNone;
  if (name == "kill") return FaultAction::kKill;
  if (name == "stop") return FaultAction::kStop;
  if (name == "delay") return FaultAction::kDelay;
  if (name == "slow") return FaultAction::kSlow;
  throw nb::value_error("action: expected none, kill, stop, delay or slow");
}

void arm_fault(const std::string& action, uint64_t passage, double seconds, int rank,
               uint64_t sequence) {
  const ArmedFault fault{fault_named(action), passage, uint64_t(seconds * 1e9), rank, sequence};
  const bool ends = fault.action == FaultAction::kKill || fault.action == FaultAction::kStop;
  if (passage == 0) throw nb::value_error("passage: expected 1 or more, got 0");
  if (!(seconds >= 0 && seconds < 1e6)) throw nb::value_error("seconds: expected 0 to 1e6");
  if (ends && rank >= 0)
    throw nb::value_error("rank: a signal ends or stops all ranks of a process; leave it out");
  arm(fault);
}

Named<int> fault_passages() {
  const Passages now = passages();
  nb::dict d;
  d["publish"] = now.count[int(Point::kPublish)];
  d["acknowledge"] = now.count[int(Point::kAcknowledge)];
  d["await"] = now.count[int(Point::kAwait)];
  return d;
}

}  // namespace

void bind_faults(nb::module_& m) {
  m.def(
      "arm_fault", &arm_fault, nb::arg("action"), nb::arg("passage") = 1, nb::arg("seconds") = 0.0,
      nb::arg("rank") = -1, nb::arg("sequence") = 0,
      "Made for tests: has a fault happen when this process passes a point of the protocol.\n\n"
      "Points are each publication, each acknowledgement and each wait of a call\n"
      "(docs/reliability.md). The fault before it is forgotten, and passages are counted from "
      "0.\n\n"
      "Args:\n"
      "    action: `none` (only count), `kill` (SIGKILL), `stop` (SIGSTOP), `delay` (sleep once)\n"
      "        or `slow` (sleep there and at each later passage).\n"
      "    passage: where, counted from 1.\n"
      "    seconds: of a delay, or of each sleep.\n"
      "    rank: counts passages of this rank alone, for ranks that are threads; -1: of all. A\n"
      "        thread cannot be killed or stopped.\n"
      "    sequence: counts passages of this collective of a communicator alone, numbered from 1;\n"
      "        0: of all, and of messages.\n\n"
      "Raises:\n"
      "    ValueError: an argument out of range.");
  m.def("disarm_fault", &disarm, "Nothing happens any more, and nothing is counted.");
  m.def("fault_passages", &fault_passages,
        "Counts the points passed since `arm_fault`, by kind: publish, acknowledge, await.");
  // For Triton kernels in the interpreter, which run as Python.
  m.def(
      "fault_armed", [] { return load_relaxed_sys(&fault_is_armed) != 0; },
      "Tells whether a fault is armed.");
  m.def(
      "pass_fault_point",
      [](int point, int rank, uint64_t sequence) { pass_armed(Point(point), rank, sequence); },
      nb::arg("point"), nb::arg("rank"), nb::arg("sequence"), nb::call_guard<WithoutGil>(),
      "For what passes a point in Python; `sequence` 0: no collective.");
  nb::dict points;
  points["publish"] = int(Point::kPublish);
  points["acknowledge"] = int(Point::kAcknowledge);
  points["await"] = int(Point::kAwait);
  add_constant(m, "FAULT_POINTS", points,
               "Code of each kind of point: publish, acknowledge, await.");
}

}  // namespace ringcomm::host
