// Mixtures of experts: tokens are copied once per expert that they go to, sorted by expert, and put together again.
//
// sortedIndices says for every copy (token, choice) at which row it is; rows past the last one were dropped.
#include "checks.h"

namespace cannsim {

static void not_padded(bool padded) { require(!padded, "paddedMode true is not simulated."); }

static void permute(const In& tokens, const In& experts, int64_t kept, const Out& rows, const Out& places) {
  int64_t choices = experts.dim() == 1 ? 1 : experts.size(1);
  at::Tensor order = at::argsort(experts.flatten(), /*stable=*/true, 0, /*descending=*/false);
  at::Tensor source = order.floor_divide(choices).slice(0, 0, kept);
  at::Tensor found = at::empty_like(order);
  found.index_put_({order}, at::arange(order.numel()));
  rows = tokens.index_select(0, source);
  places = found;
}

// The copies in the order of the tokens, in float; what was dropped is 0.
static at::Tensor copies(const at::Tensor& rows, const at::Tensor& places) {
  at::Tensor with_none = at::cat({rows.to(at::kFloat), at::zeros({1, rows.size(1)})});
  return with_none.index_select(0, indices(places).flatten().clamp_max(rows.size(0)));
}

// What is written for dropped copies goes to a row that is cut off.
static at::Tensor rows_of(const at::Tensor& copied, const at::Tensor& places, int64_t count) {
  at::Tensor rows = at::zeros({count + 1, copied.size(1)});
  rows.index_copy_(0, indices(places).flatten().clamp_max(count), copied);
  return rows.slice(0, 0, count);
}

static void unpermute(const In& rows, const In& places, const OptIn& probs, const Out& out) {
  int64_t choices = probs.given() ? probs.size(1) : 1;
  at::Tensor copied = copies(rows, places).unflatten(0, {-1, choices});
  if (probs.given()) copied = copied * probs.to(at::kFloat).unsqueeze(-1);
  out = copied.sum(1);
}

static void unpermute_gradient(const OptIn& rows, const In& grad, const In& places, const OptIn& probs,
                               const Out& rows_grad, const OptOut& probs_grad) {
  at::Tensor each = grad.to(at::kFloat).unsqueeze(1);  // (token, choice, width)
  if (probs.given()) {
    probs_grad = (copies(rows, places).unflatten(0, {-1, probs.size(1)}) * each).sum(-1);
    each = each * probs.to(at::kFloat).unsqueeze(-1);
  }
  rows_grad = rows_of(each.flatten(0, 1), places, rows_grad.size(0));
}

}  // namespace cannsim

OP(MoeTokenPermute,
   (In tokens, In indices, int64_t numOutTokens, bool paddedMode, Out permuteTokensOut, Out sortedIndicesOut),
   (not_padded(paddedMode), rank(tokens, 2, 2), rank(indices, 1, 2), dtype(tokens, kFloating), dtype(indices, kIndex),
    require(indices.size(0) == tokens.size(0), "The first dimension of indices ", shape_text(indices.sizes()),
            " must equal that of tokens ", shape_text(tokens.sizes()), "."),
    shape(permuteTokensOut, {numOutTokens, tokens.size(1)}), shape(sortedIndicesOut, {indices.numel()})),
   permute(tokens, indices, numOutTokens, permuteTokensOut, sortedIndicesOut))
OP(MoeTokenPermuteGrad, (In permutedOutputGrad, In sortedIndices, int64_t numTopk, bool paddedMode, Out out),
   (not_padded(paddedMode), rank(permutedOutputGrad, 2, 2), dtype(permutedOutputGrad, kFloating),
    dtype(sortedIndices, {{at::kInt}}),
    require(sortedIndices.numel() == out.size(0) * numTopk, "sortedIndices has ", sortedIndices.numel(),
            " elements, expected ", out.size(0), " tokens times numTopk ", numTopk, ".")),
   out = copies(permutedOutputGrad, sortedIndices).unflatten(0, {-1, numTopk}).sum(1))
OP(MoeTokenUnpermute,
   (In permutedTokens, In sortedIndices, OptIn probsOptional, bool paddedMode, OptInts restoreShapeOptional, Out out),
   (not_padded(paddedMode), rank(permutedTokens, 2, 2), dtype(permutedTokens, kFloating),
    dtype(sortedIndices, {{at::kInt}}), dtype(probsOptional, kFloating),
    require(!probsOptional.given() || probsOptional.numel() == sortedIndices.numel(), "probs ",
            shape_text(probsOptional.sizes()), " and sortedIndices ", shape_text(sortedIndices.sizes()),
            " must have as many elements.")),
   unpermute(permutedTokens, sortedIndices, probsOptional, out))
OP(MoeTokenUnpermuteGrad,
   (OptIn permutedTokens, In unpermutedTokensGrad, In sortedIndices, OptIn probsOptional, bool paddedMode,
    OptInts restoreShapeOptional, Out permutedTokensGradOut, OptOut probsGradOut),
   (not_padded(paddedMode), rank(unpermutedTokensGrad, 2, 2), dtype(unpermutedTokensGrad, kFloating),
    dtype(sortedIndices, {{at::kInt}}),
    require(permutedTokens.given() || !probsOptional.given(), "permutedTokens is needed for the gradient of probs.")),
   unpermute_gradient(permutedTokens, unpermutedTokensGrad, sortedIndices, probsOptional, permutedTokensGradOut,
                      probsGradOut))
