/* SPDX-License-Identifier: Apache-2.0 */

// The LL collectives: two sets of buffers used alternately, flags instead of epochs, and the
// clearing of the sets before the flags wrap around.
//
// -D: those of signal.pml; CALLS, more than there are flags. Each call is short or long, on all
// ranks alike. Packets that a long call leaves behind the packets of short calls stay there for
// long.
#include "signal.pml"

#define PACKETS 2  // per sender and set: only long calls use the second packet
#define CLEARED 0
#define packet_of(owner, parity, sender, at) \
  ((((owner) * 2 + (parity)) * WORLD + (sender)) * PACKETS + (at))

// An LL packet: its flag, and the call to which its payload belongs. One access moves both.
byte flags[WORLD * 2 * WORLD * PACKETS];
byte calls[WORLD * 2 * WORLD * PACKETS];

// The number of packets of a flag's call. The first rank to begin the call decides.
byte lengths[2];
byte begun[2];

#ifdef MUTANT_ONE_SET
#define parity_of(flag) 0
#else
#define parity_of(flag) ((flag) & 1)
#endif

// ll.h: packet_arrived
#define packet_arrived(at, flag) (flags[at] == flag)

// ll.h: begin_ll
inline begin_ll() {
#ifdef MUTANT_FLAG_ZERO_USED
  flag = (flag + 1) % FLAG_COUNT;
#else
  flag = next_flag(flag);
#endif
#ifndef MUTANT_NOT_CLEARED
  if
  :: clears_other_set(flag) ->
     for (p : 0 .. WORLD - 1) {
       for (at : 0 .. PACKETS - 1) {
#ifdef MUTANT_OWN_SET_CLEARED
         here = packet_of(me, parity_of(flag), p, at);
#else
         here = packet_of(me, parity_of(flag + 1), p, at);
#endif
         d_step { flags[here] = CLEARED; calls[here] = 0 }
       }
     }
  :: else
  fi;
#endif
  atomic {
    if
    :: begun[call & 1] != call + 1 ->
       begun[call & 1] = call + 1;
       if
       :: lengths[call & 1] = 1
       :: lengths[call & 1] = 2
       fi
    :: else
    fi;
    length = lengths[call & 1]
  }
}

// ll.h: send_payload
inline send_payload(reader) {
  for (at : 0 .. length - 1) {
    atomic {
      proceed();
      here = packet_of(reader, parity_of(flag), me, at);
      flags[here] = flag;
      calls[here] = call
    }
  }
}

// ll.h: look_around
inline look_around(sender) {
#ifndef MUTANT_LL_NOT_AWAITED
  if
  :: packet_arrived(here, flag)
  :: reason_to_give_up(!packet_arrived(here, flag), sender); give_up()
#ifdef FAULTS
  :: may_fail -> faults++; die()
  :: may_fail -> faults++; stop()
#endif
  fi
#else
  skip
#endif
}

// Loads the packets again and again until all have arrived.
// ll.h: await_packets
inline await_packets(sender) {
  for (at : 0 .. length - 1) {
    atomic {
      here = packet_of(me, parity_of(flag), sender, at);
      look_around(sender);
      assert(calls[here] == call)
    };
    atomic { proceed(); assert(packet_arrived(here, flag) && calls[here] == call) }
  }
}

proctype rank(byte me) {
  byte call, d, p, at, here, flag, length;
  for (call : 0 .. CALLS - 1) {
    may_close();
    begin_ll();
    for (d : 1 .. WORLD - 1) {
      p = rotated_peer(me, d);
      send_payload(p)
    };
    for (d : 1 .. WORLD - 1) {
      p = rotated_peer(me, d);
#ifdef MUTANT_ONE_PEER_AWAITED
      if
      :: d > 1 -> break
      :: else
      fi;
#endif
      await_packets(p)
    }
  };
closed:
  has_detached(me) = true;
gave_up:
died:
  skip
}

init {
  atomic {
    byte i;
    for (i : 0 .. WORLD - 1) { run rank(i) }
  }
}
