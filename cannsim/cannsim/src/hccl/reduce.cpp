// Types of HCCL and their reductions. Half types are summed in float32 and rounded once.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>

#include "comm.h"

namespace cannsim {

namespace {

struct Type {
  HcclDataType type;
  size_t bytes;
  const char* name;
};

constexpr Type kTypes[] = {
    {HCCL_DATA_TYPE_INT8, 1, "int8"},       {HCCL_DATA_TYPE_INT16, 2, "int16"},     {HCCL_DATA_TYPE_INT32, 4, "int32"},
    {HCCL_DATA_TYPE_FP16, 2, "float16"},    {HCCL_DATA_TYPE_FP32, 4, "float32"},    {HCCL_DATA_TYPE_INT64, 8, "int64"},
    {HCCL_DATA_TYPE_UINT64, 8, "uint64"},   {HCCL_DATA_TYPE_UINT8, 1, "uint8"},     {HCCL_DATA_TYPE_UINT16, 2, "uint16"},
    {HCCL_DATA_TYPE_UINT32, 4, "uint32"},   {HCCL_DATA_TYPE_FP64, 8, "float64"},    {HCCL_DATA_TYPE_BFP16, 2, "bfloat16"},
    {HCCL_DATA_TYPE_INT128, 16, "int128"},  {HCCL_DATA_TYPE_HIF8, 1, "hif8"},       {HCCL_DATA_TYPE_FP8E4M3, 1, "fp8e4m3"},
    {HCCL_DATA_TYPE_FP8E5M2, 1, "fp8e5m2"}, {HCCL_DATA_TYPE_FP8E8M0, 1, "fp8e8m0"},
};

template <class Value, class Sum>
void reduce_as(void* target, const std::vector<const void*>& sources, size_t count, HcclReduceOp op) {
  auto* out = static_cast<Value*>(target);
  for (size_t i = 0; i < count; i++) {
    Sum total = Sum(static_cast<const Value*>(sources[0])[i]);
    for (size_t k = 1; k < sources.size(); k++) {
      Sum value = Sum(static_cast<const Value*>(sources[k])[i]);
      switch (op) {
        case HCCL_REDUCE_SUM: total = Sum(total + value); break;
        case HCCL_REDUCE_PROD: total = Sum(total * value); break;
        case HCCL_REDUCE_MAX: total = std::max(total, value); break;
        default: total = std::min(total, value);
      }
    }
    out[i] = Value(total);
  }
}

}  // namespace

size_t type_size(HcclDataType type) {
  for (const Type& known : kTypes) {
    if (known.type == type) return known.bytes;
  }
  return 0;
}

const char* type_name(HcclDataType type) {
  for (const Type& known : kTypes) {
    if (known.type == type) return known.name;
  }
  return "unknown";
}

bool can_reduce(HcclDataType type, HcclReduceOp op) {
  const std::string family = chip().family;
  const bool product = op == HCCL_REDUCE_PROD;
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_FP32: return true;
    case HCCL_DATA_TYPE_INT16: return family == "310P" ? op == HCCL_REDUCE_SUM : family != "910A" && !product;
    case HCCL_DATA_TYPE_INT64: return family != "310P";
    case HCCL_DATA_TYPE_BFP16: return chip().bf16 && !product;
    case HCCL_DATA_TYPE_FP64:
    case HCCL_DATA_TYPE_UINT64: return chip().float64_reduce;
    default: return false;
  }
}

void reduce(void* target, const std::vector<const void*>& sources, size_t count, HcclDataType type, HcclReduceOp op) {
  switch (type) {
    case HCCL_DATA_TYPE_FP32: return reduce_as<float, float>(target, sources, count, op);
    case HCCL_DATA_TYPE_FP16: return reduce_as<c10::Half, float>(target, sources, count, op);
    case HCCL_DATA_TYPE_BFP16: return reduce_as<c10::BFloat16, float>(target, sources, count, op);
    case HCCL_DATA_TYPE_FP64: return reduce_as<double, double>(target, sources, count, op);
    case HCCL_DATA_TYPE_INT8: return reduce_as<int8_t, int32_t>(target, sources, count, op);
    case HCCL_DATA_TYPE_INT16: return reduce_as<int16_t, int32_t>(target, sources, count, op);
    case HCCL_DATA_TYPE_INT32: return reduce_as<uint32_t, int32_t>(target, sources, count, op);
    case HCCL_DATA_TYPE_UINT64: return reduce_as<uint64_t, uint64_t>(target, sources, count, op);
    default: return reduce_as<int64_t, int64_t>(target, sources, count, op);
  }
}

}  // namespace cannsim
