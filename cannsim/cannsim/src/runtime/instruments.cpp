// Counters and the text of the last error; read from Python by cannsim/__init__.py.
#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "internal.h"

namespace cannsim {

namespace {

struct Counter {
  uint64_t calls = 0;
  uint64_t bytes = 0;
};

// Leaked on purpose: worker threads may count until the very end of the process.
struct Counters {
  std::mutex mutex;
  std::map<std::string, Counter, std::less<>> by_name;        // since reset()
  std::map<std::string, uint64_t, std::less<>> calls_forever;  // for "the n-th call" of a fault
};

Counters& counters() {
  static auto* instance = new Counters;
  return *instance;
}

struct RecentError {
  std::mutex mutex;
  std::string text;
};

RecentError& recent_error() {
  static auto* instance = new RecentError;
  return *instance;
}

thread_local std::string t_error;

}  // namespace

int enter(const char* name) {
  uint64_t nth;
  {
    Counters& all = counters();
    std::lock_guard lock(all.mutex);
    auto found = all.by_name.try_emplace(name).first;
    found->second.calls++;
    nth = ++all.calls_forever[name];
  }
  trace_call(name, nth);
  return apply_faults(name, nth);
}

void count_bytes(const char* name, size_t bytes) {
  Counters& all = counters();
  std::lock_guard lock(all.mutex);
  all.by_name[name].bytes += bytes;
  trace_value("bytes", name, current_device(), bytes);
}

void count_calls(const std::string& name, int calls) {
  Counters& all = counters();
  std::lock_guard lock(all.mutex);
  all.by_name[name].calls += uint64_t(calls);
  trace_value("calls", name.c_str(), current_device(), uint64_t(calls));
}

// CANNSIM_STOP_AT_FIRST_ERROR=1: what runs after a failed operator computes with garbage, so nothing does. Memory that
// ran out is no such error: torch_npu frees what it caches and tries again.
void stop_at_error(const std::string& text) {
  static const bool wanted = env_long("CANNSIM_STOP_AT_FIRST_ERROR", 0) != 0;
  if (!wanted) return;
  for (const char* memory : {"EL0004", "EI0007", "EI0011"}) {
    if (text.rfind(memory, 0) == 0) return;
  }
  fprintf(stderr, "cannsim: stopped at the first error: %s\n", text.c_str());
  const rlimit no_core{0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  abort();  // not exit: no destructor may wait for the device, and Python's faulthandler prints where it stands
}

void set_error(const std::string& text) {
  stop_at_error(text);
  RecentError& recent = recent_error();
  std::lock_guard lock(recent.mutex);
  recent.text = text;
  t_error = text;
}

std::string take_thread_error() { return std::exchange(t_error, {}); }

}  // namespace cannsim

// As in CANN, reading the message clears it.
API const char* aclGetRecentErrMsg() {
  static thread_local std::string text;
  auto& recent = cannsim::recent_error();
  std::lock_guard lock(recent.mutex);
  text.swap(recent.text);
  recent.text.clear();
  return text.empty() ? nullptr : text.c_str();
}

// ---- for Python (ctypes)

// {"name": [calls, bytes], ...}; the string lives until the next call of this thread.
API const char* cannsim_counters_json() {
  static thread_local std::string json;
  auto& all = cannsim::counters();
  std::lock_guard lock(all.mutex);
  json = "{";
  for (const auto& [name, counter] : all.by_name) {
    json += (json.size() > 1 ? ", \"" : "\"") + name + "\": [" + std::to_string(counter.calls) + ", " +
            std::to_string(counter.bytes) + "]";
  }
  json += "}";
  return json.c_str();
}

API void cannsim_reset() {
  auto& all = cannsim::counters();
  {
    std::lock_guard lock(all.mutex);
    all.by_name.clear();
  }
  for (int i = 0; i < cannsim::kMaxDevices; i++) {
    cannsim::device(i).peak = cannsim::device(i).allocated.load();
  }
}

API uint64_t cannsim_allocated(int device) { return cannsim::device(device).allocated; }
API uint64_t cannsim_peak(int device) { return cannsim::device(device).peak; }
API int cannsim_pending(int device) { return cannsim::pending_tasks(device); }
