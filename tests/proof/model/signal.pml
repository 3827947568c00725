/* SPDX-License-Identifier: Apache-2.0 */

// The words of the signal protocol and the steps on them, shared by one_shot.pml and ring.pml.
//
// A comment `file: function` before a step names the modelled code, and the code names the step.
// Words are read and written one after the other, as release and acquire order them. An item is
// written and published in one step, since nobody may read it earlier. It is read in two steps,
// when it arrives and when it is released, so a change between the two is noticed.
//
// -D: WORLD and START, the epoch before the first item; COMMUNICATORS, which run at once, each in a
// thread of its own on every rank; FAULTS=n: up to n times a rank dies, stops for good or closes
// between two calls, or a wait for a slow rank passes its deadline; MUTANT_*: a mistake.
#include "schedule.pml"

#define PAIR 0
#define SHARED 1
#ifndef COMMUNICATORS
#define COMMUNICATORS 1
#endif
#if COMMUNICATORS == 1 || defined(MUTANT_ONE_REGION)
#define REGION 0
#else
#define REGION communicator
#endif
#if COMMUNICATORS > 1 && defined(FAULTS)
#error "the words of faults are those of one communicator"
#endif

#define LINKS (COMMUNICATORS * 2 * WORLD * WORLD)
#define link(stream, owner, peer) (((REGION * 2 + (stream)) * WORLD + (owner)) * WORLD + (peer))

byte ready[LINKS] = START;     // of `owner`, written by `peer`
byte consumed[LINKS] = START;  // of `owner`, written by `peer`
byte sent[LINKS] = START;
byte seen[LINKS] = START;

bool aborted[WORLD];
bool detached[COMMUNICATORS * WORLD];
bool dead[WORLD];
bool one_stopped;  // a rank has stopped for good
#ifdef FAULTS
byte faults;
#define may_fail (faults < FAULTS)
#define faults_happened (faults > 0)
#else
#define faults_happened false
#endif

#if WORLD == 2
#define any_aborted (aborted[0] || aborted[1])
#elif WORLD == 3
#define any_aborted (aborted[0] || aborted[1] || aborted[2])
#else
#define any_aborted (aborted[0] || aborted[1] || aborted[2] || aborted[3])
#endif

// signal.h: abort_seen
#ifdef MUTANT_NO_LOOK_AT_ABORT_WORDS
#define abort_seen() aborted[me]
#else
#define abort_seen() any_aborted
#endif

// signal.h: has_detached
#define has_detached(peer) detached[REGION * WORLD + (peer)]

// signal.h: raise_fault
inline raise_fault() {
#ifndef MUTANT_NO_ABORT_RAISED
  aborted[me] = true
#else
  skip
#endif
}

// signal.h: give_up
inline give_up() {
  raise_fault();
  goto gave_up
}

inline die() {
  dead[me] = true;
  goto died
}

// The process lives, but never takes another step.
inline stop() {
  one_stopped = true;
  goto died
}

// Events that may happen at any step.
inline proceed() {
  if
  :: true
#ifdef FAULTS
  :: may_fail -> faults++; die()
  :: may_fail -> faults++; stop()
#endif
  fi
}

// An event between two calls: the rank's user closes, whatever calls others make next.
inline may_close() {
  if
  :: true
#ifdef FAULTS
  :: may_fail -> faults++; goto closed
#endif
  fi
}

// Looks at the word again after the detach word: items published before the detach count.
#ifdef MUTANT_DETACHED_COUNTS_MORE
#define in_vain(word, want) true
#else
#define in_vain(word, want) (!reached(word, want))
#endif

// signal.h: reason_to_give_up
inline reason_to_give_up(vain, peer) {
  if
#ifndef MUTANT_NO_LOOK_AT_DETACHED
  :: vain && has_detached(peer) -> assert(faults_happened)
#endif
#ifdef FAULTS
  :: abort_seen()
#ifndef MUTANT_NO_LOOK_AT_PROCESSES
  :: vain && dead[peer]
#endif
#ifndef MUTANT_NO_DEADLINE
  :: vain && one_stopped           // the deadline: else this wait might never end
  :: vain && may_fail -> faults++  // the deadline, although the peers are only slow
#endif
#endif
  fi
}

// signal.h: await_alone
inline await_alone(word, want, peer) {
  if
  :: reached(word, want)
  :: reason_to_give_up(in_vain(word, want), peer); give_up()
#ifdef FAULTS
  :: may_fail -> faults++; die()
  :: may_fail -> faults++; stop()
#endif
  fi
}

// signal.h: publish
inline publish(stream, reader, epoch) {
  ready[link(stream, reader, me)] = (epoch) % EPOCHS
}

// signal.h: acknowledge
inline acknowledge(stream, sender, epoch) {
  consumed[link(stream, sender, me)] = (epoch) % EPOCHS
}

#define sent_to(stream, reader) sent[link(stream, me, reader)]
#define seen_of(stream, sender) seen[link(stream, me, sender)]

#if defined(MUTANT_SLOT_REUSED_EARLY)
#define NEXT 0
#elif defined(MUTANT_SLOT_AWAITED_LONGER)
#define NEXT 2
#else
#define NEXT 1
#endif

// A call compares with the word's value at its begin. The word only grows, so all that it had
// reached then it has reached now: the model only looks at the current word.
// endpoint.h: await_reader
inline await_reader(stream, reader, epoch) {
  await_alone(consumed[link(stream, me, reader)], epoch, reader)
}

// endpoint.h: slot_is_free
inline slot_is_free(stream, reader, item) {
#ifndef MUTANT_CONSUMED_NOT_AWAITED
  await_reader(stream, reader, held_before((sent_to(stream, reader) + NEXT + (item)) % EPOCHS))
#else
  skip
#endif
}

// endpoint.h: drained
inline drained(stream, reader, items_sent) {
#ifndef MUTANT_BUFFER_RETURNED_EARLY
  await_reader(stream, reader, (sent_to(stream, reader) + (items_sent)) % EPOCHS)
#else
  skip
#endif
}

// Nobody else reads the words that the next two steps change, so they are not separate steps.
// endpoint.h: commit_sent
inline commit_sent(stream, reader, items_sent) {
  sent_to(stream, reader) = (sent_to(stream, reader) + (items_sent)) % EPOCHS
}

// endpoint.h: commit_seen
inline commit_seen(stream, sender, items_seen) {
  seen_of(stream, sender) = (seen_of(stream, sender) + (items_seen)) % EPOCHS
}

#ifdef MUTANT_WRONG_EPOCH
#define FIRST 0
#else
#define FIRST 1
#endif

// The waiting half of endpoint.h's arrive().
inline await_item(stream, sender, item) {
#ifndef MUTANT_READY_NOT_AWAITED
  await_alone(ready[link(stream, me, sender)],
              (seen_of(stream, sender) + FIRST + (item)) % EPOCHS, sender)
#else
  skip
#endif
}

// Visits the peers in the code's order.
#define each_peer(visit) \
  d = 1; \
  do \
  :: d < WORLD -> p = rotated_peer(me, d); visit; d++ \
  :: else -> break \
  od
