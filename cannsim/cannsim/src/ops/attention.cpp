// Attention for training: aclnnFlashAttentionScore and its gradient, with equal lengths or packed
// sequences (TND). Computed in float and rounded once.
#include "attention.h"

#include <ATen/ExpandUtils.h>

#include <cmath>

#include "checks.h"
#include "random.h"

namespace cannsim {

static at::Tensor f(const at::Tensor& x) { return x.to(at::kFloat); }

static Attention training(const std::string& layout, int64_t heads, double scale, double keep, int64_t pre,
                          int64_t next, int64_t sparse, int64_t pse_type, const OptInts& prefix,
                          const OptInts& q_ends, const OptInts& kv_ends) {
  return {layout, heads, scale, keep, pre, next, sparse, pse_type, prefix, q_ends, kv_ends};
}

// ---- checks -------------------------------------------------------------------------------------

// (B, N, Sq, Sk) of operators with equal lengths.
struct Lengths {
  int64_t batch, sq, sk;
};
static Lengths lengths_of(const at::Tensor& query, const at::Tensor& key, const std::string& layout) {
  if (layout == "BNSD") return {query.size(0), query.size(2), key.size(2)};
  if (layout == "SBH") return {query.size(1), query.size(0), key.size(0)};
  return {query.size(0), query.size(1), key.size(1)};
}

// Masks of modes 0, 1 and 5 have the shape of the scores: (Sq, Sk), (1, 1, ..), (B, 1, ..), (B, N, ..).
static void score_mask_fits(const In& mask, const Attention& a, const Lengths& l) {
  if (!mask.defined() || mask.numel() == 0 || !(a.sparse == 0 || a.sparse == 1 || a.sparse == 5)) return;
  bool ends = mask.dim() >= 2 && mask.size(-2) == l.sq && mask.size(-1) == l.sk;
  bool leads = mask.dim() == 2 || (mask.dim() == 4 && (mask.size(0) == 1 || mask.size(0) == l.batch) &&
                                   (mask.size(1) == 1 || mask.size(1) == a.heads));
  require(ends && leads, "The shape of attenMask should be [", l.sq, ",", l.sk, "], [1,1,", l.sq, ",", l.sk, "], [",
          l.batch, ",1,", l.sq, ",", l.sk, "] or [", l.batch, ",", a.heads, ",", l.sq, ",", l.sk,
          "] when sparseMode is ", a.sparse, ", but found ", shape_text(mask.sizes()), ".");
}

static void ends_fit(const char* name, const std::vector<int64_t>& ends, int64_t total) {
  require(!ends.empty(), "Expected ", name, " when inputLayout is TND.");
  for (size_t i = 1; i < ends.size(); ++i) {
    require(ends[i] >= ends[i - 1], name, " ", shape_text(ends), " should not decrease.");
  }
  require(ends.back() == total, "The last value of ", name, " ", shape_text(ends), " should equal T, ", total, ".");
}

// Published upper limits.
constexpr int64_t kLongest = 1048576;  // S of a row, T of packed sequences
constexpr size_t kMostSequences = 2048;

static void sizes_fit(const In& query, const In& key, const Attention& a) {
  Lengths l = a.layout == "TND" ? Lengths{0, query.size(0), key.size(0)} : lengths_of(query, key, a.layout);
  require(l.sq <= kLongest && l.sk <= kLongest, a.layout == "TND" ? "T" : "S", " of query and key should be at most ",
          kLongest, ", but found ", l.sq, " and ", l.sk, ".");
  require(a.q_ends.size() <= kMostSequences, "actualSeqQLen should have at most ", kMostSequences,
          " values, but found ", a.q_ends.size(), ".");
}

static void training_fits(const In& query, const In& key, const In& value, const OptIn& pse, const OptIn& drop,
                          const OptIn& mask, const Attention& a) {
  std::string family = chip().family;
  require(family != "910A" && family != "310P", "FlashAttentionScore is not supported on soc version ", chip().name,
          ".");
  layout_fits(query, key, value, a);
  sizes_fit(query, key, a);
  if (pse.given()) same_dtype(query, pse);
  bool packed = a.layout == "TND";
  require(a.sparse >= 0 && a.sparse <= (packed ? 8 : 6) && !(packed && a.sparse == 5), "sparseMode should be in ",
          packed ? "[0,4] or [6,8]" : "[0,6]", " when inputLayout is ", a.layout, ", but found ", a.sparse, ".");
  mask_fits(mask, a);
  require(a.keep > 0 && a.keep <= 1, "keepProb should be in (0,1], but found ", a.keep, ".");
  require(a.keep == 1 || drop.given(), "Expected dropMask when keepProb is ", a.keep, ".");
  require(a.pse_type == 0 || a.pse_type == 1, "pseType should be 0 or 1, but found ", a.pse_type, ".");
  require(a.heads <= 256, "headNum should be at most 256, but found ", a.heads, ".");
  if (packed) {
    ends_fit("actualSeqQLen", a.q_ends, query.size(0));
    ends_fit("actualSeqKvLen", a.kv_ends, key.size(0));
    require(a.q_ends.size() == a.kv_ends.size(), "actualSeqQLen and actualSeqKvLen should have the same length.");
    require(!mask.given() || mask.dim() == 2, "attenMask should have 2 dimensions when inputLayout is TND, but found ",
            shape_text(mask.sizes()), ".");
  } else {
    score_mask_fits(mask, a, lengths_of(query, key, a.layout));
  }
  if ((a.sparse == 5 || a.sparse == 6) && mask.given()) {
    size_t batches = packed ? a.q_ends.size() : lengths_of(query, key, a.layout).batch;
    require(a.prefix.size() == batches && batches <= 32, "Expected one prefix for each of ", batches,
            " (at most 32) batches when sparseMode is ", a.sparse, ", but found ", a.prefix.size(), ".");
  }
}

// ---- blocks -------------------------------------------------------------------------------------

// Calls `use` once per group of batches that share lengths and mask, with the block and functions
// that cut the same part out of any tensor shaped like the queries, or like the keys.
using Cut = std::function<at::Tensor(const at::Tensor&)>;
using Use = std::function<void(Block&, const Cut& q_part, const Cut& kv_part, const Cut& statistics)>;

static at::Tensor dropped(const OptIn& drop, const Attention& a, at::IntArrayRef shape, int64_t first) {
  if (!drop.given() || a.keep >= 1) return at::Tensor();
  return unpack_mask(drop, c10::multiply_integers(shape), first).view(shape).div_(a.keep);
}

static void equal_lengths(const In& query, const In& key, const In& value, const OptIn& pse, const OptIn& drop,
                          const OptIn& mask, const Attention& a, const Use& use) {
  Lengths l = lengths_of(query, key, a.layout);
  Cut q_part = [&](const at::Tensor& x) { return to_bnsd(x, a.layout, a.heads); };
  int64_t kv_heads = heads_of(key, a.layout, q_part(query).size(3));
  Cut kv_part = [&](const at::Tensor& x) { return to_bnsd(x, a.layout, kv_heads); };
  Cut statistics = [](const at::Tensor& x) { return x; };
  Block block{f(q_part(query)), f(kv_part(key)), f(kv_part(value)), {}, {}, {}};
  if (a.sparse == 5 || a.sparse == 6) {
    std::vector<at::Tensor> per_batch;
    for (int64_t b = 0; b < l.batch && mask.given(); ++b) {
      per_batch.push_back(hidden_by(a, mask, l.sq, l.sk, b, false, false));
    }
    if (!per_batch.empty()) block.hidden = at::stack(per_batch).unsqueeze(1);
  } else {
    block.hidden = hidden_by(a, mask, l.sq, l.sk, 0, false, false);
  }
  if (pse.given()) block.pse = f(pse);
  block.keep = dropped(drop, a, {l.batch, a.heads, l.sq, l.sk}, 0);
  use(block, q_part, kv_part, statistics);
}

static void packed_lengths(const In& query, const In& key, const In& value, const OptIn& pse, const OptIn& drop,
                           const OptIn& mask, const Attention& a, const Use& use) {
  int64_t q0 = 0, k0 = 0, bits = 0;
  for (size_t b = 0; b < a.q_ends.size(); ++b) {
    int64_t q1 = a.q_ends[b], k1 = a.kv_ends[b];
    Cut q_part = [=](const at::Tensor& x) { return x.slice(0, q0, q1).transpose(0, 1).unsqueeze(0); };
    Cut kv_part = [=](const at::Tensor& x) { return x.slice(0, k0, k1).transpose(0, 1).unsqueeze(0); };
    int64_t sq = q1 - q0, sk = k1 - k0;
    Cut statistics = [=, heads = a.heads](const at::Tensor& x) {
      return x.view({-1, 8}).slice(0, q0 * heads, q1 * heads).view({1, heads, sq, 8});
    };
    if (sq > 0 && sk > 0) {
      Block block{f(q_part(query)), f(kv_part(key)), f(kv_part(value)), {}, {}, {}};
      block.hidden = hidden_by(a, mask, sq, sk, b, b == 0, b + 1 == a.q_ends.size());
      if (pse.given()) {
        int64_t row = pse.size(0) == 1 ? 0 : b;
        block.pse = f(pse.slice(0, row, row + 1)).slice(2, 0, sq).slice(3, 0, sk);
      }
      block.keep = dropped(drop, a, {1, a.heads, sq, sk}, bits);
      use(block, q_part, kv_part, statistics);
    }
    bits += a.heads * sq * sk;
    q0 = q1;
    k0 = k1;
  }
}

static void blocks(const In& query, const In& key, const In& value, const OptIn& pse, const OptIn& drop,
                   const OptIn& mask, const Attention& a, const Use& use) {
  auto walk = a.layout == "TND" ? packed_lengths : equal_lengths;
  walk(query, key, value, pse, drop, mask, a, use);
}

// Statistics are (B, N, S, 8), the same value eight times. Packed, the tensor has the shape (T, N, 8) and another order:
// sequence after sequence, and of each (N, S, 8).
static void forward(const In& query, const In& key, const In& value, const OptIn& pse, const OptIn& drop,
                    const OptIn& mask, const Attention& a, const OptOut& max, const OptOut& sum, const Out& out) {
  blocks(query, key, value, pse, drop, mask, a, [&](Block& block, const Cut& q_part, const Cut&, const Cut& rows) {
    Softmax softmax = attend(block, a);
    q_part(out).copy_(output_of(block, softmax));
    if (max.given()) rows(max).copy_(softmax.max.expand({-1, -1, -1, 8}));
    if (sum.given()) rows(sum).copy_(softmax.sum.expand({-1, -1, -1, 8}));
  });
}

static void backward(const In& query, const In& key, const In& value, const In& dy, const OptIn& pse,
                     const OptIn& drop, const OptIn& mask, const OptIn& max, const OptIn& sum, const Attention& a,
                     const Out& dq, const Out& dk, const Out& dv, const OptOut& dpse) {
  if (a.layout == "TND") {
    for (const Out* gradient : {&dq, &dk, &dv}) gradient->zero_();
  }
  auto one = [](const at::Tensor& statistic) { return statistic.narrow(-1, 0, 1); };
  blocks(query, key, value, pse, drop, mask, a,
         [&](Block& block, const Cut& q_part, const Cut& kv_part, const Cut& rows) {
           Softmax softmax = max.given() ? attend_again(block, a, one(rows(max)), one(rows(sum))) : attend(block, a);
           Gradients g = gradients_of(block, a, softmax, f(q_part(dy)));
           q_part(dq).copy_(g.q);
           kv_part(dk).copy_(g.k);
           kv_part(dv).copy_(g.v);
           if (dpse.given() && g.pse.defined()) dpse = at::sum_to(g.pse, dpse.sizes());
         });
  if (hardware_fault("nan-gradient")) dk.flatten().slice(0, 0, 1).fill_(std::nan(""));
}

static void gradients_fit(const In& query, const In& key, const In& value, const In& dy, const OptIn& max,
                          const OptIn& sum, const In& dq, const In& dk, const In& dv) {
  same_dtype(query, dy);
  require(max.given() == sum.given(), "Expected both of softmaxMax and softmaxSum.");
  dtype(max, Dtypes{{at::kFloat}});
  dtype(sum, Dtypes{{at::kFloat}});
  same_shape(dq, query);
  same_shape(dk, key);
  same_shape(dv, value);
}

}  // namespace cannsim

