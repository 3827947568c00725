// SPDX-License-Identifier: Apache-2.0

// A PTX text in the form that the interpreter executes.
//
// Terms. A *row* holds one value for each of the 32 lanes of a warp, in 64 bits each; unused upper
// bits are zero. Registers are rows of a frame; immediates and addresses of variables are rows of
// the module. Source: NVIDIA, "Parallel Thread Execution ISA", version 9.0.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace ptx {

constexpr int kLanes = 32;
using Mask = uint32_t;  // of lanes

// The text contains something that the interpreter does not know, or that PTX does not allow.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The windows of the state spaces among generic addresses; every other address is a host pointer.
// Inside its own space an address counts from kSpaceBase, so that 0 is never valid.
constexpr uint64_t kSpaceBase = 0x400;
constexpr uint64_t kSharedWindow = uint64_t(1) << 60;
constexpr uint64_t kParamWindow = uint64_t(2) << 60;
constexpr uint64_t kWindowBytes = uint64_t(1) << 32;

struct Type {
  char kind = 'b';  // 'p' predicate, 'b' bits, 'u', 's', 'f', 'h' bf16
  int bits = 0;
  bool operator==(const Type&) const = default;
};

enum class Space : uint8_t { kGeneric, kGlobal, kShared, kKernelParam, kFrameParam };
enum class Order : uint8_t { kWeak, kRelaxed, kAcquire, kRelease, kAcqRel };
enum class Atomic : uint8_t { kAdd, kMin, kMax, kExchange, kSwap, kAnd, kOr, kXor };
// The operations of the warp itself, which concern more than one lane's registers.
enum class Control : uint8_t { kNone, kBranch, kCall, kReturn, kBarrier, kShuffle };

class Warp;
struct Function;
struct Instruction;
using Handler = void (*)(Warp&, const Instruction&, Mask);

// Bytes of the caller's parameters that are copied to the callee's, or back.
struct Passed {
  uint32_t from, to, bytes;
};

struct Call {
  std::string callee;
  const Function* function = nullptr;
  std::vector<uint32_t> arguments;  // offsets in the caller's parameters
  std::vector<uint32_t> results;
};

// An access in the text that orders memory, and whether a kernel has executed it.
struct OrderingSite {
  uint32_t line = 0;
  std::atomic<bool> reached{false};
};

struct Instruction {
  Handler run = nullptr;
  Control control = Control::kNone;
  Type type, from;  // of the result, or of what is compared; of the source of a conversion
  Space space = Space::kGeneric;
  Order order = Order::kWeak;
  Atomic atomic = Atomic::kAdd;
  bool reduces = false;    // a barrier: bar.red.or
  bool unless = false;     // the guard is negated
  uint8_t count = 1;       // of elements of a vector
  int32_t guard = kNoRow;  // a row of predicates
  int32_t dst[4] = {kNoRow, kNoRow, kNoRow, kNoRow};
  int32_t src[5] = {kNoRow, kNoRow, kNoRow, kNoRow, kNoRow};
  int64_t offset = 0;  // of an address
  uint32_t target = 0;
  const Call* call = nullptr;
  OrderingSite* site = nullptr;
  uint32_t line = 0;
  std::string_view text;

  // Rows: from 0 on, the registers of the frame; ~index for negative values, those of the module.
  static constexpr int32_t kNoRow = INT32_MIN;
};

struct Parameter {
  std::string name;
  uint32_t offset, bytes;
};

struct Function {
  std::string name;
  bool is_kernel = false;
  bool defined = false;
  std::vector<Parameter> results, parameters;
  uint32_t own_param_bytes = 0;  // of results and parameters
  uint32_t param_bytes = 0;      // with those of the calls inside
  uint32_t rows = 0;
  int max_threads = 0;
  // The smallest number of trips of any launch that counted trips.
  std::unique_ptr<std::atomic<uint32_t>> fewest_trips =
      std::make_unique<std::atomic<uint32_t>>(UINT32_MAX);
  uint32_t shared_bytes = 0;  // with the variables of the whole module
  std::vector<Instruction> code;
  std::vector<std::unique_ptr<Call>> calls;
};

class Module {
 public:
  // Throws Refused with the line of the unknown part.
  explicit Module(std::string text);

  const Function* kernel(std::string_view name) const;
  const uint64_t* constants() const { return constants_.data(); }
  const std::deque<OrderingSite>& sites() const { return sites_; }

 private:
  friend class Parser;
  std::string text_;
  std::map<std::string, std::unique_ptr<Function>, std::less<>> functions_;
  std::deque<OrderingSite> sites_;
  std::vector<uint64_t> constants_;                                // rows of kLanes
  std::vector<std::unique_ptr<std::vector<uint64_t>>> variables_;  // of the global space
};

// Assigns rows to registers; registers that are never live at the same time may share a row.
// numbers: the registers of code, 0 to count - 1; on return rows. Returns the number of rows.
uint32_t assign_rows(std::vector<Instruction>& code, uint32_t count);

}  // namespace ptx
