// Random fills, sampling and dropout.
#include "random.h"

#include <ATen/CPUGeneratorImpl.h>

#include <cstring>

#include "checks.h"

namespace cannsim {

at::Generator generator(int64_t seed, int64_t offset) {
  uint64_t mixed = static_cast<uint64_t>(seed) * 0x9E3779B97F4A7C15ull + static_cast<uint64_t>(offset);
  return at::make_generator<at::CPUGeneratorImpl>(mixed);
}

// The variants with seed tensors are used while a graph is captured: the values are read when it runs.
static at::Generator generator(const at::Tensor& seed, const at::Tensor& base, int64_t offset) {
  return generator(seed.item().toLong(), base.item().toLong() + offset);
}

at::Tensor unpack_mask(const at::Tensor& packed, int64_t count, int64_t first) {
  at::Tensor keep = at::empty({count}, at::kFloat);
  float* value = keep.data_ptr<float>();
  const auto* bits = static_cast<const uint8_t*>(packed.const_data_ptr());
  for (int64_t i = 0; i < count; ++i) value[i] = (bits[(first + i) >> 3] >> ((first + i) & 7)) & 1;
  return keep;
}

// Which elements are kept. Dropout masks and a Bernoulli fill with one probability come from the same generator of
// bits on the hardware, so that dropout in place and not in place agree for one seed.
static at::Tensor kept(int64_t count, double drop, const at::Generator& source) {
  return at::empty({count}, at::kFloat).uniform_(0, 1, source).ge(static_cast<float>(drop));
}

static void pack_mask(const std::vector<int64_t>& shape, double drop, const at::Generator& source, Out& out) {
  at::Tensor keep = kept(c10::multiply_integers(shape), drop, source);
  const bool* value = keep.const_data_ptr<bool>();
  auto* bits = static_cast<uint8_t*>(out.mutable_data_ptr());
  std::memset(bits, 0, out.nbytes());
  for (int64_t i = 0; i < keep.numel(); ++i) {
    if (value[i]) bits[i >> 3] |= 1 << (i & 7);
  }
}

static void mask_fits(const In& out, const std::vector<int64_t>& shape, double drop) {
  require(drop >= 0 && drop <= 1, "prob should be in [0,1], but found ", drop, ".");
  require(out.scalar_type() == at::kByte, "Tensor out expected dtype is DT_UINT8 but found ",
          dtype_name(out.scalar_type()), ".");
  int64_t bytes = (c10::multiply_integers(shape) + 127) / 128 * 16;  // bits in units of 128
  require(out.numel() >= bytes, "Expected tensor for out to have at least ", bytes, " bytes, but found shape ",
          shape_text(out.sizes()), ".");
}

static void probabilities(const In& self, int64_t samples, bool replacement) {
  dtype(self, kFloatingOrDouble);
  rank(self, 1, 2);
  require(samples > 0, "Expected numsamples to be positive, but found ", samples, ".");
  require(replacement || samples <= self.size(-1), "Expected numsamples to be at most ", self.size(-1),
          " without replacement, but found ", samples, ".");
}

static at::Tensor sample(const at::Tensor& weights, int64_t count, bool replacement, const at::Generator& source) {
  return at::multinomial(weights.to(at::kFloat), count, replacement, source);
}

}  // namespace cannsim

// ---- fills --------------------------------------------------------------------------------------

OP(InplaceNormal, (Out selfRef, float mean, float std, int64_t seed, int64_t offset), (dtype(selfRef, kReal)),
   selfRef.normal_(mean, std, generator(seed, offset)))
OP(InplaceNormalTensor,
   (Out selfRef, float mean, float std, In seedTensor, In offsetTensor, int64_t offset), (dtype(selfRef, kReal)),
   selfRef.normal_(mean, std, generator(seedTensor, offsetTensor, offset)))
OP(InplaceUniform, (Out selfRef, double from, double to, uint64_t seed, uint64_t offset), (dtype(selfRef, kReal)),
   selfRef.uniform_(from, to, generator(seed, offset)))
OP(InplaceUniformTensor,
   (Out selfRef, double from, double to, In seedTensor, In offsetTensor, uint64_t offset), (dtype(selfRef, kReal)),
   selfRef.uniform_(from, to, generator(seedTensor, offsetTensor, offset)))
OP(InplaceRandom, (Out selfRef, int64_t from, int64_t to, int64_t seed, int64_t offset),
   (dtype(selfRef, kReal), require(from < to, "Expected from < to, but found ", from, " and ", to, ".")),
   selfRef.random_(from, to, generator(seed, offset)))