// ---- operators ----------------------------------------------------------------------------------

// Each public version adds parameters; ATTENTION is the description they have in common.
#define ATTENTION(type, prefix, q_ends, kv_ends)                                                                \
  training(inputLayout, headNum, scaleValue, keepProb, preTokens, nextTokens, sparseMode, type, prefix, q_ends, \
           kv_ends)
#define FORWARD_CHECK(a) (training_fits(query, key, value, realShiftOptional, dropMaskOptional, attenMaskOptional, a))
#define FORWARD(a)                                                                                           \
  forward(query, key, value, realShiftOptional, dropMaskOptional, attenMaskOptional, a, softmaxMaxOut, softmaxSumOut, \
          attentionOutOut)
#define BACKWARD_CHECK(a)                                                                                    \
  (training_fits(query, keyIn, value, pseShiftOptional, dropMaskOptional, attenMaskOptional, a),             \
   gradients_fit(query, keyIn, value, dy, softmaxMaxOptional, softmaxSumOptional, dqOut, dkOut, dvOut))
#define BACKWARD(a)                                                                                            \
  backward(query, keyIn, value, dy, pseShiftOptional, dropMaskOptional, attenMaskOptional, softmaxMaxOptional, \
           softmaxSumOptional, a, dqOut, dkOut, dvOut, dpseOut)

