// SPDX-License-Identifier: Apache-2.0

// Parses a PTX text into a Module. Statements end with a semicolon; names are valid in the scopes
// that braces open. Unknown parts are refused, with their line.
#include <algorithm>
#include <cctype>
#include <cstring>
#include <optional>
#include <unordered_map>
#include <utility>

#include "tests/ptx_interpreter/source/instructions.h"
#include "tests/ptx_interpreter/source/memory.h"

namespace ptx {
namespace {

struct Token {
  std::string_view text;
  uint32_t line;
};

bool is_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || std::strchr("_$.%:", c) != nullptr;
}

// Words (names, numbers, opcodes with their dots), strings, and single characters.
std::vector<Token> tokens_of(std::string_view text) {
  std::vector<Token> tokens;
  uint32_t line = 1;
  for (size_t at = 0; at < text.size();) {
    const char c = text[at];
    if (c == '\n') ++line;
    if (std::isspace(static_cast<unsigned char>(c)) != 0 || c == '\0') {
      ++at;
    } else if (text.substr(at, 2) == "//") {
      at = std::min(text.find('\n', at), text.size());
    } else if (c == '"') {
      const size_t end = text.find('"', at + 1);
      tokens.push_back({text.substr(at, end + 1 - at), line});
      at = end + 1;
    } else {
      size_t end = at;
      while (end < text.size() && is_word(text[end])) ++end;
      if (end == at) ++end;
      tokens.push_back({text.substr(at, end - at), line});
      at = end;
    }
  }
  return tokens;
}

std::vector<std::string_view> split(std::string_view text, char by) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(by, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::optional<Type> type_of(std::string_view name) {
  if (name == "pred") return Type{'p', 1};
  if (name.size() < 2 || std::strchr("busf", name[0]) == nullptr) return std::nullopt;
  for (const int bits : {8, 16, 32, 64})
    if (name.substr(1) == std::to_string(bits)) return Type{name[0], bits};
  return std::nullopt;
}

std::optional<uint64_t> number_of(std::string_view word) {
  if (word.empty() || std::isdigit(static_cast<unsigned char>(word[0])) == 0) return std::nullopt;
  const std::string text(word);
  if (text.starts_with("0f") || text.starts_with("0F") || text.starts_with("0d") ||
      text.starts_with("0D"))
    return std::stoull(text.substr(2), nullptr, 16);
  if (text.starts_with("0x")) return std::stoull(text.substr(2), nullptr, 16);
  size_t used = 0;
  const uint64_t value = std::stoull(text, &used, 10);
  if (used != text.size() && text.substr(used) != "U") return std::nullopt;
  return value;
}

uint32_t aligned(uint32_t offset, uint32_t to) { return (offset + to - 1) / to * to; }

}  // namespace

class Parser {
 public:
  explicit Parser(Module& module) : module_(module), tokens_(tokens_of(module.text_)) {}

  void run() {
    while (at_ < tokens_.size()) top_level();
    for (auto& [name, function] : module_.functions_) {
      for (auto& made : function->calls) {
        const auto found = module_.functions_.find(made->callee);
        if (found == module_.functions_.end() || !found->second->defined)
          throw Refused("PTX: a call of " + made->callee + ", which is not in the text");
        made->function = found->second.get();
        if (made->arguments.size() != made->function->parameters.size() ||
            made->results.size() != made->function->results.size())
          throw Refused("PTX: a call of " + made->callee + " with other parameters than it has");
      }
    }
  }

 private:
  struct Name {
    enum class Kind { kRegister, kAddress, kParam, kKernelParam } kind;
    uint64_t value;
    int bits;
  };
  struct Family {
    std::string_view prefix;
    uint32_t count;
    int bits;
  };
  struct Scope {
    std::unordered_map<std::string_view, Name> names;
    std::vector<Family> families;
    uint32_t params_at;
  };

  // ---- tokens ----------------------------------------------------------------------------------

