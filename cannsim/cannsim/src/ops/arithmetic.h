// Arithmetic whose rounding in half precision differs between the public kernels.
#pragma once

#include "checks.h"

namespace cannsim {

// x + value * a * b, or x + value * a / b.
enum class Term { product, quotient };
// once: computed in float, rounded when it is written. steps: float16 is rounded after each of the three steps.
enum class Rounds { once, steps };

inline bool before_950() { return std::string(chip().family) != "950"; }

inline at::Scalar rounded(const at::Scalar& value, at::ScalarType dtype) {
  if (value.isComplex() || (dtype != at::kHalf && dtype != kBf16)) return value;
  return at::scalar_tensor(value, at::TensorOptions(at::kFloat)).to(dtype).to(at::kDouble).item();
}

inline at::Tensor add_term(Term term, Rounds rounds, const at::Tensor& x, const at::Tensor& a, const at::Tensor& b,
                           const at::Scalar& value) {
  bool half = x.scalar_type() == at::kHalf && a.scalar_type() == at::kHalf && b.scalar_type() == at::kHalf;
  if (half && rounds == Rounds::steps) {
    at::Tensor both = term == Term::product ? at::mul(a, b) : at::div(a, b);
    return at::add(x, at::mul(both, rounded(value, at::kHalf)));
  }
  return term == Term::product ? at::addcmul(wide(x), wide(a), wide(b), value)
                               : at::addcdiv(wide(x), wide(a), wide(b), value);
}

}  // namespace cannsim
