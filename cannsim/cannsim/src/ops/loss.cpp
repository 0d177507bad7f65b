// Softmax and losses with their gradients. Half and bfloat16 are computed in float.
#include "checks.h"

namespace cannsim {

static const Dtypes kTarget{{at::kLong, at::kByte, at::kInt}};

static at::Tensor f(const at::Tensor& x) { return x.scalar_type() == at::kDouble ? x : x.to(at::kFloat); }
static std::optional<at::Tensor> f_or_none(const OptIn& x) {
  return x.given() ? std::optional<at::Tensor>(f(x)) : std::nullopt;
}

// input (N, C) or (C), target (N) or a scalar.
static void classes(const In& input, const In& target, const In& weight, int64_t reduction) {
  dtype(input, kFloating);
  dtype(target, kTarget);
  rank(input, 1, 2);
  rank(target, 0, 1);
  require(input.dim() == 1 || (target.dim() == 1 && target.size(0) == input.size(0)),
          "Expected target batch size to match self ", shape_text(input.sizes()), ", but found ",
          shape_text(target.sizes()), ".");
  if (weight.defined()) shape(weight, {input.size(-1)});
  require(reduction >= 0 && reduction <= 2, "reduction should be in [0,2], but found ", reduction, ".");
}

// 0 none, 1 mean, 2 sum: the same codes as torch.
static void reduction_fits(int64_t reduction) {
  require(reduction >= 0 && reduction <= 2, "reduction should be in [0,2], but found ", reduction, ".");
}

static at::Tensor hidden(const at::Tensor& scores, const at::Tensor& mask, bool causal) {
  return causal ? at::ones({scores.size(-2), scores.size(-1)}, at::kBool).triu(1) : mask.to(at::kBool);
}

static int64_t reduction_code(const std::string& name) {
  return name == "none" ? at::Reduction::None : name == "sum" ? at::Reduction::Sum : at::Reduction::Mean;
}

static void cross_entropy_fits(const In& input, const In& target, const OptIn& weight, const std::string& reduction,
                               double smoothing, double zloss_scale) {
  dtype(input, kFloating);
  dtype(target, kIndex);
  dtype(weight, Dtypes{{at::kFloat}});
  rank(input, 2, 2);
  shape(target, {input.size(0)});
  shape(weight, {input.size(1)});
  require(reduction == "mean" || reduction == "sum" || reduction == "none" || reduction.empty(),
          "reduction should be one of mean, sum and none, but found ", reduction, ".");
  require(smoothing >= 0 && smoothing < 1, "labelSmoothing should be in [0,1), but found ", smoothing, ".");
  require(zloss_scale == 0, "lseSquareScaleForZloss should be 0, but found ", zloss_scale, ".");
  require(input.size(0) <= 200000, "N of input ", shape_text(input.sizes()), " should be at most 200000.");
}

static void cross_entropy(const In& input, const In& target, const OptIn& weight, const std::string& reduction,
                          int64_t ignore, double smoothing, const Out& loss, const Out& log_prob) {
  at::Tensor wide = f(input);
  log_prob = at::log_softmax(wide, -1);
  loss = at::cross_entropy_loss(wide, target.to(at::kLong), f_or_none(weight), reduction_code(reduction), ignore,
                                smoothing);
}

// The loss of row i is -sum_c dist[i, c] * log_prob[i, c] with the smoothed, weighted target.
static at::Tensor cross_entropy_gradient(const In& grad_loss, const In& log_prob, const In& target,
                                         const OptIn& weight, const std::string& reduction, int64_t ignore,
                                         double smoothing) {
  at::Tensor logp = f(log_prob);
  int64_t count = logp.size(1);
  at::Tensor labels = target.to(at::kLong);
  at::Tensor valid = labels.ne(ignore);
  at::Tensor safe = labels.masked_fill(valid.logical_not(), 0).unsqueeze(1);
  at::Tensor w = weight.given() ? f(weight) : at::ones({count});
  at::Tensor dist = (w * (smoothing / count)).expand_as(logp).clone();
  at::Tensor label_weight = w.index_select(0, safe.squeeze(1)).unsqueeze(1);
  dist.scatter_add_(1, safe, label_weight * (1 - smoothing));
  dist.mul_(valid.unsqueeze(1));
  at::Tensor g = f(grad_loss);
  if (reduction_code(reduction) == at::Reduction::Mean) g = g / (label_weight.squeeze(1) * valid).sum();
  at::Tensor row = dist * (g.dim() == 0 ? g : g.reshape({-1, 1}));
  return at::exp(logp) * row.sum(1, true) - row;
}

}  // namespace cannsim

