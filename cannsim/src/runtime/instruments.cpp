// Counters, the trace file and the text of the last error; read from Python by cannsim/__init__.py.
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
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

// One JSON object per line and call; a single write() so that ranks can share the file.
void trace(const char* name, uint64_t nth) {
  static const int file = [] {
    std::string path = env_string("CANNSIM_TRACE", "");
    if (path.empty()) return -1;
    int opened = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (opened < 0) fprintf(stderr, "cannsim: cannot write CANNSIM_TRACE=%s\n", path.c_str());
    return opened;
  }();
  if (file < 0) return;
  char line[320];
  int length = snprintf(line, sizeof line,
                        "{\"seconds\": %.6f, \"pid\": %d, \"rank\": %d, \"thread\": %ld, \"device\": %d, "
                        "\"name\": \"%s\", \"call\": %llu}\n",
                        now_seconds(), int(getpid()), rank(), long(syscall(SYS_gettid)), current_device(),
                        name, static_cast<unsigned long long>(nth));
  if (write(file, line, size_t(length)) != length) fprintf(stderr, "cannsim: trace line lost\n");
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
  trace(name, nth);
  return apply_faults(name, nth);
}

void count_bytes(const char* name, size_t bytes) {
  Counters& all = counters();
  std::lock_guard lock(all.mutex);
  all.by_name[name].bytes += bytes;
}

void count_calls(const std::string& name, int calls) {
  Counters& all = counters();
  std::lock_guard lock(all.mutex);
  all.by_name[name].calls += uint64_t(calls);
}

void operator_failed(const std::string& text) {
  set_error(text);
  static const bool ends = env_string("CANNSIM_FIRST_ERROR", "") == "exit";
  if (!ends) return;
  fprintf(stderr, "cannsim: %s\ncannsim: the process ends at its first error (CANNSIM_FIRST_ERROR=exit).\n", text.c_str());
  _exit(70);
}

void set_error(const std::string& text) {
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
