// Records Gloo's messages in C++: their times, messages launched by C++, and launches by Python.
//
// Times. PyTorch reports every Gloo message to its RecordFunction callbacks: `before` when one of
// Gloo's threads starts the message, `end` when the message is complete. The callbacks below only
// store the two times: they take no lock, do not enter the interpreter and wake no tracer thread.
// They identify the message by thread-local debug information, which PyTorch passes from the
// launching thread to the thread that runs the message.
//
// The callbacks are installed in the launching thread for the duration of the launch; the message
// keeps them. A global callback would be simpler, but PyTorch copies the list of global callbacks
// under a lock whenever one of Gloo's threads takes over the state of a thread. If that list is not
// empty, the copy allocates memory, which blocks while another thread forks: in the child, the lock
// is held by a thread that does not exist, and the first backward pass hangs.
//
// Messages launched by C++. DistributedDataParallel launches the same few messages in every step,
// from C++. A call to Python for each of them costs more than the rest of the recording, because the
// code is no longer in a cache. Therefore, a kernel right above the Python kernel writes the values
// that are specific to a known message to a ring; the writer thread adds the others later. A message
// is known once Python has recorded it and registered it here. All others are passed on to Python.
//
// Launches by Python. For a Python kernel, PyTorch converts all arguments to Python objects and back
// for the kernel below, which costs more than the recording itself. Therefore, the tracer's wrapper
// of a ProcessGroup method offers the launch beforehand and adds the description of the message
// afterwards. The kernels here do the rest: they launch the message and record its launch time, its
// size and the address of its elements.
//
// Called by gloo_times.py, known_messages.py and interpose/c10d/python_launches.py.

#include "layout.h"

#include <ATen/core/stack.h>
#include <ATen/record_function.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/library.h>

#include <pthread.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

namespace {

using ddltrace::Control;
using ddltrace::Message;
using ddltrace::now_ns;
using ddltrace::Offer;
using ddltrace::Shared;
using ddltrace::Slot;

constexpr int64_t kRingSize = 1 << 12;
constexpr int64_t kNumSlots = 1 << 14;
constexpr int64_t kMaxKnown = 1 << 10;
constexpr int64_t kMaxGroups = 64;
constexpr int64_t kMostPassed = kRingSize / 2;

enum State : int64_t { kOpen = 0, kOk = 1, kFailed = 2, kGone = 3 };

// State of a message in the ring: `what` is one of these, or, from kFirst on, the pattern of the
// message. "Under way": the writer has read the message, and it is not complete.
enum What : int64_t { kFree = 0, kLaunching = 1, kLeftOut = 2, kUnderWay = 3, kFirst = 4 };
constexpr int64_t kOfCpp = -1; // C++ has launched it
constexpr int64_t kOfPython = -2; // Python will number it

Control control;
Shared collectives[kMaxGroups]; // number of collectives of each group so far
std::atomic<int64_t> num_groups{0}; // used places of `collectives`
Slot slots[kRingSize + kNumSlots];
Message ring[kRingSize];

std::atomic<int64_t> launches{0};

// Accompanies a message from its launch to its end; PyTorch destroys it with the message.
class Launch : public c10::DebugInfoBase {
 public:
  Launch(int64_t slot, bool waited_once)
      : slot_(slots[slot]), number_(++launches), waited_once_(waited_once) {
    slot_.began_ns = 0;
    slot_.ended_ns = 0;
    slot_.waited = 0;
    slot_.state = kOpen;
    slot_.owner = number_;
  }

  ~Launch() override {
    // The end of the message will not be reported any more.
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
    // A failed message ends inside the handler of its exception.
    if (std::current_exception()) {
      slot_.state = kFailed;
    } else if (!waited_once_) {
      slot_.state = kOk;
    }
  }

 private:
  // If this message is not followed, the slot may belong to another message by now.
  bool owns() const {
    return slot_.owner.load() == number_;
  }

