// Records when a device executes the work that the job launches, without the interpreter.
//
// A mark is an event in a stream of the job. Here marks are recorded, paired to intervals, and
// resolved to times of the host's clock; the hooks of gradients (gradients.cpp) record theirs without
// entering Python. The functions of the CUDA runtime and PyTorch's function for the current stream are
// passed in as pointers, so that the library compiles without CUDA and fits every build of PyTorch.
//
// Called by timing/device_marks.py.

#include "shared.h"

#include <cmath>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

// As in device_marks.py. Every function returns 0 if it succeeded.
struct Runtime {
  int (*create)(void** event, unsigned flags);
  int (*record)(void* event, void* stream);
  int (*query)(void* event);
  int (*elapsed)(float* milliseconds, void* start, void* end);
  int (*capturing)(void* stream, int* status);
  int (*current_device)(int* device);
  int (*clear_error)(); // may be null: the driver keeps no error
  int (*current_stream)(int32_t device, void** stream);
};

constexpr int kNotReady = 600; // cudaErrorNotReady, hipErrorNotReady, CUDA_ERROR_NOT_READY
constexpr size_t kMaxPending = 1 << 16;

// Results in place of a mark or a time.
constexpr int64_t kNone = -1;
constexpr int64_t kError = -2;
constexpr int64_t kFull = -3;

struct Mark {
  void* event; // lasts until the process ends; used again by later marks
  int64_t stream = 0; // number of the stream
  int64_t uses = 0; // how many intervals it begins or ends that are not resolved
  int64_t passed_ns = 0; // when the device passed it; 0 if that was not asked yet
};

struct Interval {
  int64_t site, start, end;
};

// The device's clock is that of the host at this event.
struct Anchor {
  void* event;
  int64_t host_ns;
};

// Guards everything below except `device`.
std::mutex lock;
Runtime runtime;
std::deque<Mark> marks; // never moved
std::vector<int64_t> unused;
std::deque<Interval> pending;
std::unordered_map<void*, int64_t> streams;
int64_t num_recorded = 0;
int64_t gradient_start = kNone; // where the device's work for the next gradient begins
std::atomic<int64_t> device{kNone}; // index of the timed device
std::atomic<int64_t> error{0}; // of the last call that failed

int64_t fail(int status) {
  if (runtime.clear_error != nullptr) {
    runtime.clear_error(); // the job would take it for an error of its own next call
  }
  error = status;
  return kError;
}

void release(int64_t number) {
  if (--marks[number].uses == 0) {
    unused.push_back(number);
  }
}

// Records a mark into the current stream. `free`: the stream is known not to be captured.
int64_t record(bool free) {
  const int64_t index = device.load();
  void* stream = nullptr;
  int status = 0;
  if (index < 0 || runtime.current_stream(static_cast<int32_t>(index), &stream) != 0) {
    return kNone;
  }
  if (!free && (runtime.capturing(stream, &status) != 0 || status != 0)) {
    if (status == 0 && runtime.clear_error != nullptr) {
      runtime.clear_error(); // another thread captures, and the stream would take part
    }
    return kNone;
  }
  if (unused.empty()) {
    int now = -1;
    // An event belongs to the device that is current at its creation.
    if (runtime.current_device(&now) != 0 || now != index) {
      return kNone;
    }
    void* event = nullptr;
    if ((status = runtime.create(&event, 0)) != 0) {
      return fail(status);
    }
    marks.push_back(Mark{event});
    unused.push_back(static_cast<int64_t>(marks.size()) - 1);
  }
  const int64_t number = unused.back();
  Mark& mark = marks[number];
  if ((status = runtime.record(mark.event, stream)) != 0) {
    return fail(status);
  }
  unused.pop_back();
  mark.stream = streams.emplace(stream, static_cast<int64_t>(streams.size())).first->second;
  mark.uses = 1;
  mark.passed_ns = 0;
  ++num_recorded;
  return number;
}

// Takes one use of each mark. Returns whether the interval will be resolved.
int64_t add_interval(int64_t site, int64_t start, int64_t end) {
  const bool is_full = pending.size() >= kMaxPending;
  if (is_full || marks[start].stream != marks[end].stream) {
    release(start);
    release(end);
    return is_full ? kFull : 0;
  }
  pending.push_back(Interval{site, start, end});
  return 1;
}

// When the device passed a mark; `kNone` if it has not.
int64_t passed(Mark& mark, const Anchor& anchor) {
  if (mark.passed_ns != 0) {
    return mark.passed_ns;
  }
  const int status = runtime.query(mark.event);
  if (status == kNotReady) {
    if (runtime.clear_error != nullptr) {
      runtime.clear_error();
    }
    return kNone;
  }
  float milliseconds = 0;
  if (status != 0) {
    return fail(status);
  }
  if (const int failed = runtime.elapsed(&milliseconds, anchor.event, mark.event)) {
    return fail(failed);
  }
  mark.passed_ns = anchor.host_ns + std::llround(static_cast<double>(milliseconds) * 1e6);
  return mark.passed_ns;
}

} // namespace

