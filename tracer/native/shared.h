// Definitions that all source files share.

#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>

namespace ddltrace {

using Shared = std::atomic<int64_t>; // also read and written by Python
static_assert(sizeof(Shared) == sizeof(int64_t), "read as plain integers");

// The current time, on the same clock as Python's `time.monotonic_ns`.
inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

// In device_marks.cpp: ends the device's work for one gradient and begins that for the next.
// site: the recording site of the work
// on_device: index of the device on which the gradient lies; others are not timed
void end_gradient(int64_t site, int64_t on_device);

} // namespace ddltrace
