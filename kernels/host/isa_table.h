// One KernelTable. Included once by each isa_*.cpp, which sets RINGCOMM_ISA before.
#pragma once

#include "kernels/host/isa_adamw.h"
#include "kernels/host/isa_kernels.h"
#include "kernels/host/isa_quantization.h"
#include "kernels/host/isa_rows.h"

RINGCOMM_NAMESPACE_BEGIN
namespace host {

// Loops of the same bits are compiled once. A sum, a product or a bitwise operation of signed
// numbers is that of unsigned ones, and of the operators of Bool three differ.
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

constexpr KernelTable make_table(const char* isa) {
  KernelTable t{isa,     &copy, &copy_streaming, &adamw_kernel, &reduce_norm_kernel, {}, {}, {}, {},
                nullptr, {}};
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
  fill_row<Float16, float>(t.widening[half_index(DType::kFloat16)]);
  fill_row<BFloat16, float>(t.widening[half_index(DType::kBFloat16)]);
  fill_row<float, Float16>(t.narrowing[half_index(DType::kFloat16)]);
  fill_row<float, BFloat16>(t.narrowing[half_index(DType::kBFloat16)]);
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
