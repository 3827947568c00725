// SPDX-License-Identifier: Apache-2.0

// Hooks that run on this thread in the middle of a record: while it is stored or loaded.
#pragma once

inline thread_local void (*in_store)() = nullptr;
inline thread_local void (*in_load)() = nullptr;
