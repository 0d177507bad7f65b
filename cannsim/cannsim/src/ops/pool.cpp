// Pooling, and its inverse.
#include "checks.h"

namespace cannsim {
static std::optional<int64_t> divisor(int64_t value) { return value ? std::optional<int64_t>(value) : std::nullopt; }
}  // namespace cannsim

// ---- average ------------------------------------------------------------------------------------

OP(AvgPool2d,
   (In self, Ints kernelSize, Ints stride, Ints padding, bool ceilMode, bool countIncludePad, int64_t divisorOverride,
    int8_t cubeMathType, Out out),
   (rank(self, 3, 4)),
   out = at::avg_pool2d(wide(self), kernelSize, stride, padding, ceilMode, countIncludePad, divisor(divisorOverride)))
OP(AvgPool2dBackward,
   (In gradOutput, In self, Ints kernelSize, Ints stride, Ints padding, bool ceilMode, bool countIncludePad,
    int64_t divisorOverride, int8_t cubeMathType, Out gradInput),
   (rank(self, 3, 4), same_shape(gradInput, self)),
   gradInput = at::avg_pool2d_backward(wide(gradOutput), wide(self), kernelSize, stride, padding, ceilMode,
                                       countIncludePad, divisor(divisorOverride)))
OP(AvgPool3d,
   (In self, Ints kernelSize, Ints stride, Ints padding, bool ceilMode, bool countIncludePad, int64_t divisorOverride,
    Out out),
   (dtype(self, kFloating), rank(self, 4, 5)),
   out = at::avg_pool3d(wide(self), kernelSize, stride, padding, ceilMode, countIncludePad, divisor(divisorOverride)))
OP(AvgPool3dBackward,
   (In gradOutput, In self, Ints kernelSize, Ints stride, Ints padding, bool ceilMode, bool countIncludePad,
    int64_t divisorOverride, Out gradInput),
   (dtype(self, kFloating), rank(self, 4, 5), same_shape(gradInput, self)),
   gradInput = at::avg_pool3d_backward(wide(gradOutput), wide(self), kernelSize, stride, padding, ceilMode,
                                       countIncludePad, divisor(divisorOverride)))
OP(AdaptiveAvgPool2d, (In self, Ints outputSize, Out out), (rank(self, 3, 4)),
   out = at::_adaptive_avg_pool2d(wide(self), outputSize))
OP(AdaptiveAvgPool2dBackward, (In gradOutput, In self, Out out), (rank(self, 3, 4), same_shape(out, self)),
   out = at::_adaptive_avg_pool2d_backward(wide(gradOutput), wide(self)))
OP(AdaptiveAvgPool3d, (In self, Ints outputSize, Out out), (rank(self, 4, 5)),
   out = at::_adaptive_avg_pool3d(wide(self), outputSize))
OP(AdaptiveAvgPool3dBackward, (In gradOutput, In self, Out out), (rank(self, 4, 5), same_shape(out, self)),
   out = at::_adaptive_avg_pool3d_backward(wide(gradOutput), wide(self)))

// ---- maximum ------------------------------------------------------------------------------------

#define MAX_POOL(name, backward, function, lowest, highest)                                                      \
  OP(name, (In self, Ints kernelSize, Ints stride, Ints padding, Ints dilation, bool ceilMode, Out out, Out where), \
     (rank(self, lowest, highest)),                                                                              \
     auto [values, found] = at::function(wide(self), kernelSize, stride, padding, dilation, ceilMode);           \
     out = values;                                                                                               \
     where = found)                                                                                              \
  OP(backward,                                                                                                   \
     (In gradOutput, In self, In where, Ints kernelSize, Ints stride, Ints padding, Ints dilation, bool ceilMode, \
      Out gradInput),                                                                                            \
     (rank(self, lowest, highest), same_shape(gradInput, self)),                                                 \
     gradInput = at::function##_backward(wide(gradOutput), wide(self), kernelSize, stride, padding, dilation,    \
                                         ceilMode, indices(where)))

MAX_POOL(MaxPool2dWithIndices, MaxPool2dWithIndicesBackward, max_pool2d_with_indices, 3, 4)
MAX_POOL(MaxPool3dWithArgmax, MaxPool3dWithArgmaxBackward, max_pool3d_with_indices, 4, 5)

// The mask marks the positions of the maxima in an order that is not public: it is left zero, and the
// gradient finds them again.
OP(MaxPool2dWithMask,
   (In self, Ints kernelSize, Ints stride, Ints padding, Ints dilation, bool ceilMode, Out out, Out mask),
   (rank(self, 3, 4)),
   out = at::max_pool2d(wide(self), kernelSize, stride, padding, dilation, ceilMode);
   mask.zero_())
OP(MaxPool2dWithMaskBackward,
   (In gradOutput, In self, In mask, Ints kernelSize, Ints stride, Ints padding, Ints dilation, bool ceilMode,
    Out gradInput),
   (rank(self, 3, 4), same_shape(gradInput, self)),
   at::Tensor where =
       std::get<1>(at::max_pool2d_with_indices(wide(self), kernelSize, stride, padding, dilation, ceilMode));
   gradInput = at::max_pool2d_with_indices_backward(wide(gradOutput), wide(self), kernelSize, stride, padding,
                                                    dilation, ceilMode, where))

#define ADAPTIVE_MAX_POOL(name, function, lowest, highest)                                            \
  OP(name, (In self, Ints outputSize, Out out, Out where), (rank(self, lowest, highest)),             \
     auto [values, found] = at::function(wide(self), outputSize);                                     \
     out = values;                                                                                    \
     where = found)                                                                                   \
  OP(name##Backward, (In gradOutput, In self, In where, Out gradInput),                               \
     (rank(self, lowest, highest), same_shape(gradInput, self)),                                      \
     gradInput = at::function##_backward(wide(gradOutput), wide(self), indices(where)))

ADAPTIVE_MAX_POOL(AdaptiveMaxPool2d, adaptive_max_pool2d, 3, 4)
ADAPTIVE_MAX_POOL(AdaptiveMaxPool3d, adaptive_max_pool3d, 4, 5)

OP(MaxUnpool2d, (In self, In where, Ints outputSize, Out out), (rank(self, 3, 4), same_shape(where, self)),
   out = at::max_unpool2d(wide(self), indices(where), outputSize))
OP(MaxUnpool3d, (In self, In where, Ints outputSize, Ints stride, Ints padding, Out out),
   (rank(self, 4, 5), same_shape(where, self)),
   out = at::max_unpool3d(wide(self), indices(where), outputSize, stride, padding))
