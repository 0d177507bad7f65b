// Elementwise operators of two or three tensors: arithmetic, comparison, logic, bits, clamping.
#include <ATen/ScalarOps.h>

#include "arithmetic.h"

namespace cannsim {
// A scalar as a tensor that does not raise the result type, like a Python number in torch.
static at::Tensor number(const at::Scalar& value) { return at::native::wrapped_scalar_tensor(value); }

// The factor of aclnnMuls: before 950, half precision takes it rounded to half precision.
static at::Tensor factor(const at::Tensor& self, const at::Scalar& value) {
  return number(self.scalar_type() == at::kHalf && before_950() ? rounded(value, at::kHalf) : value);
}
static at::Tensor divisor(const at::Tensor&, const at::Scalar& value) { return number(value); }

// Before 950 whole numbers are divided as float32, and the result goes into whole numbers without its fraction.
static void quotient_out(at::Tensor& out, const at::Tensor& self, const at::Tensor& other) {
  const bool whole = c10::isIntegralType(out.scalar_type(), false) && before_950();
  if (whole) {
    out.copy_(at::div(self, other));
  } else {
    at::div_out(out, self, other);
  }
}

// An update in place keeps its dtype: a result of a higher kind (float into int) does not fit.
static void result_fits(const In& out, const at::Tensor& other) {
  at::ScalarType result = at::result_type(out, other);
  require(at::canCast(result, out.scalar_type()), "Result type ", dtype_name(result),
          " can't be cast to the desired output type ", dtype_name(out.scalar_type()), ".");
}

static at::Tensor add_fused(Term term, const at::Tensor& x, const at::Tensor& a, const at::Tensor& b,
                            const at::Scalar& value) {
  bool older = before_950();
  return add_term(term, older ? Rounds::steps : Rounds::once, x, a, b, older ? rounded(value, x.scalar_type()) : value);
}

static const char* rounding(int mode) { return mode == 2 ? "floor" : "trunc"; }
static std::optional<std::string_view> rounding_or_none(int mode) {
  return mode == 0 ? std::nullopt : std::optional<std::string_view>(rounding(mode));
}
}  // namespace cannsim

// ---- arithmetic ---------------------------------------------------------------------------------

