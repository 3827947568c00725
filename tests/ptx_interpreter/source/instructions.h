// SPDX-License-Identifier: Apache-2.0

// The instructions that the interpreter knows, and their effects on the lanes.
#pragma once

#include <optional>

#include "tests/ptx_interpreter/source/module.h"

namespace ptx {

// The handler of an instruction that computes registers from registers, such as "add.s64", or
// nullptr. It reads src[0] and so on, and writes dst[0].
Handler arithmetic(std::string_view opcode);

// The handlers of other instructions; each reads the fields of the instruction listed with it.
void load(Warp& warp, const Instruction& i, Mask mask);   // dst[count], src[0] + offset
void store(Warp& warp, const Instruction& i, Mask mask);  // src[0] + offset, src[1..count]
void update(Warp& warp, const Instruction& i,
            Mask mask);  // dst[0], src[0] + offset, src[1], src[2]
void load_matrices(Warp& warp, const Instruction& i, Mask mask);  // dst[4], src[0] + offset
void fence(Warp& warp, const Instruction& i, Mask mask);
void fence_sc(Warp& warp, const Instruction& i, Mask mask);
void fence_alias(Warp& warp, const Instruction& i, Mask mask);
// The handler of an access to a multicast address, or nullptr. A load uses dst[4], src[0] + offset;
// a store src[0] + offset, src[1..4].
Handler multicast(std::string_view opcode);
void pack(Warp& warp, const Instruction& i, Mask mask);    // dst[0], src[count] of type.bits
void unpack(Warp& warp, const Instruction& i, Mask mask);  // dst[count] of type.bits, src[0]
Handler shuffle(std::string_view opcode);  // dst[0], dst[1] or none, src[4]; nullptr: not known
void reduce_lanes(Warp& warp, const Instruction& i, Mask mask);  // dst[0], src[0], mask src[3]
void vote_all(Warp& warp, const Instruction& i, Mask mask);      // the same, of predicates

// The handler of a mov from a special register, such as "%tid.x", or nullptr.
Handler special_register(std::string_view name);

}  // namespace ptx