  Slot& slot_;
  int64_t number_;
  bool waited_once_; // ends when the holder of its handle has waited for it; other messages may end earlier
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

// Of this thread: the number of nested launches, and the callbacks for them.
thread_local int depth = 0;
thread_local at::CallbackHandle listener{0};

void push(int64_t slot, bool waited_once) {
  c10::ThreadLocalDebugInfo::_push(
      c10::DebugInfoKind::TEST_INFO, std::make_shared<Launch>(slot, waited_once));
}

void pop() {
  c10::ThreadLocalDebugInfo::_pop(c10::DebugInfoKind::TEST_INFO);
}

// Assigns the next launches of this thread to the message of a slot. Returns whether it succeeded.
bool begin_launch(int64_t slot, bool waited_once) {
  try {
    push(slot, waited_once);
  } catch (...) {
    return false;
  }
  if (depth == 0) {
    try {
      listener = at::addThreadLocalCallback(at::RecordFunctionCallback(on_begin, on_end)
                                                .scopes({at::RecordScope::USER_SCOPE}));
    } catch (...) {
      pop();
      return false;
    }
  }
  ++depth;
  return true;
}

// Ends the launch.
void end_launch() {
  try {
    pop();
    if (--depth == 0) {
      at::removeCallback(listener);
    }
  } catch (...) {
  }
}

enum class Kind { kBucket, kBroadcast };

// A message of one dense tensor on the CPU. A bucket is identified by its memory, which the reducer
// keeps from step to step. The tensors of `_broadcast_coalesced` are allocated in each call, so any
// memory matches.
struct Call {
  Kind kind;
  const void* group;
  c10::ScalarType dtype;
  const c10::StorageImpl* storage;
  int64_t offset;
  int64_t bytes;
  int64_t root;

  bool same_as(const Call& other) const {
    return kind == other.kind && group == other.group && dtype == other.dtype &&
        (kind == Kind::kBroadcast ||
         (storage == other.storage && offset == other.offset && bytes == other.bytes));
  }
};

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

struct Known {
  Known(const Call& call, WeakStorage storage, int64_t group, int64_t what)
      : call(call), storage(std::move(storage)), group(group), what(what) {}

