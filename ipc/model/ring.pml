/* The ring protocol of docs/ipc-protocol.md under total store order with explicit store buffers.
 *
 * NRINGS producers, one ring each, one consumer that sleeps over all of them (an engine over its front ends). A frame
 * is one slot, written as two words. Positions count frames. Producer 0 (-DCRASH) or the consumer (-DCCRASH) may be killed at
 * any step: what its store buffer holds still drains, as on hardware. Peer death ends the generation:
 * the survivor drains to write_position, closes, and meets the successor in a fresh segment.
 *
 * Checked: no torn, lost or overwritten frame, order kept, no lost wake-up (an invalid end state), at most one doorbell
 * per armed position, nothing of a closed generation delivered.
 *
 * Mutants, each of which must fail (ipc/model/check.py runs them):
 *   -DNO_STORELOAD       publish is a plain release store: the load of wake_at may pass it
 *   -DRELAXED_PUBLISH    write_position may become visible before the frame
 *   -DNO_RECHECK         the consumer sleeps without re-reading write_position after arming
 *   -DNO_ATTACH_BELL     no unconditional doorbell when a new generation is attached
 *   -DPRIVATE_RESTART    a successor goes on in the old segment from a private count of frames begun
 *   -DNO_READ_RELEASE    read_position is given back before the frame was read
 *   -DCLOSE_UNDRAINED    a generation is closed before what it published was read
 */
#ifndef NRINGS
#define NRINGS 2
#endif
#ifndef FRAMES
#define FRAMES 2           /* frames of ring 0 in each generation */
#endif
#define LIMIT(r) ((r) == 0 -> FRAMES : 1)   /* the other ring has one frame: enough to wake the same sleeper */
#ifndef CAPACITY
#define CAPACITY 1
#endif
#define GENERATIONS 2
#define UNARMED 15         /* wake_at of a ring whose reader never armed: no publish crosses it */

/* ---- one segment per ring and generation, index SEG(r, g) ---- */
#define SEG(r, g) ((r) * GENERATIONS + (g))
#define SLOT(r, g, p) (SEG(r, g) * CAPACITY + (p) % CAPACITY)
#define NSEG (NRINGS * GENERATIONS)
byte write_position[NSEG];
byte read_position[NSEG];
byte wake_at[NSEG] = UNARMED;
byte word_a[NSEG * CAPACITY];          /* frame p of generation g holds value VALUE(g, p) in both words */
byte word_b[NSEG * CAPACITY];
#define VALUE(g, p) (1 + (g) * 8 + (p))

/* ---- kernel objects: they survive any process ---- */
bit bell[NRINGS];                      /* pipe of each channel: readable or not (a doorbell never counts) */
byte attached[NRINGS];                 /* newest generation offered to the consumer */
bit producer_dead[NRINGS];             /* control-socket EOF of generation `attached` */
bit consumer_dead;                     /* seen by producers as EOF */
byte consumer_life;

/* ---- store buffers: one entry per word, drained by Drain at any later time ---- */
byte buffered_a[NRINGS]; bit pending_a[NRINGS];
byte buffered_b[NRINGS]; bit pending_b[NRINGS];
byte buffered_position[NRINGS]; bit pending_position[NRINGS];
byte buffer_slot[NRINGS]; byte buffer_segment[NRINGS];
byte buffered_read[NRINGS]; bit pending_read[NRINGS]; byte read_segment[NRINGS];

/* ---- ghosts ---- */
bit rung_at[NSEG * FRAMES];            /* doorbells by armed position */
byte delivered[NSEG];
bit closed[NSEG];
byte producer_done = 0;
bit consumer_done = 0;
byte crashes = 0;

#define PRODUCER_EMPTY(r) (!pending_a[r] && !pending_b[r] && !pending_position[r])
#ifdef RELAXED_PUBLISH
#define POSITION_MAY_DRAIN(r) true
#else
#define POSITION_MAY_DRAIN(r) (!pending_a[r] && !pending_b[r])
#endif

active [NRINGS] proctype Drain() {
  byte r = _pid;
end_drain:
  do
  :: atomic { pending_a[r] -> word_a[buffer_slot[r]] = buffered_a[r]; pending_a[r] = 0 }
  :: atomic { pending_b[r] -> word_b[buffer_slot[r]] = buffered_b[r]; pending_b[r] = 0 }
  :: atomic { pending_position[r] && POSITION_MAY_DRAIN(r) ->
              write_position[buffer_segment[r]] = buffered_position[r]; pending_position[r] = 0 }
  :: atomic { pending_read[r] -> read_position[read_segment[r]] = buffered_read[r]; pending_read[r] = 0 }
  od
}

#ifdef CRASH
#define MAY_DIE if :: atomic { r == 0 && crashes < 1 -> crashes++; goto dead } :: skip fi
#else
#define MAY_DIE skip
#endif