// ---- softmax ------------------------------------------------------------------------------------

OP(Softmax, (In self, int64_t dim, Out out),
   (dtype(self, kFloatingOrDouble), dtype(out, kFloatingOrDouble), dimension(self, dim), same_shape(out, self)),
   out = at::softmax(f(self), dim))
OP(LogSoftmax, (In self, int64_t dim, Out out),
   (dtype(self, kFloatingOrDouble), dtype(out, kFloatingOrDouble), dimension(self, dim), same_shape(out, self)),
   out = at::log_softmax(f(self), dim))
OP(SoftmaxBackward, (In gradOutput, In output, int64_t dim, Out out),
   (dtype(gradOutput, kFloatingOrDouble), same_shape(gradOutput, output), dimension(output, dim),
    same_shape(out, output)),
   out = at::_softmax_backward_data(f(gradOutput), f(output), dim, f(output).scalar_type()))
OP(LogSoftmaxBackward, (In gradOutput, In output, int64_t dim, Out out),
   (dtype(gradOutput, kFloatingOrDouble), same_shape(gradOutput, output), dimension(output, dim),
    same_shape(out, output)),
   out = at::_log_softmax_backward_data(f(gradOutput), f(output), dim, f(output).scalar_type()))
// True hides the position, as in attention. With fixedTriuMask the operator takes a causal mask of its own.
OP(ScaledMaskedSoftmax, (In x, In mask, double scale, bool fixedTriuMask, Out y),
   (dtype(x, kFloating), rank(x, 4, 4), dtype(mask, kMask), same_shape(y, x)),
   y = at::softmax((f(x) * scale).masked_fill(hidden(x, mask, fixedTriuMask), -10000.0), -1))
OP(ScaledMaskedSoftmaxBackward, (In gradOutput, In y, In mask, double scale, bool fixTriuMask, Out out),
   (dtype(gradOutput, kFloating), rank(y, 4, 4), same_shape(out, y)),
   out = at::_softmax_backward_data(f(gradOutput), f(y), -1, at::kFloat)
             .masked_fill(hidden(y, mask, fixTriuMask), 0) * scale)

// ---- classification -----------------------------------------------------------------------------

OP(NLLLoss, (In self, In target, In weight, int64_t reduction, int64_t ignoreIndex, Out out, Out totalWeightOut),
   (classes(self, target, weight, reduction)),
   auto [loss, total] = at::nll_loss_forward(f(self), target.to(at::kLong), f(weight), reduction, ignoreIndex);
   out = loss;
   totalWeightOut = total)
OP(NLLLossBackward,
   (In gradOutput, In self, In target, In weight, int64_t reduction, int64_t ignoreIndex, In totalWeight, Out out),
   (classes(self, target, weight, reduction), same_shape(out, self)),
   out = at::nll_loss_backward(f(gradOutput), f(self), target.to(at::kLong), f(weight), reduction, ignoreIndex,
                               f(totalWeight).reshape({})))
OP(CrossEntropyLoss,
   (In input, In target, OptIn weightOptional, Text reductionOptional, int64_t ignoreIndex, double labelSmoothing,
    double lseSquareScaleForZloss, bool returnZloss, Out lossOut, Out logProbOut, OptOut zlossOut,
    OptOut lseForZlossOut),
   (cross_entropy_fits(input, target, weightOptional, reductionOptional, labelSmoothing, lseSquareScaleForZloss),
    same_shape(logProbOut, input), require(!returnZloss, "returnZloss is not simulated.")),
   cross_entropy(input, target, weightOptional, reductionOptional, ignoreIndex, labelSmoothing, lossOut, logProbOut))
