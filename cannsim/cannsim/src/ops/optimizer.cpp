// Fused optimizer steps and the kernels of gradient scaling.
#include <cmath>

#include "checks.h"

namespace cannsim {

struct AdamW {
  double lr, beta1, beta2, weight_decay, eps;
  bool amsgrad, maximize;
};

// One step with decoupled weight decay. `power1` and `power2` are beta^step after this step.
static void adamw(const Out& weight, const Out& m, const Out& v, const OptOut& v_max, const at::Tensor& grad,
                  double power1, double power2, const AdamW& o) {
  at::Tensor gradient = grad.to(at::kFloat);
  if (o.maximize) gradient = -gradient;
  at::Tensor first = m.to(at::kFloat).mul(o.beta1).add_(gradient, 1 - o.beta1);
  at::Tensor second = v.to(at::kFloat).mul(o.beta2).addcmul_(gradient, gradient, 1 - o.beta2);
  at::Tensor scale = second;
  if (o.amsgrad) {
    scale = at::maximum(v_max.to(at::kFloat), second);
    v_max = scale;
  }
  at::Tensor denominator = scale.sqrt().div_(std::sqrt(1 - power2)).add_(o.eps);
  weight = weight.to(at::kFloat).mul(1 - o.lr * o.weight_decay).addcdiv_(first, denominator, -o.lr / (1 - power1));
  m = first;
  v = second;
}

// The product tables of ops-nn list the fused step for A2 and later only.
static void not_old(const char* operation) {
  std::string family = chip().family;
  require(family != "910A" && family != "310P", operation, " is not supported on soc version ", chip().name, ".");
}

static double number(const at::Tensor& x) { return x.item().toDouble(); }

}  // namespace cannsim

// `step` counts the steps done before this one.
OP(ApplyAdamWV2,
   (Out varRef, Out mRef, Out vRef, OptOut maxGradNormOptionalRef, In grad, In step, float lr, float beta1,
    float beta2, float weightDecay, float eps, bool amsgrad, bool maximize),
   (not_old("ApplyAdamWV2"), dtype(varRef, kFloating), dtype(mRef, kFloating), dtype(vRef, kFloating),
    dtype(grad, kFloating), same_shape(varRef, mRef), same_shape(varRef, vRef), same_shape(varRef, grad),
    dtype(step, Dtypes{{at::kLong, at::kFloat}}),
    require(step.numel() == 1, "Expected tensor for step to have one element, but found shape ",
            shape_text(step.sizes()), "."),
    require(!amsgrad || maxGradNormOptionalRef.defined(), "Expected maxGradNormOptional when amsgrad is true.")),
   double after = number(step) + 1;
   adamw(varRef, mRef, vRef, maxGradNormOptionalRef, grad, std::pow(double(beta1), after),
         std::pow(double(beta2), after), {lr, beta1, beta2, weightDecay, eps, amsgrad, maximize}))
// The older interface passes every number as a tensor and the powers before this step.
OP(ApplyAdamW,
   (Out varRef, Out mRef, Out vRef, In beta1Power, In beta2Power, In lr, In weightDecay, In beta1, In beta2, In eps,
    In grad, OptOut maxGradNormOptional, bool amsgrad, bool maximize),
   (dtype(varRef, kFloating), same_shape(varRef, mRef), same_shape(varRef, vRef), same_shape(varRef, grad)),
   adamw(varRef, mRef, vRef, maxGradNormOptional, grad, number(beta1Power) * number(beta1),
         number(beta2Power) * number(beta2),
         {number(lr), number(beta1), number(beta2), number(weightDecay), number(eps), amsgrad, maximize}))
OP(FusedSgd,
   (OutList paramsRef, OutList gradsRef, OptInList momentumBufferListOptionalRef, OptIn gradScaleOptional,
    float weightDecay, float momentum, float lr, float dampening, bool nesterov, bool maximize, bool isFirstStep),
   (dtype(paramsRef, kFloating), same_shapes(paramsRef, gradsRef)),
   for (size_t i = 0; i < paramsRef.size(); ++i) {
     at::Tensor gradient = gradsRef[i].to(at::kFloat);
     if (gradScaleOptional.given()) gradient = gradient / gradScaleOptional.to(at::kFloat);
     if (maximize) gradient = -gradient;
     at::Tensor weight = paramsRef[i].to(at::kFloat);
     if (weightDecay != 0) gradient = gradient + weight * weightDecay;
     if (momentum != 0) {
       const at::Tensor& buffer = momentumBufferListOptionalRef[i];
       buffer.copy_(isFirstStep ? gradient : buffer.to(at::kFloat) * momentum + gradient * (1 - dampening));
       gradient = nesterov ? gradient + buffer.to(at::kFloat) * momentum : buffer.to(at::kFloat);
     }
     paramsRef.write(i, weight - gradient * lr);
   })

// ---- gradient scaling ---------------------------------------------------------------------------

OP(AmpUpdateScale,
   (In currentScale, In growthTracker, In foundInf, double growthFactor, double backoffFactor, int64_t growthInterval,
    Out updatedScale, Out updatedGrowthTracker),
   (dtype(currentScale, Dtypes{{at::kFloat}}), dtype(foundInf, Dtypes{{at::kFloat}}),
    dtype(growthTracker, Dtypes{{at::kInt}})),
   double scale = number(currentScale);
   int64_t tracker = growthTracker.item().toLong();
   if (number(foundInf) != 0) {
     scale *= backoffFactor;
     tracker = 0;
   } else if (++tracker == growthInterval) {
     double grown = scale * growthFactor;
     if (std::isfinite(static_cast<float>(grown))) scale = grown;
     tracker = 0;
   } 
   updatedScale.fill_(scale);
   updatedGrowthTracker.fill_(tracker))
OP(ForeachNonFiniteCheckAndUnscale, (OutList scaledGrads, Out foundInf, In invScale),
   (dtype(scaledGrads, kFloating), dtype(foundInf, Dtypes{{at::kFloat}}), dtype(invScale, Dtypes{{at::kFloat}})),
   double factor = number(invScale);
   for (const at::Tensor& gradient : scaledGrads) {
     if (!at::isfinite(gradient).all().item().toBool()) foundInf.fill_(1.0);
     gradient.mul_(factor);
   })
