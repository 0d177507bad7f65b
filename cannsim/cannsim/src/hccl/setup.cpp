// Making and destroying communicators, and what can be asked about them.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <regex>
#include <sstream>

#include "comm.h"

using namespace cannsim;

namespace {

// The root keeps the file open until its own communicator is complete.
struct OpenRoots {
  std::mutex mutex;
  std::map<uint64_t, int> fd_by_token;
};
OpenRoots& open_roots() {
  static auto* instance = new OpenRoots;
  return *instance;
}

struct RootInfo {
  char magic[8];  // "cannsim"
  int32_t pid, fd;
  uint64_t token;
};

int refuse(HcclResult code, const std::string& text) {
  set_error(text);
  return code;
}

int exhausted(const std::string& resource) {
  return refuse(HCCL_E_MEMORY, "EI0007: Failed to allocate resource[" + resource +
                                   "]. Reason: Memory resources are exhausted.");
}

// -1 and an EI0001 text when the value is outside the documented range.
double timeout_from_environment(const char* name, double fallback, double low, double high) {
  const char* text = getenv(name);
  if (!text || !*text) return fallback;
  char* end = nullptr;
  double value = strtod(text, &end);
  if (*end == 0 && value >= low && value <= high) return value;
  char range[64];
  snprintf(range, sizeof range, "[%.0f, %.0f]", low, high);
  set_error(std::string("EI0001: Environment variable [") + name + "] is invalid. Reason: value " + text +
            " is not a number in " + range + ".");
  return -1;
}

double connect_timeout() { return timeout_from_environment("HCCL_CONNECT_TIMEOUT", 120, 120, 7200); }

double exec_timeout() {
  std::string family = chip().family;
  bool old = family == "910A" || family == "310P";
  double value = timeout_from_environment("HCCL_EXEC_TIMEOUT", 1836, old ? 1 : 0, old ? 17340 : 2147483647);
  return old && value >= 68 ? double(int(value) / 68 * 68) : value;  // whole multiples of 68 s there
}

int new_segment(RootInfo& info) {
  static std::mutex mutex;
  static std::mt19937_64 random(std::random_device{}());
  int fd = memfd_create("cannsim-hccl", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, sizeof(Header)) != 0) return HCCL_E_SYSCALL;
  memset(&info, 0, sizeof info);
  snprintf(info.magic, sizeof info.magic, "cannsim");
  info.pid = getpid();
  info.fd = fd;
  {
    std::lock_guard lock(mutex);
    info.token = random() | 1;
  }
  const ssize_t written = pwrite(fd, &info.token, sizeof info.token, offsetof(Header, token));
  if (written != ssize_t(sizeof info.token)) return HCCL_E_SYSCALL;
  std::lock_guard lock(open_roots().mutex);
  open_roots().fd_by_token[info.token] = fd;
  return HCCL_SUCCESS;
}

void close_root(uint64_t token) {
  std::lock_guard lock(open_roots().mutex);
  auto found = open_roots().fd_by_token.find(token);
  if (found == open_roots().fd_by_token.end()) return;
  close(found->second);
  open_roots().fd_by_token.erase(found);
}

int open_segment(const RootInfo& info) {
  std::string path = "/proc/" + std::to_string(info.pid) + "/fd/" + std::to_string(info.fd);
  int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return -1;
  uint64_t token = 0;
  if (pread(fd, &token, sizeof token, offsetof(Header, token)) != ssize_t(sizeof token) || token != info.token) {
    close(fd);
    return -1;
  }
  return fd;
}

// The caller's structure may be that of an older header, and end before a field: its first word is its size.
bool has_field(const HcclCommConfig* config, size_t offset, size_t bytes) {
  size_t size = 0;
  if (config) memcpy(&size, config, sizeof(size));
  return size >= offset + bytes;
}
#define HAS_FIELD(config, field) has_field(config, offsetof(HcclCommConfig, field), sizeof((config)->field))

// Buffers with a name (hcclBufferName) that communicators of this process share, by device and name.
struct NamedBuffers {
  std::mutex mutex;
  std::map<std::pair<int32_t, std::string>, std::weak_ptr<void>> buffers;
};
NamedBuffers& named_buffers() {
  static auto* instance = new NamedBuffers;
  return *instance;
}