OP(CrossEntropyLossGrad,
   (In gradLoss, In logProb, In target, OptIn weightOptional, OptIn gradZlossOptional, OptIn lseForZlossOptional,
    Text reductionOptional, int64_t ignoreIndex, double labelSmoothing, double lseSquareScaleForZloss, Out out),
   (cross_entropy_fits(logProb, target, weightOptional, reductionOptional, labelSmoothing, lseSquareScaleForZloss),
    same_shape(out, logProb)),
   out = cross_entropy_gradient(gradLoss, logProb, target, weightOptional, reductionOptional, ignoreIndex,
                                labelSmoothing))
OP(BinaryCrossEntropy, (In self, In target, OptIn weight, int64_t reduction, Out out),
   (dtype(self, kFloating), same_shape(self, target), reduction_fits(reduction)),
   out = at::binary_cross_entropy(f(self), f(target), f_or_none(weight), reduction))
OP(BinaryCrossEntropyBackward, (In gradOutput, In self, In target, OptIn weightOptional, int64_t reduction, Out out),
   (dtype(self, kFloating), same_shape(self, target), reduction_fits(reduction)),
   out = at::binary_cross_entropy_backward(f(gradOutput), f(self), f(target), f_or_none(weightOptional), reduction))
OP(BinaryCrossEntropyWithLogits,
   (In self, In target, OptIn weightOptional, OptIn posWeightOptional, int64_t reduction, Out out),
   (dtype(self, kFloating), same_shape(self, target), reduction_fits(reduction)),
   out = at::binary_cross_entropy_with_logits(f(self), f(target), f_or_none(weightOptional),
                                              f_or_none(posWeightOptional), reduction))
OP(BinaryCrossEntropyWithLogitsBackward,
   (In gradOutput, In self, In target, OptIn weightOptional, OptIn posWeightOptional, int64_t reduction, Out out),
   (dtype(self, kFloating), same_shape(self, target), reduction_fits(reduction)),
   at::Tensor y = f(target);
   at::Tensor p = at::sigmoid(f(self));
   at::Tensor up = posWeightOptional.given() ? f(posWeightOptional) * y : y;
   at::Tensor gradient = ((up + 1 - y) * p - up) * f(gradOutput);
   if (weightOptional.given()) gradient = gradient * f(weightOptional);
   out = reduction == at::Reduction::Mean ? gradient / self.numel() : gradient)

// ---- regression ---------------------------------------------------------------------------------

OP(MseLoss, (In self, In target, int64_t reduction, Out out), (dtype(self, kFloating), reduction_fits(reduction)),
   out = at::mse_loss(self, target, reduction))
OP(MseLossBackward, (In gradOutput, In self, In target, int64_t reduction, Out out),
   (dtype(self, kFloating), reduction_fits(reduction)),
   out = at::mse_loss_backward(gradOutput, self, target, reduction))
OP(L1Loss, (In self, In target, int64_t reduction, Out out), (dtype(self, kFloating), reduction_fits(reduction)),
   out = at::l1_loss(self, target, reduction))
OP(L1LossBackward, (In gradOutput, In self, In target, int64_t reduction, Out gradInput),
   (dtype(self, kFloating), reduction_fits(reduction)),
   at::Tensor sign = at::sign(f(self) - f(target)) * f(gradOutput);
   gradInput = reduction == at::Reduction::Mean ? sign / sign.numel() : sign)
OP(SmoothL1Loss, (In self, In target, int64_t reduction, float beta, Out result),
   (dtype(self, kFloating), reduction_fits(reduction)), result = at::smooth_l1_loss(self, target, reduction, beta))
OP(SmoothL1LossBackward, (In gradOut, In self, In target, int64_t reduction, float beta, Out gradInput),
   (dtype(self, kFloating), reduction_fits(reduction)),
   gradInput = at::smooth_l1_loss_backward(gradOut, self, target, reduction, beta))
