// The memory that C++ and Python share: every field, once. The structures below are made of these
// lists, and layout.py reads the lists from this file. Each field is an integer of 64 bits.

#pragma once

#include "shared.h"

// The state of gloo_messages.cpp.
// backward_thread: whose all-reduces may be known: it runs a backward pass
// broadcast_thread: the same of broadcasts: it is inside of `_broadcast_coalesced`
// paused: known messages are counted only
// launched: messages of the ring so far
// buckets: all-reduces among them
// taken: how many of the launched the writer has taken up, or passed over
#define DDLTRACE_CONTROL(FIELD) \
  FIELD(backward_thread) FIELD(broadcast_thread) FIELD(paused) FIELD(launched) FIELD(buckets) \
  FIELD(taken)

// The times of a message. The first slots are those of the ring's messages.
#define DDLTRACE_SLOT(FIELD) FIELD(owner) FIELD(began_ns) FIELD(ended_ns) FIELD(state)

// A message in the ring: the values in which it differs from others of its pattern.
// what: a `What` of gloo_messages.cpp, or from `kFirst` on the number of its pattern
// number: among the collectives of its group
// bytes: of the input
// root: or the other side
// id: as Python numbers it; `kOfCpp` or `kOfPython` while it has none
// passed: if the launch that came next here took another place: the number of that launch, and one
#define DDLTRACE_MESSAGE(FIELD) \
  FIELD(what) FIELD(enqueue_ns) FIELD(number) FIELD(bytes) FIELD(out_bytes) FIELD(root) FIELD(id) \
  FIELD(passed)

// A launch that Python offers: a thread writes here before it calls, and reads here after that.
// state: `kNothing` or another of these; once launched: when, as a negative number
// waited_once: whether it is over only when its holder has waited for it
// bytes: of its input; of its only tensors if it has no separate output
// address: where the elements of its input lie; 0 if it has several tensors, or none
// storage: where the memory of that begins
// place: in the ring; -1 if it is unrecorded
#define DDLTRACE_OFFER(FIELD) \
  FIELD(state) FIELD(waited_once) FIELD(bytes) FIELD(out_bytes) FIELD(address) FIELD(storage) \
  FIELD(place)

// The state of gradients.cpp.
// written: gradients so far
// missed: those that found no room
// paused: nothing is noted
// newest_ns: when the newest became ready
#define DDLTRACE_GRADIENT_CONTROL(FIELD) \
  FIELD(written) FIELD(missed) FIELD(paused) FIELD(newest_ns)

// A gradient that became ready, as a row of `Recorder.flat`: an instant.
// site: the leaf's; `kNone`: it is not written yet, or has been read
#define DDLTRACE_GRADIENT(FIELD) FIELD(site) FIELD(start_ns) FIELD(end_ns) FIELD(thread)

namespace ddltrace {

#define DDLTRACE_SHARED(name) Shared name;
#define DDLTRACE_PLAIN(name) int64_t name = 0;
#define DDLTRACE_NAME(name) #name " "

struct Control { DDLTRACE_CONTROL(DDLTRACE_SHARED) };
struct Slot { DDLTRACE_SLOT(DDLTRACE_SHARED) };
struct Message { DDLTRACE_MESSAGE(DDLTRACE_SHARED) };
struct Offer { DDLTRACE_OFFER(DDLTRACE_PLAIN) };
struct GradientControl { DDLTRACE_GRADIENT_CONTROL(DDLTRACE_SHARED) };
struct Gradient { DDLTRACE_GRADIENT(DDLTRACE_SHARED) };

// What layout.py compares with what it has read from this file.
constexpr const char* kLayout =
    "CONTROL " DDLTRACE_CONTROL(DDLTRACE_NAME)
    "SLOT " DDLTRACE_SLOT(DDLTRACE_NAME)
    "MESSAGE " DDLTRACE_MESSAGE(DDLTRACE_NAME)
    "OFFER " DDLTRACE_OFFER(DDLTRACE_NAME)
    "GRADIENT_CONTROL " DDLTRACE_GRADIENT_CONTROL(DDLTRACE_NAME)
    "GRADIENT " DDLTRACE_GRADIENT(DDLTRACE_NAME);

} // namespace ddltrace
