// Attention for inference: prompt, incremental and fused, dense or paged. No gradients, no
// quantisation, no sinks: these are refused. Each batch has its own lengths, so batches are computed one by one.
#include "attention.h"
#include "checks.h"

namespace cannsim {

struct Inference {
  Attention a;
  int64_t kv_heads = 0;
  int64_t block_size = 0;  // of a paged cache
  std::vector<int64_t> q_lengths, kv_lengths;  // per batch; with TND running totals, except a paged kv
  at::Tensor q_rope, k_rope;  // further channels of query and key, which carry the positions (MLA)
};

static const Dtypes kInference{{at::kHalf, kBf16}};

static Inference inference(const std::string& layout, int64_t heads, int64_t kv_heads, double scale, int64_t pre,
                           int64_t next, int64_t sparse, int64_t block_size, const OptInts& q_lengths,
                           const OptInts& kv_lengths) {
  Inference i;
  i.a = {layout, heads, scale, 1.0, pre, next, sparse, 1, {}, {}, {}, false};
  i.kv_heads = kv_heads ? kv_heads : heads;
  i.block_size = block_size;
  i.q_lengths = q_lengths;
  i.kv_lengths = kv_lengths;
  return i;
}

static bool packed(const Inference& i) { return i.a.layout == "TND"; }
static int64_t start(const std::vector<int64_t>& ends, int64_t b) { return b ? ends[b - 1] : 0; }
static int64_t length(const std::vector<int64_t>& lengths, int64_t b, int64_t whole) {
  return lengths.empty() ? whole : lengths[lengths.size() == 1 ? 0 : b];
}

// ---- checks -------------------------------------------------------------------------------------

static void inference_fits(const In& query, const Tensors& key, const Tensors& value, const In& mask,
                           const OptIn& table, const Inference& i) {
  dtype(query, kInference);
  require(!key.empty() && key.size() == value.size(), "Expected as many value tensors as key tensors.");
  for (const In& x : {In(query, "query"), In(key[0], "key"), In(value[0], "value")}) contiguous(x);
  same_dtype(query, In(key[0], "key"));
  const std::string& layout = i.a.layout;
  require(layout == "BSH" || layout == "BSND" || layout == "BNSD" || layout == "BNSD_BSND" || layout == "TND" ||
              layout == "SH",
          "inputLayout should be one of BSH, BSND, BNSD, BNSD_BSND and TND, but found ", layout, ".");
  require(i.a.heads > 0 && i.a.heads <= 256, "numHeads should be in [1,256], but found ", i.a.heads, ".");
  require(i.a.heads % i.kv_heads == 0 && i.a.heads / i.kv_heads <= 64, "numHeads ", i.a.heads,
          " should be a multiple (at most 64 times) of numKeyValueHeads ", i.kv_heads, ".");
  int64_t head_dim = layout == "BSH" || layout == "SH" ? query.size(-1) / i.a.heads : query.size(-1);
  require(head_dim <= 512 && head_dim % 8 == 0,
          "Head dimension D should be at most 512 and 16-byte aligned, but found ", head_dim, ".");
  require(i.a.heads * head_dim < 65535, "N * D of query should be below 65535, but found ", i.a.heads, " * ", head_dim,
          ".");
  bool single = layout == "BSH" || layout == "BSND" ? query.size(1) == 1 : layout == "BNSD" && query.size(2) == 1;
  require(single || head_dim % 16 == 0, "Head dimension D should be a multiple of 16 when there are several queries, "
          "but found ", head_dim, ".");
  require(i.a.sparse >= 0 && i.a.sparse <= 4, "sparseMode should be in [0,4], but found ", i.a.sparse, ".");
  for (int64_t length : i.kv_lengths) {
    require(length >= 0 && length <= 262144, "actualSeqLengthsKv should be in [0,262144], but found ", length, ".");
  }
  if (!single) mask_fits(mask, i.a);
  if (packed(i)) require(!i.q_lengths.empty(), "Expected actualSeqLengths when inputLayout is TND.");
  if (!table.given()) return;
  dtype(table, Dtypes{{at::kInt}});
  rank(table, 2, 2);
  require(!i.kv_lengths.empty(), "Expected actualSeqLengthsKv with blockTable.");
  int64_t step = single ? 16 : 128;
  require(i.block_size > 0 && i.block_size % step == 0 && i.block_size <= 512, "blockSize should be a multiple of ",
          step, " and at most 512, but found ", i.block_size, ".");
}

// ---- one batch ----------------------------------------------------------------------------------

static int64_t batches(const at::Tensor& query, const Inference& i) {
  return packed(i) ? static_cast<int64_t>(i.q_lengths.size()) : query.size(0);
}

// The rows of batch b as (N, S, D), also for writing.
static at::Tensor rows_of(const at::Tensor& x, const Inference& i, const std::string& layout, int64_t b) {
  if (packed(i)) return x.slice(0, start(i.q_lengths, b), i.q_lengths[b]).transpose(0, 1);
  at::Tensor rows = to_bnsd(x, layout, i.a.heads).select(0, b);
  return rows.slice(1, 0, length(rows.size(1) == 1 ? std::vector<int64_t>{} : i.q_lengths, b, rows.size(1)));
}

// A paged cache is (blocks, block size, N * D), (blocks, block size, N, D) or (blocks, N, block size, D).
static at::Tensor from_pages(const at::Tensor& cache, const at::Tensor& table, const Inference& i, int64_t b) {
  int64_t size = i.kv_lengths[i.kv_lengths.size() == 1 ? 0 : b];
  std::vector<at::Tensor> pages;
  for (int64_t page = 0; page * i.block_size < size; ++page) {
    at::Tensor block = cache.select(0, table[b][page].item().toLong());
    if (block.dim() == 2) block = block.unflatten(1, {i.kv_heads, -1});
    pages.push_back(block.size(0) == i.kv_heads && block.size(1) == i.block_size ? block : block.transpose(0, 1));
  }
  if (pages.empty()) return at::empty({i.kv_heads, 0, cache.size(-1)}, cache.options());
  return at::cat(pages, 1).slice(1, 0, size);
}

static at::Tensor keys_of(const Tensors& list, const OptIn& table, const Inference& i, int64_t b) {
  if (table.given()) return from_pages(list[0], table, i, b);
  if (packed(i)) {
    const auto& ends = i.kv_lengths.empty() ? i.q_lengths : i.kv_lengths;
    return list[0].slice(0, start(ends, b), ends[b]).transpose(0, 1);
  }
  bool separate = list.size() > 1;  // one tensor per batch
  at::Tensor all = to_bnsd(list[separate ? b : 0], i.a.layout, i.kv_heads).select(0, separate ? 0 : b);
  return all.slice(1, 0, length(i.kv_lengths, b, all.size(1)));
}

static at::Tensor hidden_rows(const at::Tensor& mask, const Inference& i, int64_t sq, int64_t sk, int64_t b) {
  if (!mask.defined() || mask.numel() == 0) return at::Tensor();
  if (sq > 1 && i.a.sparse >= 2) return hidden_by(i.a, mask, sq, sk, b, false, false);
  if (i.a.sparse >= 2) return at::Tensor();  // documented: one query row ignores the sparse mode
  at::Tensor given = mask.to(at::kBool);
  if (given.dim() == 4) given = given.select(0, given.size(0) > 1 ? b : 0).select(0, 0);
  if (given.dim() == 3) given = given.select(0, given.size(0) > 1 ? b : 0);
  if (given.dim() == 2 && sq == 1 && given.size(0) > 1) given = given.slice(0, b, b + 1);  // (B, Sk)
  given = given.slice(-2, 0, sq).slice(-1, 0, sk);
  if (sq == 1 && sk > 512 && hardware_fault("mask-past-512")) {
    given = given.clone();
    given.slice(-1, 512).fill_(false);
  }
  bool window = i.a.sparse == 0 && sq > 1 && (i.a.pre < sq || i.a.next < sk);
  return window ? hidden_by(i.a, given, sq, sk, b, false, false) : given;
}

static void infer(const In& query, const Tensors& key, const Tensors& value, const OptIn& pse, const OptIn& mask,
                  const OptIn& table, const Inference& i, const Out& out, const OptOut& lse) {
  std::string out_layout = i.a.layout == "BNSD_BSND" ? "BSND" : i.a.layout;
  for (int64_t b = 0; b < batches(query, i); ++b) {
    at::Tensor q = rows_of(query, i, i.a.layout, b).to(at::kFloat).unsqueeze(0);
    at::Tensor k = keys_of(key, table, i, b).to(at::kFloat).unsqueeze(0);
    at::Tensor v = keys_of(value, table, i, b).to(at::kFloat).unsqueeze(0);
    if (i.q_rope.defined()) {
      Tensors rope;
      rope.push_back(i.k_rope);
      q = at::cat({q, rows_of(i.q_rope, i, i.a.layout, b).to(at::kFloat).unsqueeze(0)}, -1);
      k = at::cat({k, keys_of(rope, table, i, b).to(at::kFloat).unsqueeze(0)}, -1);
    }
    int64_t sq = q.size(2), sk = k.size(2);
    if (sq == 0) continue;
    at::Tensor target = rows_of(out, i, out_layout, b);
    if (sk == 0) {
      target.zero_();
      continue;
    }
    Block block{q, k, v, hidden_rows(mask, i, sq, sk, b), {}, {}};
    Attention a = i.a;
    a.pse_type = 0;
    if (pse.given()) {
      int64_t row = pse.size(0) > 1 ? b : 0;
      block.pse = pse.slice(0, row, row + 1).slice(-2, 0, sq).slice(-1, 0, sk).to(at::kFloat);
    }
    Softmax softmax = attend(block, a);
    target.copy_(output_of(block, softmax).squeeze(0));
    if (!lse.given()) continue;
    at::Tensor value_of_rows = (softmax.max + softmax.sum.log()).squeeze(0);  // (N, Sq, 1)
    if (packed(i)) {
      lse.slice(0, start(i.q_lengths, b), i.q_lengths[b]).copy_(value_of_rows.transpose(0, 1));
    } else {
      lse.select(0, b).slice(1, 0, sq).copy_(value_of_rows);
    }
  }
}

static Tensors one(const In& tensor) {
  Tensors list;
  list.push_back(tensor);
  list.name = tensor.name;
  return list;
}

static Inference with_rope(Inference i, const OptIn& query, const OptIn& key) {
  require(query.given() == key.given(), "Expected both of queryRope and keyRope.");
  if (query.given()) i.q_rope = query, i.k_rope = key;
  return i;
}

// innerPrecise of prompt attention, bit 0: fast, with scores in half precision. The default of
// npu_prompt_flash_attention; bfloat16 knows no such mode.
static Inference fast(Inference i, const In& query, int64_t inner_precise) {
  i.a.half_scores = (inner_precise & 1) && query.scalar_type() == at::kHalf;
  return i;
}

// What would change the result and is not computed here must not pass unnoticed.
static void not_simulated(std::initializer_list<const OptIn*> arguments) {
  for (const OptIn* x : arguments) {
    require(!x->given(), "Tensor ", x->name, " (quantisation, padding on the left, a shared prefix or a sink) is not simulated.");
  }
}

}  // namespace cannsim

