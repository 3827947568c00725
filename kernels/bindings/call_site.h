// Where in the user's Python a native call comes from: the innermost frame outside the library.
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

// What take_call_site() finds on this thread from here on; null: the frames count again. For calls
// that run elsewhere than where they were made.
void hold_call_site(const CallSite* site);

// Sets `call_site` for the call that this thread is about to make. Keeps no error set.
void take_call_site();

}  // namespace ringcomm::host