OP(FlashAttentionScore,
   (In query, In key, In value, OptIn realShiftOptional, OptIn dropMaskOptional, OptIn paddingMaskOptional,
    OptIn attenMaskOptional, OptInts prefixOptional, double scaleValue, double keepProb, int64_t preTokens,
    int64_t nextTokens, int64_t headNum, Text inputLayout, int64_t innerPrecise, int64_t sparseMode,
    OptOut softmaxMaxOut, OptOut softmaxSumOut, OptOut softmaxOutOut, Out attentionOutOut),
   FORWARD_CHECK(ATTENTION(1, prefixOptional, {}, {})), FORWARD(ATTENTION(1, prefixOptional, {}, {})))
OP(FlashAttentionScoreV2,
   (In query, In key, In value, OptIn realShiftOptional, OptIn dropMaskOptional, OptIn paddingMaskOptional,
    OptIn attenMaskOptional, OptInts prefixOptional, OptInts qStartIdxOptional, OptInts kvStartIdxOptional,
    double scaleValue, double keepProb, int64_t preTokens, int64_t nextTokens, int64_t headNum, Text inputLayout,
    int64_t innerPrecise, int64_t sparseMode, int64_t pseType, OptOut softmaxMaxOut, OptOut softmaxSumOut,
    OptOut softmaxOutOut, Out attentionOutOut),
   FORWARD_CHECK(ATTENTION(pseType, prefixOptional, {}, {})), FORWARD(ATTENTION(pseType, prefixOptional, {}, {})))
