// Cross entropy of a vocabulary that is spread over devices, fused with its last layer. Between the first two
// operators the caller exchanges maxima, sums and the logits of the targets.
#include "checks.h"

namespace cannsim {

static const Dtypes kHalves{{at::kHalf, kBf16}};

// Bits, the first one highest: 1 where a target belongs to another device. The last byte is filled up with 1.
static at::Tensor pack_bits(const at::Tensor& absent) {
  at::Tensor bits = at::ones({(absent.numel() + 7) / 8 * 8}, at::kInt);
  bits.narrow(0, 0, absent.numel()).copy_(absent);
  at::Tensor weight = at::bitwise_right_shift(at::full({8}, 128, at::kInt), at::arange(8, at::kInt));
  return (bits.view({-1, 8}) * weight).sum(1);
}

static at::Tensor unpack_bits(const at::Tensor& bytes, int64_t count) {
  at::Tensor shift = at::arange(7, -1, -1, at::kInt);
  at::Tensor bits = at::bitwise_right_shift(bytes.to(at::kInt).unsqueeze(1), shift);
  return at::bitwise_and(bits, 1).flatten().narrow(0, 0, count);
}

static at::Tensor logits(const at::Tensor& input, const at::Tensor& weight) {
  return at::matmul(wide(input), wide(weight).t());
}

static void layer_fits(const In& input, const In& weight) {
  dtype(input, kHalves);
  same_dtype(input, weight);
  rank(input, 2, 2);
  rank(weight, 2, 2);
  require(input.size(1) == weight.size(1), "Expected tensor for weight to have ", input.size(1),
          " columns, but found shape ", shape_text(weight.sizes()), ".");
}

static void no_smoothing(double smoothing) {
  require(smoothing == 0, "labelSmoothing should be 0, but found ", smoothing, ".");
}

}  // namespace cannsim

OP(FusedLinearOnlineMaxSum,
   (In input, In weight, In target, int64_t vocabStartIndex, int64_t vocabEndIndex, Out logitsMaxLocalOut,
    Out sumExpLogitsLocalOut, Out predictedLogitsLocalOut, Out targetMaskOut, Out maskedTargetOut,
    OptOut vocabParallelLogitsOutOptional),
   (layer_fits(input, weight), dtype(target, kIndex), shape(target, {input.size(0)}),
    require(vocabStartIndex >= 0 && vocabStartIndex <= vocabEndIndex, "Expected vocabStartIndex ", vocabStartIndex,
            " to be at least 0 and at most vocabEndIndex ", vocabEndIndex, ".")),
   at::Tensor all = logits(input, weight), most = all.amax(-1), below = all - most.unsqueeze(1);
   at::Tensor wanted = indices(target);
   at::Tensor absent = wanted.lt(vocabStartIndex).logical_or(wanted.gt(vocabEndIndex));
   at::Tensor masked = (wanted - vocabStartIndex).masked_fill(absent, 0);
   logitsMaxLocalOut = most;
   sumExpLogitsLocalOut = below.exp().sum(-1);
   predictedLogitsLocalOut = below.gather(1, masked.unsqueeze(1)).squeeze(1).masked_fill(absent, 0);
   targetMaskOut = pack_bits(absent);
   maskedTargetOut = masked;
   if (vocabParallelLogitsOutOptional.given()) vocabParallelLogitsOutOptional = all)

OP(FusedCrossEntropyLossWithMaxSum,
   (In logitsMax, In sumExpLogits, In predictedLogits, float labelSmoothing, OptIn inputOptional, OptIn weightOptional,
    OptIn vocabParallelLogitsOptional, Out lossOut, OptOut softMaxOutOptional),
   (same_shape(sumExpLogits, logitsMax), same_shape(predictedLogits, logitsMax), same_shape(lossOut, logitsMax),
    no_smoothing(labelSmoothing),
    require(!inputOptional.given() && !weightOptional.given(), "inputOptional and weightOptional should be null.")),
   lossOut = sumExpLogits.log() - predictedLogits;
   if (softMaxOutOptional.given()) {
     at::Tensor below = wide(vocabParallelLogitsOptional) - logitsMax.unsqueeze(1);
     softMaxOutOptional = below.exp() / sumExpLogits.unsqueeze(1);
   })

OP(FusedLinearCrossEntropyLossGrad,
   (In grad, In input, In weight, In targetMask, In maskedTarget, float labelSmoothing, OptIn logitsMaxOptional,
    OptIn sumExpLogitsOptional, OptIn softmaxOptional, Out inputGradOut, Out weightGradOut),
   (layer_fits(input, weight), shape(grad, {input.size(0)}), shape(maskedTarget, {input.size(0)}),
    no_smoothing(labelSmoothing), same_shape(inputGradOut, input), same_shape(weightGradOut, weight),
    require(softmaxOptional.given() || (logitsMaxOptional.given() && sumExpLogitsOptional.given()),
            "Expected softmaxOptional, or logitsMaxOptional and sumExpLogitsOptional.")),
   at::Tensor share = softmaxOptional.given()
                          ? wide(softmaxOptional).clone()
                          : (logits(input, weight) - logitsMaxOptional.unsqueeze(1)).exp() /
                                sumExpLogitsOptional.unsqueeze(1);
   at::Tensor present = (1 - unpack_bits(targetMask, input.size(0))).to(at::kFloat).unsqueeze(1);
   share.scatter_add_(1, indices(maskedTarget).unsqueeze(1), -present);
   share = share * grad.unsqueeze(1);
   inputGradOut = at::matmul(share, wide(weight));
   weightGradOut = at::matmul(share.t(), wide(input)))
