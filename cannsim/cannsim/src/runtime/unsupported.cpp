// Functions that must exist for libtorch_npu to load, and that the simulator does not support:
// custom kernels, memory shared between processes, dumps. They say so.
#include "internal.h"

static int unsupported(const char* name) {
  cannsim::set_error(cannsim::describe_error(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, name));
  return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
}

#define UNSUPPORTED(name, ...) \
  API int name(__VA_ARGS__) { return unsupported(__func__); }

UNSUPPORTED(aclrtBinaryGetFunction, const aclrtBinHandle, const char*, aclrtFuncHandle*)
UNSUPPORTED(aclrtBinaryLoadFromData, const void*, size_t, const aclrtBinaryLoadOptions*, aclrtBinHandle*)
UNSUPPORTED(aclrtGetFunctionAddr, aclrtFuncHandle, void**, void**)
UNSUPPORTED(aclrtMemExportToShareableHandle, aclrtDrvMemHandle, aclrtMemHandleType, uint64_t, uint64_t*)
UNSUPPORTED(aclrtMemImportFromShareableHandle, uint64_t, int32_t, aclrtDrvMemHandle*)
UNSUPPORTED(aclrtMemSetPidToShareableHandle, uint64_t, int32_t*, size_t)
UNSUPPORTED(rtDevBinaryRegister, void*, void**)
UNSUPPORTED(rtFunctionRegister, void*, void*, void*, void*, uint32_t)
UNSUPPORTED(rtGetC2cCtrlAddr, uint64_t*, uint32_t*)
UNSUPPORTED(rtKernelLaunch, void*, uint32_t, void*, uint32_t, void*, void*)

API aclError aclmdlInitDump() { return ACL_SUCCESS; }
API aclError aclmdlSetDump(const char*) { return unsupported(__func__); }
API aclError aclmdlFinalizeDump() { return ACL_SUCCESS; }
