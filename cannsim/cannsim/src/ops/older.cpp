// The operators of the older interface that are simulated: those that op-plugin still launches on every chip
// because they have no aclnn function, and the few that it takes when operators are compiled for each shape.
// Those of boxes are in older_boxes.cpp.
#include "older.h"

#include <map>

#include "random.h"

namespace cannsim {

// By the name under which they are counted: aclop/Mish.
static std::map<std::string, OlderBody>& bodies() {
  static std::map<std::string, OlderBody> all;
  return all;
}

OlderEntry::OlderEntry(const char* name, OlderBody body) { bodies()[std::string("aclop/") + name] = body; }

int run_task(const char* name, const std::function<void()>& task);  // op.cpp

static at::Tensor view(const OlderTensor& tensor) {
  at::ScalarType type = to_torch(tensor.type);
  if (type == at::ScalarType::Undefined) return {};
  if (c10::multiply_integers(tensor.dims) == 0) return at::empty(tensor.dims, type);  // has no memory, but is there
  if (!tensor.data) return {};
  return at::from_blob(tensor.data, tensor.dims, at::TensorOptions().dtype(type));
}

static bool launch_older(const OlderCall& call, aclrtStream stream, int* error) {
  auto found = bodies().find("aclop/" + call.name);
  if (found == bodies().end()) return false;
  const char* name = found->first.c_str();
  *error = enter(name);
  if (*error) return true;
  enqueue(stream, name, [name, call, body = found->second] {
    return run_task(name, [&] {
      Older arguments{{}, {}, call.attributes};
      for (const OlderTensor& tensor : call.inputs) arguments.in.push_back(view(tensor));
      for (const OlderTensor& tensor : call.outputs) arguments.out.push_back(view(tensor));
      body(arguments);
    });
  });
  return true;
}

static const bool provided = (provide_older(launch_older), true);

// The names, separated by blanks. Read from Python by cannsim/operators_table.py.
extern "C" CANNSIM_API const char* cannsimOlderOperators() {
  static const std::string text = [] {
    std::string names;
    for (const auto& [name, body] : bodies()) names += name.substr(name.find('/') + 1) + " ";
    return names;
  }();
  return text.c_str();
}

// ---- shapes

// torch_npu leaves out tensors without elements, in the end all of them.
OLDER(ConcatD, if (!o.in.empty()) o.put(0, at::cat(o.in, o.attribute<int64_t>("concat_dim", 0)));
      else require(o.out[0].numel() == 0, "ConcatD: nothing is given"))
OLDER(BroadcastTo, o.put(0, o.in[0].expand(o.out[0].sizes())))
OLDER(Transpose, o.put(0, o.in[0].permute(o.constant(1))))
OLDER(Slice, at::Tensor part = o.in[0]; auto offsets = o.constant(1), sizes = o.constant(2);
      for (size_t i = 0; i < offsets.size(); ++i) {
        int64_t dim = static_cast<int64_t>(i);
        part = part.narrow(dim, offsets[i], sizes[i] < 0 ? part.size(dim) - offsets[i] : sizes[i]);
      } o.put(0, part))
OLDER(Pad, auto pairs = o.constant(1); std::vector<int64_t> padding;  // before and after, first dimension first
      for (size_t i = pairs.size(); i >= 2; i -= 2) padding.insert(padding.end(), {pairs[i - 2], pairs[i - 1]});
      o.put(0, at::constant_pad_nd(o.in[0], padding)))

OLDER(ConfusionTransposeD, auto order = o.attribute("perm", std::vector<int64_t>());
      auto shape = o.attribute("shape", std::vector<int64_t>());
      o.put(0, o.attribute("transpose_first", false) ? o.in[0].permute(order).reshape(shape)
                                                     : o.in[0].reshape(shape).permute(order)))
OLDER(Fill, o.put(0, o.in[1].to(o.out[0].scalar_type()).expand(o.out[0].sizes())))
OLDER(ZerosLike, o.out[0].zero_())
OLDER(Cast, o.put(0, o.in[0]))

OLDER(StridedSlice, at::Tensor part = o.in[0]; auto from = o.constant(1), to = o.constant(2), step = o.constant(3);
      for (const char* mask : {"begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask"}) {
        require(o.attribute<int64_t>(mask, 0) == 0, "StridedSlice: cannsim knows no ", mask);
      }
      for (size_t i = 0; i < from.size(); ++i) part = part.slice(static_cast<int64_t>(i), from[i], to[i], step[i]);
      o.put(0, part))
OLDER(OneHotD, at::Tensor wanted = indices(o.in[0]);
      require(o.attribute<int64_t>("axis", -1) == -1, "OneHotD: cannsim knows only the last axis");
      at::Tensor hit = wanted.unsqueeze(-1).eq(at::arange(o.attribute<int64_t>("depth", 0)));
      o.put(0, at::where(hit, o.in[1], o.in[2])))

// Tensors with sizes and strides of their own: to, its sizes, strides and offset, and the same of what is copied.
static at::Tensor strided(const Older& o, size_t i) {
  at::Tensor tensor = at::from_blob(o.in[i].data_ptr(), o.constant(i + 1), o.constant(i + 2), o.in[i].options());
  require(o.constant(i + 3) == std::vector<int64_t>{0}, "ViewCopy: cannsim knows no offset");
  return tensor;
}
OLDER(ViewCopy, strided(o, 0).copy_(strided(o, 4)))

// ---- products

static at::Tensor turned(const at::Tensor& x, bool turn) { return wide(turn ? x.transpose(-1, -2) : x); }

static at::Tensor product(const Older& o, const char* first, const char* second) {
  at::Tensor left = turned(o.in[0], o.attribute(first, false)), right = turned(o.in[1], o.attribute(second, false));
  at::Tensor result = at::matmul(left, right);
  return o.in.size() > 2 && o.in[2].defined() ? result + wide(o.in[2]) : result;
}

OLDER(MatMul, o.put(0, product(o, "transpose_x1", "transpose_x2")))
OLDER(MatMulV2, o.put(0, product(o, "transpose_x1", "transpose_x2")))
OLDER(BatchMatMul, o.put(0, product(o, "adj_x1", "adj_x2")))

// ---- element by element

OLDER(Abs, o.put(0, at::abs(o.in[0])))
OLDER(Add, o.put(0, wide(o.in[0]) + wide(o.in[1])))
OLDER(Sub, o.put(0, wide(o.in[0]) - wide(o.in[1])))
OLDER(Mul, o.put(0, wide(o.in[0]) * wide(o.in[1])))
OLDER(RealDiv, o.put(0, wide(o.in[0]) / wide(o.in[1])))
OLDER(Equal, o.put(0, o.in[0].eq(o.in[1])))
OLDER(NotEqual, o.put(0, o.in[0].ne(o.in[1])))
OLDER(Greater, o.put(0, o.in[0].gt(o.in[1])))
OLDER(GreaterEqual, o.put(0, o.in[0].ge(o.in[1])))
OLDER(Less, o.put(0, o.in[0].lt(o.in[1])))
OLDER(LessEqual, o.put(0, o.in[0].le(o.in[1])))
OLDER(Select, o.put(0, at::where(o.in[0].to(at::kBool), o.in[1], o.in[2])))
OLDER(IsFinite, o.put(0, at::isfinite(o.in[0])))
OLDER(ClipByValueV2, o.put(0, at::minimum(at::maximum(o.in[0], o.in[1]), o.in[2])))
OLDER(Mish, o.put(0, at::mish(wide(o.in[0]))))
OLDER(MishGrad, o.put(0, at::mish_backward(wide(o.in[0]), wide(o.in[1]))))
OLDER(Swish, at::Tensor x = wide(o.in[0]); o.put(0, x * at::sigmoid(x * o.attribute("scale", 1.0f))))
OLDER(SwishGrad, o.put(0, at::silu_backward(wide(o.in[0]), wide(o.in[1]))))

OLDER(ReduceSum, o.put(0, at::sum(wide(o.in[0]), o.constant(1), o.attribute("keep_dims", false))))
OLDER(ReduceMin, o.put(0, at::amin(o.in[0], o.constant(1), o.attribute("keep_dims", false))))
OLDER(ReduceMax, o.put(0, at::amax(o.in[0], o.constant(1), o.attribute("keep_dims", false))))

// ---- convolution

// Attributes name all five dimensions (batch and channel first), paddings each end.
OLDER(Conv3D, auto last = [&](const char* name) {
        auto all = o.attribute(name, std::vector<int64_t>(5, 1));
        return std::vector<int64_t>(all.begin() + 2, all.end());
      };
      auto pads = o.attribute("pads", std::vector<int64_t>(6));
      at::Tensor x = at::constant_pad_nd(wide(o.in[0]), {pads[4], pads[5], pads[2], pads[3], pads[0], pads[1]});
      std::optional<at::Tensor> bias; if (o.in.size() > 2 && o.in[2].defined()) bias = wide(o.in[2]);
      o.put(0, at::conv3d(x, wide(o.in[1]), bias, last("strides"), at::IntArrayRef({0, 0, 0}), last("dilations"),
                          o.attribute<int64_t>("groups", 1))))

// ---- dropout with a byte for each element: 1 keeps it

OLDER(DropOutGenMaskV3, int64_t count = c10::multiply_integers(o.constant(0));
      at::Generator source = generator(o.attribute<int64_t>("seed", 0), o.attribute<int64_t>("seed2", 0));
      at::Tensor keep = at::empty({count}, at::kFloat).uniform_(0, 1, source).lt(o.in[1].item<double>());
      o.out[0].zero_(); o.out[0].flatten().narrow(0, 0, count).copy_(keep))
static at::Tensor dropped(const at::Tensor& x, const at::Tensor& mask, double keep) {
  if (keep == 0) return at::zeros_like(x);
  return x * mask.flatten().narrow(0, 0, x.numel()).view(x.sizes()) / keep;
}
OLDER(DropOutDoMaskV3, o.put(0, dropped(wide(o.in[0]), o.in[1], o.in[2].item<double>())))
// softmax(x + alpha * y), and what dropout leaves of it
OLDER(AxpyWithSoftmaxAndDropOutDoMask,
      at::Tensor sum = at::add(wide(o.in[0]), wide(o.in[1]), o.attribute("alpha", 1.0f));
      at::Tensor share = at::softmax(sum, o.attribute("axis", std::vector<int64_t>{-1}).at(0)); o.put(0, share);
      o.put(1, dropped(share, o.in[2], o.attribute("input_keep_prob", 1.0f))))
OLDER(DropoutWithMulsAndSoftmaxGrad, at::Tensor share = wide(o.in[2]);
      int64_t axis = o.attribute("axes", std::vector<int64_t>{-1}).at(0);
      at::Tensor grad = dropped(wide(o.in[0]), o.in[1], o.attribute("input_keep_prob", 1.0f));
      o.put(0, at::_softmax_backward_data(grad, share, axis, at::kFloat) * o.attribute("alpha", 1.0f)))

// ---- order

OLDER(ArgMaxWithValue, auto [values, where] = at::max(o.in[0], o.attribute<int64_t>("dimension", 0), true);
      o.put(0, where); o.put(1, values))
OLDER(ArgMinWithValue, auto [values, where] = at::min(o.in[0], o.attribute<int64_t>("dimension", 0), true);
      o.put(0, where); o.put(1, values))
OLDER(SortV2, int64_t axis = o.attribute<int64_t>("axis", -1);
      o.put(0, std::get<0>(at::sort(o.in[0], axis, o.attribute("descending", false)))))

// ---- distances

// The gradient of the first points; everything comes broadcast to (..., first, second, coordinate). p -1: the maximum.
OLDER(CdistGrad, float p = o.attribute("p", 2.0f); at::Tensor grad = wide(o.in[0]), distance = wide(o.in[3]);
      at::Tensor apart = wide(o.in[1]) - wide(o.in[2]), far = apart.abs();
      at::Tensor some = distance.masked_fill(distance.eq(0), 1), slope;
      if (p == 0) {
        slope = at::zeros_like(apart);
      } else if (p < 0) {
        slope = apart.sgn() * far.ge(distance);
      } else {
        slope = apart.sgn() * far.pow(p - 1).masked_fill(far.eq(0), 0) / some.pow(p - 1);
      } o.put(0, (grad * slope.masked_fill(distance.eq(0), 0)).sum(-2)))

// ---- losses and optimizers

static int64_t only_axis(const Older& o) {
  auto axes = o.attribute("axes", std::vector<int64_t>{-1});
  require(axes.size() == 1, "cannsim knows a softmax over one axis only");
  return axes[0];
}
OLDER(SoftmaxV2, o.put(0, at::softmax(wide(o.in[0]), only_axis(o))))
OLDER(LogSoftmaxV2, o.put(0, at::log_softmax(wide(o.in[0]), only_axis(o))))
OLDER(SoftmaxCrossEntropyWithLogits, at::Tensor logits = wide(o.in[0]), labels = wide(o.in[1]);
      o.put(0, -(labels * at::log_softmax(logits, -1)).sum(-1)); o.put(1, at::softmax(logits, -1) - labels))

// op-plugin adds the length of the longest target times the number of classes to the blank; log_alpha is padded.
OLDER(CTCLossV2, at::Tensor odds = wide(o.in[0]);
      auto [loss, alpha] = at::_ctc_loss(odds, o.in[1].to(at::kLong), o.constant(2), o.constant(3),
                                         o.attribute<int64_t>("blank", 0) % odds.size(2),
                                         o.attribute("zero_infinity", false));
      o.put(0, loss); o.out[1].zero_(); o.out[1].view({alpha.size(0), alpha.size(1), -1})
                                            .narrow(2, 0, alpha.size(2)).copy_(alpha))

// Adam as TensorFlow has it: var, m, v, beta1_power, beta2_power, lr, beta1, beta2, epsilon, grad.
OLDER(ApplyAdamD,
      std::vector<double> number(9);
      for (size_t i = 3; i < 9; ++i) number[i] = o.in[i].item<double>();
      double beta1 = number[6], beta2 = number[7], rate = number[5] * std::sqrt(1 - number[4]) / (1 - number[3]);
      at::Tensor grad = wide(o.in[9]), m = wide(o.in[1]) * beta1 + grad * (1 - beta1);
      at::Tensor v = wide(o.in[2]) * beta2 + grad * grad * (1 - beta2);
      at::Tensor step = o.attribute("use_nesterov", false) ? m * beta1 + grad * (1 - beta1) : m;
      o.put(0, wide(o.in[0]) - rate * step / (v.sqrt() + number[8])); o.put(1, m); o.put(2, v))

// Adam with decoupled decay: var, m, v, beta1_power, beta2_power, lr, weight_decay, beta1, beta2, epsilon, grad. The
// powers are those before this step.
OLDER(ApplyAdamW, require(!o.attribute("amsgrad", false), "ApplyAdamW: the operator has no amsgrad");
      std::vector<double> number(10);
      for (size_t i = 3; i < 10; ++i) number[i] = o.in[i].item<double>();
      double rate = number[5], beta1 = number[7], beta2 = number[8];
      at::Tensor grad = o.attribute("maximize", false) ? -wide(o.in[10]) : wide(o.in[10]);
      at::Tensor m = wide(o.in[1]) * beta1 + grad * (1 - beta1);
      at::Tensor v = wide(o.in[2]) * beta2 + grad * grad * (1 - beta2);
      at::Tensor root = (v / (1 - number[4] * beta2)).sqrt() + number[9];
      at::Tensor kept = wide(o.in[0]) * (1 - rate * number[6]);
      o.put(0, kept - rate / (1 - number[3] * beta1) * m / root); o.put(1, m); o.put(2, v))

// Adam of BERT, without correction of the bias: var, m, v, lr, beta1, beta2, epsilon, grad, max_grad_norm,
// global_grad_norm, weight_decay; mbart_adam has a step_size in place of the rate. Of the decay in that mode the public
// kernel and its description say different things.
OLDER(ApplyAdamV2, std::vector<double> number(12);
      for (size_t i = 3; i < o.in.size(); ++i) {
        if (i != 7 && o.in[i].defined()) number[i] = o.in[i].item<double>();
      }
      bool mbart = o.attribute<std::string>("adam_mode", "adam") == "mbart_adam";
      require(!mbart || number[10] <= 0, "ApplyAdamV2: cannsim knows no weight_decay of mbart_adam");
      at::Tensor grad = wide(o.in[7]), var = wide(o.in[0]);
      if (!mbart && number[8] > 0 && number[9] > 1) grad = grad / number[9];
      at::Tensor m = wide(o.in[1]) * number[4] + grad * (1 - number[4]);
      at::Tensor v = wide(o.in[2]) * number[5] + grad * grad * (1 - number[5]);
      at::Tensor step = m / (v.sqrt() + number[6]) * (mbart ? number[11] : number[3]);
      o.put(0, var - step - var * (number[3] * std::max(number[10], 0.0))); o.put(1, m); o.put(2, v))

// ---- signs as bits, and the rest

OLDER(SignBitsPack,  // bit 1: not negative; the last byte is filled up with 0
      at::Tensor bits = at::ge(o.in[0].flatten(), 0).to(at::kByte);
      bits = at::constant_pad_nd(bits, {0, (8 - bits.numel() % 8) % 8}).reshape({-1, 8});
      at::Tensor weight = at::bitwise_left_shift(at::ones({8}, at::kByte), at::arange(8, at::kByte));
      o.put(0, (bits * weight).sum(1)))
OLDER(SignBitsUnpack, at::Tensor bytes = o.in[0].flatten().unsqueeze(1);
      at::Tensor bits = at::bitwise_and(at::bitwise_right_shift(bytes, at::arange(8, at::kByte)), 1);
      o.put(0, bits.to(at::kFloat) * 2 - 1))

// Channels come in blocks of 16 (NC1HWC0): each argument gives c1_len of them, from its offset on.
static at::Tensor blocks(const at::Tensor& x, int64_t offset, int64_t count) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape[1] = std::max(shape[1], (offset + count) * 16);
  at::Tensor padded = at::zeros(shape, x.options());
  padded.narrow(1, 0, x.size(1)).copy_(x);
  return padded.narrow(1, offset * 16, count * 16);
}
OLDER(StrideAdd, int64_t count = o.attribute<int64_t>("c1_len", 1);
      o.put(0, blocks(wide(o.in[0]), o.attribute<int64_t>("x1_c1_offset", 0), count) +
                   blocks(wide(o.in[1]), o.attribute<int64_t>("x2_c1_offset", 0), count)))

// In row j of the batch the positions from start[i][j] up to end[i][j] of the last axis become value[i].
OLDER(MaskedFillRange, const at::Tensor &x = o.in[0], &start = o.in[1], &end = o.in[2];
      int64_t axis = o.attribute<int64_t>("axis", -1), last = x.dim() - 1;
      require(last >= 1 && (axis == -1 || axis == last), "MaskedFillRange: cannsim knows only the last axis");
      at::Tensor filled = x.clone();
      for (int64_t i = 0; i < start.size(0); ++i) {
        for (int64_t j = 0; j < start.size(1); ++j) {
          int64_t from = start[i][j].item<int64_t>(), to = std::min(end[i][j].item<int64_t>(), x.size(last));
          if (to > from) filled[j].narrow(last - 1, from, to - from).copy_(o.in[3][i]);
        }
      } o.put(0, filled))

}  // namespace cannsim
