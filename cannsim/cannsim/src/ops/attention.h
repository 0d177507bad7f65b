// The mathematics shared by the training and the inference attention operators.
//
// Inside, a block is (B, N, S, D) in float: B batches with the same lengths, N query heads. Keys and
// values may have fewer heads (grouped queries): head n uses key head n / (N / Nkv).
#pragma once

#include <string>
#include <vector>

#include "op.h"

namespace cannsim {

struct Attention {
  std::string layout;
  int64_t heads = 0;
  double scale = 1;
  double keep = 1;  // 1 - dropout
  int64_t pre = 0;  // with sparse modes 0 and 4: how many keys to the left and right are visible
  int64_t next = 0;
  int64_t sparse = 0;
  int64_t pse_type = 1;  // 0: scale * qk + pse, 1: scale * (qk + pse)
  std::vector<int64_t> prefix, q_ends, kv_ends;  // per batch; ends are running totals (TND)
  bool half_scores = false;  // the product of queries and keys is rounded to half precision
};

struct Block {
  at::Tensor q, k, v;
  at::Tensor hidden;  // bool, true = not seen; undefined: everything is seen
  at::Tensor pse;     // added to the scores, or undefined
  at::Tensor keep;    // dropout factors (0 or 1/keep), or undefined
};

struct Softmax {
  at::Tensor p, max, sum;  // (B, N, Sq, Sk), (B, N, Sq, 1), (B, N, Sq, 1)
};

struct Gradients {
  at::Tensor q, k, v, pse;
};

at::Tensor to_bnsd(const at::Tensor& x, const std::string& layout, int64_t heads);
at::Tensor from_bnsd(const at::Tensor& x, const std::string& layout);
// How many heads a key or value tensor holds, for queries with `head_dim` elements per head.
int64_t heads_of(const at::Tensor& x, const std::string& layout, int64_t head_dim);

// What the sparse mode hides. `mask` is the caller's (1 = hidden) or undefined: then the mode and the
// window have no effect. `batch` chooses the prefix; first and last matter for modes 7 and 8.
at::Tensor hidden_by(const Attention& a, const at::Tensor& mask, int64_t sq, int64_t sk, int64_t batch,
                     bool first, bool last);

Softmax attend(const Block& block, const Attention& a);
// The same probabilities from the statistics that the forward pass kept.
Softmax attend_again(const Block& block, const Attention& a, const at::Tensor& max, const at::Tensor& sum);
at::Tensor output_of(const Block& block, const Softmax& softmax);
Gradients gradients_of(const Block& block, const Attention& a, const Softmax& softmax, const at::Tensor& dy);

// Checks that both kinds of operators make.
void layout_fits(const In& query, const In& key, const In& value, const Attention& a);
void mask_fits(const In& mask, const Attention& a);

}  // namespace cannsim
