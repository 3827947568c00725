// The owner of one rank's end of a communicator: its region of the heap, the view that the
// templates work on, and one method per collective. All methods block; calls from several threads
// queue up.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/host/heap.h"
#include "kernels/host/ops.h"
#include "kernels/host/team.h"
#include "ringcomm/all_reduce.h"
#include "ringcomm/exchange.h"

namespace ringcomm::host {

struct CommConfig {
  int rank, world;
  int slots;               // a power of two, at least 2
  uint32_t segment_bytes;  // a multiple of 64
  uint64_t timeout_ns;
};

struct PeerAddress {
  std::shared_ptr<const void> owner;  // keeps the peer's heap mapped
  char* heap_base;                    // as mapped here
  uint64_t region_offset;
  int pid;  // 0: a thread of this process
};

// What a reduction needs beside its buffers.
struct Reduction {
  DType dtype;
  RedOp op;
  double factor;
  Algorithm algorithm;
};

// Where the fault of this communicator began, and what the rank that saw it left behind.
struct FaultReport {
  Fault fault;
  std::string reason;
};

class Comm {
 public:
  Comm(std::shared_ptr<Heap> heap, const CommConfig& config);
  ~Comm();
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  uint64_t region_offset() const { return region_; }
  uint64_t region_bytes() const { return layout_.region_bytes(); }
  // Peers know this region from here on; it returns to the heap only with their farewells.
  void connect(const std::vector<PeerAddress>& peers);
  // All peers are connected: from here on this rank may write into their regions.
  void activate() { connected_ = true; }
  void close();

  Status all_reduce(const char* in, char* out, uint64_t elems, const Reduction& r);
  Status reduce(const char* in, char* out, uint64_t elems, const Reduction& r, int root);
  Status reduce_scatter(const char* in, char* out, uint64_t out_elems, const Reduction& r);
  Status reduce_scatter_list(const std::vector<Span>& in, char* out, const Reduction& r);
  Status all_gather(const char* in, char* out, uint64_t in_bytes, DType dtype, Algorithm algorithm);
  Status all_gather_list(const char* in, const std::vector<Span>& out, DType dtype);
  Status broadcast(char* buffer, uint64_t bytes, DType dtype, int root);
  Status gather(const char* in, uint64_t bytes, const std::vector<Span>& out, DType dtype,
                int root);
  Status scatter(const std::vector<Span>& in, char* out, uint64_t bytes, DType dtype, int root);
  Status all_to_all(const std::vector<Span>& in, const std::vector<Span>& out, DType dtype);
  Status barrier();

  void abort(const std::string& reason);
  bool aborted() const;
  bool faulted(FaultReport* report) const;  // false: no fault
  void set_timeout_ns(uint64_t timeout_ns) { view_.timeout_ns = timeout_ns; }
  uint64_t timeout_ns() const { return view_.timeout_ns; }

  const View& view() const { return view_; }
  const Waiter& waiter() const { return waiter_; }
  bool connected() const { return connected_; }

 private:
  using E = Endpoint<SoloTeam, HostOps>;
  template <class Body>
  Status run(CallId id, double factor, ReduceFn fn, uint64_t total_bytes, Body body);
  void say_farewell();

  std::shared_ptr<Heap> heap_;
  Layout layout_;
  uint64_t region_;
  std::vector<char*> regions_, heaps_;
  std::vector<int> pids_;
  std::vector<std::shared_ptr<const void>> owners_;
  std::vector<PeerState> in_;
  std::vector<const void*> sources_;
  std::vector<double> factors_;
  CallHeader mine_{};
  Waiter waiter_;
  StorePath store_path_;
  View view_;
  std::mutex mutex_;
  bool connected_ = false;
};

// The staging segment that suits a world, if the user names none.
uint32_t default_segment_bytes(int world);

}  // namespace ringcomm::host
