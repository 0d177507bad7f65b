// Sorting, top-k and searching.
#include "checks.h"

namespace cannsim {
static void k_fits(const In& self, int64_t k, int64_t dim) {
  dimension(self, dim);
  int64_t size = self.dim() ? self.size(dim) : 1;
  require(k >= 0 && k <= size, "Expected k to be in [0,", size, "] for dim ", dim, " of self ",
          shape_text(self.sizes()), ", but found ", k, ".");
}

// Keep what top-k and nucleus sampling keep, put -inf elsewhere. p and k hold one value per row.
static at::Tensor top_k_top_p(const at::Tensor& logits, const OptIn& p, const OptIn& k) {
  auto [values, order] = at::sort(logits.to(at::kFloat), -1);  // ascending
  int64_t size = logits.size(-1);
  if (k.given()) {
    at::Tensor last = (size - k.to(at::kLong)).clamp(0, size - 1).unsqueeze(-1);
    values = values.masked_fill(values < values.gather(-1, last), -INFINITY);
  }
  if (p.given()) {
    at::Tensor below = values.softmax(-1).cumsum(-1);
    at::Tensor drop = below <= (1 - p.to(at::kFloat)).unsqueeze(-1);
    drop.select(-1, size - 1).fill_(false);
    values = values.masked_fill(drop, -INFINITY);
  }
  return at::empty_like(values).scatter_(-1, order, values);
}
}  // namespace cannsim

OP(Sort, (In self, bool stable, int64_t dim, bool descending, Out valuesOut, Out indicesOut),
   (dtype(self, kReal), dimension(self, dim), same_shape(valuesOut, self), same_shape(indicesOut, self)),
   auto [values, order] = at::sort(self, std::optional<bool>(true), dim, descending);
   valuesOut = values;
   indicesOut = order)
OP(Topk, (In self, int64_t k, int64_t dim, bool largest, bool sorted, Out valuesOut, Out indicesOut),
   (dtype(self, kReal), k_fits(self, k, dim), same_dtype(valuesOut, self), same_shape(valuesOut, indicesOut)),
   auto [values, order] = at::topk(self, k, dim, largest, sorted);
   valuesOut = values;
   indicesOut = order)
OP(Kthvalue, (In self, int64_t k, int64_t dim, bool keepdim, Out valuesOut, Out indicesOut),
   (dtype(self, kReal), k_fits(self, k, dim)),
   auto [value, where] = at::kthvalue(self, k, dim, keepdim);
   valuesOut = value;
   indicesOut = where)
OP(Median, (In self, Out valuesOut), (dtype(self, kReal)), valuesOut = at::median(self))
OP(MedianDim, (In self, int64_t dim, bool keepDim, Out valuesOut, Out indicesOut),
   (dtype(self, kReal), dimension(self, dim)),
   auto [value, where] = at::median(self, dim, keepDim);
   valuesOut = value;
   indicesOut = where)
OP(SearchSorted, (In sortedSequence, In self, bool outInt32, bool right, OptIn sorter, Out out),
   (dtype(out, kIndex)), out = at::searchsorted(sortedSequence, self, outInt32, right, {}, sorter.optional()))
OP(SearchSorteds, (In sortedSequence, Num self, bool outInt32, bool right, OptIn sorter, Out out),
   (dtype(out, kIndex)), out = at::searchsorted(sortedSequence, self, outInt32, right, {}, sorter.optional()))
OP(Bucketize, (In self, In boundaries, bool outInt32, bool right, Out out), (dtype(out, kIndex), same_shape(out, self)),
   out = at::bucketize(self, boundaries, outInt32, right))
OP(Unique2, (In self, bool sorted, bool returnInverse, bool returnCounts, Out valueOut, Out inverseOut, Out countsOut),
   (dtype(self, kReal)),
   auto [values, inverse, counts] = at::_unique2(self, sorted, returnInverse, returnCounts);
   valueOut.resize_and_write(values);
   if (returnInverse) inverseOut.resize_and_write(inverse);
   if (returnCounts) countsOut.resize_and_write(counts))
OP(Unique, (In self, bool sorted, bool returnInverse, Out valueOut, Out inverseOut), (dtype(self, kReal)),
   auto [values, inverse, counts] = at::_unique2(self, sorted, returnInverse, false);
   valueOut.resize_and_write(values);
   if (returnInverse) inverseOut.resize_and_write(inverse))
OP(ApplyTopKTopP, (In logits, OptIn p, OptIn k, Out out),
   (dtype(logits, kFloating), rank(logits, 2, 2), same_shape(out, logits), same_dtype(p, logits),
    require(p.given() || k.given(), "Expected one of p and k, but found neither.")),
   out = top_k_top_p(logits, p, k))
OP(IsInTensorScalar, (In element, Num testElement, bool assumeUnique, bool invert, Out out), (same_shape(out, element)),
   out = at::isin(element, testElement, assumeUnique, invert))
OP(IsInScalarTensor, (Num element, In testElements, bool assumeUnique, bool invert, Out out), (),
   out = at::isin(element, testElements, assumeUnique, invert))
OP(UniqueConsecutive,
   (In self, bool returnInverse, bool returnCounts, int64_t dim, Out valueOut, Out inverseOut, Out countsOut),
   (dtype(self, kReal)),
   std::optional<int64_t> along = dim == 1000 ? std::nullopt : std::optional<int64_t>(dim);  // 1000: flattened
   auto [values, inverse, counts] = at::unique_consecutive(self, returnInverse, returnCounts, along);
   valueOut.resize_and_write(values);
   if (returnInverse) inverseOut.resize_and_write(inverse);
   if (returnCounts) countsOut.resize_and_write(counts))
