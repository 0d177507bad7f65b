// Elementwise operators that few models use: inverse hyperbolic functions, shrinkage, noisy slopes, complex
// and whole numbers, and the same on lists of tensors.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ExpandUtils.h>

#include "checks.h"

namespace cannsim {
// The slopes of prelu, one or one per channel, so that they broadcast with x.
static at::Tensor per_channel(const at::Tensor& x, const at::Tensor& weight) {
  std::vector<int64_t> sizes(x.dim(), 1);
  if (x.dim() > 1) sizes[1] = weight.numel();
  return weight.reshape(sizes);
}

static at::Tensor rrelu(const at::Tensor& x, const at::Tensor& noise, const at::Scalar& lower, const at::Scalar& upper,
                        bool training, uint64_t seed) {
  at::Tensor drawn = wide(noise);
  at::Tensor y = at::rrelu_with_noise(wide(x), drawn, lower, upper, training, at::make_generator<at::CPUGeneratorImpl>(seed));
  if (!drawn.is_same(noise)) noise.copy_(drawn);
  return y;
}

static at::Tensor rounded(const at::Tensor& x, int mode) {
  switch (mode) {
    case 1: return at::round(x);
    case 2: return at::floor(x);
    case 3: return at::ceil(x);
    case 5: return at::trunc(x);
    case 7: return at::frac(x);
    default: throw Refused{kInvalidArgument, "roundMode " + std::to_string(mode) + " is not simulated."};
  }
}

// out[i] = function(i)
static void each(const Outputs& out, const std::function<at::Tensor(size_t)>& function) {
  for (size_t i = 0; i < out.size(); ++i) out.write(i, function(i));
}
}  // namespace cannsim

#define UNARY(name, function)                                                                         \
  OP(name, (In self, Out out), (dtype(self, kNumeric), same_shape(out, self)), at::function##_out(out, self)) \
  OP(Inplace##name, (Out selfRef), (dtype(selfRef, kNumeric)), at::function##_out(selfRef, selfRef))

UNARY(Acosh, acosh)
UNARY(Asinh, asinh)
UNARY(Atanh, atanh)
UNARY(Sinc, sinc)

// ---- activations --------------------------------------------------------------------------------

OP(Celu, (In self, Num alpha, Out out), (dtype(self, kFloating), same_shape(out, self)), out = at::celu(self, alpha))
OP(InplaceCelu, (Out selfRef, Num alpha), (dtype(selfRef, kFloating)), at::celu_(selfRef, alpha))
OP(Hardshrink, (In self, Num lambd, Out out), (dtype(self, kFloating), same_shape(out, self)),
   out = at::hardshrink(self, lambd))
OP(Softshrink, (In self, Num lambd, Out out),
   (dtype(self, kFloating), same_shape(out, self),
    require(lambd.toDouble() >= 0, "lambd should be greater or equal to 0, but found to be [", lambd.toDouble(), "].")),
   out = at::softshrink(self, lambd))
OP(Logit, (In input, double eps, Out out), (dtype(input, kFloating), same_shape(out, input)),
   out = at::logit(wide(input), eps < 0 ? std::nullopt : std::optional<double>(eps)))
OP(Prelu, (In self, In weight, Out out), (dtype(self, kFloating), same_shape(out, self)),
   out = at::_prelu_kernel(wide(self), per_channel(self, wide(weight))))
OP(RReluWithNoise,
   (In self, In noise, Num lower, Num upper, bool training, int64_t seed, int64_t offset, Out out),
   (dtype(self, kFloating), same_shape(out, self)),
   out = rrelu(self, noise, lower, upper, training, seed + offset))
OP(InplaceRReluWithNoise, (Out selfRef, In noise, Num lower, Num upper, bool training, int64_t seed, int64_t offset),
   (dtype(selfRef, kFloating)), selfRef = rrelu(selfRef, noise, lower, upper, training, seed + offset))
OP(HardshrinkBackward, (In gradOutput, In self, Num lambd, Out gradInput), (dtype(self, kFloating)),
   gradInput = at::hardshrink_backward(gradOutput, self, lambd))
OP(SoftshrinkBackward, (In gradOutput, In self, Num lambd, Out gradInput), (dtype(self, kFloating)),
   gradInput = at::softshrink_backward(gradOutput, self, lambd))
OP(LogitGrad, (In x, In dy, double eps, Out out), (dtype(x, kFloating), same_shape(out, x)),
   out = at::logit_backward(wide(dy), wide(x), eps < 0 ? std::nullopt : std::optional<double>(eps)))
OP(PreluBackward, (In gradOutput, In self, In weight, Out gradInput, Out gradWeight), (dtype(self, kFloating)),
   at::Tensor slope = per_channel(self, wide(weight));
   auto [dx, dw] = at::_prelu_kernel_backward(wide(gradOutput), wide(self), slope);
   gradInput = dx;
   gradWeight = at::sum_to(dw, slope.sizes()))
OP(AngleV2, (In x, Out out), (same_shape(out, x)), out = at::angle(wide(x)))

// ---- two tensors --------------------------------------------------------------------------------

OP(Polar, (In input, In angle, Out out), (same_dtype(input, angle), broadcast(out, input, angle)),
   out = at::polar(input, angle))
OP(Complex, (In real, In imag, Out out), (same_dtype(real, imag), broadcast(out, real, imag)),
   out = at::complex(real, imag))
OP(Gcd, (In self, In other, Out out), (broadcast(out, self, other)), out = at::gcd(self, other))
OP(LeftShifts, (In self, Num shiftBits, Out out), (dtype(self, kIntegral)), out = at::bitwise_left_shift(self, shiftBits))
OP(InplaceAtan2, (Out selfRef, In other), (expands_to(other, selfRef)), selfRef.atan2_(other))
OP(InplaceAddRelu, (Out selfRef, In other, Num alpha), (expands_to(other, selfRef)),
   selfRef = at::relu(at::add(selfRef, other, alpha)))
OP(InplaceXLogYScalarOther, (Out selfRef, Num other), (), selfRef.xlogy_(other))
OP(LinalgCross, (In self, In other, int64_t dim, Out out), (broadcast(out, self, other)),
   out = at::linalg_cross(wide(self), wide(other), dim))

// ---- lists --------------------------------------------------------------------------------------

#define FOREACH_UNARY(name, function)                                                     \
  OP(Foreach##name, (InList x, OutList out), (dtype(x, kForeach), same_shapes(x, out)),   \
     each(out, [&](size_t i) { return at::function(x[i]); }))

FOREACH_UNARY(Acos, acos)
FOREACH_UNARY(Asin, asin)
FOREACH_UNARY(Atan, atan)
FOREACH_UNARY(Cosh, cosh)
FOREACH_UNARY(Sinh, sinh)
OP(ForeachRoundOffNumber, (InList x, In roundMode, OutList out), (dtype(x, kForeach), same_shapes(x, out)),
   int mode = roundMode.item<int>();
   each(out, [&](size_t i) { return rounded(x[i], mode); }))
OP(ForeachRoundOffNumberV2, (InList x, Num roundMode, OutList out), (dtype(x, kForeach), same_shapes(x, out)),
   each(out, [&](size_t i) { return rounded(x[i], roundMode.toInt()); }))