OP(InplaceRandomTensor,
   (Out selfRef, int64_t from, int64_t to, In seedTensor, In offsetTensor, int64_t offset), (dtype(selfRef, kReal)),
   selfRef.random_(from, to, generator(seedTensor, offsetTensor, offset)))
OP(InplaceRandomWithoutFromTo, (Out selfRef, int64_t seed, int64_t offset), (dtype(selfRef, kReal)),
   selfRef.random_(generator(seed, offset)))
OP(SimThreadExponential, (Out selfRef, int64_t count, double lambda, int64_t seed, int64_t offset),
   (dtype(selfRef, kFloating), require(lambda > 0, "lambda should be positive, but found ", lambda, ".")),
   selfRef.exponential_(lambda, generator(seed, offset)))
OP(NormalFloatFloat, (float mean, float std, int64_t seed, int64_t offset, Out out), (dtype(out, kFloating)),
   out.normal_(mean, std, generator(seed, offset)))
OP(NormalTensorFloat, (In mean, float std, int64_t seed, int64_t offset, Out out), (same_shape(out, mean)),
   out = at::normal(mean, std, generator(seed, offset)))
OP(NormalFloatTensor, (float mean, In std, int64_t seed, int64_t offset, Out out), (same_shape(out, std)),
   out = at::normal(mean, std, generator(seed, offset)))
OP(NormalTensorTensor, (In mean, In std, int64_t seed, int64_t offset, Out out), (broadcast(out, mean, std)),
   out = at::normal(mean, std, generator(seed, offset)))
OP(InplaceBernoulli, (Out selfRef, Num prob, int64_t seed, int64_t offset),
   (dtype(selfRef, kReal), require(prob.toDouble() >= 0 && prob.toDouble() <= 1,
                                   "prob should be in [0,1], but found ", prob.toDouble(), ".")),
   selfRef = kept(selfRef.numel(), 1 - prob.toDouble(), generator(seed, offset)).view(selfRef.sizes()))
OP(InplaceBernoulliTensor, (Out selfRef, In prob, int64_t seed, int64_t offset), (dtype(selfRef, kReal)),
   selfRef.bernoulli_(prob.to(at::kFloat), generator(seed, offset)))

// ---- sampling -----------------------------------------------------------------------------------

OP(Randperm, (int64_t n, int64_t seed, int64_t offset, Out out), (shape(out, {n})),
   out = at::randperm(n, generator(seed, offset)))
OP(Multinomial, (In self, int64_t numsamples, bool replacement, int64_t seed, int64_t offset, Out out),
   (probabilities(self, numsamples, replacement)),
   out = sample(self, numsamples, replacement, generator(seed, offset)))
OP(MultinomialTensor,
   (In self, int64_t numsamples, bool replacement, In seedTensor, In offsetTensor, int64_t offset, Out out),
   (probabilities(self, numsamples, replacement)),
   out = sample(self, numsamples, replacement, generator(seedTensor, offsetTensor, offset)))

// ---- dropout ------------------------------------------------------------------------------------

OP(DropoutGenMask, (Ints shape, double prob, int64_t seed, int64_t offset, Out out), (mask_fits(out, shape, prob)),
   pack_mask(shape, prob, generator(seed, offset), out))
OP(DropoutGenMaskV2, (Ints shape, double prob, int64_t seed, int64_t offset, aclDataType probDataType, Out out),
   (mask_fits(out, shape, prob)), pack_mask(shape, prob, generator(seed, offset), out))
OP(DropoutGenMaskV2Tensor,
   (Ints shape, double prob, In seedTensor, In offsetTensor, int64_t offset, aclDataType probDataType, Out out),
   (mask_fits(out, shape, prob)), pack_mask(shape, prob, generator(seedTensor, offsetTensor, offset), out))
OP(DropoutDoMask, (In self, In mask, double prob, Out out), (dtype(self, kFloating), same_shape(out, self)),
   double keep = 1 - prob;
   out = keep == 0 ? at::zeros_like(self) : self * (unpack_mask(mask, self.numel()).view(self.sizes()) / keep))
OP(DropoutV3, (In input, OptIn optionalNoiseShape, double p, int64_t seed, int64_t offset, Out out, Out maskOut),
   (dtype(input, kFloating), same_shape(out, input),
    require(!optionalNoiseShape.given(), "A noise shape is not simulated.")),
   pack_mask(input.sizes().vec(), p, generator(seed, offset), maskOut);
   out = input * (unpack_mask(maskOut, input.numel()).view(input.sizes()) / std::max(1 - p, 1e-12)))
OP(DropoutV3Grad, (In gradY, In mask, double scale, Out gradX), (dtype(gradY, kFloating), same_shape(gradX, gradY)),
   gradX = gradY * (unpack_mask(mask, gradY.numel()).view(gradY.sizes()) * scale))