  const Call call;
  // While this reference exists, no other storage can have the same address.
  const WeakStorage storage;
  const int64_t group;
  const int64_t what;
  std::atomic<bool> active{false}; // until then, the message is passed on to Python
};

// Append-only. Threads that hold the interpreter lock append; any thread reads.
std::array<std::optional<Known>, kMaxKnown> known;
std::atomic<int64_t> num_known{0};
std::atomic<int64_t> num_forgotten{0};

// Messages have the same order in every step, so the search begins after the last match.
const Known* find(const Call& call) {
  thread_local int64_t last = 0;
  const int64_t first = num_forgotten.load(), count = num_known.load() - first;
  for (int64_t i = 1; i <= count; ++i) {
    const int64_t place = first + (last + i) % count;
    if (known[place]->active.load() && known[place]->call.same_as(call)) {
      last = place - first;
      return &*known[place];
    }
  }
  return nullptr;
}

// The call that this thread is passing on to Python, which may register it or query it.
struct Passing {
  const Call& call;
  WeakStorage storage;
  const Known* message;
};
thread_local const Passing* passing = nullptr;

// Whether a tensor is dense, on the CPU, and owns its memory.
bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cpu() && tensor.layout() == c10::kStrided &&
      tensor.has_storage() && !tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

std::optional<Call> read(const c10::OperatorHandle& op, torch::jit::Stack& stack, Kind kind) {
  const size_t count = op.schema().arguments().size();
  const c10::IValue& tensors = torch::jit::peek(stack, 0, count);
  const c10::IValue& group = torch::jit::peek(stack, 1, count);
  if (!tensors.isTensorList() || !group.isObject()) {
    return std::nullopt;
  }
  const auto list = tensors.toTensorList();
  if (list.size() != 1) {
    return std::nullopt;
  }
  const at::Tensor tensor = list.get(0);
  if (!is_plain(tensor)) {
    return std::nullopt;
  }
  return Call{
      kind,
      group.toObjectRef().getSlot(0).toCapsule().get(),
      tensor.scalar_type(),
      tensor.storage().unsafeGetStorageImpl(),
      tensor.storage_offset(),
      static_cast<int64_t>(tensor.nbytes()),
      kind == Kind::kBroadcast ? torch::jit::peek(stack, 2, count).toInt() : -1};
}

// The number of the next launch whose slot in the ring is free; -1 if there is none. Slots are skipped
// if the writer has read their message and the message stays in flight; a slot is not skipped again
// before the writer has seen the first skip.
int64_t next_free(int64_t number) {
  const int64_t end = std::min(number + kMostPassed, control.taken.load() + kRingSize);
  for (; number < end; ++number) {
    const int64_t what = ring[number % kRingSize].what.load();
    if (what != kUnderWay) {
      return what == kFree ? number : -1;
    }
  }
  return -1;
}

// Records a message that is launched now. Returns its slot in the ring; -1 if there is none.
int64_t claim(int64_t enqueue_ns, int64_t bytes, int64_t out_bytes, int64_t id) {
  int64_t first = control.launched.load();
  int64_t position;
  do {
    position = next_free(first);
    if (position < 0) {
      return -1;
    }
  } while (!control.launched.compare_exchange_weak(first, position + 1));
  for (int64_t passed = first; passed < position; ++passed) {
    ring[passed % kRingSize].passed = passed + 1;
  }
  Message& noted = ring[position % kRingSize];
  noted.enqueue_ns = enqueue_ns;
  noted.bytes = bytes;
  noted.out_bytes = out_bytes;
  noted.id = id;
  noted.what = kLaunching; // last: the writer checks how long this state persists
  return position % kRingSize;
}

using Keys = c10::DispatchKeySet;
constexpr Keys kPython(Keys::FULL_AFTER, c10::DispatchKey::ADInplaceOrView);
constexpr Keys kBackend(Keys::FULL_AFTER, c10::DispatchKey::BackendSelect);
// The kernels in Python are registered at a key that PyTorch never uses, and are called from here: to
// remove a kernel while another thread may be about to call it would be unsafe.
constexpr Keys kInPython(c10::DispatchKey::TESTING_ONLY_GenericMode);

// Whether the Python kernel is next in the dispatch order and can be bypassed. Otherwise another kernel
// must see the call first: a dispatch mode of the job, or the resolution of a conjugated view.
bool kernel_is_next(Keys keys) {
  return (keys & kPython).highestPriorityTypeId() == c10::DispatchKey::BackendSelect;
}

// The groups of which a collective passed the gates, in their places of `collectives`. No references: a
// weak one would keep the group's destructor from running. Python forgets all of them when the job
// destroys a group, because another one may get its address.
std::atomic<const void*> seen_groups[kMaxGroups];
std::mutex adding_group;

// The place of a group; -1 if there are too many.
int64_t place_of(const void* group) {
  for (int64_t i = 0; i < num_groups.load(); ++i) {
    if (seen_groups[i].load() == group) {
      return i;
    }
  }
  const std::lock_guard<std::mutex> lock(adding_group);
  const int64_t count = num_groups.load();
  for (int64_t i = 0; i < count; ++i) {
    if (seen_groups[i].load() == group) {
      return i;
    }
  }
  if (count == kMaxGroups) {
    return -1;
  }
  seen_groups[count] = group;
  num_groups = count + 1;
  return count;
}

// The place of the group of a call: of the first argument that is an object; -1 if there is none.
int64_t place_of(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const size_t count = op.schema().arguments().size();
  for (size_t i = 0; i < count; ++i) {
    const c10::IValue& value = torch::jit::peek(stack, i, count);
    if (value.isObject()) {
      return place_of(value.toObjectRef().getSlot(0).toCapsule().get());
    }
  }
  return -1;
}

// The place of the group whose kernel in Python this thread calls; -1 outside of such a call.
thread_local int64_t gated = -1;

// Calls the kernel in Python, or, while nothing is recorded, the backend. Collectives are counted in
// both cases, by whoever launches them, so that their numbers agree on all ranks: one rank may be
// switched on before the last message of a step is launched, and another one after.
template <bool is_collective>
void gate(const c10::OperatorHandle& op, Keys keys, torch::jit::Stack* stack) {
  const Keys below = keys & kBackend;
  const bool off = control.off.load();
  int64_t place = -1;
  if (is_collective && !keys.has(c10::DispatchKey::Meta)) {
    try {
      place = place_of(op, *stack);
    } catch (...) {
    }
  }
  if (off) {
    op.redispatchBoxed(below, stack);
    if (place >= 0) {
      ++collectives[place];
    }
    return;
  }
  struct Restore {
    const int64_t former = gated;
    ~Restore() {
      gated = former;
    }
  } restore;
  gated = place;
  op.redispatchBoxed(kInPython | below, stack);
}

// Launches the message of a slot in the ring. If the launch fails, the message is dropped. Returns
// false if the launch could not begin.
bool launch_as(
    int64_t place,
    bool waited_once,
    const c10::OperatorHandle& op,
    Keys keys,
    torch::jit::Stack* stack) {
  if (!begin_launch(place, waited_once)) {
    ring[place].what = kLeftOut;
    return false;
  }
  try {
    op.redispatchBoxed(keys & kBackend, stack);
  } catch (...) {
    end_launch();
    ring[place].what = kLeftOut;
    throw;
  }
  end_launch();
  return true;
}

// Launches a known message; returns false if Python has to launch it.
bool launch(
    const Known& message,
    const c10::OperatorHandle& op,
    Keys keys,
    torch::jit::Stack* stack,
    const Call& call) {
  if (control.paused.load()) {
    op.redispatchBoxed(keys & kBackend, stack);
    ++collectives[message.group];
    return true;
  }
  const int64_t place = claim(now_ns(), call.bytes, call.bytes, kOfCpp);
  if (place < 0 || !launch_as(place, /*waited_once=*/false, op, keys, stack)) {
    return false;
  }
  Message& noted = ring[place];
  noted.root = call.root;
  noted.number = collectives[message.group]++;
  noted.what = message.what;
  if (call.kind == Kind::kBucket) {
    ++control.buckets;
  }
  return true;
}

constexpr int64_t kOnOffer = 0;
constexpr int64_t kNothing = -1;
constexpr int64_t kUnrecorded = -2; // only bypasses the Python kernel

// Nothing is offered.
constexpr Offer no_offer() {
  Offer offer;
  offer.state = kNothing;
  offer.place = -1;
  return offer;
}

// A launch of this thread for Python. Python reads this memory instead of querying each tensor.
thread_local Offer offered = no_offer();

bool is_offered() {
  return offered.state == kOnOffer || offered.state == kUnrecorded;
}

// Of one argument: its tensors, and the bytes of their elements.
struct Extent {
  const at::Tensor* first = nullptr;
  int64_t count = 0;
  int64_t bytes = 0;
};

// Adds the tensors of a tensor, a list or a list of lists; returns false if one is not plain.
bool add(Extent& extent, const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!is_plain(tensor)) {
      return false;
    }
    extent.first = extent.count++ == 0 ? &tensor : extent.first;
    extent.bytes += static_cast<int64_t>(tensor.nbytes());
    return true;
  }
  for (const c10::IValue& inner : value.toListRef()) {
    if (!add(extent, inner)) {
      return false;
    }
  }
  return true;
}

