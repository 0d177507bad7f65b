// The object half of the aclnn interface: tensors, scalars, arrays, lists and executors.
#include <algorithm>

#include "op.h"

namespace cannsim {

at::ScalarType to_torch(aclDataType dtype) {
  switch (dtype) {
    case ACL_FLOAT: return at::kFloat;
    case ACL_FLOAT16: return at::kHalf;
    case ACL_BF16: return at::kBFloat16;
    case ACL_DOUBLE: return at::kDouble;
    case ACL_INT8: return at::kChar;
    case ACL_INT16: return at::kShort;
    case ACL_INT32: return at::kInt;
    case ACL_INT64: return at::kLong;
    case ACL_UINT8: return at::kByte;
    case ACL_UINT16: return at::kUInt16;
    case ACL_UINT32: return at::kUInt32;
    case ACL_UINT64: return at::kUInt64;
    case ACL_BOOL: return at::kBool;
    case ACL_COMPLEX32: return at::kComplexHalf;
    case ACL_COMPLEX64: return at::kComplexFloat;
    case ACL_COMPLEX128: return at::kComplexDouble;
    case ACL_FLOAT8_E4M3FN: return at::kFloat8_e4m3fn;
    case ACL_FLOAT8_E5M2: return at::kFloat8_e5m2;
    default: return at::ScalarType::Undefined;
  }
}

static at::Scalar read_scalar(const void* value, aclDataType dtype) {
  switch (dtype) {
    case ACL_FLOAT: return *static_cast<const float*>(value);
    case ACL_DOUBLE: return *static_cast<const double*>(value);
    case ACL_FLOAT16: return static_cast<float>(*static_cast<const at::Half*>(value));
    case ACL_BF16: return static_cast<float>(*static_cast<const at::BFloat16*>(value));
    case ACL_INT8: return static_cast<int64_t>(*static_cast<const int8_t*>(value));
    case ACL_UINT8: return static_cast<int64_t>(*static_cast<const uint8_t*>(value));
    case ACL_INT16: return static_cast<int64_t>(*static_cast<const int16_t*>(value));
    case ACL_INT32: return static_cast<int64_t>(*static_cast<const int32_t*>(value));
    case ACL_INT64: return *static_cast<const int64_t*>(value);
    case ACL_BOOL: return *static_cast<const bool*>(value);
    case ACL_COMPLEX64: return *static_cast<const c10::complex<float>*>(value);
    case ACL_COMPLEX128: return *static_cast<const c10::complex<double>*>(value);
    default: throw Refused{kInvalidArgument, "scalar dtype " + std::to_string(dtype)};
  }
}

}  // namespace cannsim

using cannsim::to_torch;

// A dtype without a torch counterpart (packed 4-bit types) or a bad scalar gives nullptr, as a
// failed creation does in the real library.
extern "C" CANNSIM_API aclTensor* aclCreateTensor(const int64_t* shape, uint64_t rank, aclDataType dtype,
                                                  const int64_t* strides, int64_t offset, aclFormat format,
                                                  const int64_t*, uint64_t, void* data) {
  at::ScalarType type = to_torch(dtype);
  if (type == at::ScalarType::Undefined) {
    cannsim::set_error("EZ1001: aclCreateTensor: dtype " + std::to_string(dtype) + " is not simulated");
    return nullptr;
  }
  auto options = at::TensorOptions().dtype(type).device(at::kCPU);
  char* start = static_cast<char*>(data) + offset * static_cast<int64_t>(c10::elementSize(type));
  at::Tensor view = at::from_blob(start, at::IntArrayRef(shape, rank), at::IntArrayRef(strides, rank), options);
  return new aclTensor{std::move(view), format, std::make_shared<std::vector<int64_t>>()};
}

extern "C" CANNSIM_API int aclDestroyTensor(const aclTensor* tensor) {
  delete tensor;
  return 0;
}

// The caller frees the shape with delete[].
extern "C" CANNSIM_API int aclGetViewShape(const aclTensor* tensor, int64_t** shape, uint64_t* rank) {
  if (!tensor || !shape || !rank) return cannsim::kNullArgument;
  auto sizes = tensor->found_shape->empty() ? tensor->tensor.sizes().vec() : *tensor->found_shape;
  *rank = sizes.size();
  *shape = new int64_t[sizes.size() + 1];
  std::copy(sizes.begin(), sizes.end(), *shape);
  return 0;
}

extern "C" CANNSIM_API aclScalar* aclCreateScalar(void* value, aclDataType dtype) {
  try {
    return new aclScalar{cannsim::read_scalar(value, dtype), dtype};
  } catch (const cannsim::Refused& refused) {
    cannsim::set_error("EZ1001: aclCreateScalar: " + refused.text + " is not simulated");
    return nullptr;
  }
}

extern "C" CANNSIM_API int aclDestroyScalar(const aclScalar* scalar) {
  delete scalar;
  return 0;
}

extern "C" CANNSIM_API aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t size) {
  return new aclIntArray{{values, values + size}};
}

extern "C" CANNSIM_API aclFloatArray* aclCreateFloatArray(const float* values, uint64_t size) {
  return new aclFloatArray{{values, values + size}};
}

extern "C" CANNSIM_API aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t size) {
  return new aclBoolArray{{values, values + size}};
}

extern "C" CANNSIM_API int aclDestroyIntArray(const aclIntArray* array) {
  delete array;
  return 0;
}

extern "C" CANNSIM_API int aclDestroyFloatArray(const aclFloatArray* array) {
  delete array;
  return 0;
}

extern "C" CANNSIM_API int aclDestroyBoolArray(const aclBoolArray* array) {
  delete array;
  return 0;
}

extern "C" CANNSIM_API aclTensorList* aclCreateTensorList(const aclTensor* const* items, uint64_t size) {
  return new aclTensorList{{items, items + size}};
}

extern "C" CANNSIM_API aclScalarList* aclCreateScalarList(const aclScalar* const* items, uint64_t size) {
  return new aclScalarList{{items, items + size}};
}

// A list owns its items.
extern "C" CANNSIM_API int aclDestroyTensorList(const aclTensorList* list) {
  if (list) std::for_each(list->items.begin(), list->items.end(), [](const aclTensor* item) { delete item; });
  delete list;
  return 0;
}

extern "C" CANNSIM_API int aclDestroyScalarList(const aclScalarList* list) {
  if (list) std::for_each(list->items.begin(), list->items.end(), [](const aclScalar* item) { delete item; });
  delete list;
  return 0;
}

extern "C" CANNSIM_API int aclSetAclOpExecutorRepeatable(aclOpExecutor* executor) {
  executor->repeatable = true;
  return 0;
}

extern "C" CANNSIM_API int aclDestroyAclOpExecutor(aclOpExecutor* executor) {
  delete executor;
  return 0;
}
