// One KernelTable. Included once by each isa_*.cpp, which sets RINGCOMM_ISA before.
#pragma once

#include "kernels/host/isa_adamw.h"
#include "kernels/host/isa_kernels.h"

RINGCOMM_NAMESPACE_BEGIN
namespace host {

template <class T, RedOp op>
constexpr ReduceFn entry() {
  if constexpr (supports<T>(op))
    return &reduce_kernel<T, op>;
  else
    return nullptr;
}

template <class T>
constexpr void fill_row(ReduceFn (&row)[int(RedOp::kCount)]) {
  row[int(RedOp::kSum)] = entry<T, RedOp::kSum>();
  row[int(RedOp::kAvg)] = entry<T, RedOp::kAvg>();
  row[int(RedOp::kPremulSum)] = entry<T, RedOp::kPremulSum>();
  row[int(RedOp::kProduct)] = entry<T, RedOp::kProduct>();
  row[int(RedOp::kMin)] = entry<T, RedOp::kMin>();
  row[int(RedOp::kMax)] = entry<T, RedOp::kMax>();
  row[int(RedOp::kBand)] = entry<T, RedOp::kBand>();
  row[int(RedOp::kBor)] = entry<T, RedOp::kBor>();
  row[int(RedOp::kBxor)] = entry<T, RedOp::kBxor>();
}

constexpr KernelTable make_table(const char* isa) {
  KernelTable t{isa, &copy, &copy_streaming, &adamw_kernel, &reduce_norm_kernel, {}};
  fill_row<uint8_t>(t.reduce[int(DType::kUInt8)]);
  fill_row<int8_t>(t.reduce[int(DType::kInt8)]);
  fill_row<uint16_t>(t.reduce[int(DType::kUInt16)]);
  fill_row<int16_t>(t.reduce[int(DType::kInt16)]);
  fill_row<uint32_t>(t.reduce[int(DType::kUInt32)]);
  fill_row<int32_t>(t.reduce[int(DType::kInt32)]);
  fill_row<uint64_t>(t.reduce[int(DType::kUInt64)]);
  fill_row<int64_t>(t.reduce[int(DType::kInt64)]);
  fill_row<Bool>(t.reduce[int(DType::kBool)]);
  fill_row<Float16>(t.reduce[int(DType::kFloat16)]);
  fill_row<BFloat16>(t.reduce[int(DType::kBFloat16)]);
  fill_row<float>(t.reduce[int(DType::kFloat32)]);
  fill_row<double>(t.reduce[int(DType::kFloat64)]);
  fill_row<Complex<float>>(t.reduce[int(DType::kComplex64)]);
  fill_row<Complex<double>>(t.reduce[int(DType::kComplex128)]);
  return t;
}

}  // namespace host
RINGCOMM_NAMESPACE_END