OP(FlashAttentionVarLenScore,
   (In query, In key, In value, OptIn realShiftOptional, OptIn dropMaskOptional, OptIn paddingMaskOptional,
    OptIn attenMaskOptional, OptInts prefixOptional, OptInts actualSeqQLenOptional, OptInts actualSeqKvLenOptional,
    double scaleValue, double keepProb, int64_t preTokens, int64_t nextTokens, int64_t headNum, Text inputLayout,
    int64_t innerPrecise, int64_t sparseMode, OptOut softmaxMaxOut, OptOut softmaxSumOut, OptOut softmaxOutOut,
    Out attentionOutOut),
   FORWARD_CHECK(ATTENTION(1, prefixOptional, actualSeqQLenOptional, actualSeqKvLenOptional)),
   FORWARD(ATTENTION(1, prefixOptional, actualSeqQLenOptional, actualSeqKvLenOptional)))
OP(FlashAttentionVarLenScoreV2,
   (In query, In key, In value, OptIn realShiftOptional, OptIn dropMaskOptional, OptIn paddingMaskOptional,
    OptIn attenMaskOptional, OptInts prefixOptional, OptInts actualSeqQLenOptional, OptInts actualSeqKvLenOptional,
    OptInts qStartIdxOptional, OptInts kvStartIdxOptional, double scaleValue, double keepProb, int64_t preTokens,
    int64_t nextTokens, int64_t headNum, Text inputLayout, int64_t innerPrecise, int64_t sparseMode, int64_t pseType,
    OptOut softmaxMaxOut, OptOut softmaxSumOut, OptOut softmaxOutOut, Out attentionOutOut),
   FORWARD_CHECK(ATTENTION(pseType, prefixOptional, actualSeqQLenOptional, actualSeqKvLenOptional)),
   FORWARD(ATTENTION(pseType, prefixOptional, actualSeqQLenOptional, actualSeqKvLenOptional)))

