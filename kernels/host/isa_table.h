// SPDX-License-Identifier: Apache-2.0

// One KernelTable. Each isa_*.cpp sets RINGCOMM_ISA and includes this file once.
#pragma once

#include "kernels/host/isa_adamw.h"
#include "kernels/host/isa_kernels.h"
#include "kernels/host/isa_quantization.h"
#include "kernels/host/isa_rows.h"

RINGCOMM_NAMESPACE_BEGIN
namespace host {

// Reductions with equal results share a loop: sums, products and bitwise operations of signed
// numbers use the unsigned loop, and Bool needs only three operators.
constexpr bool wraps(RedOp op) {
  return op == RedOp::kSum || op == RedOp::kProduct || op >= RedOp::kBand;
}
constexpr RedOp bool_op(RedOp op) {
  if (op == RedOp::kProduct || op == RedOp::kMin) return RedOp::kBand;
  return op == RedOp::kSum || op == RedOp::kMax ? RedOp::kBor : op;
}

template <class In, class Out, RedOp op>
constexpr ReduceFn entry() {
  using Unsigned = typename Wrapping<In>::Type;
  if constexpr (!supports<In>(op))
    return nullptr;
  else if constexpr (kSame<In, Bool>)
    return &reduce_kernel<In, Out, bool_op(op)>;
  else if constexpr (wraps(op) && !kSame<In, Unsigned>)
    return &reduce_kernel<Unsigned, Unsigned, op>;
  else
    return &reduce_kernel<In, Out, op>;
}

template <class In, class Out = In>
constexpr void fill_row(ReduceFn (&row)[int(RedOp::kCount)]) {
  row[int(RedOp::kSum)] = entry<In, Out, RedOp::kSum>();
  row[int(RedOp::kAvg)] = entry<In, Out, RedOp::kAvg>();
  row[int(RedOp::kPremulSum)] = entry<In, Out, RedOp::kPremulSum>();
  row[int(RedOp::kProduct)] = entry<In, Out, RedOp::kProduct>();
  row[int(RedOp::kMin)] = entry<In, Out, RedOp::kMin>();
  row[int(RedOp::kMax)] = entry<In, Out, RedOp::kMax>();
  row[int(RedOp::kBand)] = entry<In, Out, RedOp::kBand>();
  row[int(RedOp::kBor)] = entry<In, Out, RedOp::kBor>();
  row[int(RedOp::kBxor)] = entry<In, Out, RedOp::kBxor>();
}

// Fills in the loops of one element type, and the loops between it and its accumulator's type.
template <DType dtype, class T>
constexpr void fill_type(KernelTable& t) {
  using Acc = typename Traits<T>::Acc;
  static_assert(sizeof(T) == size_of(dtype), "size_of (core/dtypes.h) gives another size");
  static_assert(kSame<T, Acc> == (accumulator_of(dtype) == dtype) &&
                    sizeof(Acc) == size_of(accumulator_of(dtype)),
                "accumulator_of (core/dtypes.h) gives another type than Traits<T>::Acc");
  fill_row<T>(t.reduce[int(dtype)]);
  if constexpr (!kSame<T, Acc>) {
    fill_row<T, Acc>(t.widening[half_index(dtype)]);
    fill_row<Acc, T>(t.narrowing[half_index(dtype)]);
  }
}

constexpr KernelTable make_table(const char* isa) {
  KernelTable t{isa,     &copy, &copy_streaming, &adamw_kernel, &reduce_norm_kernel, {}, {}, {}, {},
                nullptr, {}};
  fill_type<DType::kUInt8, uint8_t>(t);
  fill_type<DType::kInt8, int8_t>(t);
  fill_type<DType::kUInt16, uint16_t>(t);
  fill_type<DType::kInt16, int16_t>(t);
  fill_type<DType::kUInt32, uint32_t>(t);
  fill_type<DType::kInt32, int32_t>(t);
  fill_type<DType::kUInt64, uint64_t>(t);
  fill_type<DType::kInt64, int64_t>(t);
  fill_type<DType::kBool, Bool>(t);
  fill_type<DType::kFloat16, Float16>(t);
  fill_type<DType::kBFloat16, BFloat16>(t);
  fill_type<DType::kFloat32, float>(t);
  fill_type<DType::kFloat64, double>(t);
  fill_type<DType::kComplex64, Complex<float>>(t);
  fill_type<DType::kComplex128, Complex<double>>(t);
  t.quant[int(QuantFormat::kInt8)] = quant_kernels<Int8Format>();
  t.quant[int(QuantFormat::kFp8)] = quant_kernels<Fp8Format>();
  t.quant[int(QuantFormat::kInt4)] = quant_kernels<Int4Format>();
  t.copy_rows = &copy_rows;
  t.rows[float_type_index(DType::kFloat16)] = row_kernels<Float16>();
  t.rows[float_type_index(DType::kBFloat16)] = row_kernels<BFloat16>();
  t.rows[float_type_index(DType::kFloat32)] = row_kernels<float>();
  return t;
}

}  // namespace host
RINGCOMM_NAMESPACE_END
