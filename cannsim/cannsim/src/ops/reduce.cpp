// Reductions: sums, extremes, norms, statistics, running sums.
#include "checks.h"

namespace cannsim {
static const Dtypes kExtreme{
    {at::kFloat, at::kHalf, kBf16, at::kDouble, at::kInt, at::kLong, at::kShort, at::kChar, at::kByte, at::kBool}};

// Products of half precision are rounded once, at the end.
static at::ScalarType widened(aclDataType dtype) {
  at::ScalarType type = to_torch(dtype);
  return type == at::kHalf || type == kBf16 ? at::kFloat : type;
}
static void dimensions(const In& tensor, const std::vector<int64_t>& dims) {
  for (int64_t dim : dims) dimension(tensor, dim);
}
// A reduction to one value may write to a tensor of any shape with one element.
static void reduced(const In& out, const In& self, std::vector<int64_t> dims, bool keep) {
  std::vector<bool> gone(self.dim(), dims.empty());
  for (int64_t dim : dims) {
    if (self.dim()) gone[dim < 0 ? dim + self.dim() : dim] = true;
  }
  std::vector<int64_t> expected;
  for (int64_t i = 0; i < self.dim(); ++i) {
    if (!gone[i]) expected.push_back(self.size(i));
    if (gone[i] && keep) expected.push_back(1);
  }
  if (out.numel() == 1 && c10::multiply_integers(expected) == 1) return;
  shape(out, expected);
}
}  // namespace cannsim

OP(ReduceSum, (In self, Ints dims, bool keepDims, aclDataType dtype_, Out out),
   (dtype(self, kNumeric), dimensions(self, dims), reduced(out, self, dims, keepDims)),
   out = at::sum(self, at::OptionalIntArrayRef(dims), keepDims, to_torch(dtype_)))
OP(Mean, (In self, Ints dim, bool keepDim, aclDataType dtype_, Out out),
   (dtype(self, kNumeric), dimensions(self, dim), reduced(out, self, dim, keepDim)),
   out = at::mean(self, at::OptionalIntArrayRef(dim), keepDim, to_torch(dtype_)))
OP(Prod, (In self, aclDataType dtype_, Out out), (dtype(self, kNumeric)),
   out = at::prod(wide(self), widened(dtype_)))
OP(ProdDim, (In self, int64_t dim, bool keepDim, aclDataType dtype_, Out out),
   (dtype(self, kNumeric), dimension(self, dim)), out = at::prod(wide(self), dim, keepDim, widened(dtype_)))

// ---- extremes -----------------------------------------------------------------------------------

OP(Max, (In self, Out out), (dtype(self, kExtreme)), out = at::max(self))
OP(Min, (In self, Out out), (dtype(self, kExtreme)), out = at::min(self))
OP(Amax, (In self, Ints dim, bool keepDim, Out out),
   (dtype(self, kExtreme), dimensions(self, dim), reduced(out, self, dim, keepDim)),
   out = at::amax(self, dim, keepDim))
OP(Amin, (In self, Ints dim, bool keepDim, Out out),
   (dtype(self, kExtreme), dimensions(self, dim), reduced(out, self, dim, keepDim)),
   out = at::amin(self, dim, keepDim))
OP(AminmaxAll, (In self, Out minOut, Out maxOut), (dtype(self, kExtreme)),
   minOut = at::min(self);
   maxOut = at::max(self))
OP(MaxDim, (In self, int64_t dim, bool keepdim, Out out, Out indices),
   (dtype(self, kExtreme), dimension(self, dim), dtype(indices, kIndex), reduced(out, self, {dim}, keepdim)),
   auto [values, where] = at::max(self, dim, keepdim);
   out = values;
   indices = where)
OP(MinDim, (In self, int64_t dim, bool keepdim, Out out, Out indices),
   (dtype(self, kExtreme), dimension(self, dim), dtype(indices, kIndex), reduced(out, self, {dim}, keepdim)),
   auto [values, where] = at::min(self, dim, keepdim);
   out = values;
   indices = where)
OP(ArgMax, (In self, int64_t dim, bool keepdim, Out out),
   (dtype(self, kReal), dimension(self, dim), dtype(out, kIndex)), out = at::argmax(self, dim, keepdim))
