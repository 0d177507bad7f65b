// The simulated machine: which process holds which device, and how much of its memory. Every process that
// uses the runtime keeps one small file in the folder CANNSIM_STATE, mapped into its memory; other
// processes (and the simulated npu-smi) read it. Without CANNSIM_STATE a process is alone.
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
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
  uint64_t held;               // one bit for each physical device that the process has set
};
static_assert(kMaxDevices <= 64);

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

// A process that was killed and that its parent has not waited for yet still has its number, and holds nothing.
bool lives(int pid) {
  if (kill(pid, 0) != 0 && errno == ESRCH) return false;
  char line[256] = "";  // NUMBER (NAME) STATE ...; a name may hold brackets
  if (FILE* file = fopen(("/proc/" + std::to_string(pid) + "/stat").c_str(), "r")) {
    if (!fgets(line, sizeof line, file)) line[0] = 0;
    fclose(file);
  }
  const char* end = strrchr(line, ')');
  return !end || strncmp(end, ") Z", 3) != 0;
}

// The records of the other living processes; those of processes that died are removed on the way.
std::vector<Record> others() {
  std::vector<Record> found;
  std::string folder = env_string("CANNSIM_STATE", "");
  DIR* listing = folder.empty() ? nullptr : opendir(folder.c_str());
  if (!listing) return found;
  while (dirent* entry = readdir(listing)) {
    int pid = atoi(entry->d_name);
    if (pid <= 0 || pid == getpid() || !strstr(entry->d_name, ".device")) continue;
    std::string path = folder + "/" + entry->d_name;
    if (!lives(pid)) {
      unlink(path.c_str());
      continue;
    }
    Record record;
    int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) continue;
    if (read(file, &record, sizeof record) == ssize_t(sizeof record)) found.push_back(record);
    close(file);
  }
  closedir(listing);
  return found;
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

size_t machine_used_by_others(int device_index) {
  size_t total = 0;
  for (const Record& record : others()) total += record.used[visible_devices()[size_t(device_index)]];
  return total;
}

bool machine_hold(int device_index) {
  const uint64_t bit = uint64_t(1) << visible_devices()[size_t(device_index)];
  if (!g_record || g_owner != getpid() || (__atomic_load_n(&g_record->held, __ATOMIC_RELAXED) & bit)) return true;
  // Processes that come at the same time count one after the other; a lock ends with the process that has it.
  int folder = open(env_string("CANNSIM_STATE", "").c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder >= 0) flock(folder, LOCK_EX);
  int holders = 0;
  for (const Record& record : others()) holders += (record.held & bit) != 0;
  const bool granted = holders < process_limit();
  if (granted) __atomic_fetch_or(&g_record->held, bit, __ATOMIC_RELAXED);
  if (folder >= 0) close(folder);
  return granted;
}

void machine_release(int device_index) {
  if (!g_record || g_owner != getpid()) return;
  __atomic_fetch_and(&g_record->held, ~(uint64_t(1) << visible_devices()[size_t(device_index)]), __ATOMIC_RELAXED);
}

}  // namespace cannsim
