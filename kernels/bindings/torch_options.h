// SPDX-License-Identifier: Apache-2.0

// Collectives with the arguments of torch.distributed: tensors in a list, and an options object
// such as AllreduceOptions.
//
// In Python, reading an option takes 0.15 us, and reading the op takes 0.7 us, because torch makes
// a new object of it. Together they take as long as a small collective. These calls read the
// options from memory.
#pragma once

#include "kernels/bindings/tensors.h"

namespace ringcomm::host {

// Returns true for options of a synchronous call with the group's own timeout. Sets `op` to torch's
// constant for their op, and leaves it null for options without an op, such as those of an
// all-gather. False: Python reads the options.
bool is_plain(nanobind::handle options, nanobind::handle* op);

// Returns the tensor of a list of exactly one tensor; null: another object, or another length.
nanobind::handle only_tensor(nanobind::handle list);

// Torch's name for an algorithm that the call chooses itself.
nanobind::handle auto_algorithm();

void bind_torch_options(nanobind::module_& m);

inline int finished(int status, nanobind::handle output) {
  if (status == 0) advance_version(output);
  return status;
}

// Fast has the class of the calls, and functions that make them:
//   Calls
//   all_reduce(calls, tensor, op, algorithm)
//   reduce_scatter(calls, output, input, op, algorithm)
//   all_gather(calls, output, input, algorithm)
template <class Fast>
void bind_for_torch(nanobind::class_<typename Fast::Calls>& c) {
  using Calls = typename Fast::Calls;
  const auto any = [] { return nanobind::arg().none(); };  // accepts None: Python raises the error
  c.def(
       "all_reduce_for_torch",
       [](Calls& calls, nanobind::handle tensors, nanobind::handle options) {
         nanobind::handle op;
         const nanobind::handle tensor = only_tensor(tensors);
         if (!tensor.is_valid() || !is_plain(options, &op) || !op.is_valid()) return kNotFast;
         return finished(Fast::all_reduce(calls, tensor, op, auto_algorithm()), tensor);
       },
       nanobind::sig("def all_reduce_for_torch(self, tensors: object, options: object, /) -> int"),
       any(), any(),
       "As `all_reduce_fast`, of a list of one tensor and AllreduceOptions; advances its "
       "version.\n\n"
       "`NOT_FAST` also for options that ask for an asynchronous call or name a timeout.")
      .def(
          "reduce_scatter_for_torch",
          [](Calls& calls, nanobind::handle output, nanobind::handle input,
             nanobind::handle options) {
            nanobind::handle op;
            if (!is_plain(options, &op) || !op.is_valid()) return kNotFast;
            return finished(Fast::reduce_scatter(calls, output, input, op, auto_algorithm()),
                            output);
          },
          nanobind::sig("def reduce_scatter_for_torch(self, output: object, input: object, "
                        "options: object, /) -> int"),
          any(), any(), any())
      .def(
          "all_gather_for_torch",
          [](Calls& calls, nanobind::handle output, nanobind::handle input,
             nanobind::handle options) {
            nanobind::handle op;
            if (!is_plain(options, &op) || op.is_valid()) return kNotFast;
            return finished(Fast::all_gather(calls, output, input, auto_algorithm()), output);
          },
          nanobind::sig("def all_gather_for_torch(self, output: object, input: object, "
                        "options: object, /) -> int"),
          any(), any(), any());
}

}  // namespace ringcomm::host