  [[noreturn]] void refuse(const std::string& what) const {
    const uint32_t line = at_ < tokens_.size() ? tokens_[at_].line : 0;
    throw Refused("PTX, line " + std::to_string(line) + ": " + what);
  }
  std::string_view peek() const { return at_ < tokens_.size() ? tokens_[at_].text : ""; }
  std::string_view take() {
    if (at_ >= tokens_.size()) refuse("the text ends early");
    return tokens_[at_++].text;
  }
  bool take_if(std::string_view text) {
    if (peek() != text) return false;
    ++at_;
    return true;
  }
  void expect(std::string_view text) {
    if (!take_if(text)) refuse("expected " + std::string(text) + ", got " + std::string(peek()));
  }
  uint64_t take_number() {
    const bool negative = take_if("-");
    const std::optional<uint64_t> number = number_of(peek());
    if (!number) refuse("expected a number, got " + std::string(peek()));
    ++at_;
    return negative ? -*number : *number;
  }
  void skip_statement() {
    while (take() != ";") {
    }
  }

  // ---- declarations ----------------------------------------------------------------------------

  struct Variable {
    std::string_view name;
    uint32_t align, bytes, element_bytes;
  };
  // After the state space: [.align n] [.ptr ...] .type name[[n]...]
  Variable variable() {
    uint32_t align = 0;
    if (take_if(".align")) align = uint32_t(take_number());
    const std::optional<Type> type = type_of(peek().substr(1));
    if (!type) refuse("a variable of type " + std::string(peek()));
    ++at_;
    const uint32_t element = std::max(type->bits / 8, 1);
    if (take_if(".ptr"))
      while (peek().starts_with('.')) {
        const bool has_number = take() == ".align";
        if (has_number) take_number();
      }
    Variable made{take(), std::max(align, element), element, element};
    while (take_if("[")) {
      made.bytes *= peek() == "]" ? 0 : uint32_t(take_number());
      expect("]");
    }
    return made;
  }

  void top_level() {
    const std::string_view word = take();
    if (word == ".version" || word == ".address_size") {
      take();
    } else if (word == ".target") {
      for (take(); take_if(",");) take();
    } else if (word == ".visible" || word == ".weak" || word == ".extern" || word == ";") {
      return;
    } else if (word == ".global" || word == ".const") {
      global_variable();
    } else if (word == ".shared") {
      shared_variable(globals_);
    } else if (word == ".func" || word == ".entry") {
      function(word == ".entry");
    } else if (word == ".file") {
      take_number();
      take();
      while (take_if(",")) take_number();
    } else if (word == ".section") {
      take();
      expect("{");
      for (int depth = 1; depth > 0;) {
        const std::string_view inside = take();
        depth += inside == "{" ? 1 : inside == "}" ? -1 : 0;
      }
    } else {
      --at_;
      refuse("the directive " + std::string(word) + " is not known");
    }
  }

  void shared_variable(Scope& scope) {
    const Variable v = variable();
    expect(";");
    shared_bytes_ = aligned(shared_bytes_, v.align);
    scope.names[v.name] = {Name::Kind::kAddress, kSpaceBase + shared_bytes_, 64};
    shared_bytes_ += v.bytes;
  }

  void global_variable() {
    const Variable v = variable();
    auto memory = std::make_unique<std::vector<uint64_t>>(v.bytes / 8 + 1);
    auto* bytes = reinterpret_cast<uint8_t*>(memory->data());
    if (take_if("=")) {
      const bool list = take_if("{");
      uint32_t at = 0;
      do {
        const uint64_t value = take_number();
        if (at + v.element_bytes > v.bytes) refuse("more values than the variable has room for");
        std::memcpy(bytes + at, &value, v.element_bytes);
        at += v.element_bytes;
      } while (list && take_if(","));
      if (list) expect("}");
    }
    expect(";");
    globals_.names[v.name] = {Name::Kind::kAddress, reinterpret_cast<uint64_t>(bytes), 64};
    const auto begin = reinterpret_cast<uint64_t>(bytes);
    allow({begin, begin + memory->size() * 8});
    module_.variables_.push_back(std::move(memory));
  }

  std::vector<Parameter> parameters(uint32_t& offset, Scope& scope, bool is_kernel) {
    std::vector<Parameter> made;
    while (!take_if(")")) {
      expect(".param");
      const Variable v = variable();
      offset = aligned(offset, v.align);
      made.push_back({std::string(v.name), offset, v.bytes});
      scope.names[v.name] = is_kernel ? Name{Name::Kind::kKernelParam, kSpaceBase + offset, 64}
                                      : Name{Name::Kind::kParam, offset, 64};
      offset += v.bytes;
      take_if(",");
    }
    return made;
  }