active [NRINGS] proctype Producer() {
  byte r = _pid - NRINGS; byte g = 0; byte p = 0; byte armed_at; byte begun = 0;
attach:
  atomic { attached[r] = g; producer_dead[r] = 0 };
  MAY_DIE;
#ifndef NO_ATTACH_BELL
  bell[r] = 1;
#endif
  do
  :: p >= LIMIT(r) -> break
  :: p < LIMIT(r) ->
     /* claim: wait for room, or for the end of the connection */
     if
     :: p - read_position[SEG(r, g)] < CAPACITY -> skip
     :: consumer_dead || consumer_done -> goto finished
     fi;
     begun = p + 1;
     atomic { PRODUCER_EMPTY(r) -> buffer_slot[r] = SLOT(r, g, p); buffer_segment[r] = SEG(r, g);
              buffered_a[r] = VALUE(g, p); pending_a[r] = 1 };
     MAY_DIE;
     atomic { !pending_b[r] -> buffered_b[r] = VALUE(g, p); pending_b[r] = 1 };
     MAY_DIE;
     /* publish */
#if defined(NO_STORELOAD)
     atomic { !pending_position[r] -> buffered_position[r] = p + 1; pending_position[r] = 1 };
#elif defined(RELAXED_PUBLISH)
     atomic { !pending_position[r] -> buffered_position[r] = p + 1; pending_position[r] = 1 };
     !pending_position[r];
#else
     atomic { PRODUCER_EMPTY(r) -> write_position[SEG(r, g)] = p + 1 };      /* exchange: drains, then is visible */
#endif
     MAY_DIE;
     armed_at = wake_at[SEG(r, g)];
     MAY_DIE;
     if
     :: p <= armed_at && armed_at < p + 1 ->
        atomic { assert(!rung_at[SEG(r, g) * FRAMES + armed_at]); rung_at[SEG(r, g) * FRAMES + armed_at] = 1; bell[r] = 1 }
     :: else -> skip
     fi;
     MAY_DIE;
     p++
  od;
  goto finished;
dead:
  /* what was stored still drains; the kernel reports EOF; the supervisor starts a successor */
  PRODUCER_EMPTY(r);
  producer_dead[r] = 1;
#ifdef PRIVATE_RESTART
  p = begun; producer_dead[r] = 0;
  goto attach;
#else
  g++; p = 0;
  goto attach;
#endif
finished:
  PRODUCER_EMPTY(r);
  producer_done++
}

#ifdef CCRASH
#define CONSUMER_MAY_DIE if :: atomic { consumer_life == 0 && crashes < 1 -> crashes++; goto killed } :: skip fi
#else
#define CONSUMER_MAY_DIE skip
#endif

#define ALL_DELIVERED(r) (h[r] >= LIMIT(r))
byte h[NRINGS]; byte own[NRINGS];      /* private to the consumer; global only so that `never` claims could see them */

active proctype Consumer() {
  byte r; byte a; byte b; bit busy; bit all;
loop:
  do
  :: all = 1; busy = 0; r = 0;
     do
     :: r < NRINGS ->
        /* drain what is published, then look for the end of the generation */
        do
        :: write_position[SEG(r, own[r])] > h[r] ->
#ifdef NO_READ_RELEASE
           atomic { !pending_read[r] -> buffered_read[r] = h[r] + 1; read_segment[r] = SEG(r, own[r]); pending_read[r] = 1 };
#endif
           a = word_a[SLOT(r, own[r], h[r])];
           b = word_b[SLOT(r, own[r], h[r])];
           assert(!closed[SEG(r, own[r])]);
           assert(a == VALUE(own[r], h[r]) && b == VALUE(own[r], h[r]));
           CONSUMER_MAY_DIE;
           h[r]++;
           atomic { assert(delivered[SEG(r, own[r])] == h[r] - 1); delivered[SEG(r, own[r])] = h[r] };
#ifndef NO_READ_RELEASE
           atomic { !pending_read[r] -> buffered_read[r] = h[r]; read_segment[r] = SEG(r, own[r]); pending_read[r] = 1 };
#endif
           CONSUMER_MAY_DIE;
           busy = 1
        :: else -> break
        od;
        if
        #ifdef CLOSE_UNDRAINED
        :: attached[r] > own[r] ->
#else
        :: attached[r] > own[r] && write_position[SEG(r, own[r])] == h[r] ->
#endif
           atomic { assert(write_position[SEG(r, own[r])] == h[r]); closed[SEG(r, own[r])] = 1; own[r] = attached[r]; h[r] = 0; busy = 1 }
        :: else -> skip
        fi;
        if :: !ALL_DELIVERED(r) -> all = 0 :: else -> skip fi;
        r++
     :: else -> break
     od;
     if :: all -> break :: else -> skip fi;
     if :: busy -> goto loop :: else -> skip fi;
     /* arm every ring, re-read every ring, sleep only if all are empty */
     r = 0;
     do
     :: r < NRINGS ->
        atomic { !pending_read[r] -> wake_at[SEG(r, own[r])] = h[r] };          /* exchange: drains, then is visible */
        CONSUMER_MAY_DIE;
#ifndef NO_RECHECK
        if :: write_position[SEG(r, own[r])] > h[r] -> busy = 1 :: else -> skip fi;
#endif
        r++
     :: else -> break
     od;
     if :: busy -> goto loop :: else -> skip fi;
     CONSUMER_MAY_DIE;
#if NRINGS == 1
     if
     :: bell[0] -> bell[0] = 0
     fi
#else
     if
     :: bell[0] -> bell[0] = 0
     :: bell[1] -> bell[1] = 0
     fi
#endif
  od;
  goto ended;
killed:
  /* a killed consumer ends every generation; producers see EOF and stop; its successor gets new segments (not modelled
     further: they start empty, which is the initial state of this model) */
  consumer_life = 1;
  consumer_dead = 1;
ended:
  consumer_done = 1
}
