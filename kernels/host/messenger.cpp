// SPDX-License-Identifier: Apache-2.0

#include "kernels/host/messenger.h"

#include <algorithm>
#include <cstring>

namespace ringcomm::host {
namespace {

// Epochs are compared modulo 2^32.
constexpr uint64_t kMaxMessageItems = uint64_t(1) << 31;

uint32_t items_of(const CallHeader& h, const Layout& layout) {
  const bool whole = h.heap_offset != kNotInHeap;
  return ringcomm::items_of(h.stream_bytes, whole ? kOneItem : log2_of(layout.segment_bytes));
}

}  // namespace

Messenger::Messenger(Comm& comm) : comm_(comm), peers_(size_t(comm.view().world)) {}

Messenger::~Messenger() { stop(); }

CallHeader Messenger::header_of(const Request& r, bool in_heap) const {
  const View& v = comm_.view();
  const auto collective = r.is_send ? Collective::kSend : Collective::kReceive;
  // A message's tag takes the field of a collective's root.
  const CallId id{r.number, r.bytes, collective, int(r.dtype), -1, r.tag, Algorithm::kOneShot};
  const uint64_t item_bytes = in_heap ? whole_item(r.bytes) : v.layout.segment_bytes;
  return {id,  r.bytes,   item_bytes, in_heap ? uint64_t(r.ptr - v.heaps[v.rank]) : kNotInHeap,
          1.0, kNotInHeap};
}

RequestPtr Messenger::post_send(const char* ptr, uint64_t bytes, int peer, int tag, DType dtype) {
  auto r = std::make_shared<Request>(true, const_cast<char*>(ptr), bytes, peer, tag, dtype);
  const std::lock_guard lock(mutex_);
  if (comm_.aborted() || stopping_) {
    complete(r, Status::kAborted);
    return r;
  }
  record(*r);
  peers_[size_t(peer)].sends.push_back(r);
  progress_sends(peer);
  if (!r->done()) kick();
  return r;
}

RequestPtr Messenger::post_receive(char* ptr, uint64_t bytes, int peer, int tag, DType dtype) {
  auto r = std::make_shared<Request>(false, ptr, bytes, peer, tag, dtype);
  const std::lock_guard lock(mutex_);
  if (comm_.aborted() || stopping_) {
    complete(r, Status::kAborted);
    return r;
  }
  record(*r);
  if (!match_unexpected(r)) {
    posted_.push_back(r);
    progress();
  }
  return r;
}

bool Messenger::withdraw(const RequestPtr& r) {
  const std::lock_guard lock(mutex_);
  const auto it = std::find(posted_.begin(), posted_.end(), r);
  if (it == posted_.end()) return false;
  posted_.erase(it);
  complete(r, Status::kOk);
  kick();
  return true;
}

void Messenger::record(Request& r) {
  r.number = ++messages_;
  note_look();
  r.posted_ns = looked_ns_ - unwatched_ns_;
  comm_.recorder().begin(Track::kMessages, header_of(r, false).id, r.bytes, r.peer);
}

void Messenger::complete(const RequestPtr& r, Status status) {
  r->status = status;
  const int peer = r->source >= 0 ? r->source : r->peer;
  if (r->number != 0) comm_.recorder().end(Track::kMessages, r->number, status, peer);
  r->set_done();
  changed_.notify_all();
}

bool Messenger::progress() {
  bool moved = false;
  for (int p = 0; p < comm_.view().world; ++p) {
    if (p == comm_.view().rank) continue;
    moved |= progress_sends(p);
    moved |= progress_receives(p);
  }
  return moved;
}

bool Messenger::progress_sends(int peer) {
  const View& v = comm_.view();
  PeerQueue& q = peers_[size_t(peer)];
  EpochLine* epochs = v.epochs(Stream::kMessage, 0, peer);
  // Pairs with the release in take_item() of the peer.
  const uint32_t consumed =
      load_acquire_sys(&v.signals(v.rank, Stream::kMessage, 0, peer)->consumed);
  SoloTeam team{{&comm_.waiter()}};
  bool moved = false;
  while (!q.unacknowledged.empty() && reached(consumed, q.unacknowledged.front().second)) {
    complete(q.unacknowledged.front().first, Status::kOk);
    q.unacknowledged.pop_front();
    moved = true;
  }
  while (!q.sends.empty()) {
    const RequestPtr r = q.sends.front();
    const uint32_t epoch = epochs->sent + 1;
    if (!reached(consumed, v.layout.held_before(epoch))) break;
    char* slot = v.slot(v.rank, Stream::kMessage, 0, peer, epoch);
    const bool in_heap = r->bytes >= kZeroCopyMinBytes && v.in_my_heap(r->ptr, r->bytes);
    const CallHeader header = header_of(*r, in_heap);
    if (r->next_item == 0) *v.header(peer, Stream::kMessage, 0, v.rank, epoch) = header;
    if (!in_heap) {
      const uint64_t begin = r->next_item * header.item_bytes;
      const uint64_t bytes = item_length(r->bytes, header.item_bytes, r->next_item);
      if (bytes > 0) std::memcpy(slot, r->ptr + begin, bytes);
    }
    epochs->sent = epoch;
    publish(team, v, Stream::kMessage, peer, epoch);
    moved = true;
    if (++r->next_item < items_of(header, v.layout)) continue;
    q.sends.pop_front();
    if (in_heap)
      q.unacknowledged.emplace_back(r, epoch);
    else
      complete(r, Status::kOk);
  }
  return moved;
}

RequestPtr Messenger::match_posted(int peer, int tag) {
  for (auto it = posted_.begin(); it != posted_.end(); ++it) {
    if (((*it)->peer != -1 && (*it)->peer != peer) || (*it)->tag != tag) continue;
    RequestPtr r = *it;
    posted_.erase(it);
    return r;
  }
  return nullptr;
}

bool Messenger::match_unexpected(const RequestPtr& r) {
  for (auto it = unexpected_.begin(); it != unexpected_.end(); ++it) {
    const MessagePtr m = *it;
    if ((r->peer != -1 && r->peer != m->peer) || r->tag != m->tag) continue;
    unexpected_.erase(it);
    r->next_item = m->next_item;
    if (m->next_item == m->items)
      deliver(*m, r);
    else
      m->request = r;  // still arriving: progress_receives() delivers it
    return true;
  }
  return false;
}

void Messenger::deliver(Message& m, const RequestPtr& r) {
  const bool fits = m.bytes == r->bytes && m.dtype == r->dtype;
  r->source = m.peer;
  r->message_bytes = m.bytes;
  r->message_dtype = m.dtype;
  if (fits && !m.buffer.empty()) std::memcpy(r->ptr, m.buffer.data(), m.buffer.size());
  complete(r, fits ? Status::kOk : Status::kMismatch);
}

// True if a peer's header_of() could have made this header of a message.
bool Messenger::sound(const CallHeader& h, int peer) const {
  const View& v = comm_.view();
  const bool in_heap = h.heap_offset != kNotInHeap;
  const uint64_t item_bytes = in_heap ? whole_item(h.stream_bytes) : v.layout.segment_bytes;
  if (h.id.collective != Collective::kSend || h.id.match_bytes != h.stream_bytes) return false;
  if (h.id.dtype < 0 || h.id.dtype >= int(DType::kCount) || h.item_bytes != item_bytes)
    return false;
  return in_heap ? v.in_heap_of(peer, h.heap_offset, h.stream_bytes)
                 : h.stream_bytes / item_bytes < kMaxMessageItems;
}

// Ends all requests, and leaves a fault record. Returns false, since no more data may move.
bool Messenger::fail_corrupt(const CallHeader& h, int peer) {
  const View& v = comm_.view();
  SoloTeam team{{&comm_.waiter()}};
  if (Fault* record = claim_fault(v)) {
    *record = Fault{};
    record->status = Status::kCorrupt;
    record->rank = v.rank;
    record->peer = peer;
    record->stream = Stream::kMessage;
    record->mine.id.collective = Collective::kReceive;
    record->theirs = h;
    raise_fault(team, v);
  } else {
    await_raised(team, v);
  }
  fail_all(Status::kCorrupt);
  return false;
}

// Begins the next message of `peer`, if there is one and a receive can use it.
bool Messenger::begin_message(int peer) {
  const View& v = comm_.view();
  const uint32_t first = v.epochs(Stream::kMessage, 0, peer)->seen + 1;
  CallHeader h;  // a copy: the peer may still write there
  std::memcpy(&h, v.header(v.rank, Stream::kMessage, 0, peer, first), sizeof(h));
  // Moves a message aside only if it blocks a receive whose own message comes later.
  const auto waiting = std::find_if(posted_.begin(), posted_.end(), [&](const RequestPtr& p) {
    return p->peer == -1 || p->peer == peer;
  });
  if (waiting == posted_.end()) return false;
  if (!sound(h, peer)) return fail_corrupt(h, peer);
  const RequestPtr r = match_posted(peer, h.id.root);
  auto m = std::make_shared<Message>();
  m->peer = peer;
  m->tag = h.id.root;
  m->dtype = DType(h.id.dtype);
  m->bytes = h.stream_bytes;
  m->item_bytes = h.item_bytes;
  m->items = items_of(h, v.layout);
  m->zero_copy = h.heap_offset == kNotInHeap ? nullptr : v.heaps[peer] + h.heap_offset;
  m->request = r;
  // A message that does not match its receive must be drained as well.
  const bool fits = r != nullptr && r->bytes == m->bytes && r->dtype == m->dtype;
  m->goes = r == nullptr ? Goes::kAside : fits ? Goes::kThere : Goes::kNowhere;
  if (r == nullptr) unexpected_.push_back(m);
  peers_[size_t(peer)].incoming = m;
  return true;
}

void Messenger::take_item(int peer, Message& m) {
  const View& v = comm_.view();
  EpochLine* epochs = v.epochs(Stream::kMessage, 0, peer);
  const uint32_t epoch = epochs->seen + 1;
  const uint64_t begin = m.next_item * m.item_bytes,
                 bytes = item_length(m.bytes, m.item_bytes, m.next_item);
  const char* slot = v.slot(peer, Stream::kMessage, 0, v.rank, epoch);
  const char* from = m.zero_copy != nullptr ? m.zero_copy + begin : slot;
  if (m.goes == Goes::kAside) m.buffer.insert(m.buffer.end(), from, from + bytes);
  if (m.goes == Goes::kThere && bytes > 0) std::memcpy(m.request->ptr + begin, from, bytes);
  epochs->seen = epoch;
  ++m.next_item;
  if (m.request != nullptr) m.request->next_item = m.next_item;
  SoloTeam team{{&comm_.waiter()}};
  acknowledge(team, v, Stream::kMessage, peer, epoch);
}

bool Messenger::progress_receives(int peer) {
  const View& v = comm_.view();
  PeerQueue& q = peers_[size_t(peer)];
  bool moved = false;
  for (;;) {
    // Pairs with the release in progress_sends() of the peer.
    const uint32_t ready = load_acquire_sys(&v.signals(v.rank, Stream::kMessage, 0, peer)->ready);
    const uint32_t arrived = ready - v.epochs(Stream::kMessage, 0, peer)->seen;
    // More items than slots: a sound sender waits for an acknowledgement before it sends more.
    if (int32_t(arrived) > v.layout.slots) {
      CallHeader unread{};
      unread.id.collective = Collective::kSend;
      return fail_corrupt(unread, peer);
    }
    if (int32_t(arrived) <= 0) return moved;
    if (q.incoming == nullptr && !begin_message(peer)) return moved;
    const MessagePtr m = q.incoming;
    take_item(peer, *m);
    moved = true;
    if (m->next_item < m->items) continue;
    q.incoming = nullptr;
    // Zero copy: a sender that gave up may have changed its buffer (see verify_peer_buffers()). The
    // fence of the acknowledgement separates the reads of the buffer from this read of the abort
    // word.
    const bool doubtful = m->zero_copy != nullptr && abort_seen(v);
    if (m->request != nullptr && doubtful)
      complete(m->request, Status::kAborted);
    else if (m->request != nullptr)
      deliver(*m, m->request);
  }
}

void Messenger::fail_all(Status status) {
  for (PeerQueue& q : peers_) {
    for (const RequestPtr& r : q.sends) complete(r, status);
    for (const auto& [r, epoch] : q.unacknowledged) complete(r, status);
    if (q.incoming && q.incoming->request) complete(q.incoming->request, status);
    q = PeerQueue{};
  }
  for (const RequestPtr& r : posted_) complete(r, status);
  posted_.clear();
  unexpected_.clear();
}

}  // namespace ringcomm::host
