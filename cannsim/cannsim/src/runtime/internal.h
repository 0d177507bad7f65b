// Private to libascendcl: devices, streams, events, graphs, and what the files here share.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../core.h"

// Every exported C function: `API aclError aclrtX(...) { ENTER(); ... }`.
#define API extern "C" CANNSIM_API
#define ENTER()                                             \
  do {                                                      \
    if (int error = cannsim::enter(__func__)) return error; \
  } while (0)
// As ENTER, and the calling thread must have a device (error 107002 otherwise).
#define ENTER_WITH_DEVICE()                                     \
  ENTER();                                                      \
  do {                                                          \
    if (int error = cannsim::require_device(__func__)) return error; \
  } while (0)

namespace cannsim {

constexpr int kMaxDevices = 64;

// ---- environment (config.cpp)
long env_long(const char* name, long fallback);
double env_double(const char* name, double fallback);
std::string env_string(const char* name, const char* fallback);
int rank();                  // RANK, -1 when not set
bool chip_known();           // CANNSIM_CHIP names a chip of the table
void check_hardware_faults();  // ends the process when CANNSIM_HARDWARE names one that does not exist
std::string chip_names();    // all known names, for messages
int physical_devices();      // CANNSIM_DEVICES
const std::vector<int>& visible_devices();  // physical id of each device the process may use
size_t memory_limit();       // bytes per device: CANNSIM_MEMORY_GB or the chip's
int process_limit();         // processes that may hold a device: CANNSIM_PROCESSES_PER_DEVICE or the chip's
double now_seconds();        // steady clock

// ---- errors (errors.cpp)
std::string describe_error(int code, const char* where);  // text in the form CANN prints
std::string take_thread_error();  // last set_error() of the calling thread, cleared

void stop_at_error(const std::string& text);  // ends the process, if CANNSIM_STOP_AT_FIRST_ERROR asks for it

// ---- the trace file (trace.cpp)
bool traces_detail();                                                              // CANNSIM_TRACE_DETAIL=1
void trace_call(const char* name, uint64_t nth);                                   // with CANNSIM_TRACE
void trace_value(const char* event, const char* name, int device, uint64_t value);  // with detail, as the next
void trace_task(const char* name, int device, int stream, double begin);

// ---- fault injection (faults.cpp)
enum class Fault { kNone, kFail, kHang };
struct PendingFault {  // armed by enter(), taken by the enqueue() of the same name and thread
  Fault fault = Fault::kNone;
  int code = 0;
};
int apply_faults(const char* name, uint64_t nth_call);  // code to return, or 0
PendingFault take_pending_fault(const char* name);
[[noreturn]] void hang_forever();

// ---- devices (device.cpp)
struct Device {
  std::mutex mutex;
  int error = 0;           // sticky: the first failure of a task on this device
  std::string error_text;
  std::atomic<size_t> allocated{0};
  std::atomic<size_t> peak{0};
  std::atomic<bool> overflow{false};  // float status: an operator overflowed since it was cleared

  void fail(int code, const std::string& text);
  int report();  // the sticky error (and its text for aclGetRecentErrMsg), or 0
};
Device& device(int index);
int current_device();                    // of the calling thread, -1: none
void set_current_device(int index);      // of a stream's worker: that of the stream
int require_device(const char* where);   // 0, or 107002
int op_timeout_seconds();                // after which a hung kernel is reported

// ---- the simulated machine, shared by processes through CANNSIM_STATE (machine.cpp)
void machine_open();
void machine_close();
void machine_set_used(int device, size_t bytes);
size_t machine_used_by_others(int device);
bool machine_hold(int device);     // false: as many other processes as may do so hold it
void machine_release(int device);

// ---- graphs (graph.cpp)
struct Task {
  const char* name = "";
  std::function<int()> run;
  bool after_error = false;  // event records run even when the device has failed
  int stream = 0;            // id of the one that it was launched on
};
struct TaskGroup {
  std::mutex mutex;
  std::vector<Task> tasks;
  bool updated = false;  // since a replay ran it last
  std::shared_ptr<std::atomic<int>> replays;  // of its graph, launched and not done; null for a group of one
};
// A captured graph is the list of its tasks in the order of their launch, which is a valid order
// for every stream that took part, so a replay runs them one after the other.
struct Graph {
  uint32_t id = 0;
  std::shared_ptr<Graph>* handle = nullptr;  // what the caller holds, also during the capture
  std::mutex mutex;
  std::vector<std::shared_ptr<TaskGroup>> groups;
  std::vector<struct Stream*> streams;  // first: where the capture began
  int held = 0;  // streams of the device, once it is captured
  int invalid = 0;  // error code: the capture was broken by a forbidden call
  std::shared_ptr<std::atomic<int>> replays = std::make_shared<std::atomic<int>>(0);
  void add(Task task, std::shared_ptr<TaskGroup> open_group);
};

// ---- streams (stream.cpp)
struct Stream {
  Stream(int device, int id) : device_index(device), id(id) {}
  void push(Task task);                  // waits while the queue is full
  bool wait_idle(double seconds);        // < 0: forever. False on timeout
  bool idle();

  const int device_index;
  const int id;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> queue;
  uint64_t pushed = 0, done = 0;
  bool started = false;
  bool stopping = false;
  std::shared_ptr<Graph> capture;             // being captured into
  std::shared_ptr<TaskGroup> open_group;      // between TaskGrpBegin and TaskGrpEnd
  std::shared_ptr<TaskGroup> update_group;    // between TaskUpdateBegin and TaskUpdateEnd
  size_t update_index = 0;
  uint32_t overflow_switch = 0;

 private:
  void work();
};
Stream* resolve_stream(aclrtStream stream);  // nullptr: the default stream of the current device
void submit(Stream* stream, Task task);      // queue, or record into the graph being captured
aclError synchronize_all(int device, double seconds);
void stop_streams();
// A device has so many streams (CANNSIM_STREAMS), and a captured graph holds as many as took part in its capture.
bool take_streams(int device, int count);  // false: not enough are left
void give_streams(int device, int count);
int pending_tasks(int device);

// ---- events (event.cpp)
// One launch of aclrtRecordEvent. Every launch has its own: a second record on a faster stream must not
// release those who wait for the first.
struct EventRecord {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  double seconds = 0;  // when it ran
};

struct Event {
  std::mutex mutex;
  std::shared_ptr<EventRecord> latest;  // null: never recorded
  uint32_t flags = 0;
  bool ended = false;               // aclrtDestroyEvent was called; see there
  bool flag = false;                // of an external event: recorded and not reset
  std::condition_variable changed;  // of the flag
  std::shared_ptr<Graph> capture;  // recorded last on a stream that is being captured
};

}  // namespace cannsim
