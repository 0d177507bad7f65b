// Start and end, versions, devices and contexts, what a device can do.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "internal.h"

namespace cannsim {

namespace {

thread_local int t_device = -1;
char g_contexts[kMaxDevices];  // the address is the context of that device
std::atomic<bool> g_used[kMaxDevices];  // has a primary context: some thread of this process took it
std::atomic<bool> g_initialised{false};
std::atomic<int> g_op_timeout{1091};  // seconds, default of an AI core task on A2
std::atomic<bool> g_saturates{false};  // asked for; 910A and 310P always do
std::atomic<int> g_default_device{-1};  // "defaultDevice" of the file given to aclInit; -1: none

std::string cann_version() { return env_string("CANNSIM_CANN_VERSION", "9.1.0"); }

int visible_count() { return int(visible_devices().size()); }

// {"defaultDevice": {"default_device": "0"}} lets threads that set no device use that one. torch_npu
// asks for it from CANN 8.3 on; before, such a thread gets error 107002.
int default_device_from(const char* path) {
  FILE* file = path && *path ? fopen(path, "r") : nullptr;
  if (!file) return -1;
  char text[4096];
  text[fread(text, 1, sizeof text - 1, file)] = 0;
  fclose(file);
  const char* key = strstr(text, "\"default_device\"");
  const char* digits = key ? strpbrk(key, "0123456789") : nullptr;
  return digits ? atoi(digits) : -1;
}

// Registered by aclInit, so it runs before the static destructors of libtorch.
void at_exit() {
  stop_streams();
  machine_close();
}

// libopapi installs the boxed operators when it is loaded; torch_npu would do that at its first operator, too late.
void install_boxed() {
  if (env_string("CANNSIM_BOXED", "0") == "0") return;
  if (!dlopen("libopapi.so", RTLD_NOW | RTLD_GLOBAL)) fprintf(stderr, "cannsim: CANNSIM_BOXED: %s\n", dlerror());
}

}  // namespace

Device& device(int index) {
  static auto* all = new Device[kMaxDevices];
  return all[index];
}

void Device::fail(int code, const std::string& text) {
  stop_at_error(text);
  std::lock_guard lock(mutex);
  if (error) return;
  error = code;
  error_text = text;
}

int Device::report() {
  std::lock_guard lock(mutex);
  if (error) set_error(error_text);
  return error;
}

int current_device() { return t_device; }
void set_current_device(int index) {
  t_device = index;
  g_used[index] = true;
}

bool saturating() { return !chip().inf_nan || g_saturates; }
void note_overflow() { device(current_device()).overflow = true; }

// Makes a device that of the calling thread, unless too many other processes hold it.
int take_device(int index, const char* where) {
  if (!machine_hold(index)) {
    set_error(describe_error(ACL_ERROR_RT_DEV_SETUP_ERROR, where) + " open device " + std::to_string(index) +
              " failed, runtime result = 507033. Reason: " + std::to_string(process_limit()) +
              " processes hold it, and no more may hold one " + chip().name + " (CANNSIM_PROCESSES_PER_DEVICE).");
    return ACL_ERROR_RT_DEV_SETUP_ERROR;
  }
  if (!g_used[index]) {  // the place is taken first: processes that open the device at the same time meet the limit
    static const double seconds = env_double("CANNSIM_OPEN_SECONDS", 0);
    std::this_thread::sleep_for(std::chrono::duration<double>(real_seconds(seconds)));
  }
  set_current_device(index);
  return ACL_SUCCESS;
}

int require_device(const char* where) {
  if (t_device < 0 && g_default_device >= 0) return take_device(g_default_device, where);
  if (t_device >= 0) return ACL_SUCCESS;
  set_error(describe_error(ACL_ERROR_RT_CONTEXT_NULL, where));
  return ACL_ERROR_RT_CONTEXT_NULL;
}

int op_timeout_seconds() { return g_op_timeout; }

}  // namespace cannsim

using cannsim::chip;
using cannsim::t_device;

// ---- start and end

API aclError aclInit(const char* config) {
  ENTER();
  if (!cannsim::chip_known()) {
    std::string text = "EE2002: Value " + cannsim::env_string("CANNSIM_CHIP", "") +
                       " for environment variable CANNSIM_CHIP is invalid. Expected value: " + cannsim::chip_names() + ".";
    fprintf(stderr, "cannsim: %s\n", text.c_str());
    cannsim::set_error(text);
    return ACL_ERROR_RT_SOC_VERSION;
  }
  cannsim::check_hardware_faults();
  cannsim::process_limit();  // a value that cannot be meant is told now, also to a process that is alone
  if (cannsim::g_initialised.exchange(true)) return ACL_ERROR_REPEAT_INITIALIZE;
  static const bool registered = atexit(cannsim::at_exit) == 0;
  (void)registered;
  int wanted = cannsim::default_device_from(config);
  if (wanted < cannsim::visible_count()) cannsim::g_default_device = wanted;
  cannsim::machine_open();
  cannsim::install_boxed();
  return ACL_SUCCESS;
}

API aclError aclFinalize() {
  ENTER();
  cannsim::g_initialised = false;
  return ACL_SUCCESS;
}