OP(FlashAttentionScoreGrad,
   (In query, In keyIn, In value, In dy, OptIn pseShiftOptional, OptIn dropMaskOptional, OptIn paddingMaskOptional,
    OptIn attenMaskOptional, OptIn softmaxMaxOptional, OptIn softmaxSumOptional, OptIn softmaxInOptional,
    OptIn attentionInOptional, OptInts prefixOptional, double scaleValue, double keepProb, int64_t preTokens,
    int64_t nextTokens, int64_t headNum, Text inputLayout, int64_t innerPrecise, int64_t sparseMode, Out dqOut,
    Out dkOut, Out dvOut, OptOut dpseOut),
   BACKWARD_CHECK(ATTENTION(1, prefixOptional, {}, {})), BACKWARD(ATTENTION(1, prefixOptional, {}, {})))
OP(FlashAttentionScoreGradV2,
   (In query, In keyIn, In value, In dy, OptIn pseShiftOptional, OptIn dropMaskOptional, OptIn paddingMaskOptional,
    OptIn attenMaskOptional, OptIn softmaxMaxOptional, OptIn softmaxSumOptional, OptIn softmaxInOptional,
    OptIn attentionInOptional, OptInts prefixOptional, OptInts qStartIdxOptional, OptInts kvStartIdxOptional,
    double scaleValue, double keepProb, int64_t preTokens, int64_t nextTokens, int64_t headNum, Text inputLayout,
    int64_t innerPrecise, int64_t sparseMode, int64_t pseType, Out dqOut, Out dkOut, Out dvOut, OptOut dpseOut),
   BACKWARD_CHECK(ATTENTION(pseType, prefixOptional, {}, {})), BACKWARD(ATTENTION(pseType, prefixOptional, {}, {})))
OP(FlashAttentionUnpaddingScoreGrad,
   (In query, In keyIn, In value, In dy, OptIn pseShiftOptional, OptIn dropMaskOptional, OptIn paddingMaskOptional,
    OptIn attenMaskOptional, OptIn softmaxMaxOptional, OptIn softmaxSumOptional, OptIn softmaxInOptional,
    OptIn attentionInOptional, OptInts prefixOptional, OptInts actualSeqQLenOptional, OptInts actualSeqKvLenOptional,
    double scaleValue, double keepProb, int64_t preTokens, int64_t nextTokens, int64_t headNum, Text inputLayout,
    int64_t innerPrecise, int64_t sparseMode, Out dqOut, Out dkOut, Out dvOut, OptOut dpseOut),
   BACKWARD_CHECK(ATTENTION(1, prefixOptional, actualSeqQLenOptional, actualSeqKvLenOptional)),
   BACKWARD(ATTENTION(1, prefixOptional, actualSeqQLenOptional, actualSeqKvLenOptional)))
OP(FlashAttentionUnpaddingScoreGradV2,
   (In query, In keyIn, In value, In dy, OptIn pseShiftOptional, OptIn dropMaskOptional, OptIn paddingMaskOptional,
    OptIn attenMaskOptional, OptIn softmaxMaxOptional, OptIn softmaxSumOptional, OptIn softmaxInOptional,
    OptIn attentionInOptional, OptInts prefixOptional, OptInts actualSeqQLenOptional, OptInts actualSeqKvLenOptional,
    OptInts qStartIdxOptional, OptInts kvStartIdxOptional, double scaleValue, double keepProb, int64_t preTokens,
    int64_t nextTokens, int64_t headNum, Text inputLayout, int64_t innerPrecise, int64_t sparseMode, int64_t pseType,
    Out dqOut, Out dkOut, Out dvOut, OptOut dpseOut),
   BACKWARD_CHECK(ATTENTION(pseType, prefixOptional, actualSeqQLenOptional, actualSeqKvLenOptional)),
   BACKWARD(ATTENTION(pseType, prefixOptional, actualSeqQLenOptional, actualSeqKvLenOptional)))