OP(ArgMin, (In self, int64_t dim, bool keepdim, Out out),
   (dtype(self, kReal), dimension(self, dim), dtype(out, kIndex)), out = at::argmin(self, dim, keepdim))

// ---- truth --------------------------------------------------------------------------------------

OP(Any, (In self, Ints dim, bool keepdim, Out out), (dtype(self, kReal), dtype(out, kMask), dimensions(self, dim)),
   out = at::any(self, at::OptionalIntArrayRef(dim), keepdim))
OP(All, (In self, Ints dim, bool keepdim, Out out), (dtype(self, kReal), dtype(out, kMask), dimensions(self, dim)),
   out = at::all(self, at::OptionalIntArrayRef(dim), keepdim))

// ---- norms and statistics -----------------------------------------------------------------------

OP(LinalgVectorNorm, (In self, Num ord, OptInts dims, bool keepDims, aclDataType dtype_, Out out),
   (dtype(self, kFloating), dimensions(self, dims), reduced(out, self, dims, keepDims)),
   out = at::linalg_vector_norm(self.to(at::kFloat), ord, dims.optional(), keepDims))
OP(Norm, (In self, OptNum pScalar, OptInts dim, bool keepdim, Out out),
   (dtype(self, kFloating), dimensions(self, dim), reduced(out, self, dim, keepdim)),
   out = at::norm(self.to(at::kFloat), pScalar.value_or(2), at::IntArrayRef(dim), keepdim))
OP(LogSumExp, (In self, Ints dim, bool keepDim, Out out),
   (dtype(self, kReal), dtype(out, kFloating), dimensions(self, dim), reduced(out, self, dim, keepDim)),
   out = at::logsumexp(self.to(at::kFloat), dim, keepDim))
// An integer would choose torch's older overload, whose argument is a bool.
static std::optional<at::Scalar> number(int64_t value) { return at::Scalar(value); }
OP(VarCorrection, (In self, OptInts dim, int64_t correction, bool keepdim, Out out), (dtype(self, kFloating)),
   out = at::var(self, dim.optional(), number(correction), keepdim))
OP(Std, (In self, OptInts dim, int64_t correction, bool keepdim, Out out), (dtype(self, kFloating)),
   out = at::std(self, dim.optional(), number(correction), keepdim))
OP(VarMean, (In self, OptInts dim, int64_t correction, bool keepdim, Out varOut, Out meanOut),
   (dtype(self, kFloating)),
   auto [variance, mean] = at::var_mean(self, dim.optional(), number(correction), keepdim);
   varOut = variance;
   meanOut = mean)
OP(StdMeanCorrection, (In self, OptInts dim, int64_t correction, bool keepdim, Out stdOut, Out meanOut),
   (dtype(self, kFloating)),
   auto [deviation, mean] = at::std_mean(self, dim.optional(), number(correction), keepdim);
   stdOut = deviation;
   meanOut = mean)
OP(Bincount, (In self, OptIn weights, int64_t minlength, Out out), (dtype(self, kIntegral), rank(self, 1, 1)),
   out = at::bincount(self, weights.optional(), minlength))
OP(Histc, (In self, int64_t bins, Num min, Num max, Out out), (dtype(self, kReal)),
   out = at::histc(self.to(at::kFloat), bins, min, max))
OP(Trace, (In self, Out out), (rank(self, 2, 2)), out = at::trace(self))

// ---- running ------------------------------------------------------------------------------------

OP(Cumsum, (In self, int64_t dim, aclDataType dtype_, Out out),
   (dtype(self, kNumeric), dimension(self, dim), same_shape(out, self)),
   out = at::cumsum(self, dim, to_torch(dtype_)))
OP(Cumprod, (In input, Num dim, aclDataType dtype_, Out out), (dtype(input, kNumeric), same_shape(out, input)),
   out = at::cumprod(input, dim.toLong(), to_torch(dtype_)))
OP(Cummax, (In self, int64_t dim, Out valuesOut, Out indicesOut), (dtype(self, kReal), dimension(self, dim)),
   auto [values, where] = at::cummax(self, dim);
   valuesOut = values;
   indicesOut = where)
OP(Cummin, (In self, int64_t dim, Out valuesOut, Out indicesOut), (dtype(self, kReal), dimension(self, dim)),
   auto [values, where] = at::cummin(self, dim);
   valuesOut = values;
   indicesOut = where)
