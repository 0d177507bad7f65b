// Reading and writing by index: embedding, gather, scatter, index, mask.
#include <algorithm>

#include "checks.h"

namespace cannsim {

// An absent index is null or an empty tensor.
static c10::List<std::optional<at::Tensor>> index_list(const MaybeTensors& indices) {
  c10::List<std::optional<at::Tensor>> list;
  for (const at::Tensor& index : indices) {
    bool given = index.defined() && index.numel() > 0;
    list.push_back(given ? std::optional<at::Tensor>(index) : std::nullopt);
  }
  return list;
}

static void indexable(const In& self, const MaybeTensors& indices) {
  static const Dtypes kinds{{at::kInt, at::kLong, at::kBool, at::kByte}};
  require(static_cast<int64_t>(indices.size()) <= self.dim(), "Expected at most ", self.dim(),
          " index tensors for self ", shape_text(self.sizes()), ", but found ", indices.size(), ".");
  for (const at::Tensor& index : indices) {
    if (index.defined() && index.numel() > 0) dtype(In(index, "indices"), kinds);
  }
}

static at::Tensor whole(const at::Tensor& index) { return index.to(at::kLong); }

static const char* reduction(int64_t code) {
  static const char* names[] = {"none", "add", "multiply", "maximum", "minimum", "mean"};
  return names[code];
}

static void index_fits(const In& self, int64_t dim, const In& index) {
  dimension(self, dim);
  dtype(index, kIndex);
  require(index.dim() == self.dim() || self.dim() == 0 || index.dim() == 0 || index.numel() == 0,
          "Expected tensor for index to have the rank of self ", shape_text(self.sizes()), ", but found ",
          shape_text(index.sizes()), ".");
}

static at::Tensor scattered(const at::Tensor& self, int64_t dim, const at::Tensor& index, const at::Tensor& src,
                            int64_t reduce) {
  if (reduce == 0) return at::scatter(self, dim, whole(index), src);
  return at::scatter(self, dim, whole(index), src, reduction(reduce));
}

static void reducible(int64_t reduce, int64_t highest) {
  require(reduce >= 0 && reduce <= highest, "reduce should be in [0,", highest, "], but found ", reduce, ".");
}

static at::Tensor scatter_reduced(const at::Tensor& self, int64_t dim, const at::Tensor& index, const at::Tensor& src,
                                  int64_t code, bool include_self) {
  static const std::string_view names[] = {"", "sum", "prod", "amax", "amin", "mean"};
  if (code == 0) return at::scatter(self, dim, index, src);
  return at::scatter_reduce(self, dim, index, src, names[code], include_self);
}

// Row t of x (T, N, D) goes to slot t of a paged cache: (blocks, size, N, D), or with "PA_NZ"
// (blocks, N * D / 16, size, 16). A negative slot skips the row.
static void write_pages(const at::Tensor& x, const Out& cache, const at::Tensor& slots, bool nz) {
  int64_t size = cache.size(nz ? 2 : 1);
  at::Tensor where = whole(slots).reshape({-1}).contiguous();
  for (int64_t t = 0; t < where.numel(); ++t) {
    int64_t slot = where[t].item().toLong();
    if (slot < 0) continue;
    at::Tensor page = cache.select(0, slot / size);
    at::Tensor target = nz ? page.select(1, slot % size) : page.select(0, slot % size);
    target.copy_(x.select(0, t).reshape(target.sizes()));
  }
}

static void pages_fit(const In& key, const In& cache, const In& slots, const std::string& mode) {
  same_dtype(key, cache);
  dtype(slots, kIndex);
  rank(key, 3, 3);
  rank(cache, 4, 4);
  bool nz = mode == "PA_NZ";
  require(mode.empty() || mode == "Norm" || nz, "cacheMode should be Norm or PA_NZ, but found ", mode, ".");
  require(slots.numel() == key.size(0), "Expected one slot for each of ", key.size(0), " tokens, but found ",
          slots.numel(), ".");
  int64_t row = key.size(1) * key.size(2);
  int64_t held = nz ? cache.size(1) * cache.size(3) : cache.size(2) * cache.size(3);
  require(row == held, "A row of key ", shape_text(key.sizes()), " does not fit keyCache ",
          shape_text(cache.sizes()), ".");
}

// data[b, ..., index[b] : index[b]+n, ...] = updates[b] along `axis`: a KV-cache write.
static void scatter_update(const Out& data, const In& indices, const In& updates, int64_t axis) {
  at::Tensor starts = whole(indices).reshape({-1});
  int64_t dim = axis < 0 ? axis + data.dim() : axis;
  for (int64_t b = 0; b < updates.size(0); ++b) {
    at::Tensor target = data.select(0, b).narrow(dim - 1, starts[b].item().toLong(), updates.size(dim));
    target.copy_(updates.select(0, b));
  }
}

}  // namespace cannsim