std::shared_ptr<void> new_buffer(size_t bytes) {
  void* address = nullptr;
  if (aclrtMalloc(&address, bytes, ACL_MEM_MALLOC_HUGE_FIRST) != ACL_SUCCESS) return nullptr;
  return {address, [](void* held) { aclrtFree(held); }};
}

// On hardware every communicator takes two buffers of HCCL_BUFFSIZE MB of device memory.
int allocate_buffer(Comm& comm, const HcclCommConfig* config) {
  const char* text = getenv("HCCL_BUFFSIZE");
  size_t megabytes = text && atol(text) > 0 ? size_t(atol(text)) : HCCL_COMM_DEFAULT_BUFFSIZE;
  if (config && config->hcclBufferSize != HCCL_COMM_BUFFSIZE_CONFIG_NOT_SET && config->hcclBufferSize > 0) {
    megabytes = config->hcclBufferSize;
  }
  size_t bytes = 2 * (megabytes << 20);
  if (HAS_FIELD(config, hcclBufferName) && config->hcclBufferName[0]) {
    int32_t device = 0;
    aclrtGetDevice(&device);
    NamedBuffers& all = named_buffers();
    std::lock_guard lock(all.mutex);
    const std::string name(config->hcclBufferName, strnlen(config->hcclBufferName, BUFFER_NAME_MAX_LENGTH));
    auto& named = all.buffers[{device, name}];
    comm.device_buffer = named.lock();
    if (!comm.device_buffer) named = comm.device_buffer = new_buffer(bytes);
  } else {
    comm.device_buffer = new_buffer(bytes);
  }
  if (comm.device_buffer) return HCCL_SUCCESS;
  return refuse(HCCL_E_OOM, "EI0011: Failed to allocate [" + std::to_string(bytes) + "] bytes of NPU memory.");
}

std::string join(const std::vector<uint32_t>& ranks) {
  std::string text;
  for (uint32_t rank : ranks) text += (text.empty() ? "" : ",") + std::to_string(rank);
  return text;
}

int missing_ranks_error(const Comm& comm, const std::vector<uint32_t>& missing, double seconds) {
  std::string list = join(missing), limit = std::to_string(int(seconds));
  if (comm.rank == 0) {
    return refuse(HCCL_E_TIMEOUT, "EI0015: Failed to collect cluster information of the communicator based on rootInfo "
                  "detection. Reason: topo exchange server get socket timeout after " + limit +
                  " s, ranks not connected: [" + list + "].");
  }
  return refuse(HCCL_E_TIMEOUT, "EI0006: Getting socket times out. Reason: wait socket establish timeout, rank [" +
                std::to_string(comm.rank) + "] waited " + limit + " s for ranks [" + list + "].");
}

// As documented for HCCL_ALGO: level0:NA;level1:ring, or one such list per operation: allreduce=level0:NA/allgather=...
bool known_algorithm(const HcclCommConfig* config) {
  if (!HAS_FIELD(config, hcclAlgo) || !config->hcclAlgo[0]) return true;
  static const std::regex form("(\\w+=)?level[0-3]:[\\w-]+(;level[0-3]:[\\w-]+)*");
  std::istringstream parts(std::string(config->hcclAlgo, strnlen(config->hcclAlgo, HCCL_COMM_ALGO_MAX_LENGTH)));
  for (std::string part; std::getline(parts, part, '/');) {
    if (!std::regex_match(part, form)) return false;
  }
  return true;
}