  void function(bool is_kernel) {
    Function made;
    made.is_kernel = is_kernel;
    scopes_.assign(1, globals_);
    scopes_.emplace_back();
    if (take_if("(")) made.results = parameters(made.own_param_bytes, scopes_.back(), false);
    made.name = take();
    if (take_if("(")) made.parameters = parameters(made.own_param_bytes, scopes_.back(), is_kernel);
    while (peek().starts_with('.')) {
      const std::string_view directive = take();
      if (directive == ".maxntid" || directive == ".reqntid") {
        made.max_threads = int(take_number());
        while (take_if(",")) take_number();
      } else if (directive == ".minnctapersm" || directive == ".maxnreg") {
        take_number();
      } else if (directive != ".noreturn") {
        refuse("the directive " + std::string(directive) + " is not known");
      }
    }
    if (take_if(";")) {
      add(std::move(made));
      return;
    }
    const uint32_t shared_before = shared_bytes_;
    body(made);
    made.shared_bytes = std::exchange(shared_bytes_, shared_before);
    made.defined = true;
    add(std::move(made));
  }

  // A definition replaces a declaration.
  void add(Function made) {
    std::unique_ptr<Function>& known = module_.functions_[made.name];
    if (known == nullptr || made.defined) known = std::make_unique<Function>(std::move(made));
  }

  // ---- bodies ----------------------------------------------------------------------------------

  void body(Function& made) {
    function_ = &made;
    made.param_bytes = params_at_ = made.own_param_bytes;
    registers_ = 0;
    labels_.clear();
    jumps_.clear();
    expect("{");
    for (int depth = 1; depth > 0;) {
      if (take_if("{")) {
        scopes_.emplace_back().params_at = params_at_;
        ++depth;
      } else if (take_if("}")) {
        params_at_ = depth > 1 ? scopes_.back().params_at : params_at_;
        scopes_.pop_back();
        --depth;
      } else {
        statement();
      }
    }
    for (const auto& [index, label] : jumps_) {
      const auto found = labels_.find(label);
      if (found == labels_.end()) refuse("no label " + std::string(label));
      made.code[index].target = found->second;
    }
    if (made.code.empty() || made.code.back().control != Control::kReturn ||
        made.code.back().guard != Instruction::kNoRow) {
      Instruction end;
      end.control = Control::kReturn;
      end.text = "the end";
      made.code.push_back(end);
    }
    made.rows = assign_rows(made.code, registers_);
  }

  void statement() {
    const std::string_view word = peek();
    if (word == ";") {
      take();
    } else if (word == ".reg") {
      take();
      declare_registers();
    } else if (word == ".shared") {
      take();
      shared_variable(scopes_.back());
    } else if (word == ".param") {
      take();
      const Variable v = variable();
      expect(";");
      params_at_ = aligned(params_at_, v.align);
      scopes_.back().names[v.name] = {Name::Kind::kParam, params_at_, 64};
      params_at_ += v.bytes;
      function_->param_bytes = std::max(function_->param_bytes, aligned(params_at_, 16));
    } else if (word == ".pragma") {
      skip_statement();
    } else if (word == ".loc") {
      const uint32_t line = tokens_[at_].line;
      while (tokens_[at_].line == line) ++at_;
    } else if (word.size() > 1 && word.back() == ':') {
      take();
      if (!labels_.emplace(word.substr(0, word.size() - 1), uint32_t(function_->code.size()))
               .second)
        refuse("a label twice: " + std::string(word));
    } else {
      instruction();
    }
  }

  void declare_registers() {
    const std::optional<Type> type = type_of(take().substr(1));
    if (!type) {
      --at_;
      refuse("registers of type " + std::string(peek()));
    }
    do {
      const std::string_view name = take();
      if (take_if("<")) {
        scopes_.back().families.push_back({name, uint32_t(take_number()), type->bits});
        expect(">");
      } else {
        scopes_.back().names[name] = {Name::Kind::kRegister, registers_++, type->bits};
      }
    } while (take_if(","));
    expect(";");
  }

