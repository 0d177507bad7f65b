// The environment variables of the simulator and the table of chips.
#include <dlfcn.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "internal.h"

namespace cannsim {

namespace {

constexpr size_t GiB = size_t(1) << 30;
constexpr size_t MiB = size_t(1) << 20;

// name, cube cores, vector cores, memory, bf16, inf/nan, L2, family, float64 reduce, processes per device.
// 910A and 310P: one kind of core, saturation instead of inf/nan, no bf16.
// Beware: "Ascend910B" without a digit is the 2019 generation.
// Processes: CANN's restrictions on use; they name no number for 950, which has that of A2 and A3 here.
constexpr Chip kChips[] = {
    {"Ascend910A", 32, 32, 32 * GiB, false, false, 32 * MiB, "910A", false, 64},
    {"Ascend910ProA", 32, 32, 32 * GiB, false, false, 32 * MiB, "910A", false, 64},
    {"Ascend910PremiumA", 32, 32, 32 * GiB, false, false, 32 * MiB, "910A", false, 64},
    {"Ascend910B", 32, 32, 32 * GiB, false, false, 32 * MiB, "910A", false, 64},
    {"Ascend910ProB", 32, 32, 32 * GiB, false, false, 32 * MiB, "910A", false, 64},
    {"Ascend310P1", 10, 8, 24 * GiB, false, false, 16 * MiB, "310P", false, 64},
    {"Ascend310P3", 8, 7, 24 * GiB, false, false, 16 * MiB, "310P", false, 64},
    {"Ascend910B1", 25, 50, 64 * GiB, true, true, 192 * MiB, "A2", false, 63},
    {"Ascend910B2", 24, 48, 64 * GiB, true, true, 192 * MiB, "A2", false, 63},
    {"Ascend910B2C", 24, 48, 64 * GiB, true, true, 192 * MiB, "A2", false, 63},
    {"Ascend910B3", 20, 40, 64 * GiB, true, true, 192 * MiB, "A2", false, 63},
    {"Ascend910B4", 20, 40, 32 * GiB, true, true, 96 * MiB, "A2", false, 63},
    {"Ascend910B4-1", 20, 40, 64 * GiB, true, true, 192 * MiB, "A2", false, 63},
    {"Ascend910_9391", 24, 48, 64 * GiB, true, true, 192 * MiB, "A3", false, 63},
    {"Ascend910_9392", 24, 48, 64 * GiB, true, true, 192 * MiB, "A3", false, 63},
    {"Ascend910_9381", 24, 48, 64 * GiB, true, true, 192 * MiB, "A3", false, 63},
    {"Ascend910_9382", 24, 48, 64 * GiB, true, true, 192 * MiB, "A3", false, 63},
    {"Ascend910_9372", 20, 40, 64 * GiB, true, true, 192 * MiB, "A3", false, 63},
    {"Ascend910_9362", 20, 40, 64 * GiB, true, true, 192 * MiB, "A3", false, 63},
    {"Ascend910_9363", 20, 40, 64 * GiB, true, true, 192 * MiB, "A3", false, 63},
    {"Ascend950", 32, 64, 128 * GiB, true, true, 128 * MiB, "950", true, 63},
};

const Chip* find_chip(const std::string& name) {
  for (const Chip& candidate : kChips) {
    if (name == candidate.name) return &candidate;
  }
  return nullptr;
}

const Chip* default_chip() { return find_chip("Ascend910B3"); }

// The rule of CANN for ASCEND_RT_VISIBLE_DEVICES: ids separated by commas, strictly ascending; an
// id that does not exist ends the list, and a list that is not ascending hides every device.
std::vector<int> parse_visible(const char* text, int count) {
  std::vector<int> ids;
  const char* p = text;
  while (*p >= '0' && *p <= '9') {
    char* end = nullptr;
    long id = strtol(p, &end, 10);
    if (id >= count) break;
    if (!ids.empty() && id <= ids.back()) return {};
    ids.push_back(int(id));
    if (*end != ',') break;
    p = end + 1;
  }
  return ids;
}

// The faults of hardware_fault.
constexpr const char* kHardwareFaults[] = {"mask-past-512", "wrong-reduce", "stale-broadcast", "slow-link",
                                           "nan-gradient"};

// A value that cannot be meant ends the process: taken as 0, or ignored, it would be a test that tests nothing.
[[noreturn]] void bad_value(const char* name, const std::string& text, const std::string& expected) {
  fprintf(stderr, "cannsim: %s=%s is not %s\n", name, text.c_str(), expected.c_str());
  _exit(2);
}

// Other people's variables are read as their owners read them.
bool is_ours(const char* name) { return strncmp(name, "CANNSIM_", 8) == 0; }

}  // namespace

long env_long(const char* name, long fallback) {
  const char* text = getenv(name);
  if (!text || !*text) return fallback;
  char* end = nullptr;
  long value = strtol(text, &end, 10);
  if (*end && is_ours(name)) bad_value(name, text, "a whole number");
  return value;
}

double env_double(const char* name, double fallback) {
  const char* text = getenv(name);
  if (!text || !*text) return fallback;
  char* end = nullptr;
  double value = strtod(text, &end);
  if ((*end || !std::isfinite(value)) && is_ours(name)) bad_value(name, text, "a number");
  return value;
}

std::string env_string(const char* name, const char* fallback) {
  const char* text = getenv(name);
  return text && *text ? text : fallback;
}

int rank() {
  static const int value = int(env_long("RANK", -1));
  return value;
}

bool chip_known() { return find_chip(env_string("CANNSIM_CHIP", "Ascend910B3")) != nullptr; }

std::string chip_names() {
  std::string names;
  for (const Chip& candidate : kChips) names += (names.empty() ? "" : ", ") + std::string(candidate.name);
  return names;
}

const Chip& chip() {
  static const Chip* found = find_chip(env_string("CANNSIM_CHIP", "Ascend910B3"));
  return found ? *found : *default_chip();
}

int physical_devices() {
  static const int count = [] {
    long value = env_long("CANNSIM_DEVICES", 1);
    if (value >= 0 && value <= kMaxDevices) return int(value);
    bad_value("CANNSIM_DEVICES", std::to_string(value), "a number of NPUs from 0 to " + std::to_string(kMaxDevices));
  }();
  return count;
}

const std::vector<int>& visible_devices() {
  static const std::vector<int> ids = [] {
    if (const char* text = getenv("ASCEND_RT_VISIBLE_DEVICES")) {
      return parse_visible(text, physical_devices());
    }
    std::vector<int> all;
    for (int i = 0; i < physical_devices(); i++) all.push_back(i);
    return all;
  }();
  return ids;
}

size_t memory_limit() {
  static const size_t bytes = [] {
    double gigabytes = env_double("CANNSIM_MEMORY_GB", double(chip().memory) / double(GiB));
    if (gigabytes <= 0) bad_value("CANNSIM_MEMORY_GB", std::to_string(gigabytes), "a number of GiB above 0");
    return size_t(gigabytes * double(GiB));
  }();
  return bytes;
}

int process_limit() {
  static const int count = [] {
    long value = env_long("CANNSIM_PROCESSES_PER_DEVICE", chip().processes);
    if (value > 0 && value <= 1 << 20) return int(value);
    bad_value("CANNSIM_PROCESSES_PER_DEVICE", std::to_string(value), "a number of processes above 0");
  }();
  return count;
}

void check_hardware_faults() {
  const std::string listed = env_string("CANNSIM_HARDWARE", "") + ",";
  std::string known;
  for (const char* name : kHardwareFaults) known += (known.empty() ? "" : ", ") + std::string(name);
  for (size_t begin = 0; begin < listed.size();) {
    size_t end = listed.find(',', begin);
    std::string name = listed.substr(begin, end - begin);
    bool found = name.empty();
    for (const char* candidate : kHardwareFaults) found = found || name == candidate;
    if (!found) bad_value("CANNSIM_HARDWARE", name, "one of " + known);
    begin = end + 1;
  }
}

bool hardware_fault(const char* name) {
  static const std::string listed = "," + env_string("CANNSIM_HARDWARE", "") + ",";
  return listed.find("," + std::string(name) + ",") != std::string::npos;
}

double now_seconds() {
  auto since_start = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(since_start).count();
}

double real_seconds(double simulated) {
  static const double scale = env_double("CANNSIM_TIME_SCALE", 1.0);
  return simulated * scale;
}

}  // namespace cannsim

// A library that is preloaded to watch calls asks for the function behind its own with RTLD_NEXT, which looks only
// through what is loaded for everybody; Python loads torch_npu, and with it this library, for itself.
__attribute__((constructor)) static void load_for_everybody() {
  Dl_info here;
  const int found = dladdr(reinterpret_cast<void*>(&load_for_everybody), &here);
  if (found) dlopen(here.dli_fname, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
}
