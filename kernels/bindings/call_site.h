// The line of the user's program that made a native call: its innermost frame outside the library.
#pragma once

#include <string>
#include <vector>

#include "kernels/host/recorder.h"

namespace ringcomm::host {

// Files under a folder of `library` are the library's, unless under one of `programs`.
void set_library_folders(std::vector<std::string> library, std::vector<std::string> programs);

// With the GIL, in a function that the library's Python calls; null: no frame of the user's, or
// more call sites than are kept. Valid for good.
const CallSite* find_call_site();

// From here on take_call_site() finds this one on the calling thread; null: it looks at the frames
// again. For calls that run on another thread than the one that made them.
void hold_call_site(const CallSite* site);

// Sets `call_site` for the call that this thread is about to make. Keeps no error set.
void take_call_site();

}  // namespace ringcomm::host
