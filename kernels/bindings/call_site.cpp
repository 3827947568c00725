// SPDX-License-Identifier: Apache-2.0

#include "kernels/bindings/call_site.h"

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <utility>

namespace nb = nanobind;

namespace ringcomm::host {
namespace {

// The limit of the table of code objects. The table keeps them alive, so that no new code object
// gets the address of one of them. A program that creates no code as it runs stays below this
// limit; a full table is cleared.
constexpr size_t kMaxCodes = 1 << 14;
constexpr size_t kNearCodes = 64;
// Call sites are kept forever, since unfinished records point to them. A program that generates
// lines without end, each in a new file, gets no call sites beyond this number (11 MiB).
constexpr size_t kMaxSites = 1 << 16;

struct Code {
  bool library;
  std::string file;
  int last_instruction = -1;
  const CallSite* last_site = nullptr;
  std::unordered_map<int, const CallSite*> sites;  // [instruction]
};

// Used only with the GIL held. (A free-threaded interpreter turns the GIL on for this module, since
// the module does not declare that it needs none.) Never destroyed: threads may still run at exit.
struct Known {
  std::vector<std::string> library, programs;
  std::unordered_map<PyObject*, std::unique_ptr<Code>> codes;
  std::pair<PyObject*, Code*> near[kNearCodes] = {};
  std::unordered_map<std::string, std::unique_ptr<CallSite>> texts;
  PyObject *get_frame, *one, *last_instruction, *back;
};

Known& known() {
  static Known* const k = [] {
    auto* made = new Known;
    made->get_frame = PySys_GetObject("_getframe");
    Py_XINCREF(made->get_frame);
    made->one = PyLong_FromLong(1);
    // Frame attributes, which are read by name: the stable ABI has no functions for them.
    made->last_instruction = PyUnicode_InternFromString("f_lasti");
    made->back = PyUnicode_InternFromString("f_back");
    return made;
  }();
  return *k;
}

thread_local const CallSite* held = nullptr;

bool lies_in(const std::string& file, const std::vector<std::string>& folders) {
  return std::any_of(folders.begin(), folders.end(),
                     [&](const std::string& folder) { return file.rfind(folder, 0) == 0; });
}

const CallSite* interned(const std::string& file, int line) {
  std::string text = file + ':' + std::to_string(line);
  constexpr size_t most = CallSite::kBytes - 1;
  if (text.size() > most) {
    size_t begin = text.size() - most + 3;
    while (begin < text.size() && (text[begin] & 0xc0) == 0x80) ++begin;  // whole characters
    text = "..." + text.substr(begin);
  }
  auto& texts = known().texts;
  const auto found = texts.find(text);
  if (found != texts.end()) return found->second.get();
  if (texts.size() >= kMaxSites) return nullptr;
  auto site = std::make_unique<CallSite>();
  std::memcpy(site->text, text.data(), text.size());
  site->words = uint32_t(text.size() / 8 + 1);
  return texts.emplace(std::move(text), std::move(site)).first->second.get();
}

std::string file_of(PyObject* code) {
  const nb::object name = nb::steal(PyObject_GetAttrString(code, "co_filename"));
  PyObject* bytes = name ? PyUnicode_EncodeFSDefault(name.ptr()) : nullptr;
  const nb::object owned = nb::steal(bytes);
  return bytes == nullptr ? "" : std::string(PyBytes_AsString(bytes));
}

Code& code_of(PyObject* code) {
  Known& k = known();
  auto& near = k.near[reinterpret_cast<uintptr_t>(code) / 64 % kNearCodes];
  if (near.first == code) return *near.second;
  auto found = k.codes.find(code);
  if (found == k.codes.end()) {
    if (k.codes.size() >= kMaxCodes) {
      std::fill(std::begin(k.near), std::end(k.near), std::pair<PyObject*, Code*>{});
      for (auto& [object, unused] : std::exchange(k.codes, {})) Py_DECREF(object);
    }
    auto made = std::make_unique<Code>();
    made->file = file_of(code);
    made->library = lies_in(made->file, k.library) && !lies_in(made->file, k.programs);
    Py_INCREF(code);
    found = k.codes.emplace(code, std::move(made)).first;
  }
  near = {code, found->second.get()};
  return *found->second;
}

int instruction_of(PyObject* frame) {
  const nb::object last = nb::steal(PyObject_GetAttr(frame, known().last_instruction));
  return last ? int(PyLong_AsLong(last.ptr())) : -1;
}

const CallSite* site_in(Code& code, PyObject* frame) {
  // The key is the instruction, since finding the line number is slow in long functions.
  const int at = instruction_of(frame);
  if (at >= 0 && at == code.last_instruction) return code.last_site;
  const CallSite*& site = code.sites[at];
  if (site == nullptr)
    site = interned(code.file, PyFrame_GetLineNumber(reinterpret_cast<PyFrameObject*>(frame)));
  code.last_instruction = at;
  code.last_site = site;
  return site;
}

}  // namespace

void set_library_folders(std::vector<std::string> library, std::vector<std::string> programs) {
  known().library = std::move(library);
  known().programs = std::move(programs);
}

const CallSite* find_call_site() {
  Known& k = known();
  // Skips frame 0, which is the library's: creating its object costs time.
  PyObject* arguments[] = {k.one};
  nb::object frame = nb::steal(PyObject_Vectorcall(k.get_frame, arguments, 1, nullptr));
  const CallSite* site = nullptr;
  while (frame) {
    const nb::object code = nb::steal(reinterpret_cast<PyObject*>(
        PyFrame_GetCode(reinterpret_cast<PyFrameObject*>(frame.ptr()))));
    Code& of = code_of(code.ptr());
    if (!of.library) {
      site = site_in(of, frame.ptr());
      break;
    }
    frame = nb::steal(PyObject_GetAttr(frame.ptr(), k.back));
    if (frame.is_none()) break;
  }
  PyErr_Clear();
  return site;
}

void hold_call_site(const CallSite* site) { held = site; }

void take_call_site() { call_site = held != nullptr ? held : find_call_site(); }

}  // namespace ringcomm::host
