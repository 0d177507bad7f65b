// What an operator costs beside its result: workspace, hidden kernels, and the unit that runs it.
//
// Sources: the gradient of fused attention keeps dq, dk and dv in float32 (its public kernel); an operator of
// the general kind first copies arguments that are not contiguous, into its workspace (l0op::Contiguous of the
// public operator library). Which dtypes the vector cores take and which go to the AICPU: the support lists in
// the public operator library (ops-math, August 2026). An operator that is not listed runs on the cores.
#include <cstdlib>
#include <map>
#include <set>
#include <sstream>

#include "op.h"

namespace cannsim {

namespace {

using Types = std::set<at::ScalarType>;

struct Cores {
  Types old, current, next;  // dtypes that the cores of 910A and 310P, of A2 and A3, and of 950 take
};

const Types kHalfAndFloat{at::kFloat, at::kHalf}, kFloats{at::kFloat, at::kHalf, at::kBFloat16};
const Types kBits{at::kBool, at::kShort, at::kInt, at::kUInt16};  // of bool: the logical operators
const Types kBitsAndLong{at::kBool, at::kShort, at::kInt, at::kUInt16, at::kLong};
const Types kAllBits{at::kBool, at::kChar,   at::kByte, at::kShort, at::kUInt16,
                     at::kInt,  at::kUInt32, at::kLong, at::kUInt64};
const Types kDivided{at::kFloat, at::kHalf, at::kBFloat16, at::kInt, at::kChar, at::kByte};
const Types kDividedAndLong{at::kFloat, at::kHalf, at::kBFloat16, at::kInt, at::kChar, at::kByte, at::kLong};
const Types kFilled{at::kFloat, at::kHalf, at::kBFloat16, at::kInt, at::kChar, at::kBool};
const Types kFilledAndLong{at::kFloat, at::kHalf, at::kBFloat16, at::kInt, at::kChar, at::kBool, at::kLong};
const Types kSummed{at::kFloat, at::kHalf, at::kBFloat16, at::kInt, at::kLong};
const Types kCounted{at::kFloat, at::kHalf, at::kBFloat16, at::kInt};

// By the beginning of the name behind "aclnn"; the longest that fits counts.
const std::map<std::string, Cores>& cores() {
  static const std::map<std::string, Cores> table{
      {"LeftShift", {{}, {}, kAllBits}},
      {"RightShift", {{}, {}, kAllBits}},
      {"BitwiseAnd", {kBits, kBitsAndLong, kBitsAndLong}},
      {"BitwiseOr", {kBits, kBitsAndLong, kAllBits}},
      {"BitwiseXor", {kBits, kBitsAndLong, kAllBits}},
      {"FloorDivide", {kDivided, kDividedAndLong, kDividedAndLong}},
      {"MaskedFill", {kFilled, kFilled, kFilledAndLong}},
      {"InplaceMaskedFill", {kFilled, kFilled, kFilledAndLong}},
      {"Cumsum", {kCounted, kCounted, kSummed}},
      {"Sort", {kHalfAndFloat, kFloats, kFloats}},
      {"Topk", {kHalfAndFloat, kFloats, kAllBits}},
      {"Floor", {kFloats, kFloats, kFloats}},
      {"Log", {kFloats, kFloats, kFloats}},
      {"Exp", {kHalfAndFloat, kFloats, kFloats}},
  };
  return table;
}

// CANNSIM_AICPU=aclnnMul,aclnnAdd: operators that the cores of this chip are said not to have.
bool sent_to_aicpu(const std::string& name) {
  static const std::string listed = [] {
    const char* text = std::getenv("CANNSIM_AICPU");
    return "," + std::string(text ? text : "") + ",";
  }();
  return listed.find(",aclnn" + name + ",") != std::string::npos;
}

bool on_aicpu(const std::string& name, at::ScalarType dtype) {
  if (sent_to_aicpu(name)) return true;
  const Cores* found = nullptr;
  size_t longest = 0;
  for (const auto& [start, cores] : cores()) {
    if (name.compare(0, start.size(), start) == 0 && start.size() > longest) found = &cores, longest = start.size();
  }
  if (!found) return dtype == at::kDouble || at::isComplexType(dtype);
  std::string family = chip().family;
  const Types& types = family == "950" ? found->next : family[0] == 'A' ? found->current : found->old;
  return !types.count(dtype);
}

// Products and attention read transposed arguments as they are, copies are made to re-lay; tensor lists of
// optimizers are contiguous by their nature.
bool reads_strides(const std::string& name) {
  for (const char* part : {"Matmul", "Mm", "Addmm", "Bmm", "Baddbmm", "Copy", "Foreach", "Permute", "Transpose"}) {
    if (name.find(part) != std::string::npos) return true;
  }
  return false;
}

// Bytes that must be copied to make a tensor contiguous; broadcasts are read as they are.
size_t bytes_to_copy(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) return 0;
  int64_t elements = 1;
  bool contiguous = true;
  for (int64_t dim = tensor.dim() - 1; dim >= 0; dim--) {
    if (tensor.size(dim) == 1 || tensor.stride(dim) == 0) continue;
    contiguous = contiguous && tensor.stride(dim) == elements;
    elements *= tensor.size(dim);
  }
  return contiguous ? 0 : size_t(elements) * tensor.itemsize();
}

// CANNSIM_WORKSPACE=aclnnAdd:1000000,aclnnMul:10x adds to the workspace of operators: bytes, or so many times
// the bytes of the arguments.
size_t asked_for(const std::string& name, size_t arguments) {
  static const std::map<std::string, std::string> table = [] {
    std::map<std::string, std::string> parsed;
    const char* text = std::getenv("CANNSIM_WORKSPACE");
    std::istringstream items(text ? text : "");
    for (std::string item; std::getline(items, item, ',');) {
      size_t colon = item.find(':');
      if (colon != std::string::npos) parsed[item.substr(0, colon)] = item.substr(colon + 1);
    }
    return parsed;
  }();
  auto found = table.find(name);
  if (found == table.end()) return 0;
  return std::strtoull(found->second.c_str(), nullptr, 10) * (found->second.back() == 'x' ? arguments : 1);
}

}  // namespace

void estimate(const Declaration& operation, const std::vector<at::Tensor>& tensors, aclOpExecutor& made) {
  std::string name = operation.name + 5;  // without "aclnn"
  made.workspace = asked_for(operation.name, made.bytes);
  bool gradient = name.rfind("FlashAttention", 0) == 0 && name.find("Grad") != std::string::npos;
  for (size_t i = 0; gradient && i < 3 && i < tensors.size(); i++) {  // query, key and value come first
    if (tensors[i].scalar_type() != at::kFloat) made.workspace += size_t(tensors[i].numel()) * sizeof(float);
  }
  if (!reads_strides(name)) {
    for (const at::Tensor& tensor : tensors) {
      if (size_t bytes = bytes_to_copy(tensor)) made.workspace += bytes, made.inner++;
    }
  }
  if (!tensors.empty() && tensors.front().defined()) made.aicpu = on_aicpu(name, tensors.front().scalar_type());
}

}  // namespace cannsim
