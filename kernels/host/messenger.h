// SPDX-License-Identifier: Apache-2.0

// Send and receive. Messages keep order per pair of ranks and match by tag; they keep no order with
// the collectives and never wait for them.
//
// A message is one or more items of the kMessage stream: the first carries the header (tag, size);
// the bytes go through the slots, or the receiver reads them in the sender's heap (zero copy). A
// thread that waits for a request drives all requests; a background thread drives requests for
// which no thread waits.
#pragma once

#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/host/comm.h"

namespace ringcomm::host {

struct Request {
  bool is_send;
  char* ptr;
  uint64_t bytes;
  int peer;        // -1: receive from any rank
  bool elsewhere;  // another engine may receive the message; it then calls withdraw()
  int tag;
  DType dtype;
  uint64_t posted_ns = 0;  // when it was posted, by Messenger::watched_ns()
  uint32_t next_item = 0;
  Status status = Status::kOk;
  int source = -1;             // the sender, once a receive is finished
  uint64_t message_bytes = 0;  // length of the message
  DType message_dtype = DType::kCount;
  uint64_t number = 0;  // number of the message on this rank; 0: it was never recorded
  uint32_t done_word = 0;

  Request(bool is_send, char* ptr, uint64_t bytes, int peer, int tag, DType dtype)
      : is_send(is_send),
        ptr(ptr),
        bytes(bytes),
        peer(peer < 0 ? -1 : peer),
        elsewhere(peer < -1),
        tag(tag),
        dtype(dtype) {}

  bool done() const { return load_acquire_sys(&done_word) != 0; }  // pairs with set_done()
  void set_done() { store_release_sys(&done_word, 1); }            // pairs with done()
};
using RequestPtr = std::shared_ptr<Request>;

class Messenger {
 public:
  explicit Messenger(Comm& comm);
  ~Messenger();

  RequestPtr post_send(const char* ptr, uint64_t bytes, int peer, int tag, DType dtype);
  RequestPtr post_receive(char* ptr, uint64_t bytes, int peer, int tag, DType dtype);
  // Ends a receive, with no source, unless a message has matched it. Returns true if it has ended
  // the receive.
  bool withdraw(const RequestPtr& request);
  // Makes a background thread drive the requests for which no thread waits.
  void drive_in_background();
  Status wait(const RequestPtr& request, uint64_t give_up_ns);
  bool idle();  // true if no request is under way
  void stop();  // ends the background thread; outstanding requests end as aborted

 private:
  // The destination of an arriving message: its request's memory (kThere), a buffer until a request
  // comes (kAside), or none (kNowhere).
  enum class Goes { kThere, kAside, kNowhere };
  struct Message {  // an arriving message
    int peer, tag;
    DType dtype;
    uint64_t bytes, item_bytes;
    uint32_t items, next_item = 0;
    const char* zero_copy;
    RequestPtr request;  // null: unexpected
    Goes goes;
    std::vector<char> buffer;  // grows with the bytes received: the size is only the sender's claim
  };
  using MessagePtr = std::shared_ptr<Message>;
  struct PeerQueue {
    std::deque<RequestPtr> sends;
    std::deque<std::pair<RequestPtr, uint32_t>> unacknowledged;  // zero copy: request, epoch
    MessagePtr incoming;
  };

  bool progress();
  bool progress_sends(int peer);
  bool progress_receives(int peer);
  bool begin_message(int peer);
  bool sound(const CallHeader& header, int peer) const;
  bool fail_corrupt(const CallHeader& header, int peer);
  void take_item(int peer, Message& message);
  RequestPtr match_posted(int peer, int tag);
  bool match_unexpected(const RequestPtr& request);
  void deliver(Message& message, const RequestPtr& request);
  void record(Request& request);
  void complete(const RequestPtr& request, Status status);
  void fail_all(Status status);
  bool idle_peer(int peer) const;
  void kick();
  void sleep(uint64_t timeout_ns, const uint32_t* peer_core);
  std::pair<Status, int> reason_to_end(const Request& request, uint64_t waited_ns) const;
  void look_at_clock(std::unique_lock<std::mutex>& lock, const RequestPtr& request,
                     uint64_t started_ns);
  void drive(std::unique_lock<std::mutex>& lock, const RequestPtr& request, uint64_t started_ns,
             uint64_t give_up_ns, bool in_background);
  void run_background();
  void rouse();
  RequestPtr next_outstanding();
  uint64_t watched_ns() const { return Waiter::now_ns() - unwatched_ns_; }
  void note_look();
  CallHeader header_of(const Request& request, bool in_heap) const;

  Comm& comm_;
  std::vector<PeerQueue> peers_;
  std::list<RequestPtr> posted_;      // receives that no message has matched
  std::list<MessagePtr> unexpected_;  // messages that no receive has matched, in order of arrival
  std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable to_drive_;  // wakes the background thread
  bool driving_ = false;              // true: a thread polls; other threads sleep on changed_
  uint64_t messages_ = 0;             // messages posted so far
  int looking_ = 0;                   // threads in look_at_clock() without the lock
  bool waits_told_ = false;           // true: the control page names the rank of the present wait
  int waiters_ = 0;  // threads in wait(), to which the background thread leaves the driving
  // The time of the last look at the clock, and the total time during which no thread could look.
  uint64_t looked_ns_ = 0, unwatched_ns_ = 0;
  uint32_t kick_ = 0;  // changed to wake the thread that drives
  bool background_ = false, stopping_ = false;
  bool resting_ = false;  // the background thread sleeps until it is notified of work
  bool urgent_ = false;   // the background thread drives at once, without waiting for a waiter
  std::thread thread_;
};

}  // namespace ringcomm::host
