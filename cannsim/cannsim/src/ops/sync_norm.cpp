// Batch normalisation over several devices: statistics of one, gathered from all, and their gradients.
#include "checks.h"

namespace cannsim {
static at::Tensor f(const at::Tensor& x) { return x.to(at::kFloat); }

// Per channel (dimension 1): the dimensions that are summed, and a statistic as it broadcasts with x.
static std::vector<int64_t> all_but_channels(const at::Tensor& x) {
  std::vector<int64_t> dims;
  for (int64_t i = 0; i < x.dim(); ++i) {
    if (i != 1) dims.push_back(i);
  }
  return dims;
}
static at::Tensor channels(const at::Tensor& x, const at::Tensor& statistic) {
  std::vector<int64_t> sizes(x.dim(), 1);
  sizes[1] = x.size(1);
  return f(statistic).reshape(sizes);
}

// Mean and variance over all ranks, from what each found over its own batch: (ranks, channels).
static void gather_statistics(const at::Tensor& mean, const at::Tensor& variance, const at::Tensor& total,
                              const OptIn& running_mean, const OptIn& running_var, double momentum) {
  if (running_mean.defined()) running_mean.mul_(1 - momentum).add_(mean.to(running_mean.scalar_type()), momentum);
  if (!running_var.defined()) return;
  at::Tensor unbiased = variance * total / (total - 1);
  running_var.mul_(1 - momentum).add_(unbiased.to(running_var.scalar_type()), momentum);
}
}  // namespace cannsim

OP(BatchNormStats, (In input, double eps, Out mean, Out invstd), (dtype(input, kFloating), rank(input, 2, 8)),
   auto [variance, average] = at::var_mean(f(input), all_but_channels(input), 0);
   mean = average;
   invstd = at::rsqrt(variance + eps))
OP(BatchNormElemt, (In input, OptIn weight, OptIn bias, In mean, In invstd, double eps, Out output),
   (dtype(input, kFloating), rank(input, 2, 8), same_shape(output, input)),
   at::Tensor y = (f(input) - channels(input, mean)) * channels(input, invstd);
   if (weight.given()) y = y * channels(input, weight);
   output = bias.given() ? y + channels(input, bias) : y)
OP(BatchNormReduce, (In x, Out sum, Out squareSum), (dtype(x, kFloating), rank(x, 2, 8)),
   sum = f(x).sum(all_but_channels(x));
   squareSum = f(x).square().sum(all_but_channels(x)))
OP(BatchNormReduceBackward,
   (In gradOut, In input, In mean, In invstd, OptIn weight, bool inputG, bool weightG, bool biasG, OptOut sumDy,
    OptOut sumDyXmu, OptOut gradWeight, OptOut gradBias),
   (dtype(input, kFloating), same_shape(gradOut, input)),
   at::Tensor dy = f(gradOut).sum(all_but_channels(input));
   at::Tensor product = (f(gradOut) * (f(input) - channels(input, mean))).sum(all_but_channels(input));
   if (inputG) sumDy = dy;
   if (inputG) sumDyXmu = product;
   if (weightG) gradWeight = product * f(invstd);
   if (biasG) gradBias = dy)
OP(BatchNormElemtBackward,
   (In gradOut, In input, In mean, In invstd, OptIn weight, In sumDy, In sumDyXmu, In counter, Out gradInput),
   (dtype(input, kFloating), same_shape(gradInput, input)),
   at::Tensor total = f(counter).sum();
   at::Tensor inverse = channels(input, invstd);
   at::Tensor projected = (f(input) - channels(input, mean)) * inverse.square() * channels(input, sumDyXmu) / total;
   at::Tensor dx = (f(gradOut) - channels(input, sumDy) / total - projected) * inverse;
   gradInput = weight.given() ? dx * channels(input, weight) : dx)
OP(BatchNormGatherStatsWithCounts,
   (In input, In mean, In invstd, OptIn runningMean, OptIn runningVar, double momentum, double eps, In counts,
    Out meanAll, Out invstdAll),
   (rank(mean, 2, 2), same_shape(mean, invstd)),
   at::Tensor count = f(counts).reshape({-1, 1});
   at::Tensor total = count.sum();
   at::Tensor average = (f(mean) * count).sum(0) / total;
   at::Tensor own = f(invstd).pow(-2) - eps;
   at::Tensor variance = ((own + (f(mean) - average).square()) * count).sum(0) / total;
   gather_statistics(average, variance, total, runningMean, runningVar, momentum);
   meanAll = average;
   invstdAll = at::rsqrt(variance + eps))
OP(SyncBatchNormGatherStats,
   (In totalSum, In totalSquareSum, In sampleCount, OptIn mean, OptIn variance, float momentum, float eps,
    Out batchMean, Out batchInvstd),
   (same_shape(totalSum, totalSquareSum)),
   at::Tensor total = f(sampleCount).sum();
   at::Tensor average = f(totalSum).sum(0) / total;
   at::Tensor spread = f(totalSquareSum).sum(0) / total - average.square();
   gather_statistics(average, spread, total, mean, variance, momentum);
   batchMean = average;
   batchInvstd = at::rsqrt(spread + eps))