// Records the offered launch. The arguments of the operators are one or two tensor arguments, of which
// the last is the input, followed by the group.
bool measure(Offer& offer, const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const size_t count = op.schema().arguments().size();
  const size_t with_tensors = torch::jit::peek(stack, 1, count).isObject() ? 1 : 2;
  Extent extent;
  for (size_t i = 0; i < with_tensors; ++i) {
    extent = Extent{};
    if (!add(extent, torch::jit::peek(stack, i, count))) {
      return false;
    }
    if (i == 0) {
      offer.out_bytes = extent.bytes;
    }
  }
  offer.bytes = extent.bytes;
  const bool is_one = extent.count == 1;
  offer.address = is_one ? reinterpret_cast<int64_t>(extent.first->const_data_ptr()) : 0;
  offer.storage = is_one ? reinterpret_cast<int64_t>(extent.first->storage().data()) : 0;
  return true;
}

// Launches the message that Python has offered; returns false if there is none.
bool launch_offered(const c10::OperatorHandle& op, Keys keys, torch::jit::Stack* stack) {
  if (!is_offered()) {
    return false;
  }
  const int64_t state = std::exchange(offered.state, kNothing);
  const int64_t now = now_ns();
  if (!kernel_is_next(keys)) {
    return false;
  }
  try {
    if (!measure(offered, op, *stack)) {
      return false;
    }
  } catch (...) {
    return false;
  }
  if (state == kUnrecorded) {
    offered.place = -1;
    offered.state = -now;
    op.redispatchBoxed(keys & kBackend, stack);
    return true;
  }
  // For a message with a slot in the ring, Python adds the other values after the launch.
  const int64_t place = claim(now, offered.bytes, offered.out_bytes, kOfPython);
  if (place < 0) {
    return false;
  }
  offered.place = place;
  offered.state = -now;
  if (!launch_as(place, offered.waited_once != 0, op, keys, stack)) {
    offered.state = kNothing;
    return false;
  }
  return true;
}

