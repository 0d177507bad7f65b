// The older operator interface (libacl_op_compiler: aclopCompileAndExecute). torch_npu falls back to
// it when an aclnn operator is missing, so every execution here is an operator that nobody wrote.
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "acl/acl_op_compiler.h"
#include "internal.h"

struct aclTensorDesc {
  aclDataType type;
  std::vector<int64_t> dims;
  aclFormat format;
  std::string name;
};
struct aclDataBuffer {
  void* data;
  size_t bytes;
};
struct aclopAttr {};

API aclDataBuffer* aclCreateDataBuffer(void* data, size_t bytes) { return new aclDataBuffer{data, bytes}; }
API aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
  delete buffer;
  return ACL_SUCCESS;
}

API aclTensorDesc* aclCreateTensorDesc(aclDataType type, int count, const int64_t* dims, aclFormat format) {
  return new aclTensorDesc{type, std::vector<int64_t>(dims, dims + count), format, ""};
}
API void aclDestroyTensorDesc(const aclTensorDesc* desc) { delete desc; }
API aclError aclGetTensorDescDimV2(const aclTensorDesc* desc, size_t index, int64_t* size) {
  if (index >= desc->dims.size()) return ACL_ERROR_INVALID_PARAM;
  *size = desc->dims[index];
  return ACL_SUCCESS;
}
API aclFormat aclGetTensorDescFormat(const aclTensorDesc* desc) { return desc->format; }
API size_t aclGetTensorDescNumDims(const aclTensorDesc* desc) { return desc->dims.size(); }
API aclDataType aclGetTensorDescType(const aclTensorDesc* desc) { return desc->type; }
API void aclSetTensorDescName(aclTensorDesc* desc, const char* name) { desc->name = name; }
API aclError aclSetTensorFormat(aclTensorDesc*, aclFormat) { return ACL_SUCCESS; }
API aclError aclSetTensorPlaceMent(aclTensorDesc*, aclMemType) { return ACL_SUCCESS; }
API aclError aclSetTensorShape(aclTensorDesc*, int, const int64_t*) { return ACL_SUCCESS; }

// Attributes are accepted and dropped: nothing executes them.
API aclopAttr* aclopCreateAttr() { return new aclopAttr; }
API void aclopDestroyAttr(const aclopAttr* attr) { delete attr; }
API aclError aclopSetAttrBool(aclopAttr*, const char*, uint8_t) { return ACL_SUCCESS; }
API aclError aclopSetAttrDataType(aclopAttr*, const char*, aclDataType) { return ACL_SUCCESS; }
API aclError aclopSetAttrFloat(aclopAttr*, const char*, float) { return ACL_SUCCESS; }
API aclError aclopSetAttrInt(aclopAttr*, const char*, int64_t) { return ACL_SUCCESS; }
API aclError aclopSetAttrListBool(aclopAttr*, const char*, int, const uint8_t*) { return ACL_SUCCESS; }
API aclError aclopSetAttrListFloat(aclopAttr*, const char*, int, const float*) { return ACL_SUCCESS; }
API aclError aclopSetAttrListInt(aclopAttr*, const char*, int, const int64_t*) { return ACL_SUCCESS; }
API aclError aclopSetAttrListListInt(aclopAttr*, const char*, int, const int*, const int64_t* const*) { return ACL_SUCCESS; }
API aclError aclopSetAttrString(aclopAttr*, const char*, const char*) { return ACL_SUCCESS; }

static aclError not_implemented(const char* op) {
  std::string text = std::string("EZ3002: Optype [") + op +
                     "] of Ops kernel [AIcoreEngine] is unsupported. Reason: cannsim has no operator of this name; add "
                     "its aclnn function (cannsim/OPERATORS.md) or set CANNSIM_BOXED=1.";
  fprintf(stderr, "cannsim: %s\n", text.c_str());
  cannsim::set_error(text);
  return ACL_ERROR_OP_NOT_FOUND;
}

API aclError aclopCompileAndExecute(const char* op, int, const aclTensorDesc* const[], const aclDataBuffer* const[], int,
                                    const aclTensorDesc* const[], aclDataBuffer* const[], const aclopAttr*, aclopEngineType,
                                    aclopCompileType, const char*, aclrtStream) {
  ENTER();
  return not_implemented(op);
}

API aclError aclopCompileAndExecuteV2(const char* op, int, aclTensorDesc*[], aclDataBuffer*[], int, aclTensorDesc*[],
                                      aclDataBuffer*[], aclopAttr*, aclopEngineType, aclopCompileType, const char*, aclrtStream) {
  ENTER();
  return not_implemented(op);
}

// ---- options: kept and given back

namespace {
struct Options {
  std::mutex mutex;
  std::map<int, std::string> compile;
  std::map<int, int64_t> system;
};
Options& options() {
  static auto* instance = new Options;
  return *instance;
}
constexpr size_t kOptionSize = 64;
}  // namespace

API aclError aclSetCompileopt(aclCompileOpt option, const char* value) {
  std::lock_guard lock(options().mutex);
  options().compile[option] = value;
  return ACL_SUCCESS;
}
API size_t aclGetCompileoptSize(aclCompileOpt) { return kOptionSize; }
API aclError aclGetCompileopt(aclCompileOpt option, char* value, size_t size) {
  std::lock_guard lock(options().mutex);
  auto found = options().compile.find(option);
  snprintf(value, size, "%s", found == options().compile.end() ? "disable" : found->second.c_str());
  return ACL_SUCCESS;
}

API aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  std::lock_guard lock(options().mutex);
  options().system[option] = value;
  return ACL_SUCCESS;
}
API aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }
API aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  std::lock_guard lock(options().mutex);
  *value = options().system[option];
  return ACL_SUCCESS;
}
