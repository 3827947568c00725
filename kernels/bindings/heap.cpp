// SPDX-License-Identifier: Apache-2.0

// Binds Heap, Allocation and PeerHeap of ringcomm._native.
#include "kernels/bindings/module.h"
#include "kernels/host/numa.h"

namespace nb = nanobind;

namespace ringcomm::host {
namespace {

// An allocation of the heap. Its memory returns to the heap with the last reference; a tensor's
// storage holds a reference.
struct Allocation {
  std::shared_ptr<Heap> heap;
  uint64_t offset, bytes;
  Allocation(std::shared_ptr<Heap> h, uint64_t size)
      : heap(std::move(h)), offset(heap->allocate(size, Heap::Purpose::kTensor)), bytes(size) {}
  ~Allocation() { heap->free(offset); }
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
};

int allocation_getbuffer(PyObject* self, Py_buffer* view, int flags) {
  Allocation* allocation = nb::inst_ptr<Allocation>(nb::handle(self));
  return PyBuffer_FillInfo(view, self, allocation->heap->base() + allocation->offset,
                           Py_ssize_t(allocation->bytes), 0, flags);
}

PyType_Slot kAllocationSlots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(allocation_getbuffer)},
                                  {0, nullptr}};

}  // namespace

void bind_heap(nb::module_& m) {
  nb::class_<Heap>(
      m, "Heap",
      "This process's symmetric heap: shared memory without a name, reclaimed by the kernel.\n\n"
      "`directory` \"\" takes anonymous memory (memfd); else an unnamed file in that tmpfs or\n"
      "hugetlbfs. Memory is committed as it is allocated, as far as the machine and the\n"
      "`memory_groups` (folders of control groups) have it. Pages come from the NUMA `nodes` "
      "while\n"
      "these have free ones, or without `nodes` from the node of the thread that touches them\n"
      "first. Raises OSError (errno, text naming need and free).")
      .def(
          "__init__",
          [](Heap* self, uint64_t capacity_bytes, const std::string& directory,
             std::vector<std::string> memory_groups, std::vector<int> nodes) {
            for (const int node : nodes)
              if (node < 0) throw nb::value_error("the number of a node must be at least 0");
            try {
              new (self)
                  Heap(capacity_bytes, directory, std::move(memory_groups), std::move(nodes));
            } catch (const HeapError& e) {
              raise_os_error(e);
            }
          },
          nb::arg("capacity_bytes"), nb::arg("directory") = "",
          nb::arg("memory_groups") = std::vector<std::string>(),
          nb::arg("nodes") = std::vector<int>())
      .def(
          "allocate",
          [](const std::shared_ptr<Heap>& self, uint64_t size_bytes) {
            try {
              return std::make_shared<Allocation>(self, size_bytes);
            } catch (const HeapError& e) {
              raise_os_error(e);
            }
          },
          nb::arg("size_bytes"),
          "Raises OSError: ENOBUFS when the heap is full, ENOMEM memory, ENOSPC the folder.")
      .def(
          "contains",
          [](const Heap& h, uintptr_t ptr, uint64_t bytes) { return h.contains(at(ptr), bytes); },
          nb::arg("ptr"), nb::arg("size_bytes"))
      .def_prop_ro("fd", &Heap::fd)
      .def_prop_ro("base_ptr", [](const Heap& h) { return reinterpret_cast<uintptr_t>(h.base()); })
      .def_prop_ro("capacity_bytes", &Heap::capacity_bytes)
      .def_prop_ro("committed_bytes", &Heap::committed_bytes)
      .def_prop_ro("used_bytes", &Heap::used_bytes)
      .def_prop_ro("largest_free_bytes", &Heap::largest_free_bytes)
      .def_prop_ro("token", &Heap::token)
      .def_prop_ro("huge_bytes", &Heap::huge_bytes,
                   "Bytes of the heap that huge pages back so far.")
      .def_prop_ro("nodes", &Heap::nodes, "The NUMA nodes that were asked for.")
      .def_prop_ro("placement_error", &Heap::placement_error,
                   "The errno with which the kernel refused them; 0: it did not.");
  m.def("has_memory_policy", &has_memory_policy,
        "True if somebody has given this thread a memory policy (numactl).");
  nb::class_<Allocation>(
      m, "Allocation", nb::type_slots(kAllocationSlots),
      "Memory of the heap, as a writable buffer. It returns to the heap with the last reference.")
      .def_prop_ro("ptr",
                   [](const Allocation& a) {
                     return reinterpret_cast<uintptr_t>(a.heap->base() + a.offset);
                   })
      .def_ro("offset_bytes", &Allocation::offset)
      .def_ro("size_bytes", &Allocation::bytes);
  nb::class_<Process>(
      m, "Process",
      "A process that runs, to ask later whether it has ended; one of pid 0 never does.\n\n"
      "Asking it costs a descriptor, or else a look into /proc. Raises OSError when there is none\n"
      "left.")
      .def(
          "__init__",
          [](Process* self, int pid, bool with_descriptor) {
            try {
              new (self) Process(pid, with_descriptor);
            } catch (const HeapError& e) {
              raise_os_error(e);
            }
          },
          nb::arg("pid"), nb::arg("with_descriptor") = true)
      .def("has_ended", &Process::has_ended,
           "True also while it is a zombie, and when another process has its pid.");
  nb::class_<Mapping>(m, "PeerHeap", "A peer process's heap, mapped here until the object dies.")
      .def_static(
          "open",
          [](int pid, int fd, uint64_t capacity_bytes, uint64_t token) {
            try {
              return std::shared_ptr<Mapping>(map_peer_heap(pid, fd, capacity_bytes, token));
            } catch (const HeapError& e) {
              raise_os_error(e);
            }
          },
          nb::arg("pid"), nb::arg("fd"), nb::arg("capacity_bytes"), nb::arg("token"),
          "Opens /proc/<pid>/fd/<fd>. Raises OSError when it cannot, or when it is another heap.")
      .def_prop_ro("base_ptr",
                   [](const Mapping& h) { return reinterpret_cast<uintptr_t>(h.base()); })
      .def_prop_ro("capacity_bytes", &Mapping::bytes);
}

}  // namespace ringcomm::host