// ---- operators ----------------------------------------------------------------------------------

OP(PromptFlashAttentionV3,
   (In query, In key, In value, OptIn pseShift, OptIn attenMask, OptInts actualSeqLengths,
    OptInts actualSeqLengthsKv, OptIn deqScale1, OptIn quantScale1, OptIn deqScale2, OptIn quantScale2,
    OptIn quantOffset2, int64_t numHeads, double scaleValue, int64_t preTokens, int64_t nextTokens, Text inputLayout,
    int64_t numKeyValueHeads, int64_t sparseMode, int64_t innerPrecise, Out attentionOut),
   (not_simulated({&deqScale1, &quantScale1, &deqScale2, &quantScale2, &quantOffset2}),
    inference_fits(query, one(key), one(value), attenMask, OptIn(at::Tensor(), "blockTable"),
                   inference(inputLayout, numHeads, numKeyValueHeads, scaleValue, preTokens, nextTokens, sparseMode, 0,
                             actualSeqLengths, actualSeqLengthsKv))),
   infer(query, one(key), one(value), pseShift, attenMask, OptIn(at::Tensor(), "blockTable"),
         fast(inference(inputLayout, numHeads, numKeyValueHeads, scaleValue, preTokens, nextTokens, sparseMode, 0,
                        actualSeqLengths, actualSeqLengthsKv),
              query, innerPrecise),
         attentionOut, OptOut(at::Tensor(), "softmaxLse")))