OP(KlDivBackward, (In gradOutput, In self, In target, int64_t reduction, bool logTarget, Out out),
   (dtype(self, kFloating), reduction_fits(reduction)),
   at::Tensor weight = logTarget ? f(target).exp() : f(target);
   at::Tensor gradient = (-weight * f(gradOutput)).expand_as(self);
   out = reduction == at::Reduction::Mean ? gradient / self.numel() : gradient)
OP(KlDiv, (In self, In target, int64_t reduction, bool logTarget, Out out),
   (dtype(self, kFloating), reduction_fits(reduction)), out = at::kl_div(self, target, reduction, logTarget))

// ---- vision and audio ---------------------------------------------------------------------------

OP(NLLLoss2d, (In self, In target, In weight, int64_t reduction, int64_t ignoreIndex, Out out, Out totalWeightOut),
   (rank(self, 3, 4), reduction_fits(reduction)),
   auto [loss, total] = at::nll_loss2d_forward(f(self), target.to(at::kLong), f(weight), reduction, ignoreIndex);
   out = loss;
   totalWeightOut = total)
OP(NLLLoss2dBackward,
   (In gradOutput, In self, In target, In weight, int64_t reduction, int64_t ignoreIndex, In totalWeight, Out out),
   (rank(self, 3, 4), same_shape(out, self)),
   out = at::nll_loss2d_backward(f(gradOutput), f(self), target.to(at::kLong), f(weight), reduction, ignoreIndex,
                                 f(totalWeight).reshape({})))
OP(SoftMarginLoss, (In self, In target, int64_t reduction, Out out), (dtype(self, kFloating), reduction_fits(reduction)),
   out = at::soft_margin_loss(f(self), f(target), reduction))
OP(SoftMarginLossBackward, (In gradOutput, In self, In target, int64_t reduction, Out gradInput),
   (dtype(self, kFloating), reduction_fits(reduction)),
   gradInput = at::soft_margin_loss_backward(f(gradOutput), f(self), f(target), reduction))
OP(MultilabelMarginLoss, (In self, In target, int64_t reduction, Out out, Out isTarget), (reduction_fits(reduction)),
   auto [loss, found] = at::multilabel_margin_loss_forward(f(self), target.to(at::kLong), reduction);
   out = loss;
   isTarget = found)
OP(KlDivTargetBackward, (In gradOutput, In self, In target, int64_t reduction, bool logTarget, Out gradTarget),
   (dtype(self, kFloating), reduction_fits(reduction)),
   at::Tensor t = f(target);
   at::Tensor slope = logTarget ? at::exp(t) * (t + 1 - f(self))
                                : at::where(t > 0, at::log(t) + 1 - f(self), at::zeros_like(t));
   if (reduction == at::Reduction::Mean) slope = slope / self.numel();
   gradTarget = f(gradOutput) * slope)
// log_alpha is padded: only the first 2 x longest target + 1 columns are used.
OP(CtcLoss,
   (In logProbs, In targets, Ints inputLengths, Ints targetLengths, int64_t blank, bool zeroInfinity,
    Out negLogLikelihood, Out logAlpha),
   (rank(logProbs, 3, 3)),
   auto [loss, alpha] = at::_ctc_loss(f(logProbs), targets.to(at::kLong), inputLengths, targetLengths, blank, zeroInfinity);
   negLogLikelihood = loss;
   logAlpha.zero_();
   logAlpha.narrow(2, 0, alpha.size(2)).copy_(alpha))
OP(CtcLossBackward,
   (In gradOutput, In logProbs, In targets, Ints inputLengths, Ints targetLengths, In negLogLikelihood, In logAlpha,
    int64_t blank, bool zeroInfinity, Out gradInput),
   (rank(logProbs, 3, 3), same_shape(gradInput, logProbs)),
   int64_t longest = targetLengths.empty() ? 0 : *std::max_element(targetLengths.begin(), targetLengths.end());
   gradInput = at::_ctc_loss_backward(f(gradOutput), f(logProbs), targets.to(at::kLong), inputLengths, targetLengths,
                                      f(negLogLikelihood), f(logAlpha).narrow(2, 0, 2 * longest + 1).contiguous(), blank,
                                      zeroInfinity))