void kernel_of_python(const c10::OperatorHandle& op, Keys keys, torch::jit::Stack* stack) {
  if (!launch_offered(op, keys, stack)) {
    op.redispatchBoxed(keys & kPython, stack);
  }
}

// Whether the message of a functional collective will be plain and have a slot. Complex tensors are
// sent as real tensors with twice as many elements. If another thread takes the last slot in the
// meantime, the Python kernel records the message, but without a link to its result.
bool will_be_launched(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const c10::IValue& value = torch::jit::peek(stack, 0, op.schema().arguments().size());
  return value.isTensor() && is_plain(value.toTensor()) && !value.toTensor().is_complex() &&
      (offered.state == kUnrecorded || next_free(control.launched.load()) >= 0);
}

// If the Python caller itself records the launch or the wait, no Python kernel has to see it. If a
// Python kernel has to see the call, it must also see the launches below.
void kernel_of_functional(const c10::OperatorHandle& op, Keys keys, torch::jit::Stack* stack) {
  if (!is_offered()) {
    op.redispatchBoxed(keys & kPython, stack);
  } else if (kernel_is_next(keys) && will_be_launched(op, *stack)) {
    op.redispatchBoxed(keys & kBackend, stack);
  } else {
    offered.state = kNothing;
    op.redispatchBoxed(keys & kPython, stack);
  }
}

// The functional collectives that Python offers, and the wait for them.
constexpr const char* kFunctional[] = {
    "all_reduce",
    "all_reduce_",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "broadcast",
    "broadcast_",
    "wait_tensor",
};

// The other operators that Python offers.
constexpr const char* kOffered[] = {
    "reduce_",
    "allgather_",
    "_allgather_base_",
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
    "gather_",
    "scatter_",
    "alltoall_",
    "alltoall_base_",
    "barrier",
    "send",
    "recv_",
};

template <Kind kind>
void kernel(const c10::OperatorHandle& op, Keys keys, torch::jit::Stack* stack) {
  if (launch_offered(op, keys, stack)) {
    return;
  }
  const Shared& thread =
      kind == Kind::kBucket ? control.backward_thread : control.broadcast_thread;
  if (thread.load() != static_cast<int64_t>(pthread_self()) || !kernel_is_next(keys)) {
    op.redispatchBoxed(keys & kPython, stack);
    return;
  }
  std::optional<Call> call;
  try {
    call = read(op, *stack, kind);
  } catch (...) {
  }
  if (!call) {
    op.redispatchBoxed(keys & kPython, stack);
    return;
  }
  const Known* message = find(*call);
  if (message != nullptr && launch(*message, op, keys, stack, *call)) {
    return;
  }
  struct Restore {
    const Passing* former = passing;
    ~Restore() {
      passing = former;
    }
  } restore;
  const at::Tensor tensor = torch::jit::peek(*stack, 0, op.schema().arguments().size())
                                .toTensorList()
                                .get(0);
  const Passing now{*call, tensor.storage().getWeakStorageImpl(), message};
  passing = &now;
  op.redispatchBoxed(keys & kPython, stack);
}

} // namespace

