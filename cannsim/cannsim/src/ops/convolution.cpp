// Convolution: enough for patch embeddings and small vision towers.
#include "checks.h"

namespace cannsim {
static at::Tensor f(const at::Tensor& x) { return x.to(at::kFloat); }
static std::optional<at::Tensor> f_or_none(const OptIn& x) {
  return x.defined() ? std::optional<at::Tensor>(f(x)) : std::nullopt;
}
// Padding may be given for each end of the two dimensions: top, bottom, left, right.
static at::Tensor padded(const at::Tensor& input, std::vector<int64_t>& padding) {
  if (input.dim() != 4 || padding.size() != 4) return f(input);
  at::Tensor wider = at::constant_pad_nd(f(input), {padding[2], padding[3], padding[0], padding[1]});
  padding = {0, 0};
  return wider;
}
static void conv_fits(const In& input, const In& weight, int64_t groups) {
  dtype(input, kFloating);
  same_dtype(input, weight);
  rank(input, 3, 5);
  require(weight.dim() == input.dim(), "Expected weight ", shape_text(weight.sizes()), " to have the rank of input ",
          shape_text(input.sizes()), ".");
  for (int64_t i = 2; i < weight.dim() && std::string(chip().family) != "950"; ++i) {
    require(weight.size(i) > 0, "Expected a kernel that is not empty, but found weight ", shape_text(weight.sizes()),
            ".");
  }
  require(groups > 0 && input.size(1) % groups == 0, "Expected groups to divide the channels of input ",
          shape_text(input.sizes()), ", but found ", groups, ".");
}
}  // namespace cannsim

OP(Convolution,
   (In input, In weight, OptIn bias, Ints stride, Ints padding, Ints dilation, bool transposed, Ints outputPadding,
    int64_t groups, Out output, int8_t cubeMathType),
   (conv_fits(input, weight, groups)),
   std::vector<int64_t> around = padding; at::Tensor x = padded(input, around);
   output = at::convolution(x, f(weight), f_or_none(bias), stride, around, dilation, transposed, outputPadding, groups))
OP(ConvolutionBackward,
   (In gradOutput, In input, In weight, OptInts biasSizes, Ints stride, Ints padding, Ints dilation, bool transposed,
    Ints outputPadding, int groups, Bools outputMask, int8_t cubeMathType, OptOut gradInput, OptOut gradWeight,
    OptOut gradBias),
   (conv_fits(input, weight, groups)),
   auto [dx, dw, db] = at::convolution_backward(
       f(gradOutput), f(input), f(weight), at::OptionalIntArrayRef(biasSizes), stride, padding, dilation, transposed,
       outputPadding, groups, {bool(outputMask[0]), bool(outputMask[1]), bool(outputMask[2])});
   if (outputMask[0]) gradInput = dx;
   if (outputMask[1]) gradWeight = dw;
   if (outputMask[2]) gradBias = db)
OP(ConvDepthwise2d,
   (In self, In weight, Ints kernelSize, OptIn bias, Ints stride, Ints padding, Ints dilation, Out out,
    int8_t cubeMathType),
   (dtype(self, kFloating), rank(self, 3, 4)),
   out = at::convolution(f(self), f(weight), f_or_none(bias), stride, padding, dilation, false, {0, 0}, self.size(-3)))
OP(ConvTbc, (In self, In weight, In bias, int64_t pad, Out output, int8_t cubeMathType),
   (dtype(self, kFloating), rank(self, 3, 3), rank(weight, 3, 3)),
   output = at::conv_tbc(f(self), f(weight), f(bias), pad))
OP(ConvTbcBackward,
   (In self, In input, In weight, In bias, int64_t pad, int8_t cubeMathType, Out gradInput, Out gradWeight,
    Out gradBias),
   (dtype(self, kFloating), rank(self, 3, 3)),
   auto [dx, dw, db] = at::conv_tbc_backward(f(self), f(input), f(weight), f(bias), pad);
   gradInput = dx;
   gradWeight = dw;
   gradBias = db)