int connect(const RootInfo& info, uint32_t size, uint32_t rank, const HcclCommConfig* config, const std::string& name,
            HcclComm* handle) {
  double connect_limit = connect_timeout(), exec_limit = exec_timeout();
  if (connect_limit < 0 || exec_limit < 0) return HCCL_E_PARA;
  if (size == 0 || size > kMaxRanks || rank >= size) {
    return refuse(HCCL_E_PARA, "EI0004: The ranktable or rank is invalid,Reason:[rank " + std::to_string(rank) + " of " +
                  std::to_string(size) + "].");
  }
  if (!known_algorithm(config)) {
    return refuse(HCCL_E_PARA, "EI0003: In [HcclCommInitRootInfoConfig], value [" + std::string(config->hcclAlgo, strnlen(config->hcclAlgo, 40)) +
                  "] for parameter [hcclAlgo] is invalid. Reason: it names no algorithms, as level0:NA;level1:ring does.");
  }
  int fd = open_segment(info);
  if (fd < 0) {
    usleep(useconds_t(real_seconds(connect_limit) * 1e6));  // nobody answers: the agent retries until the end
    return refuse(HCCL_E_TIMEOUT, "EI0006: Getting socket times out. Reason: Failed to connect agent[" +
                  std::to_string(rank) + "] to the root, which is gone.");
  }
  auto comm = Comm::attach(fd, rank, size, name);
  close(fd);
  if (!comm) return exhausted("memory of " + name);
  comm->exec_timeout = exec_limit;
  if (HAS_FIELD(config, hcclExecTimeOut) && config->hcclExecTimeOut >= 0) comm->exec_timeout = config->hcclExecTimeOut;
  auto missing = comm->wait_for_ranks(real_seconds(connect_limit));
  if (!missing.empty()) {
    close_root(info.token);
    return missing_ranks_error(*comm, missing, connect_limit);
  }
  if (int error = allocate_buffer(*comm, config)) return error;
  close_root(info.token);
  *handle = new std::shared_ptr<Comm>(comm);
  return HCCL_SUCCESS;
}

std::string name_from(const HcclCommConfig* config, uint64_t token) {
  if (config && config->hcclCommName[0]) {
    return std::string(config->hcclCommName, strnlen(config->hcclCommName, COMM_NAME_MAX_LENGTH));
  }
  char name[32];
  snprintf(name, sizeof name, "hccl_%016llx", static_cast<unsigned long long>(token));
  return name;
}

HcclResult init_from_root(const char* function, uint32_t size, const HcclRootInfo* root, uint32_t rank,
                          const HcclCommConfig* config, HcclComm* comm) {
  if (int error = enter(function)) return HcclResult(error);
  RootInfo info;
  memcpy(&info, root->internal, sizeof info);
  if (strcmp(info.magic, "cannsim") != 0) {
    return HcclResult(refuse(HCCL_E_PARA, "EI0015: Failed to collect cluster information of the communicator based on "
                             "rootInfo detection. Reason: the root info was not made by HcclGetRootInfo."));
  }
  return HcclResult(connect(info, size, rank, config, name_from(config, info.token), comm));
}

}  // namespace

HCCL_API HcclResult HcclGetRootInfo(HcclRootInfo* root) {
  if (int error = enter(__func__)) return HcclResult(error);
  RootInfo info;
  if (int error = new_segment(info)) return HcclResult(error);
  memset(root, 0, sizeof *root);
  memcpy(root->internal, &info, sizeof info);
  return HCCL_SUCCESS;
}

HCCL_API HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo* root, uint32_t rank, HcclComm* comm) {
  return init_from_root(__func__, size, root, rank, nullptr, comm);
}

HCCL_API HcclResult HcclCommInitRootInfoConfig(uint32_t size, const HcclRootInfo* root, uint32_t rank,
                                               const HcclCommConfig* config, HcclComm* comm) {
  return init_from_root(__func__, size, root, rank, config, comm);
}

HCCL_API HcclResult HcclCommInitClusterInfoConfig(const char*, uint32_t, HcclCommConfig*, HcclComm*) {
  if (int error = enter(__func__)) return HcclResult(error);
  return HcclResult(refuse(HCCL_E_NOT_SUPPORT, "EI0004: The ranktable or rank is invalid,Reason:[cannsim has no rank "
                           "tables; unset RANK_TABLE_FILE]."));
}