extern "C" {

// The layout of the shared memory.
const char* ddltrace_layout() {
  return ddltrace::kLayout;
}

// The memory shared with Python, and the number of 64-bit integers of each part.
void ddltrace_memory(void* pieces[4], int64_t lengths[4]) {
  constexpr int64_t kInteger = sizeof(int64_t);
  pieces[0] = &control;
  lengths[0] = sizeof(control) / kInteger;
  pieces[1] = slots;
  lengths[1] = sizeof(slots) / kInteger;
  pieces[2] = ring;
  lengths[2] = sizeof(ring) / kInteger;
  pieces[3] = collectives;
  lengths[3] = sizeof(collectives) / kInteger;
}

int ddltrace_begin_launch(int64_t slot, int64_t waited_once) {
  return begin_launch(slot, waited_once != 0);
}

void ddltrace_end_launch() {
  end_launch();
}

// The memory in which this thread offers launches and reads their results, and its number of 64-bit
// integers. A function call for each launch would take longer.
void* ddltrace_offered(int64_t* length) {
  *length = sizeof(offered) / sizeof(int64_t);
  return &offered;
}

// Registers the kernels, which see all launches from now on. Returns whether it succeeded.
int ddltrace_see_launches() {
  try {
    // Never destroyed: it is unsafe to unregister kernels at exit while messages are in flight.
    auto* library = new torch::Library(
        torch::Library::IMPL, "c10d", c10::DispatchKey::ADInplaceOrView, __FILE__, __LINE__);
    library->impl(
        "allreduce_", torch::CppFunction::makeFromBoxedFunction<&kernel<Kind::kBucket>>());
    library->impl(
        "broadcast_", torch::CppFunction::makeFromBoxedFunction<&kernel<Kind::kBroadcast>>());
    for (const char* name : kOffered) {
      library->impl(name, torch::CppFunction::makeFromBoxedFunction<&kernel_of_python>());
    }
    auto* functional = new torch::Library(
        torch::Library::IMPL,
        "_c10d_functional",
        c10::DispatchKey::ADInplaceOrView,
        __FILE__,
        __LINE__);
    for (const char* name : kFunctional) {
      functional->impl(
          name, torch::CppFunction::makeFromBoxedFunction<&kernel_of_functional>());
    }
    return 1;
  } catch (...) {
    return 0;
  }
}

// Calls the kernel in Python of an operator only while something is recorded. Returns whether it
// succeeded; otherwise, that kernel has to be registered at BackendSelect.
int ddltrace_gate(const char* library, const char* name, int64_t is_collective) {
  try {
    auto* gates = new torch::Library(
        torch::Library::IMPL, library, c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
    if (is_collective != 0) {
      gates->impl(name, torch::CppFunction::makeFromBoxedFunction<&gate<true>>());
    } else {
      gates->impl(name, torch::CppFunction::makeFromBoxedFunction<&gate<false>>());
    }
    return 1;
  } catch (...) {
    return 0;
  }
}

// The pattern of the message that this thread is passing on to Python; 0: unknown, -1: no message.
int64_t ddltrace_passing() {
  if (passing == nullptr) {
    return -1;
  }
  return passing->message == nullptr ? 0 : passing->message->what;
}

// Registers that message and all similar ones as known. Returns its index; -1 if there are too many.
int64_t ddltrace_make_known(int64_t group, int64_t what) {
  const int64_t place = num_known.load();
  if (passing == nullptr || place == kMaxKnown) {
    return -1;
  }
  known[place].emplace(passing->call, passing->storage, group, what);
  num_known = place + 1;
  return place;
}

// Activates a known message: it is no longer passed on to Python.
void ddltrace_activate(int64_t place) {
  known[place]->active = true;
}

// Forgets all known messages.
void ddltrace_forget() {
  num_forgotten = num_known.load();
}

// The place in `collectives` of the group whose kernel in Python this thread calls; -1 if there is none.
int64_t ddltrace_gated() {
  return gated;
}

// Forgets which group has which place.
void ddltrace_forget_groups() {
  for (auto& group : seen_groups) {
    group = nullptr;
  }
}

// A place in `collectives` for a group that no gate has seen; -1 if there is none.
int64_t ddltrace_add_counter() {
  const std::lock_guard<std::mutex> lock(adding_group);
  const int64_t count = num_groups.load();
  if (count == kMaxGroups) {
    return -1;
  }
  num_groups = count + 1;
  return count;
}

// The next number for a collective that Python records.
int64_t ddltrace_next_collective(int64_t group) {
  return collectives[group]++;
}

} // extern "C"
