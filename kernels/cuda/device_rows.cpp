// SPDX-License-Identifier: Apache-2.0

// Launches the kernels for scattered rows.
#include <algorithm>

#include "kernels/cuda/device_comm.h"

RINGCOMM_NAMESPACE_BEGIN
namespace device {
namespace {

// The bytes of rows per block, and the most blocks of a launch; chosen without measurements.
constexpr uint64_t kBytesPerBlock = 32 << 10, kMostBlocks = 1056;

bool is_multiple(const void* ptr, uint64_t of) { return reinterpret_cast<uint64_t>(ptr) % of == 0; }

// True if all rows begin at multiples of `multiple` bytes, and their size is a multiple of it.
bool all_begin_at(const RowsArgs& rows, uint64_t multiple) {
  return rows.row_bytes % multiple == 0 && is_multiple(rows.out, multiple) &&
         is_multiple(rows.with, multiple) &&
         std::all_of(rows.bases, rows.bases + kMaxWorld,
                     [&](const char* base) { return is_multiple(base, multiple); });
}

}  // namespace

void DeviceComm::launch_rows(const std::string& name, const RowsArgs& rows) {
  // Rows of 0 bytes still have scalar products: zeros.
  if (rows.count == 0 || (rows.row_bytes == 0 && rows.dots == nullptr)) return;
  LaunchParams params{};
  params.rows = rows;
  params.rows.has_vectors = all_begin_at(rows, 16);
  params.rows.has_words = rows.row_bytes <= 8 && all_begin_at(rows, 4);
  const uint64_t bytes = rows.count * rows.row_bytes;
  const uint64_t blocks =
      std::clamp<uint64_t>((bytes + kBytesPerBlock - 1) / kBytesPerBlock, 1, kMostBlocks);
  const Kernel& found = kernel("rows", name);
  driver_->launch(found.function, unsigned(blocks), 1, found.threads, stream_, &params,
                  sizeof params);
}

void DeviceComm::copy_rows(RowsArgs rows) { launch_rows("rc_copy_rows", rows); }

void DeviceComm::sum_rows(RowsArgs rows, DType dtype) {
  launch_rows(std::string("rc_sum_rows_") + name_of_float(dtype), rows);
}

void DeviceComm::scale_rows(RowsArgs rows, DType dtype) {
  launch_rows(std::string("rc_scale_rows_") + name_of_float(dtype), rows);
}

}  // namespace device
RINGCOMM_NAMESPACE_END
