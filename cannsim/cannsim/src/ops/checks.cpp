// The checks declared in checks.h.
#include "checks.h"

#include <ATen/ExpandUtils.h>

namespace cannsim {

std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return "DT_FLOAT";
    case at::kHalf: return "DT_FLOAT16";
    case at::kBFloat16: return "DT_BFLOAT16";
    case at::kDouble: return "DT_DOUBLE";
    case at::kChar: return "DT_INT8";
    case at::kShort: return "DT_INT16";
    case at::kInt: return "DT_INT32";
    case at::kLong: return "DT_INT64";
    case at::kByte: return "DT_UINT8";
    case at::kUInt16: return "DT_UINT16";
    case at::kUInt32: return "DT_UINT32";
    case at::kUInt64: return "DT_UINT64";
    case at::kBool: return "DT_BOOL";
    case at::kComplexFloat: return "DT_COMPLEX64";
    case at::kComplexDouble: return "DT_COMPLEX128";
    default: return std::string("DT_") + c10::toString(dtype);
  }
}

std::string shape_text(at::IntArrayRef shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? "," : "") + std::to_string(shape[i]);
  return text + "]";
}

static std::string list_text(const Dtypes& supported) {
  std::string text;
  for (at::ScalarType dtype : supported.list) {
    if (dtype == at::kBFloat16 && !chip().bf16) continue;
    text += (text.empty() ? "" : ",") + dtype_name(dtype);
  }
  return "[" + text + "]";
}

static void check_dtype(const at::Tensor& tensor, const std::string& name, const Dtypes& supported) {
  if (!tensor.defined()) return;
  for (at::ScalarType dtype : supported.list) {
    if (tensor.scalar_type() == dtype && (dtype != at::kBFloat16 || chip().bf16)) return;
  }
  refuse("Tensor ", name, " not implemented for ", dtype_name(tensor.scalar_type()),
         ", should be in dtype support list ", list_text(supported), ".");
}

void refuse_missing_dtype(const at::Tensor& tensor, const std::string& name) {
  if (tensor.defined() && tensor.scalar_type() == at::kBFloat16 && !chip().bf16) {
    check_dtype(tensor, name, kReal);
  }
}

void dtype(const In& tensor, const Dtypes& supported) { check_dtype(tensor, tensor.name, supported); }

void dtype(const Tensors& list, const Dtypes& supported) {
  for (size_t i = 0; i < list.size(); ++i) {
    check_dtype(list[i], list.name + "[" + std::to_string(i) + "]", supported);
  }
}

void same_dtype(const In& a, const In& b) {
  if (!a.defined() || !b.defined() || a.scalar_type() == b.scalar_type()) return;
  refuse("Expected both tensors to have same dtype, but found ", a.name, " ", dtype_name(a.scalar_type()),
         " and ", b.name, " ", dtype_name(b.scalar_type()), ".");
}

void same_shape(const In& a, const In& b) {
  if (!a.defined() || !b.defined() || a.sizes() == b.sizes()) return;
  refuse("Expected tensor for ", a.name, " to have same size as tensor for ", b.name, ", but ",
         shape_text(a.sizes()), " does not equal ", shape_text(b.sizes()), ".");
}

void shape(const In& tensor, at::IntArrayRef expected) {
  if (!tensor.defined() || tensor.sizes() == expected) return;
  refuse("Expected tensor for ", tensor.name, " to have shape ", shape_text(expected), ", but found ",
         shape_text(tensor.sizes()), ".");
}

void rank(const In& tensor, int64_t lowest, int64_t highest) {
  if (!tensor.defined() || (tensor.dim() >= lowest && tensor.dim() <= highest)) return;
  refuse("Expected tensor for ", tensor.name, " to have ", lowest, " to ", highest,
         " dimensions, but found shape ", shape_text(tensor.sizes()), ".");
}

void dimension(const In& tensor, int64_t dim) {
  int64_t rank = std::max<int64_t>(tensor.dim(), 1);
  require(dim >= -rank && dim < rank, "Expected dim of tensor ", tensor.name, " to be in range [", -rank,
          ",", rank - 1, "], but found ", dim, ".");
}

void contiguous(const In& tensor) {
  require(!tensor.defined() || tensor.is_contiguous(), "Tensor ", tensor.name, " must be contiguous, shape ",
          shape_text(tensor.sizes()), ".");
}

static std::vector<int64_t> broadcast_shape(const In& a, const In& b, at::IntArrayRef left) {
  size_t rank = std::max(left.size(), b.sizes().size());
  std::vector<int64_t> result(rank);
  for (size_t i = 0; i < rank; ++i) {  // from the last dimension
    int64_t x = i < left.size() ? left[left.size() - 1 - i] : 1;
    int64_t y = i < b.sizes().size() ? b.size(b.dim() - 1 - i) : 1;
    if (x != y && x != 1 && y != 1) {
      refuse("The size of tensor ", a.name, " ", shape_text(left), " must match the size of tensor ", b.name,
             " ", shape_text(b.sizes()), ".");
    }
    result[rank - 1 - i] = x == 1 ? y : x;
  }
  return result;
}

void broadcast(const In& out, const In& a, const In& b) { shape(out, broadcast_shape(a, b, a.sizes())); }

void broadcast(const In& out, const In& a, const In& b, const In& c) {
  shape(out, broadcast_shape(a, c, broadcast_shape(a, b, a.sizes())));
}

void expands_to(const In& b, const In& a) {
  auto together = broadcast_shape(a, b, a.sizes());
  require(a.sizes() == at::IntArrayRef(together), "The size of tensor ", b.name, " ", shape_text(b.sizes()),
          " must match the size of tensor ", a.name, " ", shape_text(a.sizes()), ". CheckShape failed!");
}

void same_lengths(const Tensors& a, const Tensors& b) {
  require(a.size() == b.size(), "Expected tensor list ", a.name, " to have same length as tensor list ",
          b.name, ", but ", a.size(), " does not equal ", b.size(), ".");
}

void same_shapes(const Tensors& a, const Tensors& b) {
  same_lengths(a, b);
  for (size_t i = 0; i < a.size(); ++i) {
    require(a[i].sizes() == b[i].sizes(), "Expected tensor for ", a.name, "[", i,
            "] to have same size as tensor for ", b.name, "[", i, "], but ", shape_text(a[i].sizes()),
            " does not equal ", shape_text(b[i].sizes()), ".");
  }
}

}  // namespace cannsim