  const Name* find(std::string_view word) {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (const auto found = scope->names.find(word); found != scope->names.end())
        return &found->second;
      for (const Family& family : scope->families) {
        if (!word.starts_with(family.prefix)) continue;
        const std::optional<uint64_t> number = number_of(word.substr(family.prefix.size()));
        if (!number || *number >= family.count) continue;
        const Name made{Name::Kind::kRegister, registers_++, family.bits};
        return &scope->names.emplace(word, made).first->second;
      }
    }
    return nullptr;
  }

  // ---- operands --------------------------------------------------------------------------------

  int32_t constant(uint64_t value) {
    const auto [found, is_new] = constants_.try_emplace(value, int32_t(constants_.size()));
    if (is_new) module_.constants_.insert(module_.constants_.end(), kLanes, value);
    return ~found->second;
  }

  struct Operand {
    int32_t row = Instruction::kNoRow;
    int bits = 0;
    std::string_view word;
  };

  // A register, an immediate of `bits` bits or the address of a variable.
  Operand operand(int bits) {
    Operand made;
    made.word = peek();
    if (made.word == "_") {
      take();
      return made;
    }
    if (made.word == "-" || number_of(made.word)) {
      const uint64_t value = take_number();
      made.row = constant(bits >= 64 ? value : value & ((uint64_t(1) << bits) - 1));
      made.bits = bits;
      return made;
    }
    const Name* name = find(made.word);
    if (name == nullptr) refuse("no register or variable " + std::string(made.word));
    take();
    made.bits = name->bits;
    if (name->kind == Name::Kind::kRegister)
      made.row = int32_t(name->value);
    else if (name->kind != Name::Kind::kParam)
      made.row = constant(name->value);
    else
      refuse("the address of a function's parameter");
    return made;
  }

  // [row], [row+n], [variable], [variable+n]
  void address(Instruction& i) {
    expect("[");
    const Name* name = find(peek());
    if (i.space == Space::kKernelParam && name != nullptr && name->kind == Name::Kind::kParam) {
      take();
      i.space = Space::kFrameParam;
      i.offset = int64_t(name->value);
      i.src[0] = constant(0);
    } else {
      if (i.space == Space::kKernelParam && !function_->is_kernel)
        refuse("a function's parameter by its address");
      i.src[0] = operand(64).row;
    }
    if (take_if("+")) i.offset += int64_t(take_number());
    expect("]");
  }

  // Parses one row, or several rows between braces; returns their number.
  template <class Put>
  uint8_t rows(int bits, Put put) {
    if (!take_if("{")) {
      put(0, operand(bits));
      return 1;
    }
    uint8_t count = 0;
    do {
      if (count == 4) refuse("a vector of more than four");
      put(count++, operand(bits));
    } while (take_if(","));
    expect("}");
    return count;
  }

  // ---- instructions ----------------------------------------------------------------------------

  void instruction() {
    Instruction i;
    const size_t begin = at_;
    i.line = tokens_[at_].line;
    if (take_if("@")) {
      i.unless = take_if("!");
      i.guard = operand(1).row;
    }
    const std::string_view opcode = take();
    const std::vector<std::string_view> parts = split(opcode, '.');
    const std::string_view name = parts[0];
    if (name == "ld" || name == "st" || name == "atom" || name == "red")
      memory(i, name, opcode, parts);
    else if (name == "ldmatrix")
      matrices(i, opcode);
    else if (name == "multimem")
      multicast_access(i, opcode);
    else if (name == "fence")
      i.run = fence_named(opcode);
    else if (name == "bra")
      branch(i, opcode);
    else if (name == "call")
      call(i, opcode);
    else if (opcode == "ret" || opcode == "exit")
      i.control = Control::kReturn;
    else if (name == "bar" || name == "barrier")
      barrier(i, opcode);
    else if (name == "shfl")
      shuffle(i, opcode);
    else if (opcode == "vote.sync.all.pred")
      vote(i);
    else if (name == "redux")
      reduce_lanes_of(i, opcode, parts);
    else if (name == "mov")
      move(i, opcode, parts);
    else
      compute(i, opcode, parts);
    const std::string_view last = tokens_[at_ > begin ? at_ - 1 : at_].text;
    expect(";");
    i.text = std::string_view(tokens_[begin].text.data(),
                              size_t(last.data() + last.size() - tokens_[begin].text.data()));
    if (i.control == Control::kBarrier || i.run == fence || i.run == fence_sc ||
        i.run == fence_alias || i.order >= Order::kAcquire) {
      i.site = &module_.sites_.emplace_back();
      i.site->line = i.line;
    }
    function_->code.push_back(i);
  }

