// The older operator interface (libacl_op_compiler: aclopCompileAndExecute). torch_npu reads the float
// status and changes formats through it; for everything else it falls back to it when an aclnn operator is
// missing, when an argument has a private format, or when operators are compiled for each shape. Some of
// those are computed by libopapi (ops/older*.cpp).
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "acl/acl_op_compiler.h"
#include "internal.h"
#include "older.h"

struct aclTensorDesc {
  aclDataType type;
  std::vector<int64_t> dims;
  aclFormat format;
  std::string name;
  bool on_host = false;
};
struct aclDataBuffer {
  void* data;
  size_t bytes;
};
struct aclopAttr {
  std::map<std::string, cannsim::OlderAttribute> values;
};

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
API aclError aclSetTensorPlaceMent(aclTensorDesc* desc, aclMemType type) {
  desc->on_host = type == ACL_MEMTYPE_HOST || type == ACL_MEMTYPE_HOST_COMPILE_INDEPENDENT;
  return ACL_SUCCESS;
}
API aclError aclSetTensorShape(aclTensorDesc*, int, const int64_t*) { return ACL_SUCCESS; }

API aclopAttr* aclopCreateAttr() { return new aclopAttr; }
API void aclopDestroyAttr(const aclopAttr* attr) { delete attr; }

static aclError keep(aclopAttr* attr, const char* name, cannsim::OlderAttribute value) {
  attr->values[name] = std::move(value);
  return ACL_SUCCESS;
}
API aclError aclopSetAttrBool(aclopAttr* attr, const char* name, uint8_t value) { return keep(attr, name, value != 0); }
API aclError aclopSetAttrDataType(aclopAttr* attr, const char* name, aclDataType value) {
  return keep(attr, name, value);
}
API aclError aclopSetAttrFloat(aclopAttr* attr, const char* name, float value) { return keep(attr, name, value); }
API aclError aclopSetAttrInt(aclopAttr* attr, const char* name, int64_t value) { return keep(attr, name, value); }
API aclError aclopSetAttrListBool(aclopAttr* attr, const char* name, int count, const uint8_t* values) {
  return keep(attr, name, std::vector<int64_t>(values, values + count));
}
API aclError aclopSetAttrListFloat(aclopAttr* attr, const char* name, int count, const float* values) {
  return keep(attr, name, std::vector<float>(values, values + count));
}
API aclError aclopSetAttrListInt(aclopAttr* attr, const char* name, int count, const int64_t* values) {
  return keep(attr, name, std::vector<int64_t>(values, values + count));
}
API aclError aclopSetAttrListListInt(aclopAttr*, const char*, int, const int*, const int64_t* const*) {
  return ACL_SUCCESS;  // no operator that is simulated has one
}
API aclError aclopSetAttrString(aclopAttr* attr, const char* name, const char* value) {
  return keep(attr, name, std::string(value));
}

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

// ---- what libopapi computes

static std::atomic<cannsim::OlderLibrary> older_library{nullptr};

void cannsim::provide_older(OlderLibrary library) { older_library = library; }

template <class Desc, class Buffer>
static std::vector<cannsim::OlderTensor> older_tensors(int count, Desc* const desc[], Buffer* const buffer[]) {
  std::vector<cannsim::OlderTensor> tensors;
  for (int i = 0; i < count; ++i) {
    cannsim::OlderTensor tensor{desc[i]->type, desc[i]->dims, buffer[i]->data, nullptr};
    if (desc[i]->on_host && tensor.data) {
      const char* bytes = static_cast<const char*>(tensor.data);
      tensor.host = std::make_shared<std::vector<char>>(bytes, bytes + buffer[i]->bytes);
      tensor.data = tensor.host->data();
    }
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

template <class Desc, class Buffer>
static bool older(const char* op, int inputs, Desc* const input_desc[], Buffer* const input[], int outputs,
                  Desc* const output_desc[], aclDataBuffer* const output[], const aclopAttr* attr, aclrtStream stream,
                  int* error) {
  if (!older_library) dlopen("libopapi.so", RTLD_NOW | RTLD_LOCAL);  // torch_npu may not have needed it so far
  cannsim::OlderLibrary library = older_library;
  if (!library) return false;
  cannsim::OlderCall call{
      op, older_tensors(inputs, input_desc, input), older_tensors(outputs, output_desc, output), {}};
  if (attr) call.attributes = attr->values;
  return library(call, stream, error);
}

API aclError aclopCompileAndExecute(const char* op, int inputs, const aclTensorDesc* const input_desc[],
                                    const aclDataBuffer* const input[], int outputs,
                                    const aclTensorDesc* const output_desc[], aclDataBuffer* const output[],
                                    const aclopAttr* attr, aclopEngineType, aclopCompileType, const char*,
                                    aclrtStream stream) {
  ENTER();
  int error = ACL_SUCCESS;
  bool done = float_status<const aclDataBuffer>(op, inputs, input, outputs, output, stream) ||
              identity(op, inputs, input, outputs, output, stream) ||
              older(op, inputs, input_desc, input, outputs, output_desc, output, attr, stream, &error);
  return done ? error : not_implemented(op);
}

API aclError aclopCompileAndExecuteV2(const char* op, int inputs, aclTensorDesc* input_desc[], aclDataBuffer* input[],
                                      int outputs, aclTensorDesc* output_desc[], aclDataBuffer* output[],
                                      aclopAttr* attr, aclopEngineType, aclopCompileType, const char*,
                                      aclrtStream stream) {
  ENTER();
  int error = ACL_SUCCESS;
  bool done = float_status<aclDataBuffer>(op, inputs, input, outputs, output, stream) ||
              identity(op, inputs, input, outputs, output, stream) ||
              older(op, inputs, input_desc, input, outputs, output_desc, output, attr, stream, &error);
  return done ? error : not_implemented(op);
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
