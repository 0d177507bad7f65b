// Normalisation layers. Statistics are computed in float and results rounded once.
#include "checks.h"

namespace cannsim {

static at::Tensor f(const at::Tensor& x) { return x.to(at::kFloat); }
static std::optional<at::Tensor> f_or_none(const OptIn& x) {
  return x.defined() ? std::optional<at::Tensor>(f(x)) : std::nullopt;
}

// The last gamma.dim() dimensions of x are normalised.
static std::vector<int64_t> trailing(int64_t count) {
  std::vector<int64_t> dims;
  for (int64_t i = -count; i < 0; ++i) dims.push_back(i);
  return dims;
}

static void gamma_fits(const In& x, const In& gamma) {
  require(gamma.dim() >= 1 && gamma.dim() <= x.dim() &&
              x.sizes().slice(x.dim() - gamma.dim()) == gamma.sizes(),
          "The shape of gamma ", shape_text(gamma.sizes()), " must equal the last dimensions of x ",
          shape_text(x.sizes()), ".");
  require(gamma.scalar_type() == x.scalar_type() || gamma.scalar_type() == at::kFloat,
          "Tensor gamma dtype must be DT_FLOAT or the dtype of x ", dtype_name(x.scalar_type()), ", but found ",
          dtype_name(gamma.scalar_type()), ".");
}

static void normalized_shape_fits(const In& input, const std::vector<int64_t>& normalized) {
  int64_t count = normalized.size();
  require(count >= 1 && count <= input.dim() &&
              input.sizes().slice(input.dim() - count) == at::IntArrayRef(normalized),
          "normalizedShape ", shape_text(normalized), " must equal the last dimensions of input ",
          shape_text(input.sizes()), ".");
}

static at::Tensor inverse_rms(const at::Tensor& x, int64_t count, double epsilon) {
  return at::rsqrt(x.square().mean(trailing(count), true) + epsilon);
}

static void rms_norm_gradient(const In& dy, const In& x, const In& rstd, const In& gamma, Out& dx, Out& dgamma) {
  int64_t count = gamma.dim();
  auto statistic = x.sizes().vec();
  std::fill(statistic.end() - count, statistic.end(), 1);
  at::Tensor inverse = f(rstd).reshape(statistic);
  at::Tensor normal = f(x) * inverse;
  at::Tensor gradient = f(dy);
  at::Tensor scaled = gradient * f(gamma);
  dx = inverse * (scaled - normal * (scaled * normal).mean(trailing(count), true));
  at::Tensor per_row = gradient * normal;
  dgamma = x.dim() == count ? per_row : per_row.flatten(0, x.dim() - count - 1).sum(0);
}

}  // namespace cannsim

OP(RmsNorm, (In x, In gamma, double epsilon, Out yOut, Out rstdOut),
   (dtype(x, kFloating), dtype(gamma, kFloating), gamma_fits(x, gamma), same_shape(yOut, x), same_dtype(yOut, x)),
   at::Tensor wide = f(x);
   at::Tensor inverse = inverse_rms(wide, gamma.dim(), epsilon);
   rstdOut = inverse;
   yOut = wide * inverse * f(gamma))
OP(RmsNormGrad, (In dy, In x, In rstd, In gamma, Out dxOut, Out dgammaOut),
   (dtype(dy, kFloating), same_dtype(dy, x), same_shape(dy, x), gamma_fits(x, gamma), same_shape(dxOut, x),
    same_shape(dgammaOut, gamma)),
   rms_norm_gradient(dy, x, rstd, gamma, dxOut, dgammaOut))
OP(GemmaRmsNorm, (In x, In gamma, double epsilon, Out yOut, Out rstdOut),
   (dtype(x, kFloating), gamma_fits(x, gamma), same_shape(yOut, x)),
   at::Tensor wide = f(x);
   at::Tensor inverse = inverse_rms(wide, gamma.dim(), epsilon);
   rstdOut = inverse;
   yOut = wide * inverse * (1 + f(gamma)))
OP(AddRmsNorm, (In x1, In x2, In gamma, double epsilon, Out yOut, Out rstdOut, Out xOut),
   (dtype(x1, kFloating), same_dtype(x1, x2), same_shape(x1, x2), gamma_fits(x1, gamma), same_shape(yOut, x1)),
   at::Tensor sum = f(x1) + f(x2);
   at::Tensor inverse = inverse_rms(sum, gamma.dim(), epsilon);
   xOut = sum;
   rstdOut = inverse;
   yOut = sum * inverse * f(gamma))