  Handler fence_named(std::string_view opcode) const {
    if (opcode == "fence.proxy.alias") return fence_alias;
    if (opcode == "fence.sc.sys" || opcode == "fence.sc.gpu") return fence_sc;
    if (opcode != "fence.acq_rel.sys" && opcode != "fence.acq_rel.gpu") unknown(opcode);
    return fence;
  }

  [[noreturn]] void unknown(std::string_view opcode) const {
    refuse("the instruction " + std::string(opcode) + " is not known");
  }

  // Returns the type of a name; types without registers of their own use registers of bits.
  static std::optional<Type> computed_type(std::string_view name) {
    if (name == "f16" || name == "bf16") return Type{'b', 16};
    if (name == "f16x2" || name == "bf16x2") return Type{'b', 32};
    return type_of(name);
  }

  void compute(Instruction& i, std::string_view opcode, std::span<const std::string_view> parts) {
    i.run = arithmetic(opcode);
    const std::optional<Type> type = computed_type(parts.back());
    if (i.run == nullptr || !type) unknown(opcode);
    i.dst[0] = operand(type->bits).row;
    if (opcode.starts_with("setp.") && opcode.ends_with("x2") && take_if("|"))
      i.dst[1] = operand(1).row;
    int count = 0;
    for (; take_if(","); ++count) {
      if (count == 4) unknown(opcode);
      // Shift amounts have 32 bits; apart from them only positions and lengths of bit fields do.
      i.src[count] = operand(parts[0].starts_with("sh") ? 64 : type->bits).row;
    }
    if (count != sources_of(parts))
      refuse(std::string(opcode) + " with " + std::to_string(count) +
             (count == 1 ? " operand" : " operands") + " behind the result");
  }

  static int sources_of(std::span<const std::string_view> parts) {
    static const std::unordered_map<std::string_view, int> not_two = {
        {"abs", 1}, {"neg", 1},  {"not", 1}, {"clz", 1},   {"popc", 1}, {"brev", 1},
        {"cvt", 1}, {"cvta", 1}, {"rcp", 1}, {"rsqrt", 1}, {"sqrt", 1}, {"ex2", 1},
        {"lg2", 1}, {"mov", 1},  {"fma", 3}, {"mad", 3},   {"selp", 3}, {"prmt", 3},
        {"shf", 3}, {"bfe", 3},  {"bfi", 4}, {"lop3", 4}};
    if (parts[0] == "setp")
      return parts[2] == "and" || parts[2] == "or" || parts[2] == "xor" ? 3 : 2;
    if (parts[0] == "cvt" && parts[parts.size() - 2].ends_with("x2")) return 2;  // into halves
    const auto found = not_two.find(parts[0]);
    return found == not_two.end() ? 2 : found->second;
  }

  void move(Instruction& i, std::string_view opcode, std::span<const std::string_view> parts) {
    const std::optional<Type> type = parts.size() == 2 ? type_of(parts[1]) : std::nullopt;
    if (!type) unknown(opcode);
    const uint8_t to = rows(type->bits, [&](int n, Operand each) { i.dst[n] = each.row; });
    expect(",");
    i.run = special_register(peek());
    if (i.run != nullptr) {
      take();
      return;
    }
    const uint8_t from = rows(type->bits, [&](int n, Operand each) { i.src[n] = each.row; });
    i.count = std::max(to, from);
    i.type = {'b', type->bits / i.count};
    i.run = to > 1 ? unpack : from > 1 ? pack : arithmetic(opcode);
    if ((to > 1 && from > 1) || i.run == nullptr) unknown(opcode);
  }