OP(IncreFlashAttentionV4,
   (In query, InList key, InList value, OptIn pseShift, OptIn attenMask, OptInts actualSeqLengths,
    OptIn dequantScale1, OptIn quantScale1, OptIn dequantScale2, OptIn quantScale2, OptIn quantOffset2,
    OptIn antiquantScale, OptIn antiquantOffset, OptIn blocktable, OptIn kvPaddingSize, int64_t numHeads,
    double scaleValue, Text inputLayout, int64_t numKeyValueHeads, int64_t blockSize, int64_t innerPrecise,
    Out attentionOut),
   (not_simulated({&dequantScale1, &quantScale1, &dequantScale2, &quantScale2, &quantOffset2, &antiquantScale,
                   &antiquantOffset, &kvPaddingSize}),
    inference_fits(query, key, value, attenMask, blocktable,
                   inference(inputLayout, numHeads, numKeyValueHeads, scaleValue, 0, 0, 0, blockSize, {},
                             actualSeqLengths))),
   infer(query, key, value, pseShift, attenMask, blocktable,
         inference(inputLayout, numHeads, numKeyValueHeads, scaleValue, 0, 0, 0, blockSize, {}, actualSeqLengths),
         attentionOut, OptOut(at::Tensor(), "softmaxLse")))