// ---- embedding ----------------------------------------------------------------------------------

OP(Embedding, (In weight, In indices, Out out),
   (dtype(weight, kNumeric), dtype(indices, kIndex), rank(weight, 2, 2)), out = at::embedding(weight, indices))
OP(EmbeddingDenseBackward,
   (In grad, In indices, uint64_t numWeights, uint64_t paddingIdx, bool scaleGradByFreq, Out out),
   (dtype(grad, kFloating), dtype(out, kFloating), rank(out, 2, 2),
    require(out.size(0) == static_cast<int64_t>(numWeights), "Expected tensor for out to have ", numWeights,
            " rows, but found ", shape_text(out.sizes()), ".")),
   out = at::embedding_dense_backward(grad.to(at::kFloat), whole(indices), numWeights, paddingIdx, scaleGradByFreq))

// ---- select and gather --------------------------------------------------------------------------

OP(IndexSelect, (In self, int64_t dim, In index, Out out),
   (dimension(self, dim), dtype(index, kIndex), rank(index, 0, 1)), out = at::index_select(self, dim, index))
OP(Gather, (In self, int64_t dim, In index, Out out),
   (index_fits(self, dim, index), same_shape(out, index), same_dtype(out, self)),
   out = at::gather(self, dim, whole(index)))
OP(Take, (In self, In index, Out out), (dtype(index, kIndex), same_shape(out, index)),
   out = at::take(self, whole(index)))
OP(Index, (In self, OptInList indices, Out out), (indexable(self, indices)),
   if (out.numel()) out = at::index(self, index_list(indices)))
OP(MaskedSelect, (In self, In mask, Out out), (dtype(mask, kMask), same_dtype(out, self)),
   out.resize_and_write(at::masked_select(self, mask.to(at::kBool))))
OP(Nonzero, (In self, Out out), (dtype(out, kIndex)), out.resize_and_write(at::nonzero(self)))
OP(NonzeroV2, (In self, Out out), (dtype(out, kIndex)), out.resize_and_write(at::nonzero(self).t()))

// ---- write by index -----------------------------------------------------------------------------

OP(IndexPutImpl, (Out selfRef, OptInList indices, In values, bool accumulate, bool unsafe),
   (indexable(selfRef, indices), same_dtype(selfRef, values)),
   // An empty tensor stands for an index that is absent; when all are, nothing was chosen.
   auto given = [](const at::Tensor& index) { return index.defined() && index.numel() > 0; };
   bool chosen = std::any_of(indices.begin(), indices.end(), given);
   if (chosen && values.numel()) at::_index_put_impl_(selfRef, index_list(indices), values, accumulate, unsafe))
OP(IndexAdd, (In self, int64_t dim, In index, In source, Num alpha, Out out),
   (dimension(self, dim), dtype(index, kIndex), rank(index, 0, 1), same_dtype(self, source), same_shape(out, self)),
   out = at::index_add(self, dim, index, source, alpha))
OP(IndexAddV2, (In self, int64_t dim, In index, In source, Num alpha, int64_t mode, Out out),
   (dimension(self, dim), dtype(index, kIndex), same_dtype(self, source), same_shape(out, self)),
   out = at::index_add(self, dim, index, source, alpha))
OP(IndexCopy, (In selfRef, int64_t dim, In index, In source, Out outRef),
   (dimension(selfRef, dim), dtype(index, kIndex), same_dtype(selfRef, source)),
   outRef = at::index_copy(selfRef, dim, whole(index), source))
OP(InplaceIndexCopy, (Out selfRef, int64_t dim, In index, In source),
   (dimension(selfRef, dim), dtype(index, kIndex), same_dtype(selfRef, source)),
   selfRef.index_copy_(dim, whole(index), source))
OP(IndexFill, (In self, int64_t dim, In index, Num value, Out out), (dimension(self, dim), dtype(index, kIndex)),
   out = at::index_fill(self, dim, whole(index), value))
OP(InplaceIndexFill, (Out selfRef, int64_t dim, In index, Num value),
   (dimension(selfRef, dim), dtype(index, kIndex)), selfRef.index_fill_(dim, whole(index), value))
OP(IndexFillTensor, (In self, int64_t dim, Ints index, Num value, Out out), (dimension(self, dim)),
   out = at::index_fill(self, dim, at::tensor(index, at::kLong), value))
OP(InplaceIndexFillTensor, (Out selfRef, int64_t dim, Ints index, Num value), (dimension(selfRef, dim)),
   selfRef.index_fill_(dim, at::tensor(index, at::kLong), value))
OP(InplacePut, (Out selfRef, In index, In source, bool accumulate), (dtype(index, kIndex), same_dtype(selfRef, source)),
   selfRef.put_(whole(index), source, accumulate))

