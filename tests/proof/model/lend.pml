/* SPDX-License-Identifier: Apache-2.0 */

// A lent buffer: a rank lends its buffer to a reader and gives up, while another thread of the rank
// may be about to raise the rank's abort word, or has stopped before raising it. Memory order is
// weak: a store may reach memory before earlier stores of its thread, unless it is a release or a
// fence precedes it.
//
// -D: TOTAL_STORE_ORDER, the order of x86: stores reach memory in their thread's order. MUTANT_*: a
// mistake.
#define CALLER 0  // the thread whose call lends the buffer
#define OTHER 1   // another thread of the rank: with its own message, or an abort by the user

bool ready, consumed;
bool changed;  // the buffer holds other data than the lent data
bool claimed, aborted;

// Stores that a thread has made and no other thread sees yet.
bool aborted_on_its_way[2];
bool changed_on_its_way;

// atomics.h: fence_seq_cst_sys
inline fence_seq_cst_sys() {
  !aborted_on_its_way[me]
}

// signal.h: raise_fault
inline raise_fault() {
  aborted_on_its_way[me] = true;
#ifndef MUTANT_NO_FENCE_AFTER_THE_WORD
  fence_seq_cst_sys()
#endif
}

// signal.h: claim_fault
inline claim_fault() {
  atomic { taken = claimed; claimed = true }
}

// If another thread has taken the record, that thread raises the word, though perhaps later. On a
// host it may stop before that: after a while the waiter raises the word itself.
// signal.h: await_raised
inline await_raised() {
#ifndef MUTANT_WORD_OF_THE_OTHER_NOT_AWAITED
  if
  :: aborted
#ifndef MUTANT_STOPPED_OWNER_AWAITED
  :: aborted_on_its_way[me] = true
#endif
  fi;
#ifndef MUTANT_NO_FENCE_AFTER_THE_WAIT
  fence_seq_cst_sys()
#endif
#else
  skip
#endif
}

// signal.h: give_up
inline give_up() {
  claim_fault();
  if
  :: !taken -> raise_fault()
  :: else -> await_raised()  // at the end of the call
  fi
}

proctype memory_of(byte thread) {
end:
  do
  :: d_step { aborted_on_its_way[thread] -> aborted = true; aborted_on_its_way[thread] = false }
  :: d_step {
#ifdef TOTAL_STORE_ORDER
       thread == CALLER && changed_on_its_way && !aborted_on_its_way[CALLER] ->
#else
       thread == CALLER && changed_on_its_way ->
#endif
       changed = true;
       changed_on_its_way = false
     }
  od
}

// A wait may give up at any time; a message may also end because its rank closes.
// endpoint.h: drained
inline drained() {
  if
  :: consumed
  :: give_up()
#ifdef MUTANT_CLOSED_WITHOUT_A_WORD
  :: true
#endif
  fi
}

proctype caller() {
  byte me = CALLER;
  bool taken;
  ready = true;
  drained();
  changed_on_its_way = true  // the buffer belongs to its user again
}

proctype other() {
  byte me = OTHER;
  bool taken;
  if
  :: true
  :: give_up()
  :: claim_fault()  // and stops
  fi
}

inline read_buffer() {
  torn = changed;
  torn = torn || changed
}

// endpoint.h: verify_peer_buffers
inline verify_peer_buffers() {
  given_up = aborted
}

proctype reader() {
  bool torn, given_up;
  ready;
#ifdef MUTANT_LOOKED_BEFORE_THE_LAST_READ
  verify_peer_buffers();
  read_buffer();
  consumed = true;
#else
  read_buffer();
  consumed = true;
  verify_peer_buffers();  // its fence keeps the look at the word behind the reads
#endif
  assert(given_up || !torn)
}

init {
  atomic {
    run caller();
    run other();
    run reader();
    run memory_of(CALLER);
    run memory_of(OTHER)
  }
}
