// The checks of the OP lines. Each one returns, or throws Refused with the text the real library
// uses, so that code which hardware would reject fails here with the same words.
#pragma once

#include <initializer_list>
#include <sstream>

#include "op.h"

namespace cannsim {

struct Dtypes {
  std::initializer_list<at::ScalarType> list;
};

// Support lists of the public operator documentation.
inline constexpr at::ScalarType kBf16 = at::kBFloat16;
inline const Dtypes kFloating{{at::kFloat, at::kHalf, kBf16}};  // what the vector and cube units compute
inline const Dtypes kFloatingOrDouble{{at::kFloat, at::kHalf, at::kDouble, kBf16}};
inline const Dtypes kIndex{{at::kLong, at::kInt}};
inline const Dtypes kMask{{at::kBool, at::kByte}};
inline const Dtypes kIntegral{
    {at::kBool, at::kChar, at::kShort, at::kInt, at::kLong, at::kByte, at::kUInt16}};
inline const Dtypes kReal{{at::kFloat, at::kHalf, at::kDouble, at::kInt, at::kLong, at::kShort, at::kChar,
                           at::kByte, at::kBool, kBf16}};
inline const Dtypes kNumeric{{at::kFloat, at::kHalf, at::kDouble, at::kInt, at::kLong, at::kShort, at::kChar,
                              at::kByte, at::kBool, at::kComplexDouble, at::kComplexFloat, kBf16}};
inline const Dtypes kForeach{{at::kFloat, at::kHalf, at::kInt, kBf16}};

std::string dtype_name(at::ScalarType dtype);  // DT_FLOAT ...
std::string shape_text(at::IntArrayRef shape);  // [2,3]

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Refused{kInvalidArgument, text.str()};
}

template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) refuse(parts...);
}

// An absent optional tensor passes every check on one tensor.
void dtype(const In& tensor, const Dtypes& supported);
void dtype(const Tensors& list, const Dtypes& supported);
void same_dtype(const In& a, const In& b);
void same_shape(const In& a, const In& b);
void shape(const In& tensor, at::IntArrayRef expected);
void rank(const In& tensor, int64_t lowest, int64_t highest);
void dimension(const In& tensor, int64_t dim);  // dim in [-rank, rank)
void contiguous(const In& tensor);
// `out` has the shape of all others broadcast together.
void broadcast(const In& out, const In& a, const In& b);
void broadcast(const In& out, const In& a, const In& b, const In& c);
void same_lengths(const Tensors& a, const Tensors& b);
// Shapes of item i agree in both lists.
void same_shapes(const Tensors& a, const Tensors& b);
// `b` shape must expand to `a` (an update in place).
void expands_to(const In& b, const In& a);

// Half precision is computed in float and rounded once, when the result is written.
inline at::Tensor wide(const at::Tensor& x) {
  return x.defined() && (x.scalar_type() == at::kHalf || x.scalar_type() == kBf16) ? x.to(at::kFloat) : x;
}
inline at::Tensor indices(const at::Tensor& x) { return x.to(at::kLong); }

}  // namespace cannsim
