// SPDX-License-Identifier: Apache-2.0

// What happens in the middle of a record, on this thread: while it is stored, while it is loaded.
#pragma once

inline thread_local void (*in_store)() = nullptr;
inline thread_local void (*in_load)() = nullptr;
