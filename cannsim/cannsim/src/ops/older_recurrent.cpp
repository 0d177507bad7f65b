// Recurrent networks of the older interface. Results of all steps are (steps, batch, hidden).
#include "older.h"

namespace cannsim {

static void one_way(const Older& o, bool masked) {
  require(o.attribute<std::string>("direction", "UNIDIRECTIONAL") == "UNIDIRECTIONAL" && !masked,
          "cannsim knows recurrent networks only forwards and without lengths");
}
static at::Tensor flat(const at::Tensor& state) {  // (batch, hidden)
  return wide(state).reshape({-1, state.size(-1)});
}
static at::Tensor before(const at::Tensor& all, const at::Tensor& first, int64_t step) {
  return step ? all[step - 1] : first;
}

// ---- LSTM. Gates lie in the order input, forget, candidate (called j, sometimes c), output.

// -> h, c, i, j, f, o, tanh(c)
static std::vector<at::Tensor> lstm(const at::Tensor& x, const at::Tensor& w_x, const at::Tensor& w_h,
                                    const at::Tensor& bias, at::Tensor h, at::Tensor c) {
  std::vector<std::vector<at::Tensor>> steps(7);
  for (const at::Tensor& input : x.unbind(0)) {
    at::Tensor gates = at::matmul(input, w_x) + at::matmul(h, w_h);
    if (bias.defined()) gates = gates + bias;
    auto part = gates.chunk(4, 1);
    at::Tensor i = part[0].sigmoid(), f = part[1].sigmoid(), j = part[2].tanh(), o = part[3].sigmoid();
    c = f * c + i * j;
    h = o * c.tanh();
    at::Tensor values[] = {h, c, i, j, f, o, c.tanh()};
    for (size_t k = 0; k < steps.size(); ++k) steps[k].push_back(values[k]);
  }
  std::vector<at::Tensor> results;
  for (const auto& values : steps) results.push_back(at::stack(values));
  return results;
}

static void put_lstm(const Older& o, const std::vector<at::Tensor>& results) {
  o.put(0, results[0]);  // y is h
  for (size_t k = 0; k < results.size(); ++k) o.put(k + 1, results[k]);
}

struct LstmGrad {
  at::Tensor w_x, w_h, bias, x, h, c;
};
// o.in from `at` on: y, first h, first c, h, c, the gradients of y, of the last h and the last c, i, j, f, o, tanh(c).
static LstmGrad lstm_grad(const Older& o, size_t at, const at::Tensor& w_x, const at::Tensor& w_h) {
  at::Tensor x = wide(o.in[0]);
  if (x.dim() == 2) x = x.unsqueeze(0);
  auto all = [&](size_t k) { return wide(o.in[at + k]).reshape({x.size(0), x.size(1), -1}); };
  at::Tensor h0 = flat(o.in[at + 1]), c0 = flat(o.in[at + 2]), h = all(3), c = all(4), dy = all(5);
  at::Tensor i = all(8), j = all(9), f = all(10), out = all(11), tanh_c = all(12);
  at::Tensor dh = flat(o.in[at + 6]), dc = flat(o.in[at + 7]), dx = at::zeros_like(x);
  LstmGrad g{at::zeros_like(w_x), at::zeros_like(w_h), at::zeros({w_x.size(1)}, at::kFloat), dx, dh, dc};
  for (int64_t t = x.size(0) - 1; t >= 0; --t) {
    at::Tensor grad = dy[t] + g.h;
    at::Tensor inner = g.c + grad * out[t] * (1 - tanh_c[t].square());
    at::Tensor gates = at::cat({inner * j[t] * i[t] * (1 - i[t]), inner * before(c, c0, t) * f[t] * (1 - f[t]),
                                inner * i[t] * (1 - j[t].square()), grad * tanh_c[t] * out[t] * (1 - out[t])}, 1);
    g.c = inner * f[t];
    g.h = at::matmul(gates, w_h.t());
    g.x[t].copy_(at::matmul(gates, w_x.t()));
    g.w_x = g.w_x + at::matmul(x[t].t(), gates);
    g.w_h = g.w_h + at::matmul(before(h, h0, t).t(), gates);
    g.bias = g.bias + gates.sum(0);
  }
  return g;
}

// x, weights of x over those of h, bias, lengths, h, c
OLDER(DynamicRNN, one_way(o, o.in[3].defined() && o.in[3].numel() > 0);
      at::Tensor x = wide(o.in[0]), w = wide(o.in[1]), w_x = w.slice(0, 0, x.size(2)), w_h = w.slice(0, x.size(2));
      put_lstm(o, lstm(x, w_x, w_h, wide(o.in[2]), flat(o.in[4]), flat(o.in[5]))))
OLDER(DynamicRNNGrad, one_way(o, o.in[16].dim() > 0); at::Tensor w = wide(o.in[1]); int64_t inputs = o.in[0].size(-1);
      LstmGrad g = lstm_grad(o, 3, w.slice(0, 0, inputs), w.slice(0, inputs));
      o.put(0, at::cat({g.w_x, g.w_h})); o.put(1, g.bias); o.put(2, g.x); o.put(3, g.h); o.put(4, g.c))
// The same with weights of their own: x, w_x, w_h, bias, lengths, h, c
OLDER(DynamicRNNV2, one_way(o, o.in[4].defined());
      put_lstm(o, lstm(wide(o.in[0]), wide(o.in[1]), wide(o.in[2]), wide(o.in[3]), flat(o.in[5]), flat(o.in[6]))))
OLDER(DynamicRNNV2Grad, one_way(o, false); LstmGrad g = lstm_grad(o, 3, wide(o.in[1]), wide(o.in[2]));
      o.put(0, g.w_x); o.put(1, g.w_h); o.put(2, g.bias); o.put(3, g.x); o.put(4, g.h); o.put(5, g.c))

// ---- GRU. Gates lie in the order reset, update, new; the reset gate comes behind the product with h.

// x, w_x, w_h, bias of x, bias of h, lengths, h -> y, h, update, reset, new, what h gives to the new state
OLDER(DynamicGRUV2, one_way(o, o.in[5].defined()); std::vector<std::vector<at::Tensor>> steps(5);
      require(o.attribute("reset_after", true), "DynamicGRUV2: cannsim knows only reset_after");
      at::Tensor h = flat(o.in[6]), w_x = wide(o.in[1]), w_h = wide(o.in[2]);
      for (const at::Tensor& input : wide(o.in[0]).unbind(0)) {
        auto from_x = (at::matmul(input, w_x) + wide(o.in[3])).chunk(3, 1);
        auto from_h = (at::matmul(h, w_h) + wide(o.in[4])).chunk(3, 1);
        at::Tensor r = (from_x[0] + from_h[0]).sigmoid(), z = (from_x[1] + from_h[1]).sigmoid();
        at::Tensor n = (from_x[2] + r * from_h[2]).tanh();
        h = (1 - z) * n + z * h;
        at::Tensor values[] = {h, z, r, n, from_h[2]};
        for (size_t k = 0; k < steps.size(); ++k) steps[k].push_back(values[k]);
      } o.put(0, at::stack(steps[0]));
      for (size_t k = 0; k < steps.size(); ++k) o.put(k + 1, at::stack(steps[k])))

// x, w_x, w_h, y, first h, h, the gradients of y and of the last h, update, reset, new, and what h gave to it
OLDER(DynamicGRUV2Grad, one_way(o, false); at::Tensor x = wide(o.in[0]), w_x = wide(o.in[1]), w_h = wide(o.in[2]);
      auto all = [&](size_t k) { return wide(o.in[k]).reshape({x.size(0), x.size(1), -1}); };
      at::Tensor h0 = flat(o.in[4]), h = all(5), dy = all(6), dh = flat(o.in[7]), z = all(8), r = all(9), n = all(10);
      at::Tensor from_h = all(11), dx = at::zeros_like(x), dw_x = at::zeros_like(w_x), dw_h = at::zeros_like(w_h);
      at::Tensor bias_x = at::zeros({w_x.size(1)}, at::kFloat), bias_h = bias_x.clone();
      for (int64_t t = x.size(0) - 1; t >= 0; --t) {
        at::Tensor grad = dy[t] + dh, last = before(h, h0, t);
        at::Tensor update = grad * (last - n[t]) * z[t] * (1 - z[t]), next = grad * (1 - z[t]) * (1 - n[t].square());
        at::Tensor reset = next * from_h[t] * r[t] * (1 - r[t]);
        at::Tensor gates_x = at::cat({reset, update, next}, 1), gates_h = at::cat({reset, update, next * r[t]}, 1);
        dh = at::matmul(gates_h, w_h.t()) + grad * z[t];
        dx[t].copy_(at::matmul(gates_x, w_x.t()));
        dw_x += at::matmul(x[t].t(), gates_x);
        dw_h += at::matmul(last.t(), gates_h);
        bias_x += gates_x.sum(0);
        bias_h += gates_h.sum(0);
      } o.put(0, dw_x); o.put(1, dw_h); o.put(2, bias_x); o.put(3, bias_h); o.put(4, dx); o.put(5, dh))

}  // namespace cannsim