// ---- scatter ------------------------------------------------------------------------------------

OP(Scatter, (In self, int64_t dim, In index, In src, int64_t reduce, Out out),
   (index_fits(self, dim, index), same_dtype(self, src), reducible(reduce, 2)),
   out = scattered(self, dim, index, src, reduce))
OP(InplaceScatter, (Out selfRef, int64_t dim, In index, In src, int64_t reduce),
   (index_fits(selfRef, dim, index), same_dtype(selfRef, src), reducible(reduce, 2)),
   selfRef = scattered(selfRef, dim, index, src, reduce))
OP(ScatterValue, (In self, int64_t dim, In index, Num value, int64_t reduce, Out out),
   (index_fits(self, dim, index), reducible(reduce, 2)),
   out = reduce ? at::scatter(self, dim, whole(index), value, reduction(reduce))
                : at::scatter(self, dim, whole(index), value))
OP(InplaceScatterValue, (Out selfRef, int64_t dim, In index, Num value, int64_t reduce),
   (index_fits(selfRef, dim, index), reducible(reduce, 2)),
   selfRef = reduce ? at::scatter(selfRef, dim, whole(index), value, reduction(reduce))
                    : at::scatter(selfRef, dim, whole(index), value))
OP(ScatterAdd, (In self, int64_t dim, In index, In src, Out out),
   (index_fits(self, dim, index), same_dtype(self, src), same_shape(out, self)),
   out = at::scatter_add(self, dim, whole(index), src))
OP(ScatterReduce, (In self, int64_t dim, In index, In src, int64_t reduce, bool includeSelf, Out out),
   (index_fits(self, dim, index), same_dtype(self, src), reducible(reduce, 5)),
   out = scatter_reduced(self, dim, whole(index), src, reduce, includeSelf))
OP(InplaceScatterReduce, (Out selfRef, int64_t dim, In index, In src, int64_t reduce, bool includeSelf),
   (index_fits(selfRef, dim, index), same_dtype(selfRef, src), reducible(reduce, 5)),
   selfRef = scatter_reduced(selfRef, dim, whole(index), src, reduce, includeSelf))
OP(InplaceScatterUpdate, (Out data, In indices, In updates, int64_t axis),
   (dtype(indices, kIndex), same_dtype(data, updates), dimension(data, axis)),
   scatter_update(data, indices, updates, axis))
// Not in the public headers: the parameters are those of the caller in op-plugin.
OP(ScatterPaKvCache,
   (In key, Out keyCacheRef, In slotMapping, In value, Out valueCacheRef, OptIn compressLensOptional,
    OptIn compressSeqOffsetOptional, OptIn seqLensOptional, Text cacheMode, Text scatterMode, OptInts strides,
    OptInts offsets),
   (pages_fit(key, keyCacheRef, slotMapping, cacheMode), pages_fit(value, valueCacheRef, slotMapping, cacheMode),
    require(!compressLensOptional.given() && !compressSeqOffsetOptional.given() && !seqLensOptional.given(),
            "compressLens, compressSeqOffset and seqLens are not simulated."),
    require(scatterMode.empty() || scatterMode == "None" || scatterMode == "Norm", "scatterMode ", scatterMode,
            " is not simulated.")),
   write_pages(key, keyCacheRef, slotMapping, cacheMode == "PA_NZ");
   write_pages(value, valueCacheRef, slotMapping, cacheMode == "PA_NZ"))
OP(ScatterNdUpdate, (Out varRef, In indices, In updates), (dtype(indices, kIndex), same_dtype(varRef, updates)),
   auto parts = whole(indices).unbind(-1);
   c10::List<std::optional<at::Tensor>> list;
   for (const at::Tensor& part : parts) list.push_back(part);
   varRef.index_put_(list, updates))

// ---- masks --------------------------------------------------------------------------------------

OP(InplaceMaskedFillScalar, (Out selfRef, In mask, Num value), (dtype(mask, kMask), expands_to(mask, selfRef)),
   selfRef.masked_fill_(mask.to(at::kBool), value))
OP(InplaceMaskedFillTensor, (Out selfRef, In mask, In value), (dtype(mask, kMask), expands_to(mask, selfRef)),
   selfRef.masked_fill_(mask.to(at::kBool), value.reshape({}).to(selfRef.scalar_type())))
OP(InplaceMaskedScatter, (Out selfRef, In mask, In source), (dtype(mask, kMask), same_dtype(selfRef, source)),
   selfRef.masked_scatter_(mask.to(at::kBool), source))
OP(MaskedScale, (In self, In mask, float scale, Out y), (dtype(self, kFloating), same_shape(y, self)),
   y = self * mask.to(self.scalar_type()) * scale)