#define FUSED_INFERENCE                                                                                         \
  inference(inputLayout, numHeads, numKeyValueHeads, scaleValue, preTokens, nextTokens, sparseMode, blockSize, \
            actualSeqLengthsOptional, actualSeqLengthsKvOptional)
#define FUSED_INFERENCE_CHECK(given, ...)                                                           \
  (not_simulated({&deqScale1Optional, &quantScale1Optional, &deqScale2Optional, &quantScale2Optional,   \
                  &quantOffset2Optional, &antiquantScaleOptional, &antiquantOffsetOptional,             \
                  &queryPaddingSizeOptional, &kvPaddingSizeOptional, &keyAntiquantScaleOptional,        \
                  &keyAntiquantOffsetOptional, &valueAntiquantScaleOptional,                            \
                  &valueAntiquantOffsetOptional, &keySharedPrefixOptional,                              \
                  &valueSharedPrefixOptional __VA_OPT__(, ) __VA_ARGS__}),                              \
   inference_fits(query, key, value, attenMaskOptional, blockTableOptional, given))
#define FUSED_INFERENCE_RUN(given)                                                                     \
  infer(query, key, value, pseShiftOptional, attenMaskOptional, blockTableOptional, given,             \
        attentionOut, softmaxLseFlag ? softmaxLse : OptOut(at::Tensor(), "softmaxLse"))
#define FUSED_INFERENCE_WITH_ROPE with_rope(FUSED_INFERENCE, queryRopeOptional, keyRopeOptional)

OP(FusedInferAttentionScoreV2,
   (In query, InList key, InList value, OptIn pseShiftOptional, OptIn attenMaskOptional,
    OptInts actualSeqLengthsOptional, OptInts actualSeqLengthsKvOptional, OptIn deqScale1Optional,
    OptIn quantScale1Optional, OptIn deqScale2Optional, OptIn quantScale2Optional, OptIn quantOffset2Optional,
    OptIn antiquantScaleOptional, OptIn antiquantOffsetOptional, OptIn blockTableOptional,
    OptIn queryPaddingSizeOptional, OptIn kvPaddingSizeOptional, OptIn keyAntiquantScaleOptional,
    OptIn keyAntiquantOffsetOptional, OptIn valueAntiquantScaleOptional, OptIn valueAntiquantOffsetOptional,
    OptIn keySharedPrefixOptional, OptIn valueSharedPrefixOptional, OptInts actualSharedPrefixLenOptional,
    int64_t numHeads, double scaleValue, int64_t preTokens, int64_t nextTokens, Text inputLayout,
    int64_t numKeyValueHeads, int64_t sparseMode, int64_t innerPrecise, int64_t blockSize, int64_t antiquantMode,
    bool softmaxLseFlag, int64_t keyAntiquantMode, int64_t valueAntiquantMode, Out attentionOut, OptOut softmaxLse),
   FUSED_INFERENCE_CHECK(FUSED_INFERENCE), FUSED_INFERENCE_RUN(FUSED_INFERENCE))
