// Layout of the memory that C++ and Python share; every field is declared once. The structures below
// are generated from these lists, and layout.py parses the lists. Each field is a 64-bit integer.

#pragma once

#include "shared.h"

// The state of gloo_messages.cpp.
// backward_thread: the thread in a backward pass, whose all-reduces are compared with known messages
// broadcast_thread: the thread in `_broadcast_coalesced`, whose broadcasts are compared
// paused: known messages are only counted
// off: nothing is recorded, and no kernel in Python is called
// launched: number of messages launched through the ring
// buckets: number of all-reduces among them
// taken: number of launched messages that the writer has read or skipped
#define DDLTRACE_CONTROL(FIELD) \
  FIELD(backward_thread) FIELD(broadcast_thread) FIELD(paused) FIELD(off) FIELD(launched) \
  FIELD(buckets) FIELD(taken)

// The times of a message. The first slots belong to the messages in the ring.
// waited: whether `ended_ns` is the end of the job's wait
#define DDLTRACE_SLOT(FIELD) FIELD(owner) FIELD(began_ns) FIELD(ended_ns) FIELD(state) FIELD(waited)

// A message in the ring: the values that differ between messages of one pattern.
// what: a `What` of gloo_messages.cpp, or, from `kFirst` on, the number of its pattern
// number: number among the collectives of its group
// bytes: size of the input
// root: rank of the root or the peer
// id: id assigned by Python; `kOfCpp` or `kOfPython` until then
// passed: if the next launch for this slot used another slot: the number of that launch plus one
#define DDLTRACE_MESSAGE(FIELD) \
  FIELD(what) FIELD(enqueue_ns) FIELD(number) FIELD(bytes) FIELD(out_bytes) FIELD(root) FIELD(id) \
  FIELD(passed)

// A launch that Python offers to C++: a thread writes it before the call and reads it afterwards.
// state: `kNothing` or another of these; after the launch: the negated launch time
// waited_once: whether the message ends only when the holder of its handle has waited for it
// bytes: size of the input, or of the only tensors if there is no separate output
// address: address of the elements of the input; 0 if there are several tensors, or none
// storage: start address of the storage of the input
// place: slot in the ring; -1 if the message is not recorded
#define DDLTRACE_OFFER(FIELD) \
  FIELD(state) FIELD(waited_once) FIELD(bytes) FIELD(out_bytes) FIELD(address) FIELD(storage) \
  FIELD(place)

// The state of gradients.cpp.
// written: number of gradients recorded
// missed: number of gradients lost because the ring was full
// paused: nothing is recorded
// newest_ns: when the newest gradient became ready
#define DDLTRACE_GRADIENT_CONTROL(FIELD) \
  FIELD(written) FIELD(missed) FIELD(paused) FIELD(newest_ns)

// A gradient that became ready: an instant, as a row of `Recorder.flat`.
// site: the site of the leaf; `kNone` if the row is not written yet or has been read
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

// The layout as compiled, which layout.py compares with the layout that it parsed from this file.
constexpr const char* kLayout =
    "CONTROL " DDLTRACE_CONTROL(DDLTRACE_NAME)
    "SLOT " DDLTRACE_SLOT(DDLTRACE_NAME)
    "MESSAGE " DDLTRACE_MESSAGE(DDLTRACE_NAME)
    "OFFER " DDLTRACE_OFFER(DDLTRACE_NAME)
    "GRADIENT_CONTROL " DDLTRACE_GRADIENT_CONTROL(DDLTRACE_NAME)
    "GRADIENT " DDLTRACE_GRADIENT(DDLTRACE_NAME);

} // namespace ddltrace
