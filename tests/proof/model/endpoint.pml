/* SPDX-License-Identifier: Apache-2.0 */

// The endpoint of the one-shot collectives: items in slots, lent buffers, and the operations on
// them. Part of one_shot.pml, which defines the calls.

// The item that a slot holds: never 0.
#if COMMUNICATORS > 1
#define FIRST_ITEM (communicator * CALLS * SEGMENTS)
#else
#define FIRST_ITEM 0
#endif
#define ITEM(call, segment) (1 + FIRST_ITEM + (call) * SEGMENTS + (segment))
#define pair_slot(sender, reader, epoch) \
  pair_slots[((REGION * WORLD + (sender)) * WORLD + (reader)) * SLOTS + slot((epoch) % EPOCHS)]
#define shared_slot(sender, epoch) \
  shared_slots[(REGION * WORLD + (sender)) * SLOTS + slot((epoch) % EPOCHS)]
byte pair_slots[COMMUNICATORS * WORLD * WORLD * SLOTS];
byte shared_slots[COMMUNICATORS * WORLD * SLOTS];

// The call whose header is next to a signal, numbered by the call's first item.
#define header(stream, reader, sender, epoch) \
  headers[link(stream, reader, sender) * SLOTS + slot((epoch) % EPOCHS)]
byte headers[LINKS * SLOTS];

inline write_header(stream, reader, segment) {
  if
  :: segment == 0 -> header(stream, reader, me, sent_to(stream, reader) + 1) = ITEM(call, 0)
  :: else
  fi
}

// A rank's user buffer: 1 + the call that lends it, or 0 for any data. One hop lends none.
byte lenders;
#define lends(rank) (kind != ONE_HOP && ((lenders >> (rank)) & 1))
byte buffers[COMMUNICATORS * WORLD];
#define buffer(rank) buffers[REGION * WORLD + (rank)]

// A lent chunk is one item, but the results of an all-reduce are shared piece by piece.
#define one_item(stream, rank) (lends(rank) && (kind != ALL_REDUCE || stream == PAIR))
#define items_on(stream, rank) (one_item(stream, rank) -> 1 : SEGMENTS)

// All-reduce works in place: marks the segments of a lent buffer's chunks that are results by now.
#if may_be(ALL_REDUCE) && defined(LEND)
bool results[COMMUNICATORS * WORLD * WORLD * SEGMENTS];
#define result(rank, chunk, segment) \
  results[((REGION * WORLD + (rank)) * WORLD + (chunk)) * SEGMENTS + (segment)]
#define reads_wrong_half(stream, sender, segment) \
  (kind == ALL_REDUCE && ((stream == PAIR && result(sender, me, segment)) || \
                          (stream == SHARED && !result(sender, sender, segment))))
#define store_result(chunk, segment) \
  result(me, chunk, segment) = lends(me) && kind == ALL_REDUCE
#else
#define reads_wrong_half(stream, sender, segment) false
#define store_result(chunk, segment) skip
#endif

// endpoint.h: send
inline send(reader, segment) {
  if
  :: segment < items_on(PAIR, me) ->
     atomic {
       slot_is_free(PAIR, reader, segment);
#ifdef MUTANT_PUBLISHED_BEFORE_WRITTEN
       publish(PAIR, reader, sent_to(PAIR, reader) + 1 + segment)
     };
     atomic {
       write_header(PAIR, reader, segment);
       pair_slot(me, reader, sent_to(PAIR, reader) + 1 + segment) = ITEM(call, segment)
#else
       write_header(PAIR, reader, segment);
       pair_slot(me, reader, sent_to(PAIR, reader) + 1 + segment) = ITEM(call, segment);
       publish(PAIR, reader, sent_to(PAIR, reader) + 1 + segment)
#endif
     }
  :: else
  fi
}

inline read_item(stream, sender, segment) {
  if
  :: lends(sender) ->
     torn = torn || buffer(sender) != 1 + call || reads_wrong_half(stream, sender, segment)
  :: !lends(sender) && stream == PAIR ->
     assert(pair_slot(sender, me, seen_of(PAIR, sender) + 1 + segment) == ITEM(call, segment))
  :: !lends(sender) && stream == SHARED ->
     assert(shared_slot(sender, seen_of(SHARED, sender) + 1 + segment) == ITEM(call, segment))
  fi
}

// endpoint.h: arrive
inline arrive(stream, sender, segment) {
  atomic {
    if
    :: !one_item(stream, sender) || segment == 0 ->
       await_item(stream, sender, segment);
       if
       :: segment == 0 ->
          assert(header(stream, me, sender, seen_of(stream, sender) + 1) == ITEM(call, 0))
       :: else
       fi
    :: else
    fi;
    read_item(stream, sender, segment);
    assert(!(arrived & (1 << sender)));
    arrived = arrived | (1 << sender)
#ifdef MUTANT_ACKNOWLEDGED_BEFORE_READ
    ; acknowledge(stream, sender, seen_of(stream, sender) + 1 + segment)
#endif
  }
}

// endpoint.h: release
inline release(stream, sender, segment) {
  atomic {
    proceed();
    read_item(stream, sender, segment);
    if
    :: !one_item(stream, sender) ->
       acknowledge(stream, sender, seen_of(stream, sender) + 1 + segment)
    :: one_item(stream, sender) && segment + 1 == SEGMENTS ->
       acknowledge(stream, sender, seen_of(stream, sender) + 1)
    :: else
    fi
  }
}

// endpoint.h: acquire_shared
inline acquire_shared(segment) {
#ifdef MUTANT_ONE_READER_AWAITED
  p = rotated_peer(me, 1);
  atomic { slot_is_free(SHARED, p, segment) }
#else
  atomic { each_peer(slot_is_free(SHARED, p, segment)) }
#endif
}

// endpoint.h: publish_shared
inline publish_shared(segment) {
  d_step {
    each_peer(write_header(SHARED, p, segment));
    shared_slot(me, sent_to(SHARED, rotated_peer(me, 1)) + 1 + segment) = ITEM(call, segment)
  };
  each_peer(atomic { proceed(); publish(SHARED, p, sent_to(SHARED, p) + 1 + segment) })
}

#define item_waits(stream) \
  (reached(ready[link(stream, me, p)], (seen_of(stream, p) + 1) % EPOCHS) && \
   !reached(consumed[link(stream, p, me)], (seen_of(stream, p) + 1) % EPOCHS))

// An unread item before a call is the beginning of this call or of a later call, so no false
// mismatch is reported. (This step only looks, so it may look at all peers at once, at any time.)
// endpoint.h: verify_streams
inline verify_streams() {
  each_peer(d_step {
    if
    :: item_waits(PAIR) -> found = header(PAIR, me, p, seen_of(PAIR, p) + 1);
       assert(found >= ITEM(call, 0) && (found - ITEM(0, 0)) % SEGMENTS == 0)
    :: else
    fi;
    if
    :: item_waits(SHARED) -> found = header(SHARED, me, p, seen_of(SHARED, p) + 1);
       assert(found >= ITEM(call, 0) && (found - ITEM(0, 0)) % SEGMENTS == 0)
    :: else
    fi;
    found = 0
  })
}

// endpoint.h: verify_peer_buffers
inline verify_peer_buffers() {
#ifndef MUTANT_NO_LOOK_AFTER_THE_LAST_READ
  if
  :: lenders != 0 && kind != ONE_HOP ->
     each_peer(atomic {
       if
       :: aborted[p] -> give_up()
       :: else
       fi
     })
  :: else
  fi;
#endif
  assert(!torn)
}
