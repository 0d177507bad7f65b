// The seam between the simulated runtime (libascendcl) and the libraries that sit on it
// (libopapi: operators, libhccl: collectives). Everything here is implemented in src/runtime/.
//
// How an operator uses it:
//
//   int aclnnAbs(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) {
//     if (int error = cannsim::enter("aclnnAbs")) return error;             // count, trace, fault
//     cannsim::enqueue(stream, "aclnnAbs", [state] { ...; return 0; });     // runs later, in order
//     return 0;
//   }
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "acl/acl.h"

#define CANNSIM_API __attribute__((visibility("default")))

namespace cannsim {

// What the simulated chip can do. README.md says which numbers have a source and which are guesses.
struct Chip {
  const char* name;     // what aclrtGetSocName returns, e.g. "Ascend910B3"
  int cube_cores;       // matrix cores ("AI core")
  int vector_cores;
  size_t memory;        // bytes of device memory
  bool bf16;            // the chip computes in bfloat16
  bool inf_nan;         // overflow gives inf/nan; false: saturation mode (910A, 310P)
  size_t l2_cache;      // bytes
  const char* family;   // "910A", "310P", "A2", "A3" or "950"
  bool float64_reduce;  // HCCL reduces float64 (950 only)
  int processes;        // that may hold one device at a time, on a physical machine
};

// The chip named by CANNSIM_CHIP (default Ascend910B3). With an unknown name aclInit fails.
CANNSIM_API const Chip& chip();

// Call first in every simulated function: counts the call, writes the trace and applies fault
// injection. Returns 0, or the error code that the function must return. `name` is a literal.
CANNSIM_API int enter(const char* name);

// The text that aclGetRecentErrMsg returns next. Thread safe.
CANNSIM_API void set_error(const std::string& text);

// Runs `task` later on the worker thread of `stream`, after everything queued there before
// (nullptr = default stream of the current device). A non-zero result becomes the sticky error of
// the device: reported at the next synchronisation, and the tasks behind it are dropped.
// While the stream is being captured the task is recorded into the graph instead, and may then
// run many times: a task must not free or change what it captured (capture shared_ptrs).
CANNSIM_API void enqueue(aclrtStream stream, const char* name, std::function<int()> task);

// True when overflow gives the largest number instead of inf and 0 instead of nan, and only the float
// status of the device tells: the only mode of 910A and 310P, a setting of the others.
CANNSIM_API bool saturating();

// For a running task: it made an inf or a nan. Sets the float status of its device.
CANNSIM_API void note_overflow();

// Adds to the byte counter of `name` (memory moved, not allocated).
CANNSIM_API void count_bytes(const char* name, size_t bytes);

// Adds to the call counter of `name`, which is no function: what an operator does inside.
CANNSIM_API void count_calls(const std::string& name, int calls);

// True when CANNSIM_HARDWARE names this known fault of real hardware (README.md lists them).
CANNSIM_API bool hardware_fault(const char* name);

// Seconds of simulated time in seconds of real time: multiplied by CANNSIM_TIME_SCALE (default 1),
// so that tests need not wait 120 s for a documented 120 s timeout.
CANNSIM_API double real_seconds(double simulated);

// True while `stream` records a graph.
CANNSIM_API bool capturing(aclrtStream stream);

}  // namespace cannsim
