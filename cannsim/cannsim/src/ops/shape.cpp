// Joining, splitting, repeating, padding, moving.
#include "checks.h"

namespace cannsim {
static void joinable(const Tensors& tensors, int64_t dim, bool new_dim) {
  require(!tensors.empty(), "Expected tensor list ", tensors.name, " to be nonempty.");
  int64_t rank = tensors[0].dim() + (new_dim ? 1 : 0);
  require(rank == 0 || (dim >= -rank && dim < rank), "Expected dim to be in range [", -rank, ",", rank - 1,
          "], but found ", dim, ".");
}

static void slices_fit(const In& self, const std::vector<int64_t>& sizes, int64_t dim) {
  dimension(self, dim);
  int64_t total = 0;
  for (int64_t size : sizes) total += size;
  require(total == self.size(dim), "Expected splitSize ", shape_text(sizes), " to sum to ", self.size(dim),
          ", but found ", total, ".");
}

static at::Tensor repeated(const at::Tensor& x, const at::Tensor& repeats, std::optional<int64_t> dim) {
  return at::repeat_interleave(x, repeats.to(at::kLong), dim);
}
}  // namespace cannsim

OP(Cat, (InList tensors, int64_t dim, Out out), (joinable(tensors, dim, false)), out = at::cat(tensors, dim))
OP(Stack, (InList tensors, int64_t dim, Out out), (joinable(tensors, dim, true)), out = at::stack(tensors, dim))
OP(ChunkCat, (InList tensors, int64_t dim, int64_t numChunks, Out out), (joinable(tensors, dim, false)),
   out = at::_chunk_cat(tensors, dim, numChunks))
OP(SplitWithSize, (In self, Ints splitSize, int64_t dim, OutList out), (slices_fit(self, splitSize, dim)),
   auto parts = at::split_with_sizes(self, splitSize, dim);
   for (size_t i = 0; i < parts.size(); ++i) out.write(i, parts[i]))

OP(Repeat, (In self, Ints repeats, Out out),
   (require(static_cast<int64_t>(repeats.size()) >= self.dim(), "Expected at least ", self.dim(),
            " repeats, but found ", repeats.size(), ".")),
   out = self.repeat(repeats))
OP(RepeatInterleave, (In self, In repeats, int64_t outputSize, Out out), (dtype(repeats, kIndex)),
   out = repeated(self.flatten(), repeats, 0))
OP(RepeatInterleaveInt, (In self, int64_t repeats, int64_t outputSize, Out out), (),
   out = at::repeat_interleave(self, repeats))
OP(RepeatInterleaveWithDim, (In self, In repeats, int64_t dim, int64_t outputSize, Out out),
   (dtype(repeats, kIndex), dimension(self, dim)), out = repeated(self, repeats, dim))
OP(RepeatInterleaveIntWithDim, (In self, int64_t repeats, int64_t dim, int64_t outputSize, Out out),
   (dimension(self, dim)), out = at::repeat_interleave(self, repeats, dim))
OP(RepeatInterleaveTensor, (In repeats, int64_t outputSize, Out out), (dtype(repeats, kIndex)),
   out = at::repeat_interleave(repeats.to(at::kLong)))
OP(RepeatInterleaveGrad, (In yGrad, In repeats, int64_t axis, Out out), (dtype(yGrad, kFloating)),
   at::Tensor count = repeats.to(at::kLong).reshape({-1}).expand({out.size(axis)});
   at::Tensor from = at::repeat_interleave(count.contiguous());
   out = at::zeros(out.sizes(), at::kFloat).index_add(axis, from, yGrad.to(at::kFloat)))

OP(ConstantPadNd, (In self, Ints pad, Num value, Out out),
   (require(pad.size() % 2 == 0 && static_cast<int64_t>(pad.size()) <= 2 * self.dim(), "Expected up to ",
            2 * self.dim(), " pad values in pairs, but found ", pad.size(), ".")),
   out = at::constant_pad_nd(self, pad, value))
OP(ReflectionPad1d, (In self, Ints padding, Out out), (rank(self, 2, 3)), out = at::reflection_pad1d(self, padding))
OP(ReflectionPad1dBackward, (In gradOutput, In self, Ints padding, Out gradInput), (rank(self, 2, 3)),
   gradInput = at::reflection_pad1d_backward(gradOutput, self, padding))
OP(Flip, (In self, Ints dims, Out out), (same_shape(out, self)), out = at::flip(self, dims))
OP(Roll, (In x, Ints shifts, Ints dims, Out out), (same_shape(out, x)), out = at::roll(x, shifts, dims))
OP(UnfoldGrad, (In gradOut, Ints inputSizes, int64_t dim, int64_t size, int64_t step, Out gradIn),
   (dtype(gradOut, kFloating)), gradIn = at::unfold_backward(gradOut, inputSizes, dim, size, step))
OP(OneHot, (In self, int numClasses, In onValue, In offValue, int64_t axis, Out out),
   (dtype(self, Dtypes{{at::kByte, at::kInt, at::kLong}}), same_dtype(onValue, offValue)),
   at::Tensor hot = at::one_hot(self.to(at::kLong), numClasses).to(at::kBool);
   if (axis >= 0 && axis < hot.dim() - 1) hot = hot.movedim(-1, axis);
   out = at::where(hot, onValue.reshape({}), offValue.reshape({})))