  void memory(Instruction& i, std::string_view name, std::string_view opcode,
              std::span<const std::string_view> parts) {
    static const std::unordered_map<std::string_view, Order> orders = {
        {"weak", Order::kWeak},       {"relaxed", Order::kRelaxed}, {"acquire", Order::kAcquire},
        {"release", Order::kRelease}, {"acq_rel", Order::kAcqRel},
    };
    static const std::unordered_map<std::string_view, Space> spaces = {
        {"global", Space::kGlobal},
        {"shared", Space::kShared},
        {"shared::cta", Space::kShared},
        {"param", Space::kKernelParam}};
    static const std::unordered_map<std::string_view, Atomic> atomics = {
        {"add", Atomic::kAdd},       {"min", Atomic::kMin},  {"max", Atomic::kMax},
        {"exch", Atomic::kExchange}, {"cas", Atomic::kSwap}, {"and", Atomic::kAnd},
        {"or", Atomic::kOr},         {"xor", Atomic::kXor}};
    const bool is_atomic = name == "atom" || name == "red";
    if (is_atomic) i.order = Order::kRelaxed;
    bool scoped = false, has_operation = false;
    for (const std::string_view part : parts.subspan(1)) {
      if (orders.contains(part)) {
        i.order = orders.at(part);
      } else if (spaces.contains(part)) {
        i.space = spaces.at(part);
      } else if (is_atomic && atomics.contains(part)) {
        i.atomic = atomics.at(part);
        has_operation = true;
      } else if (part == "sys" || part == "gpu") {
        // Smaller scopes would promise less; our kernels use them only inside a block.
        scoped = true;
      } else if (!is_atomic && (part == "v2" || part == "v4")) {
        i.count = part == "v2" ? 2 : 4;
      } else if (const std::optional<Type> type = type_of(part); type && part == parts.back()) {
        i.type = *type;
      } else if (part != "" && part != "L1::no_allocate" && part != "ca" && part != "cg") {
        unknown(opcode);
      }
    }
    const bool weak = i.order == Order::kWeak;
    if (i.type.bits < 8 || (scoped == weak && !is_atomic) || is_atomic != has_operation ||
        (is_atomic && i.type.bits < 32) ||
        (!weak && !is_atomic && (i.space == Space::kShared || i.space == Space::kKernelParam)) ||
        (name == "ld" && (i.order == Order::kRelease || i.order == Order::kAcqRel)) ||
        (name == "st" && (i.order == Order::kAcquire || i.order == Order::kAcqRel)))
      unknown(opcode);
    if (name == "st") {
      address(i);
      expect(",");
      const uint8_t count =
          rows(i.type.bits, [&](int n, Operand each) { i.src[1 + n] = each.row; });
      if (count != i.count) unknown(opcode);
      i.run = store;
      return;
    }
    if (name != "red") {
      const uint8_t count = rows(64, [&](int n, Operand each) {
        i.dst[n] = each.row;
        i.from.bits = each.bits;
      });
      if (count != i.count) unknown(opcode);
      expect(",");
    }
    address(i);
    for (int n = 1; is_atomic && take_if(","); ++n) i.src[n] = operand(i.type.bits).row;
    i.run = is_atomic ? update : load;
  }

  void matrices(Instruction& i, std::string_view opcode) {
    if (opcode != "ldmatrix.sync.aligned.m8n8.x4.shared.b16") unknown(opcode);
    const uint8_t count = rows(32, [&](int n, Operand each) { i.dst[n] = each.row; });
    if (count != 4) unknown(opcode);
    expect(",");
    i.space = Space::kShared;
    address(i);
    i.run = load_matrices;
  }

  void multicast_access(Instruction& i, std::string_view opcode) {
    i.run = multicast(opcode);
    if (i.run == nullptr) unknown(opcode);
    uint8_t count = 0;
    if (opcode.starts_with("multimem.st")) {
      address(i);
      expect(",");
      count = rows(32, [&](int n, Operand each) { i.src[1 + n] = each.row; });
    } else {
      count = rows(32, [&](int n, Operand each) { i.dst[n] = each.row; });
      expect(",");
      address(i);
    }
    if (count != 4) unknown(opcode);
  }

