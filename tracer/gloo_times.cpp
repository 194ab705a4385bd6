// Notes when Gloo begins and ends a message, on Gloo's own thread.
//
// PyTorch reports every message of Gloo to its RecordFunction callbacks: `before` when one of
// Gloo's threads takes the message up, `end` when it is done. The callbacks below store the two
// times and nothing else: no lock, no interpreter, no thread of ours to be woken. Which message
// it is they learn from a piece of thread-local debug information, which PyTorch carries from
// the thread that launches a message to the thread that runs it.
//
// The callbacks are those of the launching thread, for as long as it launches; the message keeps
// them. A global one would be simpler, but PyTorch copies the list of the global ones under a
// lock, whenever Gloo's threads take over a thread's state. If that list is not empty the copy
// allocates memory, which waits while another thread forks: the child is born with the lock
// held by nobody, and hangs in its first backward pass.
//
// Compiled once for each PyTorch by gloo_times_build.py and called by gloo_times.py.

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <exception>
#include <memory>

namespace {

constexpr int64_t kNumSlots = 1 << 16;

enum State : int64_t { kOpen = 0, kOk = 1, kFailed = 2, kGone = 3 };

// What gloo_times.py reads: four integers for each slot.
struct Slot {
  std::atomic<int64_t> owner;
  std::atomic<int64_t> began_ns;
  std::atomic<int64_t> ended_ns;
  std::atomic<int64_t> state;
};
static_assert(sizeof(Slot) == 4 * sizeof(int64_t), "read as plain integers");

Slot slots[kNumSlots];
std::atomic<int64_t> launches{0};

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

// Goes with a message from its launch to its end; PyTorch drops it with the message.
class Launch : public c10::DebugInfoBase {
 public:
  explicit Launch(int64_t slot) : slot_(slots[slot]), number_(++launches) {
    slot_.began_ns = 0;
    slot_.ended_ns = 0;
    slot_.state = kOpen;
    slot_.owner = number_;
  }

  ~Launch() override {
    // Nobody will tell its end any more.
    if (owns()) {
      int64_t open = kOpen;
      slot_.state.compare_exchange_strong(open, kGone);
    }
  }

  void begin() {
    int64_t unset = 0;
    if (owns()) {
      slot_.began_ns.compare_exchange_strong(unset, now_ns());
    }
  }

  void end() {
    if (!owns() || slot_.state.load() != kOpen) {
      return;
    }
    slot_.ended_ns = now_ns();
    // A message that failed is ended inside the handler of its exception.
    slot_.state = std::current_exception() ? kFailed : kOk;
  }

 private:
  // The slot can have been given to another message, if this one was not to be followed.
  bool owns() const {
    return slot_.owner.load() == number_;
  }

  Slot& slot_;
  int64_t number_;
};

constexpr const char kGloo[] = "gloo:";

Launch* launch_of(const at::RecordFunction& function) {
  if (std::strncmp(function.name(), kGloo, sizeof(kGloo) - 1) != 0) {
    return nullptr;
  }
  return dynamic_cast<Launch*>(
      c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::TEST_INFO));
}

std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& function) {
  if (Launch* launch = launch_of(function)) {
    launch->begin();
  }
  return nullptr;
}

void on_end(const at::RecordFunction& function, at::ObserverContext*) {
  if (Launch* launch = launch_of(function)) {
    launch->end();
  }
}

// Of this thread: how many launches are under way within each other, and what listens to them.
thread_local int depth = 0;
thread_local at::CallbackHandle listener{0};

void push(int64_t slot) {
  c10::ThreadLocalDebugInfo::_push(
      c10::DebugInfoKind::TEST_INFO, std::make_shared<Launch>(slot));
}

void pop() {
  c10::ThreadLocalDebugInfo::_pop(c10::DebugInfoKind::TEST_INFO);
}

} // namespace

extern "C" {

// The slots, and how many they are.
int64_t* ddltrace_slots(int64_t* num_slots) {
  *num_slots = kNumSlots;
  return reinterpret_cast<int64_t*>(slots);
}

// What this thread launches from now on is the message of a slot. Returns whether it is.
int ddltrace_begin_launch(int64_t slot) {
  try {
    push(slot & (kNumSlots - 1));
  } catch (...) {
    return 0;
  }
  if (depth == 0) {
    try {
      listener = at::addThreadLocalCallback(at::RecordFunctionCallback(on_begin, on_end)
                                                .scopes({at::RecordScope::USER_SCOPE}));
    } catch (...) {
      pop();
      return 0;
    }
  }
  ++depth;
  return 1;
}

// The launch is over.
void ddltrace_end_launch() {
  try {
    pop();
    if (--depth == 0) {
      at::removeCallback(listener);
    }
  } catch (...) {
  }
}

} // extern "C"