API void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}

// ---- versions

API const char* aclrtGetSocName() { return chip().name; }

API aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion* version) {
  memset(version, 0, sizeof *version);
  std::string text = name == ACL_PKG_NAME_DRIVER ? "25.5.0" : cannsim::cann_version();
  snprintf(version->version, sizeof version->version, "%s", text.c_str());
  return ACL_SUCCESS;
}

API aclError aclsysGetVersionStr(char*, char* version) {
  strcpy(version, cannsim::cann_version().c_str());  // the interface gives no length; CANN asks for 128 bytes
  return ACL_SUCCESS;
}

// ---- devices

API aclError aclrtGetDeviceCount(uint32_t* count) {
  ENTER();
  *count = uint32_t(cannsim::visible_count());
  return ACL_SUCCESS;
}

// Of the driver (libascend_hal): all devices, torch_npu applies ASCEND_RT_VISIBLE_DEVICES itself.
API int drvGetDevNum(uint32_t* count) {
  *count = uint32_t(cannsim::physical_devices());
  return 0;
}

API aclError aclrtSetDevice(int32_t index) {
  ENTER();
  if (index < 0 || index >= cannsim::visible_count()) {
    cannsim::set_error("EE1003: aclrtSetDevice failed because value " + std::to_string(index) +
                       " for parameter deviceId is invalid. Expected value: [0, " +
                       std::to_string(cannsim::visible_count()) + ").");
    return ACL_ERROR_RT_INVALID_DEVICEID;
  }
  return cannsim::take_device(index, __func__);
}

API aclError aclrtGetDevice(int32_t* index) {
  if (t_device < 0) return ACL_ERROR_RT_CONTEXT_NULL;
  *index = t_device;
  return ACL_SUCCESS;
}

API aclError aclrtResetDevice(int32_t index) {
  ENTER();
  if (index < 0 || index >= cannsim::visible_count()) return ACL_SUCCESS;
  cannsim::g_used[index] = false;
  cannsim::machine_release(index);
  return ACL_SUCCESS;
}

API aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (int error = cannsim::require_device(__func__)) return error;
  *context = &cannsim::g_contexts[t_device];
  return ACL_SUCCESS;
}

API aclError aclrtSetCurrentContext(aclrtContext context) {
  ptrdiff_t index = static_cast<char*>(context) - cannsim::g_contexts;
  if (index < 0 || index >= cannsim::visible_count()) return ACL_ERROR_RT_PARAM_INVALID;
  return cannsim::take_device(int(index), __func__);
}

API aclError aclrtGetPrimaryCtxState(int32_t index, uint32_t* flags, int32_t* active) {
  if (flags) *flags = 0;
  if (index < 0 || index >= cannsim::visible_count()) return ACL_ERROR_RT_INVALID_DEVICEID;
  *active = cannsim::g_used[index];
  return ACL_SUCCESS;
}

API aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t* const logic) {
  if (user < 0 || user >= cannsim::visible_count()) return ACL_ERROR_RT_INVALID_DEVICEID;
  *logic = cannsim::visible_devices()[size_t(user)];
  return ACL_SUCCESS;
}

API aclError aclrtSynchronizeDevice() {
  ENTER_WITH_DEVICE();
  return cannsim::synchronize_all(t_device, -1);
}

API aclError aclrtSynchronizeDeviceWithTimeout(int32_t milliseconds) {
  ENTER_WITH_DEVICE();
  return cannsim::synchronize_all(t_device, milliseconds < 0 ? -1 : cannsim::real_seconds(milliseconds / 1e3));
}

// ---- errors of the device

API aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }

API aclError aclrtPeekAtLastError(aclrtLastErrLevel) {
  return t_device < 0 ? ACL_SUCCESS : cannsim::device(t_device).report();
}

API aclError aclrtDeviceTaskAbort(int32_t, uint32_t) {
  ENTER();
  return ACL_SUCCESS;
}

API aclError aclrtGetErrorVerbose(int32_t, aclrtErrorInfo* info) {
  memset(info, 0, sizeof *info);
  return ACL_SUCCESS;
}

API aclError aclrtRepairError(int32_t, const aclrtErrorInfo*) { return ACL_ERROR_RT_FEATURE_NOT_SUPPORT; }

API aclError aclrtGetMemUceInfo(int32_t, aclrtMemUceInfo*, size_t, size_t* count) {
  *count = 0;
  return ACL_SUCCESS;
}

API aclError aclrtMemUceRepair(int32_t, aclrtMemUceInfo*, size_t) { return ACL_ERROR_RT_FEATURE_NOT_SUPPORT; }

// ---- timeouts and modes

API aclError aclrtSetOpExecuteTimeOut(uint32_t seconds) {
  if (seconds) cannsim::g_op_timeout = int(seconds);
  return ACL_SUCCESS;
}

API aclError aclrtSetOpExecuteTimeOutV2(uint64_t microseconds, uint64_t* actual) {
  if (microseconds) cannsim::g_op_timeout = int((microseconds + 999999) / 1000000);
  *actual = uint64_t(cannsim::g_op_timeout) * 1000000;
  return ACL_SUCCESS;
}

API aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }

// Saturation is the only mode of 910A and 310P; the others take either.
API aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
  bool wanted = mode == ACL_RT_OVERFLOW_MODE_SATURATION;
  if (!chip().inf_nan && !wanted) return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
  cannsim::g_saturates = wanted;
  return ACL_SUCCESS;
}

// ---- what a device can do

static bool has_attribute(aclCannAttr attribute) {
  switch (attribute) {
    case ACL_CANN_ATTR_INF_NAN: return chip().inf_nan;
    case ACL_CANN_ATTR_BF16: return chip().bf16;
    case ACL_CANN_ATTR_JIT_COMPILE: return true;
    default: return false;
  }
}

API aclError aclGetCannAttribute(aclCannAttr attribute, int32_t* value) {
  *value = has_attribute(attribute);
  return ACL_SUCCESS;
}

API aclError aclGetCannAttributeList(const aclCannAttr** attributes, size_t* count) {
  static const auto* present = [] {
    auto* list = new std::vector<aclCannAttr>;
    for (aclCannAttr attribute : {ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16, ACL_CANN_ATTR_JIT_COMPILE}) {
      if (has_attribute(attribute)) list->push_back(attribute);
    }
    return list;
  }();
  *attributes = present->data();
  *count = present->size();
  return ACL_SUCCESS;
}

API aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo info, int64_t* value) {
  switch (info) {
    case ACL_DEVICE_INFO_AI_CORE_NUM: *value = chip().cube_cores; break;
    case ACL_DEVICE_INFO_VECTOR_CORE_NUM: *value = chip().vector_cores; break;
    case ACL_DEVICE_INFO_L2_SIZE: *value = int64_t(chip().l2_cache); break;
    default: *value = 0;
  }
  return ACL_SUCCESS;
}

API aclError aclrtGetDeviceInfo(uint32_t index, aclrtDevAttr attribute, int64_t* value) {
  switch (int(attribute)) {
    case ACL_DEV_ATTR_AICPU_CORE_NUM: *value = 6; break;
    case ACL_DEV_ATTR_VECTOR_CORE_NUM: *value = chip().vector_cores; break;
    case ACL_DEV_ATTR_AICORE_CORE_NUM:
    case ACL_DEV_ATTR_CUBE_CORE_NUM: *value = chip().cube_cores; break;
    case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE: *value = int64_t(cannsim::memory_limit()); break;
    case ACL_DEV_ATTR_L2_CACHE_SIZE: *value = int64_t(chip().l2_cache); break;
    case ACL_DEV_ATTR_PHY_CHIP_ID: *value = index; break;
    default: *value = 0;
  }
  return ACL_SUCCESS;
}

static uint32_t core_limit(aclrtDevResLimitType type) {
  return uint32_t(type == ACL_RT_DEV_RES_CUBE_CORE ? chip().cube_cores : chip().vector_cores);
}

API aclError aclrtGetDeviceResLimit(int32_t, aclrtDevResLimitType type, uint32_t* value) {
  *value = core_limit(type);
  return ACL_SUCCESS;
}
API aclError aclrtSetDeviceResLimit(int32_t, aclrtDevResLimitType, uint32_t) { return ACL_SUCCESS; }
API aclError aclrtResetDeviceResLimit(int32_t) { return ACL_SUCCESS; }
API aclError aclrtGetStreamResLimit(aclrtStream, aclrtDevResLimitType type, uint32_t* value) {
  *value = core_limit(type);
  return ACL_SUCCESS;
}
API aclError aclrtSetStreamResLimit(aclrtStream, aclrtDevResLimitType, uint32_t) { return ACL_SUCCESS; }
API aclError aclrtResetStreamResLimit(aclrtStream) { return ACL_SUCCESS; }
API aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t* value) {
  *value = core_limit(type);
  return ACL_SUCCESS;
}
API aclError aclrtUseStreamResInCurrentThread(aclrtStream) { return ACL_SUCCESS; }
API aclError aclrtUnuseStreamResInCurrentThread(aclrtStream) { return ACL_SUCCESS; }

API aclError aclrtDeviceGetUuid(int32_t index, aclrtUuid* uuid) {
  memset(uuid, 0, sizeof *uuid);
  snprintf(reinterpret_cast<char*>(uuid), sizeof *uuid, "cannsim%d", index);
  return ACL_SUCCESS;
}

// Busy while tasks are queued.
API aclError aclrtGetDeviceUtilizationRate(int32_t index, aclrtUtilizationInfo* info) {
  memset(info, 0, sizeof *info);
  int busy = cannsim::pending_tasks(index) > 0 ? 100 : 0;
  info->cubeUtilization = info->vectorUtilization = busy;
  info->memoryUtilization = int(100.0 * double(cannsim::device(index).allocated) / double(cannsim::memory_limit()));
  return ACL_SUCCESS;
}

API aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t index, int32_t peer) {
  *can = index != peer;
  return ACL_SUCCESS;
}
API aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }
API aclError aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = getpid();
  return ACL_SUCCESS;
}