// Rank 0 of the new group publishes its segment in the parent; the others look there.
HCCL_API HcclResult HcclCreateSubCommConfig(HcclComm* parent_handle, uint32_t size, uint32_t*, uint64_t id, uint32_t rank,
                                            HcclCommConfig* config, HcclComm* comm) {
  if (int error = enter(__func__)) return HcclResult(error);
  Header& parent = comm_of(*parent_handle)->header();
  RootInfo info;
  if (rank == 0) {
    if (int error = new_segment(info)) return HcclResult(error);
    for (SubCommunicator& sub : parent.subs) {
      uint64_t free_entry = 0, taken = kAnyCount;
      if (!sub.id.compare_exchange_strong(free_entry, taken)) continue;
      sub.pid = info.pid, sub.fd = info.fd, sub.token = info.token;
      sub.id = id + 1;
      const int error = connect(info, size, rank, config, name_from(config, info.token), comm);
      sub.id = 0;  // all ranks are in, or will not come: the entry is free
      return HcclResult(error);
    }
    return HcclResult(exhausted("sub communicator"));
  }
  double limit = connect_timeout();
  if (limit < 0) return HCCL_E_PARA;
  for (double end = hccl_now() + real_seconds(limit); hccl_now() < end; usleep(500)) {
    for (SubCommunicator& sub : parent.subs) {
      if (sub.id != id + 1) continue;
      info = {"cannsim", sub.pid, sub.fd, sub.token};
      return HcclResult(connect(info, size, rank, config, name_from(config, info.token), comm));
    }
  }
  return HcclResult(refuse(HCCL_E_TIMEOUT, "EI0006: Getting socket times out. Reason: rank 0 of the sub communicator "
                           "did not come."));
}

// All devices of one process.
HCCL_API HcclResult HcclCommInitAll(uint32_t size, int32_t* devices, HcclComm* comms) {
  if (int error = enter(__func__)) return HcclResult(error);
  RootInfo info;
  if (int error = new_segment(info)) return HcclResult(error);
  int32_t before = -1;
  aclrtGetDevice(&before);
  for (uint32_t rank = 0; rank < size; rank++) {
    auto comm = Comm::attach(info.fd, rank, size, name_from(nullptr, info.token));
    if (!comm || aclrtSetDevice(devices[rank]) != ACL_SUCCESS) return HCCL_E_PARA;
    comm->exec_timeout = exec_timeout();
    if (int error = allocate_buffer(*comm, nullptr)) return HcclResult(error);
    comms[rank] = new std::shared_ptr<Comm>(comm);
  }
  close_root(info.token);
  if (before >= 0) aclrtSetDevice(before);
  return HCCL_SUCCESS;
}

HCCL_API HcclResult HcclCommDestroy(HcclComm handle) {
  if (int error = enter(__func__)) return HcclResult(error);
  auto* comm = static_cast<std::shared_ptr<Comm>*>(handle);
  (*comm)->device_buffer.reset();
  delete comm;  // tasks still queued keep the segment alive
  return HCCL_SUCCESS;
}

HCCL_API HcclResult HcclGetCommName(HcclComm comm, char* name) {
  snprintf(name, COMM_NAME_MAX_LENGTH, "%s", comm_of(comm)->name.c_str());
  return HCCL_SUCCESS;
}
HCCL_API HcclResult HcclGetRankSize(HcclComm comm, uint32_t* size) {
  *size = comm_of(comm)->size;
  return HCCL_SUCCESS;
}
HCCL_API HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank) {
  *rank = comm_of(comm)->rank;
  return HCCL_SUCCESS;
}

// Only a broken link (error CQE) is reported here; timeouts are errors of the stream.
HCCL_API HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) {
  *error = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}
HCCL_API HcclResult HcclCommResume(HcclComm) { return HCCL_SUCCESS; }
HCCL_API uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }
HCCL_API HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }

HCCL_API const char* HcclGetErrorString(HcclResult code) {
  static const char* const kNames[] = {"no error", "parameter error", "empty pointer", "memory error", "internal error",
                                       "not support feature", "not found specific resource", "resource unavailable",
                                       "call system interface error", "timeout", "open file fail", "tcp connect fail",
                                       "roce connect fail", "tcp transfer fail", "roce transfer fail", "call runtime api fail"};
  return size_t(code) < sizeof kNames / sizeof *kNames ? kNames[code] : "hccl error";
}
