// The calls as torch.distributed asks for them: tensors in a list, everything else in an options
// object (AllreduceOptions and the like).
//
// Reading an option in Python takes 0.15 us, and the op 0.7, since torch makes a new object of it:
// together as long as a small collective. These calls read the options where they lie in memory.
#pragma once

#include "kernels/bindings/tensors.h"

namespace ringcomm::host {

// True of options that ask for a synchronous call with the group's own timeout. `op` is set to the
// constant of torch for their op; it stays null for options that have none, such as those of an
// all-gather. False: Python reads the options.
bool is_plain(nanobind::handle options, nanobind::handle* op);

// The tensor of a list that has only one; null: another object, or another length.
nanobind::handle only_tensor(nanobind::handle list);

// Torch's name for an algorithm that the call chooses itself.
nanobind::handle auto_algorithm();

void bind_torch_options(nanobind::module_& m);

inline int finished(int status, nanobind::handle output) {
  if (status == 0) advance_version(output);
  return status;
}

// Fast has the class of the calls, and functions of tensors, an op and an algorithm that make them:
//   Calls
//   all_reduce(calls, tensor, op, algorithm)
//   reduce_scatter(calls, output, input, op, algorithm)
//   all_gather(calls, output, input, algorithm)
template <class Fast>
void bind_for_torch(nanobind::class_<typename Fast::Calls>& c) {
  using Calls = typename Fast::Calls;
  const auto any = [] { return nanobind::arg().none(); };  // Python complains about None
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