// name, names, Inplacename, Inplacenames: tensor or scalar operand with a factor alpha.
#define ARITHMETIC_WITH_ALPHA(name, function)                                                        \
  OP(name, (In self, In other, Num alpha, Out out),                                                  \
     (dtype(self, kNumeric), dtype(other, kNumeric), broadcast(out, self, other)),                   \
     at::function##_out(out, self, other, alpha))                                                    \
  OP(name##s, (In self, Num other, Num alpha, Out out), (dtype(self, kNumeric), same_shape(out, self)), \
     at::function##_out(out, self, number(other), alpha))                                            \
  OP(Inplace##name, (Out selfRef, In other, Num alpha),                                              \
     (dtype(selfRef, kNumeric), dtype(other, kNumeric), expands_to(other, selfRef), result_fits(selfRef, other)), \
     at::function##_out(selfRef, selfRef, other, alpha))                                             \
  OP(Inplace##name##s, (Out selfRef, Num other, Num alpha),                                          \
     (dtype(selfRef, kNumeric), result_fits(selfRef, number(other))),                                \
     at::function##_out(selfRef, selfRef, number(other), alpha))

ARITHMETIC_WITH_ALPHA(Add, add)
ARITHMETIC_WITH_ALPHA(Sub, sub)

OP(Rsub, (In self, In other, Num alpha, Out out), (dtype(self, kNumeric), broadcast(out, self, other)),
   at::sub_out(out, other, self, alpha))
OP(Rsubs, (In self, Num other, Num alpha, Out out), (dtype(self, kNumeric), same_shape(out, self)),
   out = at::rsub(self, other, alpha))
OP(AddV3, (Num self, In other, Num alpha, Out out), (dtype(other, kNumeric), same_shape(out, other)),
   at::add_out(out, number(self), other, alpha))
OP(AddRelu, (In self, In other, Num alpha, Out out), (dtype(self, kFloating), broadcast(out, self, other)),
   out = at::relu(at::add(self, other, alpha)))

#define ARITHMETIC(name, function, operand)                                                          \
  OP(name, (In self, In other, Out out),                                                             \
     (dtype(self, kNumeric), dtype(other, kNumeric), broadcast(out, self, other)),                   \
     function##_out(out, self, other))                                                               \
  OP(name##s, (In self, Num other, Out out), (dtype(self, kNumeric), same_shape(out, self)),         \
     function##_out(out, self, operand(self, other)))                                                \
  OP(Inplace##name, (Out selfRef, In other),                                                         \
     (dtype(selfRef, kNumeric), dtype(other, kNumeric), expands_to(other, selfRef), result_fits(selfRef, other)), \
     function##_out(selfRef, selfRef, other))                                                        \
  OP(Inplace##name##s, (Out selfRef, Num other),                                                     \
     (dtype(selfRef, kNumeric), result_fits(selfRef, number(other))),                                \
     function##_out(selfRef, selfRef, operand(selfRef, other)))

ARITHMETIC(Mul, at::mul, factor)
ARITHMETIC(Div, quotient, divisor)
ARITHMETIC(FloorDivide, at::floor_divide, divisor)

OP(DivMod, (In self, In other, int mode, Out out), (dtype(self, kNumeric), broadcast(out, self, other)),
   out = at::div(self, other, rounding_or_none(mode)))
OP(DivMods, (In self, Num other, int mode, Out out), (dtype(self, kNumeric), same_shape(out, self)),
   out = at::div(self, number(other), rounding_or_none(mode)))
OP(InplaceDivMod, (Out selfRef, In other, int mode), (expands_to(other, selfRef)),
   selfRef = at::div(selfRef, other, rounding_or_none(mode)))
OP(InplaceDivMods, (Out selfRef, Num other, int mode), (),
   selfRef = at::div(selfRef, number(other), rounding_or_none(mode)))

// ---- comparison and bits ------------------------------------------------------------------------

#define WITH_TENSOR_AND_SCALAR(name, function, dtypes)                                               \
  OP(name##Tensor, (In self, In other, Out out),                                                     \
     (dtype(self, dtypes), dtype(other, dtypes), broadcast(out, self, other)), out = at::function(self, other)) \
  OP(name##Scalar, (In self, Num other, Out out), (dtype(self, dtypes), same_shape(out, self)),      \
     out = at::function(self, other))                                                                \
  OP(Inplace##name##Tensor, (Out selfRef, In other), (dtype(selfRef, dtypes), expands_to(other, selfRef)), \
     selfRef = at::function(selfRef, other))                                                         \
  OP(Inplace##name##Scalar, (Out selfRef, Num other), (dtype(selfRef, dtypes)),                      \
     selfRef = at::function(selfRef, other))

WITH_TENSOR_AND_SCALAR(Eq, eq, kNumeric)
WITH_TENSOR_AND_SCALAR(Ne, ne, kNumeric)
WITH_TENSOR_AND_SCALAR(Lt, lt, kReal)
WITH_TENSOR_AND_SCALAR(Le, le, kReal)
WITH_TENSOR_AND_SCALAR(Gt, gt, kReal)
WITH_TENSOR_AND_SCALAR(Ge, ge, kReal)
WITH_TENSOR_AND_SCALAR(BitwiseAnd, bitwise_and, kIntegral)
WITH_TENSOR_AND_SCALAR(BitwiseOr, bitwise_or, kIntegral)
WITH_TENSOR_AND_SCALAR(BitwiseXor, bitwise_xor, kIntegral)

OP(Equal, (In self, In other, Out out), (dtype(self, kNumeric)),
   out = at::scalar_tensor(at::equal(self, other), at::kBool))
OP(IsClose, (In self, In other, double rtol, double atol, bool equal_nan, Out out),
   (broadcast(out, self, other)), out = at::isclose(self, other, rtol, atol, equal_nan))
OP(LeftShift, (In self, In shiftBits, Out out), (dtype(self, kIntegral)),
   out = at::bitwise_left_shift(self, shiftBits))
OP(RightShift, (In input, In shiftBits, Out out), (dtype(input, kIntegral)),
   out = at::bitwise_right_shift(input, shiftBits))

// ---- logic, extremes, powers --------------------------------------------------------------------

#define BINARY(name, function, dtypes)                                                               \
  OP(name, (In self, In other, Out out),                                                             \
     (dtype(self, dtypes), dtype(other, dtypes), broadcast(out, self, other)),                       \
     out = at::function(self, other))

BINARY(Maximum, maximum, kReal)
BINARY(Minimum, minimum, kReal)
BINARY(LogicalAnd, logical_and, kNumeric)
BINARY(LogicalOr, logical_or, kNumeric)
BINARY(LogicalXor, logical_xor, kNumeric)
BINARY(RemainderTensorTensor, remainder, kReal)
BINARY(FmodTensor, fmod, kReal)
BINARY(Atan2, atan2, kReal)
BINARY(LogAddExp, logaddexp, kFloating)
BINARY(LogAddExp2, logaddexp2, kFloating)
BINARY(XLogYTensor, xlogy, kReal)

OP(InplaceLogicalAnd, (Out selfRef, In other), (expands_to(other, selfRef)), selfRef.logical_and_(other))
OP(InplaceLogicalOr, (Out selfRef, In other), (expands_to(other, selfRef)), selfRef.logical_or_(other))
OP(InplaceRemainderTensorTensor, (Out selfRef, In other), (expands_to(other, selfRef)),
   selfRef.remainder_(other))
OP(RemainderTensorScalar, (In self, Num other, Out out), (dtype(self, kReal), same_shape(out, self)),
   out = at::remainder(self, other))
OP(InplaceRemainderTensorScalar, (Out selfRef, Num other), (dtype(selfRef, kReal)), selfRef.remainder_(other))
OP(RemainderScalarTensor, (Num self, In other, Out out), (dtype(other, kReal), same_shape(out, other)),
   out = at::remainder(self, other))
OP(FmodScalar, (In self, Num other, Out out), (dtype(self, kReal), same_shape(out, self)),
   out = at::fmod(self, other))
OP(InplaceFmodScalar, (Out selfRef, Num other), (dtype(selfRef, kReal)), selfRef.fmod_(other))
OP(InplaceFmodTensor, (Out selfRef, In other), (dtype(selfRef, kReal)), selfRef.fmod_(other))
OP(XLogYScalarOther, (In self, Num other, Out out), (), out = at::xlogy(self, other))
OP(XLogYScalarSelf, (Num self, In other, Out out), (), out = at::xlogy(self, other))

OP(PowTensorScalar, (In self, Num exponent, Out out), (dtype(self, kNumeric), same_shape(out, self)),
   at::pow_out(out, self, exponent))
OP(InplacePowTensorScalar, (Out self, Num exponent), (dtype(self, kNumeric)), self.pow_(exponent))
OP(PowTensorTensor, (In self, In exponent, Out out),
   (dtype(self, kNumeric), broadcast(out, self, exponent)), out = at::pow(self, exponent))
OP(InplacePowTensorTensor, (Out self, In exponent), (expands_to(exponent, self)), self.pow_(exponent))
OP(PowScalarTensor, (Num self, In exponent, Out out), (dtype(exponent, kNumeric), same_shape(out, exponent)),
   out = at::pow(self, exponent))

// ---- clamping -----------------------------------------------------------------------------------

OP(Clamp, (In self, OptNum clipValueMin, OptNum clipValueMax, Out out),
   (dtype(self, kReal), same_shape(out, self)), out = at::clamp(self, clipValueMin, clipValueMax))
OP(ClampMin, (In self, Num clipValueMin, Out out), (dtype(self, kReal), same_shape(out, self)),
   out = at::clamp_min(self, clipValueMin))
OP(ClampMax, (In self, Num clipValueMax, Out out), (dtype(self, kReal), same_shape(out, self)),
   out = at::clamp_max(self, clipValueMax))
OP(InplaceClampMax, (Out selfRef, Num clipValueMax), (dtype(selfRef, kReal)), selfRef.clamp_max_(clipValueMax))
OP(ClampTensor, (In self, OptIn clipValueMin, OptIn clipValueMax, Out out), (dtype(self, kReal)),
   out = at::clamp(self, clipValueMin.optional(), clipValueMax.optional()))
OP(ClampMinTensor, (In self, In clipValueMin, Out out), (dtype(self, kReal), broadcast(out, self, clipValueMin)),
   out = at::clamp_min(self, clipValueMin))
OP(ClampMaxTensor, (In self, In max, Out out), (dtype(self, kReal), broadcast(out, self, max)),
   out = at::clamp_max(self, max))
OP(InplaceClampMinTensor, (Out selfRef, In clipValueMin), (expands_to(clipValueMin, selfRef)),
   selfRef.clamp_min_(clipValueMin))
OP(InplaceClampMaxTensor, (Out selfRef, In max), (expands_to(max, selfRef)), selfRef.clamp_max_(max))

// ---- three operands -----------------------------------------------------------------------------

// The kernels before 950 take the factor in the dtype of the tensors and round float16 after each step.
#define FUSED_ADD(name, term)                                                                        \
  OP(name, (In self, In tensor1, In tensor2, Num value, Out out),                                    \
     (dtype(self, kReal), broadcast(out, self, tensor1, tensor2)),                                   \
     out = add_fused(Term::term, self, tensor1, tensor2, value))                   \
  OP(Inplace##name, (Out selfRef, In tensor1, In tensor2, Num value),                                \
     (dtype(selfRef, kReal), expands_to(tensor1, selfRef), expands_to(tensor2, selfRef)),            \
     selfRef = add_fused(Term::term, selfRef, tensor1, tensor2, value))

FUSED_ADD(Addcmul, product)
FUSED_ADD(Addcdiv, quotient)

OP(Lerp, (In self, In end, In weight, Out out), (dtype(self, kFloating), broadcast(out, self, end, weight)),
   out = at::lerp(self, end, weight))
OP(Lerps, (In self, In end, Num weight, Out out), (dtype(self, kFloating), broadcast(out, self, end)),
   out = at::lerp(self, end, weight))
OP(InplaceLerp, (Out selfRef, In end, In weight),
   (dtype(selfRef, kFloating), expands_to(end, selfRef), expands_to(weight, selfRef)), selfRef.lerp_(end, weight))
OP(InplaceLerps, (Out selfRef, In end, Num weight), (dtype(selfRef, kFloating), expands_to(end, selfRef)),
   selfRef.lerp_(end, weight))
OP(SWhere, (In condition, In self, In other, Out out),
   (dtype(condition, kMask), broadcast(out, condition, self, other)),
   out = at::where(condition.to(at::kBool), self, other))
