// SPDX-License-Identifier: Apache-2.0

// Finds the user's line that made a native call: in the innermost frame outside the library.
#pragma once

#include <string>
#include <vector>

#include "kernels/host/recorder.h"

namespace ringcomm::host {

// Files under a folder of `library` belong to the library, except under a folder of `programs`.
void set_library_folders(std::vector<std::string> library, std::vector<std::string> programs);

// Returns the line of the innermost frame outside the library; null: there is no such frame, or too
// many call sites are kept. The result stays valid. Called with the GIL, in a native function that
// the library's Python code calls.
const CallSite* find_call_site();

// Makes take_call_site() use this call site on the calling thread; null: take_call_site() looks for
// it in the frames. For calls that run on another thread than the user's call.
void hold_call_site(const CallSite* site);

// Sets `call_site` for the call that this thread is about to make. Leaves no Python error set.
void take_call_site();

}  // namespace ringcomm::host
