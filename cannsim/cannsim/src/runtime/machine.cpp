// The simulated machine: which process holds how much memory of which device. Every process that
// uses the runtime keeps one small file in the folder CANNSIM_STATE, mapped into its memory; other
// processes (and the simulated npu-smi) read it. Without CANNSIM_STATE a process is alone.
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "internal.h"

namespace cannsim {

namespace {

// The layout is read by cannsim/npu-smi too: change both.
struct Record {
  char magic[8];            // "cannsim1"
  int32_t pid;
  int32_t padding;
  char name[48];            // of the process
  uint64_t used[kMaxDevices];  // bytes, by physical device
};

Record* g_record = nullptr;
std::string g_path;
pid_t g_owner = 0;

std::string process_name() {
  char name[48] = "";
  if (FILE* file = fopen("/proc/self/comm", "r")) {
    if (!fgets(name, sizeof name, file)) name[0] = 0;
    fclose(file);
  }
  name[strcspn(name, "\n")] = 0;
  return name;
}

}  // namespace

void machine_open() {
  std::string folder = env_string("CANNSIM_STATE", "");
  if (folder.empty() || (g_record && g_owner == getpid())) return;
  mkdir(folder.c_str(), 0700);  // may exist
  g_path = folder + "/" + std::to_string(getpid()) + ".device";
  int file = open(g_path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, sizeof(Record)) != 0) {
    fprintf(stderr, "cannsim: cannot write in CANNSIM_STATE=%s\n", folder.c_str());
    if (file >= 0) close(file);
    return;
  }
  void* mapped = mmap(nullptr, sizeof(Record), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (mapped == MAP_FAILED) return;
  g_record = static_cast<Record*>(mapped);
  memcpy(g_record->magic, "cannsim1", 8);
  g_record->pid = getpid();
  snprintf(g_record->name, sizeof g_record->name, "%s", process_name().c_str());
  g_owner = getpid();
}

void machine_close() {
  if (g_record && g_owner == getpid()) unlink(g_path.c_str());
}

void machine_set_used(int device_index, size_t bytes) {
  if (!g_record || g_owner != getpid()) return;
  g_record->used[visible_devices()[size_t(device_index)]] = bytes;
}

// Records of processes that died are removed on the way.
size_t machine_used_by_others(int device_index) {
  std::string folder = env_string("CANNSIM_STATE", "");
  DIR* listing = folder.empty() ? nullptr : opendir(folder.c_str());
  if (!listing) return 0;
  size_t total = 0;
  while (dirent* entry = readdir(listing)) {
    int pid = atoi(entry->d_name);
    if (pid <= 0 || pid == getpid() || !strstr(entry->d_name, ".device")) continue;
    std::string path = folder + "/" + entry->d_name;
    if (kill(pid, 0) != 0 && errno == ESRCH) {
      unlink(path.c_str());
      continue;
    }
    Record record;
    int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) continue;
    if (read(file, &record, sizeof record) == ssize_t(sizeof record)) {
      total += record.used[visible_devices()[size_t(device_index)]];
    }
    close(file);
  }
  closedir(listing);
  return total;
}

}  // namespace cannsim
