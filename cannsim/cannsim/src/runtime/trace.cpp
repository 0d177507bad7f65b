// The trace file, CANNSIM_TRACE: one JSON object per line, read by cannsim/trace.py. Every call has a line. With
// CANNSIM_TRACE_DETAIL=1 there are more, told apart by "event":
//
//   bytes   what the call before, of the same name and thread, moves
//   calls   what the call before does inside: "aicpu/NAME", "inner/NAME"
//   memory  bytes that the process holds on the device from now on
//   task    work of a stream, from "begin" to "seconds"
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>

#include "internal.h"

namespace cannsim {

namespace {

int trace_file() {
  static const int file = [] {
    std::string path = env_string("CANNSIM_TRACE", "");
    if (path.empty()) return -1;
    int opened = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (opened < 0) fprintf(stderr, "cannsim: cannot write CANNSIM_TRACE=%s\n", path.c_str());
    return opened;
  }();
  return file;
}

// A single write() per line, so that ranks can share the file.
void write_line(int device, const char* name, const char* rest) {
  char line[400];
  int length = snprintf(line, sizeof line,
                        "{\"seconds\": %.6f, \"pid\": %d, \"rank\": %d, \"thread\": %ld, \"device\": %d, "
                        "\"name\": \"%s\", %s}\n",
                        now_seconds(), int(getpid()), rank(), long(syscall(SYS_gettid)), device, name, rest);
  if (write(trace_file(), line, size_t(length)) != length) fprintf(stderr, "cannsim: trace line lost\n");
}

}  // namespace

bool traces_detail() {
  static const bool wanted = trace_file() >= 0 && env_long("CANNSIM_TRACE_DETAIL", 0) != 0;
  return wanted;
}

void trace_call(const char* name, uint64_t nth) {
  if (trace_file() < 0) return;
  char rest[64];
  snprintf(rest, sizeof rest, "\"call\": %llu", static_cast<unsigned long long>(nth));
  write_line(current_device(), name, rest);
}

void trace_value(const char* event, const char* name, int device, uint64_t value) {
  if (!traces_detail()) return;
  char rest[96];
  snprintf(rest, sizeof rest, "\"event\": \"%s\", \"value\": %llu", event, static_cast<unsigned long long>(value));
  write_line(device, name, rest);
}

void trace_task(const char* name, int device, int stream, double begin) {
  if (!traces_detail()) return;
  char rest[96];
  snprintf(rest, sizeof rest, "\"event\": \"task\", \"stream\": %d, \"begin\": %.6f", stream, begin);
  write_line(device, name, rest);
}

}  // namespace cannsim
