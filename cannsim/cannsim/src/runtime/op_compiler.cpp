// The older operator interface (libacl_op_compiler: aclopCompileAndExecute). torch_npu reads the float
// status and changes formats through it; for everything else it falls back to it when an aclnn operator is
// missing, when an argument has a private format, or when operators are compiled for each shape: those
// nobody wrote.
#include <algorithm>
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
                     "] of Ops kernel [AIcoreEngine] is unsupported. Reason: cannsim does not simulate it. torch_npu "
                     "asks for it because the aclnn function of this operator is missing (python -m cannsim operators "
                     "lists those that exist) or because an argument has a private format. CANNSIM_BOXED=1 runs "
                     "operators that are missing on the CPU.";
  fprintf(stderr, "cannsim: %s\n", text.c_str());
  cannsim::set_error(text);
  return ACL_ERROR_OP_NOT_FOUND;
}

// The float status: eight equal numbers, not 0 after an overflow. The first form (910A, 310P) writes it
// into its input, in float32, and gives zeros; the second (A2 and later) gives it, in int32.
template <class Buffer>
static bool float_status(const std::string& op, int inputs, Buffer* const input[], int outputs, Buffer* const output[],
                         aclrtStream stream) {
  static const std::map<std::string, int> forms{{"NPUAllocFloatStatus", 1}, {"NPUGetFloatStatus", 1},
                                                {"NPUClearFloatStatus", 1}, {"NPUGetFloatStatusV2", 2},
                                                {"NPUClearFloatStatusV2", 2}};
  auto form = forms.find(op);
  if (form == forms.end()) return false;
  bool reads = op.rfind("NPUGet", 0) == 0, clears = op.rfind("NPUClear", 0) == 0;
  void* flags = inputs > 0 ? input[0]->data : nullptr;
  void* result = outputs > 0 ? output[0]->data : nullptr;
  int index = cannsim::resolve_stream(stream)->device_index;
  cannsim::enqueue(stream, form->first.c_str(), [=, second = form->second == 2] {
    std::atomic<bool>& overflow = cannsim::device(index).overflow;
    if (second && result) {
      std::fill_n(static_cast<int32_t*>(result), 8, int32_t(reads && overflow));
    } else if (result) {
      std::fill_n(static_cast<float*>(result), 8, 0.0f);
      if (reads) std::fill_n(static_cast<float*>(flags), 8, overflow ? 1.0f : 0.0f);
    }
    if (clears) overflow = false;
    return 0;
  });
  return true;
}

// A change of format. A private format (NZ, NC1HWC0 ...) has its documented shape and size here, but the
// elements lie as in the base format, so that every operator finds them: what is cast comes back the same.
template <class Buffer>
static bool identity(const std::string& op, int inputs, Buffer* const input[], int outputs,
                     aclDataBuffer* const output[], aclrtStream stream) {
  if ((op != "Identity" && op != "TransData") || inputs != 1 || outputs != 1) return false;
  const void* from = input[0]->data;
  void* to = output[0]->data;
  size_t bytes = std::min(input[0]->bytes, output[0]->bytes);
  cannsim::enqueue(stream, "Identity", [=] {
    if (bytes) std::memmove(to, from, bytes);
    return 0;
  });
  return true;
}

API aclError aclopCompileAndExecute(const char* op, int inputs, const aclTensorDesc* const[],
                                    const aclDataBuffer* const input[], int outputs, const aclTensorDesc* const[],
                                    aclDataBuffer* const output[], const aclopAttr*, aclopEngineType, aclopCompileType,
                                    const char*, aclrtStream stream) {
  ENTER();
  bool done = float_status<const aclDataBuffer>(op, inputs, input, outputs, output, stream) ||
              identity(op, inputs, input, outputs, output, stream);
  return done ? ACL_SUCCESS : not_implemented(op);
}

API aclError aclopCompileAndExecuteV2(const char* op, int inputs, aclTensorDesc*[], aclDataBuffer* input[], int outputs,
                                      aclTensorDesc*[], aclDataBuffer* output[], aclopAttr*, aclopEngineType,
                                      aclopCompileType, const char*, aclrtStream stream) {
  ENTER();
  bool done = float_status<aclDataBuffer>(op, inputs, input, outputs, output, stream) ||
              identity(op, inputs, input, outputs, output, stream);
  return done ? ACL_SUCCESS : not_implemented(op);
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
  // 910A and 310P compile each operator for each new shape unless they are told not to.
  bool old = std::string(cannsim::chip().family) == "910A" || std::string(cannsim::chip().family) == "310P";
  const char* initial = option == ACL_OP_JIT_COMPILE && old ? "enable" : "disable";
  snprintf(value, size, "%s", found == options().compile.end() ? initial : found->second.c_str());
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
