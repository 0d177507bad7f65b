// Extremes, medians and distances that few models use; embeddings of bags; quantisation of one tensor.
#include "checks.h"

namespace cannsim {
static void dimensions(const In& tensor, const std::vector<int64_t>& dims) {
  for (int64_t dim : dims) dimension(tensor, dim);
}
}  // namespace cannsim

OP(Aminmax, (In self, Ints dim, bool keepDim, Out minOut, Out maxOut), (dtype(self, kReal), dimensions(self, dim)),
   minOut = at::amin(self, dim, keepDim);
   maxOut = at::amax(self, dim, keepDim))
OP(AminmaxDim, (In self, int64_t dim, bool keepDim, Out minOut, Out maxOut), (dtype(self, kReal), dimension(self, dim)),
   minOut = at::amin(self, dim, keepDim);
   maxOut = at::amax(self, dim, keepDim))
OP(ReduceNansum, (In self, Ints dim, bool keepDim, aclDataType dtype_, Out out),
   (dtype(self, kNumeric), dimensions(self, dim)),
   out = at::nansum(self, at::OptionalIntArrayRef(dim), keepDim, to_torch(dtype_)))
OP(NanMedian, (In self, Out out), (dtype(self, kReal)), out = at::nanmedian(self))
OP(NanMedianDim, (In self, int64_t dim, bool keepDim, Out valuesOut, Out indicesOut),
   (dtype(self, kReal), dimension(self, dim)),
   auto [values, where] = at::nanmedian(self, dim, keepDim);
   valuesOut = values;
   indicesOut = where)
// With p = 0 the norm is the number of elements that are not 0, as in the public formula.
static at::Tensor renormed(const at::Tensor& x, const at::Scalar& p, int64_t dim, const at::Scalar& most) {
  if (p.toDouble() != 0) return at::renorm(x, p, dim, most);
  std::vector<int64_t> others;
  for (int64_t i = 0; i < x.dim(); ++i) {
    if (i != at::maybe_wrap_dim(dim, x.dim())) others.push_back(i);
  }
  at::Tensor norm = x.ne(0).sum(others, true).to(at::kFloat);
  return x * at::where(norm.gt(most), most.toDouble() / (norm + 1e-7), at::ones_like(norm));
}
OP(Renorm, (In self, Num p, int64_t dim, Num maxNorm, Out out), (dtype(self, kFloating), same_shape(out, self)),
   out = renormed(wide(self), p, dim, maxNorm))
OP(InplaceRenorm, (Out selfRef, Num p, int64_t dim, Num maxNorm), (dtype(selfRef, kFloating)),
   selfRef = renormed(wide(selfRef), p, dim, maxNorm))
OP(Cdist, (In x1, In x2, float p, int64_t computeMode, Out out), (same_dtype(x1, x2)),
   out = at::_cdist_forward(wide(x1).contiguous(), wide(x2).contiguous(), p, 2))
OP(CdistBackward, (In grad, In x1, In x2, In cdist, float p, Out out), (same_dtype(x1, x2)),
   out = at::_cdist_backward(wide(grad).contiguous(), wide(x1).contiguous(), wide(x2).contiguous(), p,
                             wide(cdist).contiguous()))
OP(Pdist, (In self, float p, Out out), (rank(self, 2, 2)), out = at::pdist(wide(self), p))
OP(UniqueDim, (In self, bool sorted, bool returnInverse, int64_t dim, Out valueOut, Out inverseOut, Out countsOut),
   (dtype(self, kReal), dimension(self, dim)),
   auto [values, inverse, counts] = at::unique_dim(self, dim, true, true, true);
   valueOut.resize_and_write(values);
   inverseOut = inverse;
   countsOut.resize_and_write(counts))
OP(InplaceAddr, (Out selfRef, In vec1, In vec2, Num beta, Num alpha), (rank(vec1, 1, 1), rank(vec2, 1, 1)),
   selfRef = at::addr(selfRef, vec1, vec2, beta, alpha))
OP(Slogdet, (In self, Out signOut, Out logOut), (dtype(self, kFloatingOrDouble)),
   auto [sign, log] = at::slogdet(wide(self));
   signOut = sign;
   logOut = log)

// ---- embeddings ---------------------------------------------------------------------------------

OP(EmbeddingRenorm, (Out selfRef, In indices_, double maxNorm, double normType), (rank(selfRef, 2, 2), dtype(indices_, kIndex)),
   at::Tensor table = wide(selfRef).clone();
   at::embedding_renorm_(table, indices_.to(at::kLong), maxNorm, normType);
   selfRef = table)
// What torch does not give in a mode (empty) stays as it is.
OP(EmbeddingBag,
   (In weight, In indices_, In offsets, bool scaleGradByFreq, int64_t mode, bool sparse, OptIn perSampleWeights,
    bool includeLastOffset, int64_t paddingIdx, Out output, Out offset2bag, Out bagSize, Out maxIndices),
   (rank(weight, 2, 2), dtype(indices_, kIndex), dtype(offsets, kIndex)),
   std::optional<at::Tensor> factors;
   if (perSampleWeights.given()) factors = wide(perSampleWeights);
   auto [y, bag, size, most] =
       at::_embedding_bag(wide(weight), indices_.to(at::kLong), offsets.to(at::kLong), scaleGradByFreq, mode, false,
                          factors, includeLastOffset, paddingIdx);
   output = y;
   auto keep = [](const Out& out, const at::Tensor& value) {
     if (out.numel() == value.numel()) out = value;
   };
   keep(offset2bag, bag);
   keep(bagSize, size);
   keep(maxIndices, most))

// ---- layout and quantisation --------------------------------------------------------------------

OP(ConfusionTranspose, (In x, Ints perm, Ints shape_, bool transposeFirst, Out out), (),
   out = transposeFirst ? x.permute(perm).reshape(shape_) : x.reshape(shape_).permute(perm))
// x / scale + zeroPoint, rounded to even, in the range of the output.
OP(Quantize, (In x, In scales, OptIn zeroPoints, aclDataType dtype_, int64_t axis, Out out),
   (dtype(x, kFloating), same_shape(out, x)),
   std::vector<int64_t> sizes(x.dim(), 1);
   if (scales.numel() > 1) sizes[axis] = scales.numel();
   at::Tensor y = at::round(x.to(at::kFloat) / scales.to(at::kFloat).reshape(sizes));
   if (zeroPoints.given()) y = y + zeroPoints.to(at::kFloat).reshape(sizes);
   bool byte = out.scalar_type() == at::kByte;
   bool small = byte || out.scalar_type() == at::kChar;
   out = small ? at::clamp(y, byte ? 0 : -128, byte ? 255 : 127) : y)