OP(FusedInferAttentionScoreV3,
   (In query, InList key, InList value, OptIn pseShiftOptional, OptIn attenMaskOptional,
    OptInts actualSeqLengthsOptional, OptInts actualSeqLengthsKvOptional, OptIn deqScale1Optional,
    OptIn quantScale1Optional, OptIn deqScale2Optional, OptIn quantScale2Optional, OptIn quantOffset2Optional,
    OptIn antiquantScaleOptional, OptIn antiquantOffsetOptional, OptIn blockTableOptional,
    OptIn queryPaddingSizeOptional, OptIn kvPaddingSizeOptional, OptIn keyAntiquantScaleOptional,
    OptIn keyAntiquantOffsetOptional, OptIn valueAntiquantScaleOptional, OptIn valueAntiquantOffsetOptional,
    OptIn keySharedPrefixOptional, OptIn valueSharedPrefixOptional, OptInts actualSharedPrefixLenOptional,
    OptIn queryRopeOptional, OptIn keyRopeOptional, OptIn keyRopeAntiquantScaleOptional, int64_t numHeads,
    double scaleValue, int64_t preTokens, int64_t nextTokens, Text inputLayout, int64_t numKeyValueHeads,
    int64_t sparseMode, int64_t innerPrecise, int64_t blockSize, int64_t antiquantMode, bool softmaxLseFlag,
    int64_t keyAntiquantMode, int64_t valueAntiquantMode, Out attentionOut, OptOut softmaxLse),
   FUSED_INFERENCE_CHECK(FUSED_INFERENCE_WITH_ROPE, &keyRopeAntiquantScaleOptional),
   FUSED_INFERENCE_RUN(FUSED_INFERENCE_WITH_ROPE))
OP(FusedInferAttentionScoreV4,
   (In query, InList key, InList value, OptIn pseShiftOptional, OptIn attenMaskOptional,
    OptInts actualSeqLengthsOptional, OptInts actualSeqLengthsKvOptional, OptIn deqScale1Optional,
    OptIn quantScale1Optional, OptIn deqScale2Optional, OptIn quantScale2Optional, OptIn quantOffset2Optional,
    OptIn antiquantScaleOptional, OptIn antiquantOffsetOptional, OptIn blockTableOptional,
    OptIn queryPaddingSizeOptional, OptIn kvPaddingSizeOptional, OptIn keyAntiquantScaleOptional,
    OptIn keyAntiquantOffsetOptional, OptIn valueAntiquantScaleOptional, OptIn valueAntiquantOffsetOptional,
    OptIn keySharedPrefixOptional, OptIn valueSharedPrefixOptional, OptInts actualSharedPrefixLenOptional,
    OptIn queryRopeOptional, OptIn keyRopeOptional, OptIn keyRopeAntiquantScaleOptional,
    OptIn dequantScaleQueryOptional, OptIn learnableSinkOptional, int64_t numHeads, double scaleValue,
    int64_t preTokens, int64_t nextTokens, Text inputLayout, int64_t numKeyValueHeads, int64_t sparseMode,
    int64_t innerPrecise, int64_t blockSize, int64_t antiquantMode, bool softmaxLseFlag, int64_t keyAntiquantMode,
    int64_t valueAntiquantMode, int64_t queryQuantMode, Out attentionOut, OptOut softmaxLse),
   FUSED_INFERENCE_CHECK(FUSED_INFERENCE_WITH_ROPE, &keyRopeAntiquantScaleOptional, &dequantScaleQueryOptional,
                         &learnableSinkOptional),
   FUSED_INFERENCE_RUN(FUSED_INFERENCE_WITH_ROPE))

// What a graph reserves for a task whose lengths will be updated: the same question here, where no length matters.
#define GREATEST_WORKSPACE(name) \
  extern "C" CANNSIM_API int aclnn##name##GetMaxWorkspaceSize() __attribute__((ifunc("cannsim_resolve_" #name)));
GREATEST_WORKSPACE(FusedInferAttentionScoreV2)
GREATEST_WORKSPACE(FusedInferAttentionScoreV3)
GREATEST_WORKSPACE(FusedInferAttentionScoreV4)
