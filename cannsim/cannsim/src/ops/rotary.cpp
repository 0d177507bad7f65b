// Rotary position embedding: x * cos + rotate(x) * sin, in float, rounded once.
#include "checks.h"

namespace cannsim {

enum Mode { kHalf = 0, kInterleave = 1 };  // which elements are paired: (i, i + D/2) or (2i, 2i + 1)

static at::Tensor f(const at::Tensor& x) { return x.to(at::kFloat); }

static at::Tensor rotate(const at::Tensor& x, int64_t mode) {
  if (mode == kHalf) {
    auto half = x.chunk(2, -1);
    return at::cat({-half[1], half[0]}, -1);
  }
  at::Tensor pairs = x.unflatten(-1, {-1, 2});
  return at::stack({-pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
}

static at::Tensor embed(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, int64_t mode) {
  at::Tensor wide = f(x);
  return wide * f(cos) + rotate(wide, mode) * f(sin);
}

static void rope_fits(const In& x, const In& cos, const In& sin, int64_t mode) {
  dtype(x, kFloating);
  same_dtype(x, cos);
  same_dtype(x, sin);
  same_shape(cos, sin);
  rank(x, 3, 4);
  require(mode == kHalf || mode == kInterleave, "mode should be 0 (half) or 1 (interleave), but found ", mode, ".");
  require(cos.dim() == x.dim() && cos.size(-1) == x.size(-1), "The last dimension of cos ", shape_text(cos.sizes()),
          " must equal that of x ", shape_text(x.sizes()), ".");
  require(x.size(-1) % 2 == 0 && x.size(-1) <= 896, "The last dimension D of x ", shape_text(x.sizes()),
          " must be even and at most 896.");
  expands_to(cos, x);
}

static void rotate_in_place(const Out& x, const at::Tensor& cos, const at::Tensor& sin, int64_t mode) {
  x = embed(x, cos, sin, mode);
}

static void inference_rope_fits(const In& query, const In& key, const In& cos, const In& sin, int64_t layout) {
  dtype(query, kFloating);
  same_dtype(query, key);
  same_dtype(query, cos);
  same_shape(cos, sin);
  require(layout >= 1 && layout <= 4, "layout should be in [1,4], but found ", layout, ".");
  require(query.size(-1) == 128 || query.size(-1) == 64, "The last dimension D of query ",
          shape_text(query.sizes()), " should be 64 or 128.");
}

}  // namespace cannsim

OP(RotaryPositionEmbedding, (In x, In cos, In sin, int64_t mode, Out out),
   (rope_fits(x, cos, sin, mode), same_shape(out, x)), out = embed(x, cos, sin, mode))
// The transpose of rotate is -rotate, so dx = dy * cos - rotate(dy * sin).
OP(RotaryPositionEmbeddingGrad,
   (In dy, In cos, In sin, OptIn xOptional, int64_t mode, Out dxOut, OptOut dcosOut, OptOut dsinOut),
   (rope_fits(dy, cos, sin, mode), same_shape(dxOut, dy)),
   at::Tensor gradient = f(dy);
   dxOut = gradient * f(cos) - rotate(gradient * f(sin), mode);
   if (xOptional.given() && dcosOut.given()) {
     dcosOut = at::sum_to(gradient * f(xOptional), dcosOut.sizes());
     dsinOut = at::sum_to(gradient * rotate(f(xOptional), mode), dsinOut.sizes());
   })
OP(ApplyRotaryPosEmb, (Out queryRef, Out keyRef, In cos, In sin, int64_t layout),
   (inference_rope_fits(queryRef, keyRef, cos, sin, layout)),
   rotate_in_place(queryRef, cos, sin, kHalf);
   rotate_in_place(keyRef, cos, sin, kHalf))
OP(ApplyRotaryPosEmbV2, (Out queryRef, Out keyRef, In cos, In sin, int64_t layout, Text rotaryMode),
   (inference_rope_fits(queryRef, keyRef, cos, sin, layout)),
   int64_t mode = rotaryMode == "interleave" ? kInterleave : kHalf;
   rotate_in_place(queryRef, cos, sin, mode);
   rotate_in_place(keyRef, cos, sin, mode))
