// The profiler interface (libmsprofiler and the aclprof functions of libascendcl): starts and stops
// without error and collects nothing. Times on a simulated device would mean nothing; what was
// launched is in the counters and the trace file.
#include "acl/acl_prof.h"
#include "internal.h"

struct aclprofConfig {};
struct aclprofStepInfo {};

API aclError aclprofInit(const char*, size_t) {
  ENTER();
  return ACL_SUCCESS;
}
API aclError aclprofFinalize() {
  ENTER();
  return ACL_SUCCESS;
}
API aclError aclprofStart(const aclprofConfig*) {
  ENTER();
  return ACL_SUCCESS;
}
API aclError aclprofStop(const aclprofConfig*) {
  ENTER();
  return ACL_SUCCESS;
}
API aclprofConfig* aclprofCreateConfig(uint32_t*, uint32_t, aclprofAicoreMetrics, const aclprofAicoreEvents*,
                                       uint64_t) {
  return new aclprofConfig;
}
API aclError aclprofDestroyConfig(const aclprofConfig* config) {
  delete config;
  return ACL_SUCCESS;
}
API aclError aclprofWarmup(const aclprofConfig*) { return ACL_SUCCESS; }
API aclError aclprofSetConfig(aclprofConfigType, const char*, size_t) { return ACL_SUCCESS; }
API aclError aclprofMarkEx(const char*, size_t, aclrtStream) { return ACL_SUCCESS; }
API aclError aclprofRegisterDeviceCallback() { return ACL_SUCCESS; }
API aclError aclprofGetStepTimestamp(aclprofStepInfo*, aclprofStepTag, aclrtStream) { return ACL_SUCCESS; }
API aclprofStepInfo* aclprofCreateStepInfo() { return new aclprofStepInfo; }
API void aclprofDestroyStepInfo(aclprofStepInfo* info) { delete info; }

// Reports of torch_npu itself to the profiler.
API uint64_t MsprofGetHashId(const char* text, size_t length) {
  return std::hash<std::string>()(std::string(text, length));
}
API int32_t MsprofRegisterCallback(uint32_t, void*) { return 0; }
API int32_t MsprofReportAdditionalInfo(uint32_t, const void*, uint32_t) { return 0; }
API int32_t MsprofReportApi(uint32_t, const void*) { return 0; }
API int32_t MsprofReportCompactInfo(uint32_t, const void*, uint32_t) { return 0; }
API uint64_t MsprofSysCycleTime() { return uint64_t(cannsim::now_seconds() * 1e9); }