#define LAYER_NORM(name)                                                                                             \
  OP(name,                                                                                                           \
     (In input, Ints normalizedShape, OptIn weightOptional, OptIn biasOptional, double eps, Out out,                 \
      OptOut meanOutOptional, OptOut rstdOutOptional),                                                               \
     (dtype(input, kFloating), normalized_shape_fits(input, normalizedShape), shape(weightOptional, normalizedShape), \
      shape(biasOptional, normalizedShape), same_shape(out, input)),                                                 \
     auto [y, mean, rstd] = at::native_layer_norm(f(input), normalizedShape, f_or_none(weightOptional),              \
                                                  f_or_none(biasOptional), eps);                                     \
     out = y;                                                                                                        \
     meanOutOptional = mean;                                                                                         \
     rstdOutOptional = rstd)
LAYER_NORM(LayerNorm)
LAYER_NORM(FastLayerNorm)  // added up in another order; torch_npu takes it when told to be compatible
OP(LayerNormBackward,
   (In gradOut, In input, Ints normalizedShape, In mean, In rstd, OptIn weightOptional, OptIn biasOptional,
    Bools outputMask, OptOut gradInputOut, OptOut gradWeightOut, OptOut gradBiasOut),
   (dtype(gradOut, kFloating), same_shape(gradOut, input), normalized_shape_fits(input, normalizedShape),
    require(outputMask.size() == 3, "outputMask must have 3 values, but found ", outputMask.size(), ".")),
   auto statistic = input.sizes().vec();
   std::fill(statistic.end() - normalizedShape.size(), statistic.end(), 1);
   auto [dx, dw, db] = at::native_layer_norm_backward(
       f(gradOut), f(input), normalizedShape, f(mean).reshape(statistic), f(rstd).reshape(statistic),
       f_or_none(weightOptional), f_or_none(biasOptional),
       {bool(outputMask[0]), bool(outputMask[1]), bool(outputMask[2])});
   if (outputMask[0]) gradInputOut = dx;
   if (outputMask[1]) gradWeightOut = dw;
   if (outputMask[2]) gradBiasOut = db)

OP(GroupNorm,
   (In self, OptIn gamma, OptIn beta, int64_t N, int64_t C, int64_t HxW, int64_t group, double eps, Out out,
    Out meanOut, Out rstdOut),
   (dtype(self, kFloating), same_shape(out, self),
    require(group > 0 && C % group == 0, "C ", C, " must be divisible by group ", group, ".")),
   auto [y, mean, rstd] = at::native_group_norm(f(self).contiguous(), f_or_none(gamma), f_or_none(beta), N, C, HxW,
                                                group, eps);
   out = y;
   meanOut = mean;
   rstdOut = rstd)
OP(GroupNormBackward,
   (In gradOut, In input, In mean, In rstd, OptIn gamma, int64_t N, int64_t C, int64_t HxW, int64_t group,
    Bools outputMask, OptOut gradInput, OptOut gradGammaOut, OptOut gradBetaOut),
   (dtype(gradOut, kFloating), same_shape(gradOut, input)),
   auto [dx, dw, db] = at::native_group_norm_backward(
       f(gradOut).contiguous(), f(input).contiguous(), f(mean), f(rstd), f_or_none(gamma), N, C, HxW, group,
       {bool(outputMask[0]), bool(outputMask[1]), bool(outputMask[2])});
   if (outputMask[0]) gradInput = dx;
   if (outputMask[1]) gradGammaOut = dw;
   if (outputMask[2]) gradBetaOut = db)
OP(BatchNorm,
   (In input, OptIn weight, OptIn bias, OptIn runningMean, OptIn runningVar, bool training, double momentum,
    double eps, Out output, OptOut saveMean, OptOut saveInvstd),
   (dtype(input, kFloating), same_shape(output, input)),
   auto [y, mean, inverse] = at::native_batch_norm(f(input), f_or_none(weight), f_or_none(bias),
                                                   runningMean.optional(), runningVar.optional(), training,
                                                   momentum, eps);
   output = y;
   if (training) {
     saveMean = mean;
     saveInvstd = inverse;
   })
OP(BatchNormBackward,
   (In gradOut, In input, OptIn weight, OptIn runningMean, OptIn runningVar, OptIn saveMean, OptIn saveInvstd,
    bool training, double eps, Bools outputMask, OptOut gradInput, OptOut gradWeight, OptOut gradBias),
   (dtype(gradOut, kFloating), same_shape(gradOut, input)),
   auto [dx, dw, db] = at::native_batch_norm_backward(
       f(gradOut), f(input), f_or_none(weight), f_or_none(runningMean), f_or_none(runningVar), f_or_none(saveMean),
       f_or_none(saveInvstd), training, eps, {bool(outputMask[0]), bool(outputMask[1]), bool(outputMask[2])});
   if (outputMask[0]) gradInput = dx;
   if (outputMask[1]) gradWeight = dw;
   if (outputMask[2]) gradBias = db)