namespace ddltrace {

void end_gradient(int64_t site, int64_t on_device) {
  if (on_device != device.load()) {
    return;
  }
  const std::lock_guard<std::mutex> guard(lock);
  if (gradient_start < 0) {
    return;
  }
  const int64_t start = gradient_start, end = record(false);
  gradient_start = end < 0 ? kNone : end;
  if (end < 0) {
    release(start);
    return;
  }
  ++marks[end].uses; // the next gradient's work begins here
  add_interval(site, start, end);
}

} // namespace ddltrace

extern "C" {

// Starts to time a device; forgets what was recorded of another one.
void ddltrace_marks_start(const Runtime* functions, int64_t index) {
  const std::lock_guard<std::mutex> guard(lock);
  runtime = *functions;
  marks.clear();
  unused.clear();
  pending.clear();
  streams.clear();
  gradient_start = kNone;
  num_recorded = error = 0;
  device = index;
}

// Records nothing from now on. Takes no lock: in a forked child another thread may have held it.
void ddltrace_marks_stop() {
  device = kNone;
}

// Returns the number of a mark in the current stream, `kNone` or `kError`.
int64_t ddltrace_mark(int64_t free) {
  const std::lock_guard<std::mutex> guard(lock);
  return record(free != 0);
}

// Adds one use of a mark.
void ddltrace_mark_keep(int64_t number) {
  const std::lock_guard<std::mutex> guard(lock);
  ++marks[number].uses;
}

// Takes one use of a mark.
void ddltrace_mark_forget(int64_t number) {
  const std::lock_guard<std::mutex> guard(lock);
  release(number);
}

// Ends an interval at `end`, or, if that is negative, at a new mark in the current stream. Returns 1
// if it will be resolved, 0 if it is none, `kFull` if it is lost, or `kError`.
int64_t ddltrace_mark_interval(int64_t site, int64_t start, int64_t end) {
  const std::lock_guard<std::mutex> guard(lock);
  if (end < 0 && (end = record(false)) < 0) {
    release(start);
    return end == kError ? kError : 0;
  }
  return add_interval(site, start, end);
}

// Returns when the device passed a mark, `kNone` or `kError`. Takes one use of it.
int64_t ddltrace_mark_passed(int64_t number, int64_t anchor_event, int64_t anchor_ns) {
  const std::lock_guard<std::mutex> guard(lock);
  const int64_t found =
      passed(marks[number], Anchor{reinterpret_cast<void*>(anchor_event), anchor_ns});
  release(number);
  return found;
}

// Writes completed intervals to `rows`, as rows of `Recorder.flat`, in launch order: a stream that lags
// delays the resolution of the others, but does not change their times. Returns how many, or `kError`.
int64_t ddltrace_marks_resolve(
    int64_t anchor_event, int64_t anchor_ns, int64_t rows, int64_t max_rows) {
  const Anchor anchor{reinterpret_cast<void*>(anchor_event), anchor_ns};
  auto* row = reinterpret_cast<int64_t*>(rows);
  for (int64_t count = 0; count < max_rows; ++count, row += 4) {
    // Taken for each interval: the job's threads must not wait for all of them.
    const std::lock_guard<std::mutex> guard(lock);
    if (error != 0) {
      return kError;
    }
    if (pending.empty()) {
      return count;
    }
    const Interval interval = pending.front();
    const int64_t end = passed(marks[interval.end], anchor);
    const int64_t start = end < 0 ? end : passed(marks[interval.start], anchor);
    if (end == kError || start == kError) {
      return kError;
    }
    if (end == kNone || start == kNone) {
      return count;
    }
    row[0] = interval.site;
    row[1] = start;
    row[2] = end;
    row[3] = -1 - marks[interval.end].stream; // see `stream_lane`
    pending.pop_front();
    release(interval.start);
    release(interval.end);
  }
  return max_rows;
}

// Gives up all intervals that are not resolved; returns how many.
int64_t ddltrace_marks_abandon() {
  const std::lock_guard<std::mutex> guard(lock);
  const auto count = static_cast<int64_t>(pending.size());
  for (const Interval& interval : pending) {
    release(interval.start);
    release(interval.end);
  }
  pending.clear();
  return count;
}

// Begins (`begins`) or ends the timing of gradients: the device's work for the first begins here.
void ddltrace_marks_gradients(int64_t begins) {
  const std::lock_guard<std::mutex> guard(lock);
  if (gradient_start >= 0) {
    release(gradient_start);
  }
  gradient_start = kNone;
  if (begins != 0) {
    const int64_t start = record(false);
    gradient_start = start < 0 ? kNone : start;
  }
}

// Ends the device's work for one gradient and begins that for the next, if gradients are timed.
void ddltrace_marks_end_gradient(int64_t site) {
  ddltrace::end_gradient(site, device.load());
}

// Writes the numbers of intervals that are not resolved, of marks recorded so far, of events created,
// and the error of the last call that failed.
void ddltrace_marks_state(int64_t state) {
  const std::lock_guard<std::mutex> guard(lock);
  auto* values = reinterpret_cast<int64_t*>(state);
  values[0] = static_cast<int64_t>(pending.size());
  values[1] = num_recorded;
  values[2] = static_cast<int64_t>(marks.size());
  values[3] = error;
}

} // extern "C"