  void branch(Instruction& i, std::string_view opcode) {
    if (opcode != "bra" && opcode != "bra.uni") unknown(opcode);
    i.control = Control::kBranch;
    jumps_.emplace_back(function_->code.size(), take());
  }

  uint32_t param_offset() {
    const Name* name = find(peek());
    if (name == nullptr || name->kind != Name::Kind::kParam)
      refuse("a call with " + std::string(peek()) + ", which is not a parameter");
    take();
    return uint32_t(name->value);
  }

  // call (results), name, (arguments); either list may be missing.
  void call(Instruction& i, std::string_view opcode) {
    if (opcode != "call" && opcode != "call.uni") unknown(opcode);
    auto made = std::make_unique<Call>();
    const auto list = [&](std::vector<uint32_t>& offsets) {
      if (!take_if("(")) return;
      while (!take_if(")")) {
        offsets.push_back(param_offset());
        take_if(",");
      }
    };
    if (peek() == "(") {
      list(made->results);
      expect(",");
    }
    made->callee = take();
    if (take_if(",")) list(made->arguments);
    i.control = Control::kCall;
    i.call = made.get();
    function_->calls.push_back(std::move(made));
  }

  void barrier(Instruction& i, std::string_view opcode) {
    i.control = Control::kBarrier;
    i.reduces = opcode == "bar.red.or.pred" || opcode == "barrier.sync.red.or.pred";
    if (!i.reduces && opcode != "bar.sync" && opcode != "barrier.sync") unknown(opcode);
    if (i.reduces) {
      i.dst[0] = operand(1).row;
      expect(",");
    }
    if (take() != "0") refuse("a barrier other than 0");
    if (i.reduces) {
      expect(",");
      i.src[0] = operand(1).row;
    }
    if (peek() == ",") refuse("a barrier of some of the threads");
  }

  void shuffle(Instruction& i, std::string_view opcode) {
    i.control = Control::kShuffle;
    i.run = ptx::shuffle(opcode);
    if (i.run == nullptr) unknown(opcode);
    i.dst[0] = operand(32).row;
    if (take_if("|")) i.dst[1] = operand(1).row;
    for (int n = 0; n < 4; ++n) {
      expect(",");
      i.src[n] = operand(32).row;
    }
  }

  void vote(Instruction& i) {
    i.control = Control::kShuffle;
    i.run = vote_all;
    i.dst[0] = operand(1).row;
    expect(",");
    i.src[0] = operand(1).row;
    expect(",");
    i.src[3] = operand(32).row;
  }

  void reduce_lanes_of(Instruction& i, std::string_view opcode,
                       std::span<const std::string_view> parts) {
    static const std::unordered_map<std::string_view, Atomic> operations = {
        {"add", Atomic::kAdd}, {"min", Atomic::kMin}, {"max", Atomic::kMax},
        {"and", Atomic::kAnd}, {"or", Atomic::kOr},   {"xor", Atomic::kXor}};
    const std::optional<Type> type = type_of(parts.back());
    if (parts.size() != 4 || parts[1] != "sync" || !operations.contains(parts[2]) || !type ||
        type->bits != 32 || type->kind == 'f')
      unknown(opcode);
    i.control = Control::kShuffle;
    i.run = reduce_lanes;
    i.atomic = operations.at(parts[2]);
    i.type = *type;
    i.dst[0] = operand(32).row;
    for (const int n : {0, 3}) {
      expect(",");
      i.src[n] = operand(32).row;
    }
  }

  Module& module_;
  std::vector<Token> tokens_;
  size_t at_ = 0;
  Scope globals_;
  std::vector<Scope> scopes_;
  uint32_t shared_bytes_ = 0;
  std::unordered_map<uint64_t, int32_t> constants_;
  // State of the function being parsed.
  Function* function_ = nullptr;
  uint32_t params_at_ = 0;
  uint32_t registers_ = 0;
  std::unordered_map<std::string_view, uint32_t> labels_;
  std::vector<std::pair<size_t, std::string_view>> jumps_;
};

Module::Module(std::string text) : text_(std::move(text)) { Parser(*this).run(); }

const Function* Module::kernel(std::string_view name) const {
  const auto found = functions_.find(name);
  return found == functions_.end() || !found->second->is_kernel ? nullptr : found->second.get();
}

}  // namespace ptx
