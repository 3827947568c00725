// SPDX-License-Identifier: Apache-2.0

// Binds the checksums of ringcomm._native.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "kernels/bindings/gil.h"
#include "kernels/bindings/module.h"
#include "kernels/host/crc32.h"
#include "kernels/host/crc32c.h"
#include "kernels/host/worker_pool.h"

namespace nb = nanobind;

namespace ringcomm::host {
namespace {

template <class Way>
std::vector<std::string> names_of(const Way* ways) {
  std::vector<std::string> names;
  for (; ways->name != nullptr; ++ways) names.push_back(ways->name);
  return names;
}

template <class Way>
const Way& way_of(const Way* ways, const std::string& name) {
  for (; ways->name != nullptr; ++ways)
    if (name == ways->name) return *ways;
  throw nb::value_error("way: expected one of those that run here");
}

}  // namespace

void bind_checksums(nb::module_& m) {
  m.def(
      "crc32",
      [](uintptr_t ptr, uint64_t bytes, uint32_t before) {
        const WithoutGil nogil;
        return crc32(before, at(ptr), bytes, threads_without_communicator());
      },
      nb::arg("ptr"), nb::arg("size_bytes"), nb::arg("before") = 0,
      "zlib's CRC-32 of bytes behind others, whose sum is `before`, by the threads of the rank.");
  m.def("combined_crc32", &combined_crc32, nb::arg("a"), nb::arg("b"), nb::arg("b_bytes"),
        "The CRC-32 of A and then B, from those of both and the length of B (for tests).");
  m.def(
      "crc32_ways", [] { return names_of(crc32_ways()); },
      "The ways to make a CRC-32 that run on this CPU, the one that is taken first.");
  m.def(
      "crc32_by",
      [](const std::string& way, uintptr_t ptr, uint64_t bytes, uint32_t before) {
        return way_of(crc32_ways(), way).sum(before, at(ptr), bytes);
      },
      nb::arg("way"), nb::arg("ptr"), nb::arg("size_bytes"), nb::arg("before") = 0,
      "A test's view of a way to make a CRC-32.");
  m.def(
      "crc32c_ways", [] { return names_of(crc32c_ways()); },
      "The ways to make a CRC32C that run on this CPU, the one that is taken first.");
  m.def(
      "crc32c",
      [](uintptr_t ptr, uint64_t bytes, const std::string& way) {
        return way_of(crc32c_ways(), way).sum(at(ptr), bytes);
      },
      nb::arg("ptr"), nb::arg("size_bytes"), nb::arg("way"), "A test's view of the checksum.");
}

}  // namespace ringcomm::host
