// What the sources have in common.

#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>

namespace ddltrace {

using Shared = std::atomic<int64_t>; // read and written by Python, too
static_assert(sizeof(Shared) == sizeof(int64_t), "read as plain integers");

// The time as Python's `time.monotonic_ns` tells it.
inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

} // namespace ddltrace
