// The mathematics declared in attention.h.
#include "attention.h"

#include <cmath>

#include "checks.h"

namespace cannsim {

at::Tensor to_bnsd(const at::Tensor& x, const std::string& layout, int64_t heads) {
  if (layout == "BNSD" || layout == "BNSD_BSND") return x;
  if (layout == "BSND") return x.transpose(1, 2);
  if (layout == "BSH") return x.unflatten(2, {heads, -1}).transpose(1, 2);
  if (layout == "SBH") return x.unflatten(2, {heads, -1}).permute({1, 2, 0, 3});
  TORCH_CHECK(false, "layout ", layout);
}

at::Tensor from_bnsd(const at::Tensor& x, const std::string& layout) {
  if (layout == "BNSD") return x;
  if (layout == "BSND" || layout == "BNSD_BSND") return x.transpose(1, 2);
  if (layout == "BSH") return x.transpose(1, 2).flatten(2);
  return x.permute({2, 0, 1, 3}).flatten(2);  // SBH
}

int64_t heads_of(const at::Tensor& x, const std::string& layout, int64_t head_dim) {
  if (layout == "BNSD" || layout == "BNSD_BSND" || layout == "TND") return x.size(1);
  if (layout == "BSND") return x.size(2);
  return x.size(2) / head_dim;
}

// Hidden outside of: j <= i + next and j >= i - pre, with i counted from `origin`.
static at::Tensor outside_band(int64_t sq, int64_t sk, int64_t origin, int64_t pre, int64_t next) {
  at::Tensor i = at::arange(origin, origin + sq).unsqueeze(1);
  at::Tensor j = at::arange(sk).unsqueeze(0);
  at::Tensor distance = j - i;
  return distance.gt(next).logical_or_(distance.lt(-pre));
}

constexpr int64_t kFar = 2147483647;

// The compressed modes. A kernel works in blocks: it skips those that are hidden as a whole, takes those that are seen
// as a whole without a mask, and reads for a block on the edge the corner of the 2048 x 2048 mask which lies as far
// from its diagonal. So a mask that is not the upper triangle gives other numbers, near the edge and only there.
constexpr int64_t kBlock = 128;

static bool is_triangle(const at::Tensor& corner) {
  static const at::Tensor triangle = at::ones({2 * kBlock, 2 * kBlock}, at::kBool).triu(1);
  return at::equal(corner, triangle);
}

// (sq, sk), true where the mask hides; with the upper triangle, where j > i + shift.
static at::Tensor behind_edge(const at::Tensor& mask, int64_t sq, int64_t sk, int64_t shift) {
  at::Tensor corner = mask.reshape({-1, 2048}).slice(0, 0, 2 * kBlock).slice(1, 0, 2 * kBlock).to(at::kBool);
  at::Tensor i = at::arange(sq).unsqueeze(1), j = at::arange(sk).unsqueeze(0);
  at::Tensor behind = (j - i).gt(shift);
  if (is_triangle(corner)) return behind;
  at::Tensor in_i = i.remainder(kBlock), in_j = j.remainder(kBlock);
  at::Tensor distance = (j - in_j) - (i - in_i) - shift;  // of a block from the edge
  at::Tensor row = in_i + distance.neg().clamp(0, kBlock - 1), column = in_j + distance.clamp(0, kBlock - 1);
  return at::where(distance.abs().lt(kBlock), corner.index({row, column}), behind);
}

// Row 0 stands at column `origin`; it sees `pre` keys to the left of that and `next` to the right.
static at::Tensor outside_mask(const at::Tensor& mask, int64_t sq, int64_t sk, int64_t origin, int64_t pre,
                               int64_t next) {
  at::Tensor hidden = behind_edge(mask, sq, sk, origin + next);
  if (pre >= kFar) return hidden;
  return hidden.logical_or(behind_edge(mask, sq, sk, origin - pre - 1).logical_not_());
}

at::Tensor hidden_by(const Attention& a, const at::Tensor& mask, int64_t sq, int64_t sk, int64_t batch, bool first,
                     bool last) {
  if (!mask.defined() || mask.numel() == 0) return at::Tensor();
  int64_t right = sk - sq;  // row 0 stands here when the last row and the last column meet
  switch (a.sparse) {
    case 0: {
      at::Tensor given = mask.to(at::kBool).slice(-2, 0, sq).slice(-1, 0, sk);
      if (a.pre >= sq && a.next >= sk) return given;
      return given.logical_or(outside_band(sq, sk, 0, a.pre, a.next));
    }
    case 1: return mask.to(at::kBool).slice(-2, 0, sq).slice(-1, 0, sk);
    case 2: return outside_mask(mask, sq, sk, 0, kFar, 0);
    case 3: return outside_mask(mask, sq, sk, right, kFar, 0);
    case 4: return outside_mask(mask, sq, sk, right, a.pre, a.next);
    case 5:
    case 6: {
      at::Tensor causal = outside_band(sq, sk, right, kFar, 0);
      return causal.logical_and_(at::arange(sk).ge(a.prefix.at(batch)).unsqueeze(0));
    }
    case 7:
      return outside_mask(mask, sq, sk, right, last ? a.pre : kFar, last ? a.next : 0);
    case 8:
      return outside_mask(mask, sq, sk, first ? right : 0, first ? a.pre : kFar, first ? a.next : 0);
    default: TORCH_CHECK(false, "sparse_mode ", a.sparse);
  }
}

// (B, N, S, X) -> (B, Nkv, N / Nkv * S, X), so that one product serves the whole group of heads.
static at::Tensor grouped(const at::Tensor& x, int64_t kv_heads) {
  return x.reshape({x.size(0), kv_heads, -1, x.size(3)});
}

static at::Tensor scores(const Block& b, const Attention& a) {
  int64_t kv_heads = b.k.size(1);
  at::Tensor s = at::matmul(grouped(b.q, kv_heads), b.k.transpose(-1, -2));
  s = s.view({b.q.size(0), b.q.size(1), b.q.size(2), b.k.size(2)});
  if (a.half_scores) s = s.to(at::kHalf).to(at::kFloat);
  if (b.pse.defined() && a.pse_type == 1) s = s.add_(b.pse);
  s.mul_(a.scale);
  if (b.pse.defined() && a.pse_type == 0) s = s.add_(b.pse);
  if (b.hidden.defined()) s.masked_fill_(b.hidden, -INFINITY);
  return s;
}

// A row that sees nothing gives zeros.
static at::Tensor exponentials(at::Tensor s, const at::Tensor& max) {
  return s.sub_(max.masked_fill(max.eq(-INFINITY), 0)).exp_();
}

Softmax attend(const Block& b, const Attention& a) {
  at::Tensor s = scores(b, a);
  at::Tensor max = s.amax({-1}, true);
  at::Tensor e = exponentials(s, max);
  at::Tensor sum = e.sum({-1}, true);
  return {e.div_(sum.masked_fill(sum.eq(0), 1)), max, sum};
}

Softmax attend_again(const Block& b, const Attention& a, const at::Tensor& max, const at::Tensor& sum) {
  at::Tensor e = exponentials(scores(b, a), max);
  return {e.div_(sum.masked_fill(sum.eq(0), 1)), max, sum};
}

at::Tensor output_of(const Block& b, const Softmax& softmax) {
  at::Tensor p = b.keep.defined() ? softmax.p * b.keep : softmax.p;
  at::Tensor y = at::matmul(grouped(p, b.v.size(1)), b.v);
  return y.view({b.q.size(0), b.q.size(1), b.q.size(2), b.v.size(3)});
}

Gradients gradients_of(const Block& b, const Attention& a, const Softmax& softmax, const at::Tensor& dy) {
  int64_t kv_heads = b.k.size(1);
  at::Tensor kept = b.keep.defined() ? softmax.p * b.keep : softmax.p;
  at::Tensor rows = grouped(dy, kv_heads);
  at::Tensor dv = at::matmul(grouped(kept, kv_heads).transpose(-1, -2), rows);
  at::Tensor dp = at::matmul(rows, b.v.transpose(-1, -2)).view(softmax.p.sizes());
  if (b.keep.defined()) dp = dp * b.keep;
  at::Tensor ds = softmax.p * (dp - (dp * softmax.p).sum({-1}, true));
  at::Tensor dpse;
  if (b.pse.defined()) dpse = a.pse_type == 1 ? ds * a.scale : ds;
  ds = grouped(ds, kv_heads).mul(a.scale);
  at::Tensor dq = at::matmul(ds, b.k).view(b.q.sizes());
  at::Tensor dk = at::matmul(ds.transpose(-1, -2), grouped(b.q, kv_heads));
  return {dq, dk, dv, dpse};
}

// ---- checks -------------------------------------------------------------------------------------

void layout_fits(const In& query, const In& key, const In& value, const Attention& a) {
  dtype(query, kFloating);
  same_dtype(query, key);
  same_dtype(query, value);
  bool four = a.layout == "BNSD" || a.layout == "BSND" || a.layout == "BNSD_BSND";
  bool three = a.layout == "BSH" || a.layout == "SBH" || a.layout == "TND";
  require(four || three, "inputLayout should be one of BSH, SBH, BSND, BNSD and TND, but found ", a.layout, ".");
  for (const In* x : {&query, &key, &value}) rank(*x, four ? 4 : 3, four ? 4 : 3);
  require(a.heads > 0, "headNum should be positive, but found ", a.heads, ".");

  bool flat = a.layout == "BSH" || a.layout == "SBH";
  int64_t query_heads = flat ? a.heads : heads_of(query, a.layout, 0);
  require(query_heads == a.heads, "The head number of query ", shape_text(query.sizes()), " should equal headNum ",
          a.heads, ".");
  require(!flat || query.size(2) % a.heads == 0, "H of query ", shape_text(query.sizes()),
          " should be divisible by headNum ", a.heads, ".");
  int64_t head_dim = flat ? query.size(2) / a.heads : query.size(-1);
  require(head_dim >= 1 && head_dim <= 768, "Head dimension D should be in [1,768], but found ", head_dim, ".");
  require(flat ? key.size(2) % head_dim == 0 : key.size(-1) == head_dim, "Head dimension of key ",
          shape_text(key.sizes()), " should equal that of query, ", head_dim, ".");
  int64_t kv_heads = heads_of(key, a.layout, head_dim);
  require(kv_heads > 0 && a.heads % kv_heads == 0, "The head number of query ", a.heads,
          " should be a multiple of the head number of key, ", kv_heads, ".");
  int64_t batch = a.layout == "SBH" ? 1 : 0;
  require(a.layout == "TND" || (query.size(batch) == key.size(batch) && key.size(batch) == value.size(batch)),
          "The batch size of query ", shape_text(query.sizes()), ", key ", shape_text(key.sizes()), " and value ",
          shape_text(value.sizes()), " should be the same.");
  int64_t length = a.layout == "BNSD" || a.layout == "BNSD_BSND" ? 2 : a.layout == "BSH" || a.layout == "BSND" ? 1 : 0;
  require(key.size(length) == value.size(length), "The sequence length of key ", shape_text(key.sizes()),
          " and value ", shape_text(value.sizes()), " should be the same.");
}

void mask_fits(const In& mask, const Attention& a) {
  if (!mask.defined() || mask.numel() == 0) return;
  static const Dtypes kinds{{at::kBool, at::kByte, at::kChar}};
  dtype(mask, kinds);
  auto compressed = [&](int64_t rows) {
    require(mask.dim() >= 2 && mask.size(-2) == rows && mask.size(-1) == 2048 && mask.numel() == rows * 2048,
            "The shape of attenMask should be [", rows, ",2048] when sparseMode is ", a.sparse, ", but found ",
            shape_text(mask.sizes()), ".");
  };
  if (a.sparse == 2 || a.sparse == 3 || a.sparse == 4 || a.sparse == 7 || a.sparse == 8) compressed(2048);
  if (a.sparse == 6) compressed(3072);
}

}  // namespace cannsim
