// SPDX-License-Identifier: Apache-2.0

// Converts a fault record to the words that ringcomm.errors reads.
#include "kernels/bindings/module.h"
#include "kernels/host/describe.h"

namespace nb = nanobind;

namespace ringcomm::host {
namespace {

// Returns the fields of a call that all ranks must share, as codes, without the sequence number.
nb::tuple call_of(const CallId& id) {
  return nb::make_tuple(uint32_t(id.collective), id.dtype, id.redop, id.root,
                        uint32_t(id.algorithm), uint32_t(id.kernels), id.match_bytes);
}

}  // namespace

std::string utf8_of(const nb::str& text) {
  const nb::object raw = nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "replace"));
  if (!raw.is_valid()) throw nb::python_error();
  const auto bytes = nb::cast<nb::bytes>(raw);
  return std::string(bytes.c_str(), bytes.size());
}

FaultWords fault_dict(const Fault& f, const std::string& reason) {
  nb::dict d;
  d["kind"] = name_of(f.status == Status::kOk ? Status::kAborted : f.status);
  d["op"] = name_of(f.mine.id.collective);
  d["sequence"] = f.mine.id.sequence;
  d["their_sequence"] = f.status == Status::kMismatch ? f.theirs.id.sequence : 0;
  d["message"] = f.stream == Stream::kMessage;
  d["rank"] = f.rank;
  d["peer"] = f.peer;
  d["item"] = f.item;
  d["wanted"] = f.wanted;
  d["seen"] = f.seen;
  d["waiting_for"] = f.on_consumed ? "consumed" : "ready";
  d["waited_ms"] = f.waited_ns / 1'000'000;
  d["my_call"] = call_of(f.mine.id);
  d["their_call"] = call_of(f.theirs.id);
  d["mine"] = describe(f.mine);
  const bool compares = f.status == Status::kMismatch || f.status == Status::kCorrupt;
  d["theirs"] = compares ? describe(f.theirs) : "";
  // The text of a peer, or a text of this rank that was cut, may be invalid UTF-8.
  d["reason"] =
      nb::steal(PyUnicode_DecodeUTF8(reason.data(), Py_ssize_t(reason.size()), "replace"));
  return d;
}

}  // namespace ringcomm::host
