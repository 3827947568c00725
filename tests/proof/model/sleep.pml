/* SPDX-License-Identifier: Apache-2.0 */

// The sleep of a waiter, under total store order: a store waits in its processor's buffer until it
// reaches memory, and loads overtake it. No sleep ends by itself here, so a lost wake-up is a
// deadlock. There are one sender and one reader; each sleeps on a word that the other writes.
//
// -D: ITEMS to send; START, the epoch before the first item; FENCES_FOR_ALL: a thread that goes to
// sleep has the kernel fence on all processors; MUTANT_*: a mistake.
#include "schedule.pml"

#define SENDER 0
#define READER 1

// Words by number, in memory and in the buffers: word `w` of its writer, and flag `FLAG + w` of the
// thread that sleeps on word `w`.
#define READY 0     // written by the sender
#define CONSUMED 1  // written by the reader
#define FLAG 2
byte memory[4];
#define NOTHING 255

// A buffer of two stores, the older first; a store is a word and its value.
typedef Buffer {
  byte word[2] = NOTHING;
  byte value[2]
}
Buffer buffers[2];
bool asleep[2];

#define empty(processor) (buffers[processor].word[0] == NOTHING)
#define full(processor) (buffers[processor].word[1] != NOTHING)

inline store(at, to) {
  atomic {
    !full(me);
    if
    :: empty(me) -> buffers[me].word[0] = at; buffers[me].value[0] = to
    :: else -> buffers[me].word[1] = at; buffers[me].value[1] = to
    fi
  }
}

// A processor sees its own stores. Each of these words has only one writer.
inline load(at, to) {
  to = memory[at]
}

// atomics.h: fence_seq_cst_sys
inline fence_seq_cst_sys() {
  empty(me)
}

// membarrier: the kernel interrupts the other processor, which then empties its buffer.
inline interrupt(processor) {
  d_step {
    if
    :: !empty(processor) ->
       memory[buffers[processor].word[0]] = buffers[processor].value[0];
       if
       :: full(processor) -> memory[buffers[processor].word[1]] = buffers[processor].value[1]
       :: else
       fi
    :: else
    fi;
    buffers[processor].word[0] = NOTHING;
    buffers[processor].word[1] = NOTHING;
    buffers[processor].value[0] = 0;
    buffers[processor].value[1] = 0
  }
}

// waiter.h: fence_as_writer
inline fence_as_writer() {
#ifndef FENCES_FOR_ALL
  fence_seq_cst_sys()
#else
  skip
#endif
}

// waiter.cpp: fence_as_sleeper
inline fence_as_sleeper() {
  fence_seq_cst_sys();
#if defined(FENCES_FOR_ALL) && !defined(MUTANT_FENCES_FOR_ITSELF)
  interrupt(1 - me)
#endif
}

// A processor's buffer, which the machine may empty at any time.
proctype memory_of(byte processor) {
end:
  do
  :: d_step {
       !empty(processor) ->
       memory[buffers[processor].word[0]] = buffers[processor].value[0];
       buffers[processor].word[0] = buffers[processor].word[1];
       buffers[processor].value[0] = buffers[processor].value[1];
       buffers[processor].word[1] = NOTHING;
       buffers[processor].value[1] = 0
     }
  od
}

// futex(FUTEX_WAIT): sleeps if the word in memory still has the value, in one step.
inline futex_wait(word, value) {
  atomic {
    if
#ifdef MUTANT_SLEEPS_WITHOUT_COMPARING
    :: true -> asleep[me] = true
#else
    :: memory[word] == value -> asleep[me] = true
    :: else
#endif
    fi
  };
  !asleep[me]
}

// futex(FUTEX_WAKE): the kernel fences, then looks for sleepers (Linux: kernel/futex/waitwake.c).
inline futex_wake() {
  empty(me) -> asleep[1 - me] = false
}

// signal.h: wake
inline wake(word) {
#ifndef MUTANT_NO_FENCE_OF_THE_WRITER
  fence_as_writer();
#endif
  atomic {
    load(FLAG + word, flag);
    if
    :: flag != 0 -> flag = 0; futex_wake()
    :: else
    fi
  }
}

// signal.h: publish
inline publish(epoch) {
  store(READY, epoch);
  wake(READY)
}

// signal.h: acknowledge
inline acknowledge(epoch) {
  store(CONSUMED, epoch);
  wake(CONSUMED)
}

// The part of pause() that sleeps.
// waiter.cpp: pause
inline pause(word, value) {
#ifndef MUTANT_NO_FLAG_RAISED
  store(FLAG + word, 1);
#endif
#ifndef MUTANT_NO_FENCE_OF_THE_SLEEPER
  fence_as_sleeper();
#endif
  atomic { load(word, again) };
  if
  :: again == value -> futex_wait(word, value)
  :: else
  fi;
  again = 0;
  store(FLAG + word, 0)
}

// signal.h: await_slowly
inline await_slowly(word, want) {
#ifdef MUTANT_LOADED_ONCE
  load(word, value);
#endif
  do
  :: atomic {
#ifndef MUTANT_LOADED_ONCE
       load(word, value);
#endif
       if
       :: reached(value, want) -> value = 0; break
       :: else
       fi
     };
     pause(word, value)
  od
}

proctype sender() {
  byte me = SENDER, value, again, flag, i, epoch = START;
  for (i : 1 .. ITEMS) {
    epoch = (epoch + 1) % EPOCHS;
    await_slowly(CONSUMED, (epoch + EPOCHS - SLOTS) % EPOCHS);
    publish(epoch)
  };
  await_slowly(CONSUMED, epoch)
}

proctype reader() {
  byte me = READER, value, again, flag, i, epoch = START;
  for (i : 1 .. ITEMS) {
    epoch = (epoch + 1) % EPOCHS;
    await_slowly(READY, epoch);
    acknowledge(epoch)
  }
}

init {
  atomic {
    memory[READY] = START;
    memory[CONSUMED] = START;
    run sender();
    run reader();
    run memory_of(SENDER);
    run memory_of(READER)
  }
}
