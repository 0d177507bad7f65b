// Elementwise operators of one tensor: mathematics, activations and their gradients, predicates.
#include "checks.h"

namespace cannsim {
// Documented input types of the trigonometric and exponential group: everything but unsigned.
static const Dtypes kNegatable{{at::kChar, at::kInt, at::kLong, at::kHalf, kBf16, at::kFloat, at::kDouble,
                                at::kComplexFloat, at::kComplexDouble}};
// Activations: computed by the vector unit only, so no double.
static const Dtypes kActivation{{at::kFloat, at::kHalf, kBf16, at::kBool, at::kByte, at::kChar, at::kShort,
                                 at::kInt, at::kLong}};
}  // namespace cannsim

#define NEW(name, function, dtypes)                                                          \
  OP(name, (In self, Out out), (dtype(self, dtypes), same_shape(out, self)), at::function##_out(out, self))
#define UNARY(name, function, dtypes) \
  NEW(name, function, dtypes)         \
  OP(Inplace##name, (Out selfRef), (dtype(selfRef, dtypes)), at::function##_out(selfRef, selfRef))

NEW(Abs, abs, kReal)
UNARY(Neg, neg, kNegatable)
NEW(Sign, sgn, kNumeric)
UNARY(Reciprocal, reciprocal, kNumeric)
UNARY(Sqrt, sqrt, kNumeric)
UNARY(Rsqrt, rsqrt, kNumeric)
UNARY(Exp, exp, kNumeric)
UNARY(Exp2, exp2, kReal)
UNARY(Expm1, expm1, kReal)
UNARY(Log, log, kNumeric)
UNARY(Log2, log2, kNumeric)
UNARY(Log10, log10, kNumeric)
UNARY(Log1p, log1p, kReal)
UNARY(Sin, sin, kNumeric)
UNARY(Cos, cos, kNumeric)
UNARY(Tan, tan, kNumeric)
UNARY(Asin, asin, kNumeric)
UNARY(Acos, acos, kNumeric)
UNARY(Atan, atan, kNumeric)
UNARY(Sinh, sinh, kNumeric)
UNARY(Cosh, cosh, kNumeric)
UNARY(Tanh, tanh, kActivation)
UNARY(Sigmoid, sigmoid, kActivation)
UNARY(Erf, erf, kReal)
UNARY(Erfc, erfc, kReal)
UNARY(Erfinv, erfinv, kReal)
UNARY(Floor, floor, kReal)
UNARY(Ceil, ceil, kReal)
UNARY(Round, round, kReal)
UNARY(Trunc, trunc, kReal)
UNARY(Frac, frac, kReal)
UNARY(LogicalNot, logical_not, kNumeric)
NEW(BitwiseNot, bitwise_not, kIntegral)

// ---- activations --------------------------------------------------------------------------------

#define ACTIVATION(name, expression) \
  OP(name, (In self, Out out), (dtype(self, kFloating), same_shape(out, self)), out = expression)

ACTIVATION(Silu, at::silu(self))
ACTIVATION(Gelu, at::gelu(self, "tanh"))  // documented with the tanh formula, whatever torch asked for
ACTIVATION(FastGelu, self * at::sigmoid(1.702 * self.to(at::kFloat)))
ACTIVATION(Mish, at::mish(self))
ACTIVATION(Hardswish, at::hardswish(self))
static const cannsim::Dtypes kHardsigmoid{{at::kFloat, at::kHalf, cannsim::kBf16, at::kInt}};
static at::Tensor hardsigmoid_of(const at::Tensor& x) {
  return at::hardsigmoid(x.scalar_type() == at::kInt ? x.to(at::kFloat) : x);
}
OP(Hardsigmoid, (In self, Out out), (dtype(self, kHardsigmoid), same_shape(out, self)), out = hardsigmoid_of(self))
ACTIVATION(LogSigmoid, at::log_sigmoid(self))

static const cannsim::Dtypes kRelu{{at::kFloat, at::kHalf, cannsim::kBf16, at::kChar, at::kInt, at::kLong,
                                    at::kShort, at::kByte}};
OP(Relu, (In self, Out out), (dtype(self, kRelu), same_shape(out, self)), out = at::relu(self))
OP(InplaceRelu, (Out selfRef), (dtype(selfRef, kRelu)), selfRef.relu_())

OP(LogSigmoidForward, (In self, Out out, OptOut buffer), (dtype(self, kFloating), same_shape(out, self)),
   out = at::log_sigmoid(self))
OP(GeluV2, (In x, int64_t approximate, Out y), (dtype(x, kFloating), same_shape(y, x)),
   y = at::gelu(x, approximate == 1 ? "tanh" : "none"))
OP(LeakyRelu, (In self, Num negativeSlope, Out out), (dtype(self, kFloatingOrDouble), same_shape(out, self)),
   out = at::leaky_relu(self, negativeSlope))
OP(Elu, (In self, Num alpha, Num scale, Num inputScale, Out out),
   (dtype(self, kFloating), same_shape(out, self)), out = at::elu(self, alpha, scale, inputScale))
OP(Softplus, (In self, Num beta, Num threshold, Out out), (dtype(self, kFloating), same_shape(out, self)),
   out = at::softplus(self, beta, threshold))
OP(Hardtanh, (In self, Num clipValueMin, Num clipValueMax, Out out), (same_shape(out, self)),
   out = at::hardtanh(self, clipValueMin, clipValueMax))
OP(Threshold, (In self, Num threshold, Num value, Out out), (same_shape(out, self)),
   out = at::threshold(self, threshold, value))
OP(Glu, (In self, int64_t dim, Out out), (dtype(self, kFloating), dimension(self, dim)),
   out = at::glu(self, dim))

// Gated activation: silu of the first half times the second half, in float, rounded once.
OP(SwiGlu, (In x, int64_t dim, Out out),
   (dtype(x, kFloating), dimension(x, dim), same_dtype(out, x),
    require(x.size(dim) % 2 == 0, "The size of dim ", dim, " of x ", shape_text(x.sizes()), " must be even.")),
   auto half = x.to(at::kFloat).chunk(2, dim);
   out = at::silu(half[0]).mul_(half[1]))
OP(SwiGluGrad, (In yGrad, In x, int64_t dim, Out out),
   (dtype(x, kFloating), same_dtype(yGrad, x), same_shape(out, x), dimension(x, dim)),
   auto half = x.to(at::kFloat).chunk(2, dim);
   at::Tensor gradient = yGrad.to(at::kFloat);
   out = at::cat({at::silu_backward(gradient * half[1], half[0]), gradient * at::silu(half[0])}, dim))

// ---- gradients of activations -------------------------------------------------------------------

#define GRADIENT(name, saved, expression)                                                           \
  OP(name, (In gradOutput, In saved, Out gradInput),                                                \
     (dtype(gradOutput, kFloating), same_dtype(gradOutput, saved), broadcast(gradInput, gradOutput, saved)), \
     gradInput = expression)

GRADIENT(SiluBackward, self, at::silu_backward(gradOutput, self))
GRADIENT(SigmoidBackward, output, at::sigmoid_backward(gradOutput, output))
GRADIENT(TanhBackward, output, at::tanh_backward(gradOutput, output))
GRADIENT(GeluBackward, self, at::gelu_backward(gradOutput, self, "tanh"))
GRADIENT(MishBackward, self, at::mish_backward(gradOutput, self))
GRADIENT(HardswishBackward, self, at::hardswish_backward(gradOutput, self))
GRADIENT(HardswishBackwardV2, self, at::hardswish_backward(gradOutput, self))
GRADIENT(HardsigmoidBackward, self, at::hardsigmoid_backward(gradOutput, self))

OP(GeluBackwardV2, (In gradOutput, In self, Text approximate, Out gradInput),
   (dtype(self, kFloating), broadcast(gradInput, gradOutput, self)),
   gradInput = at::gelu_backward(gradOutput, self, approximate == "tanh" ? "tanh" : "none"))
OP(FastGeluBackward, (In gradOutput, In self, Out gradInput), (dtype(self, kFloating)),
   at::Tensor x = self.to(at::kFloat);
   at::Tensor s = at::sigmoid(1.702 * x);
   gradInput = gradOutput.to(at::kFloat) * (s + 1.702 * x * s * (1 - s)))
OP(LogSigmoidBackward, (In gradOutput, In self, OptIn buffer, Out gradInput), (dtype(self, kFloating)),
   gradInput = gradOutput * at::sigmoid(-self))
OP(ThresholdBackward, (In gradOutput, In self, Num threshold, Out out),
   (broadcast(out, gradOutput, self)), out = at::threshold_backward(gradOutput, self, threshold))
OP(LeakyReluBackward, (In gradOutput, In self, Num negativeSlope, bool selfIsResult, Out out), (),
   out = at::leaky_relu_backward(gradOutput, self, negativeSlope, selfIsResult))
OP(EluBackward,
   (In gradOutput, Num alpha, Num scale, Num inputScale, bool isResult, In selfOrResult, Out gradInput), (),
   gradInput = at::elu_backward(gradOutput, alpha, scale, inputScale, isResult, selfOrResult))
OP(SoftplusBackward, (In gradOutput, In self, Num beta, Num threshold, Out gradInput), (),
   gradInput = at::softplus_backward(gradOutput, self, beta, threshold))
OP(HardtanhBackward, (In gradOutput, In self, Num min, Num max, Out out), (),
   out = at::hardtanh_backward(gradOutput, self, min, max))
OP(GluBackward, (In gradOut, In self, int64_t dim, Out out), (dtype(self, kFloating)),
   out = at::glu_backward(gradOut, self, dim))

// ---- predicates ---------------------------------------------------------------------------------

OP(IsFinite, (In self, Out out), (same_shape(out, self)), out = at::isfinite(self))
OP(IsPosInf, (In self, Out out), (same_shape(out, self)), out = at::isposinf(self))
OP(IsNegInf, (In self, Out out), (same_shape(out, self)), out = at::isneginf(self))
OP(Signbit, (In self, Out out), (same_shape(out, self)), out = at::signbit(self))
OP(NanToNum, (In self, float nan, float posinf, float neginf, Out out), (same_shape(out, self)),
   out = at::nan_to_num(self, nan, posinf, neginf))
OP(RoundDecimals, (In self, int64_t decimals, Out out), (same_shape(out, self)),
   out = at::round(self, decimals))

// ---- in place -----------------------------------------------------------------------------------

OP(InplaceLeakyRelu, (Out selfRef, Num negativeSlope), (dtype(selfRef, kFloatingOrDouble)),
   at::leaky_relu_(selfRef, negativeSlope))
OP(InplaceElu, (Out selfRef, Num alpha, Num scale, Num inputScale), (dtype(selfRef, kFloating)),
   at::elu_(selfRef, alpha, scale, inputScale))
OP(InplaceHardtanh, (Out selfRef, Num clipValueMin, Num clipValueMax), (),
   at::hardtanh_(selfRef, clipValueMin, clipValueMax))
OP(InplaceHardswish, (Out selfRef), (dtype(selfRef, kFloating)), at::hardswish_(selfRef))
OP(InplaceHardsigmoid, (Out selfRef), (dtype(selfRef, kHardsigmoid)), selfRef = hardsigmoid_of(selfRef))
OP(InplaceMish, (Out selfRef), (dtype(selfRef, kFloating)), at::mish_(selfRef))
OP(InplaceThreshold, (Out selfRef, Num threshold, Num value), (), at::threshold_(selfRef, threshold, value))
OP(InplaceNanToNum, (Out selfRef, float nan, float posinf, float neginf), (dtype(selfRef, kReal)),
   at::nan_to_num_(selfRef, nan, posinf, neginf))
OP(InplaceRoundDecimals, (Out selfRef, int64_t decimals), (dtype(selfRef, kReal)), at::round_(selfRef, decimals))
