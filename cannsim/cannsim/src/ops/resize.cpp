// Pictures and volumes: resizing, padding by reflection and replication, sampling at points, columns of windows.
#include "checks.h"

namespace cannsim {
// A scale that is not positive was not given: it follows from the sizes.
static std::optional<double> scale(double value) { return value > 0 ? std::optional<double>(value) : std::nullopt; }
}  // namespace cannsim

// ---- resizing -----------------------------------------------------------------------------------

#define RESIZE_BACKWARD_1D(name, function)                                                                        \
  OP(name, (In gradOutput, Ints outputSize, Ints inputSize, double scales, Out gradInput), (rank(gradOutput, 3, 3)), \
     gradInput = at::function(wide(gradOutput), outputSize, inputSize, scale(scales)))
#define RESIZE_BACKWARD_2D(name, function)                                                                        \
  OP(name, (In gradOutput, Ints outputSize, Ints inputSize, double scalesH, double scalesW, Out gradInput),       \
     (rank(gradOutput, 4, 4)),                                                                                    \
     gradInput = at::function(wide(gradOutput), outputSize, inputSize, scale(scalesH), scale(scalesW)))
#define RESIZE_3D(name, function)                                                                                 \
  OP(name, (In self, Ints outputSize, double scalesD, double scalesH, double scalesW, Out out), (rank(self, 5, 5)), \
     out = at::function(wide(self), outputSize, scale(scalesD), scale(scalesH), scale(scalesW)))                  \
  OP(name##Backward,                                                                                              \
     (In gradOutput, Ints outputSize, Ints inputSize, double scalesD, double scalesH, double scalesW, Out gradInput), \
     (rank(gradOutput, 5, 5)),                                                                                    \
     gradInput = at::function##_backward(wide(gradOutput), outputSize, inputSize, scale(scalesD), scale(scalesH), \
                                         scale(scalesW)))
// With the corners aligned or not.
#define INTERPOLATE_2D(name, backward, function)                                                                  \
  OP(name, (In self, Ints outputSize, bool alignCorners, double scalesH, double scalesW, Out out), (rank(self, 4, 4)), \
     out = at::function(wide(self), outputSize, alignCorners, scale(scalesH), scale(scalesW)))                    \
  INTERPOLATE_BACKWARD_2D(backward, function##_backward)
#define INTERPOLATE_BACKWARD_2D(name, function)                                                                   \
  OP(name,                                                                                                        \
     (In gradOutput, Ints outputSize, Ints inputSize, bool alignCorners, double scalesH, double scalesW,          \
      Out gradInput),                                                                                             \
     (rank(gradOutput, 4, 4)),                                                                                    \
     gradInput = at::function(wide(gradOutput), outputSize, inputSize, alignCorners, scale(scalesH), scale(scalesW)))

OP(UpsampleNearest1d, (In self, Ints outputSize, Out out), (rank(self, 3, 3)),
   out = at::upsample_nearest1d(wide(self), outputSize))
OP(UpsampleNearest1dV2, (In self, Ints outputSize, float scaleL, Out out), (rank(self, 3, 3)),
   out = at::upsample_nearest1d(wide(self), outputSize, scale(scaleL)))
OP(UpsampleNearestExact1d, (In self, Ints outputSize, double scales, Out out), (rank(self, 3, 3)),
   out = at::_upsample_nearest_exact1d(wide(self), outputSize, scale(scales)))
RESIZE_BACKWARD_1D(UpsampleNearest1dBackward, upsample_nearest1d_backward)
RESIZE_BACKWARD_1D(UpsampleNearestExact1dBackward, _upsample_nearest_exact1d_backward)
OP(UpsampleLinear1d, (In self, Ints outputSize, bool alignCorners, double scales, Out out), (rank(self, 3, 3)),
   out = at::upsample_linear1d(wide(self), outputSize, alignCorners, scale(scales)))
OP(UpsampleLinear1dBackward,
   (In gradOutput, Ints outputSize, Ints inputSize, bool alignCorners, double scales, Out gradInput),
   (rank(gradOutput, 3, 3)),
   gradInput = at::upsample_linear1d_backward(wide(gradOutput), outputSize, inputSize, alignCorners, scale(scales)))

OP(UpsampleNearest2d, (In self, Ints outputSize, Out out), (rank(self, 4, 4)),
   out = at::upsample_nearest2d(wide(self), outputSize))
OP(UpsampleNearest2dV2, (In self, Ints outputSize, float scaleH, float scaleW, Out out), (rank(self, 4, 4)),
   out = at::upsample_nearest2d(wide(self), outputSize, scale(scaleH), scale(scaleW)))
OP(UpsampleNearestExact2d, (In self, Ints outputSize, double scalesH, double scalesW, Out out), (rank(self, 4, 4)),
   out = at::_upsample_nearest_exact2d(wide(self), outputSize, scale(scalesH), scale(scalesW)))
RESIZE_BACKWARD_2D(UpsampleNearest2dBackward, upsample_nearest2d_backward)
RESIZE_BACKWARD_2D(UpsampleNearestExact2dBackward, _upsample_nearest_exact2d_backward)
INTERPOLATE_2D(UpsampleBilinear2d, UpsampleBilinear2dBackward, upsample_bilinear2d)
INTERPOLATE_BACKWARD_2D(UpsampleBilinear2dBackwardV2, upsample_bilinear2d_backward)
INTERPOLATE_2D(UpsampleBicubic2d, UpsampleBicubic2dBackward, upsample_bicubic2d)
INTERPOLATE_2D(UpsampleBilinear2dAA, UpsampleBilinear2dAABackward, _upsample_bilinear2d_aa)
INTERPOLATE_2D(UpsampleBicubic2dAA, UpsampleBicubic2dAAGrad, _upsample_bicubic2d_aa)

RESIZE_3D(UpsampleNearest3d, upsample_nearest3d)
RESIZE_3D(UpsampleNearestExact3d, _upsample_nearest_exact3d)
OP(UpsampleTrilinear3d,
   (In self, Ints outputSize, bool alignCorners, double scalesD, double scalesH, double scalesW, Out out),
   (rank(self, 5, 5)),
   out = at::upsample_trilinear3d(wide(self), outputSize, alignCorners, scale(scalesD), scale(scalesH), scale(scalesW)))
OP(UpsampleTrilinear3dBackward,
   (In gradOutput, Ints outputSize, Ints inputSize, bool alignCorners, double scalesD, double scalesH, double scalesW,
    Out gradInput),
   (rank(gradOutput, 5, 5)),
   gradInput = at::upsample_trilinear3d_backward(wide(gradOutput), outputSize, inputSize, alignCorners, scale(scalesD),
                                                 scale(scalesH), scale(scalesW)))

// ---- padding ------------------------------------------------------------------------------------

#define PAD(name, function, lowest)                                                                    \
  OP(name, (In self, Ints padding, Out out), (rank(self, lowest, lowest + 1)),                         \
     out = at::function(wide(self), padding))                                                          \
  OP(name##Backward, (In gradOutput, In self, Ints padding, Out gradInput),                            \
     (rank(self, lowest, lowest + 1), same_shape(gradInput, self)),                                    \
     gradInput = at::function##_backward(wide(gradOutput), wide(self), padding))

PAD(ReflectionPad2d, reflection_pad2d, 3)
PAD(ReflectionPad3d, reflection_pad3d, 4)
PAD(ReplicationPad1d, replication_pad1d, 2)
PAD(ReplicationPad2d, replication_pad2d, 3)
PAD(ReplicationPad3d, replication_pad3d, 4)

// ---- sampling -----------------------------------------------------------------------------------

OP(AffineGrid, (In theta, Ints size, bool alignCorners, Out out), (dtype(theta, kFloating), rank(theta, 3, 3)),
   out = at::affine_grid_generator(wide(theta), size, alignCorners))

#define GRID_SAMPLER(name, function)                                                                              \
  OP(name, (In input, In grid, int64_t interpolationMode, int64_t paddingMode, bool alignCorners, Out out),       \
     (same_dtype(input, grid)),                                                                                   \
     out = at::function(wide(input), wide(grid), interpolationMode, paddingMode, alignCorners))                   \
  OP(name##Backward,                                                                                              \
     (In gradOutput, In input, In grid, int64_t interpolationMode, int64_t paddingMode, bool alignCorners,        \
      Bools outputMask, OptOut inputGrad, Out gridGrad),                                                          \
     (same_dtype(input, grid)),                                                                                   \
     auto [dx, dgrid] = at::function##_backward(wide(gradOutput), wide(input), wide(grid), interpolationMode,     \
                                                paddingMode, alignCorners,                                        \
                                                {bool(outputMask[0]), bool(outputMask[1])});                      \
     if (outputMask[0]) inputGrad = dx;                                                                           \
     gridGrad = dgrid)

GRID_SAMPLER(GridSampler2D, grid_sampler_2d)
GRID_SAMPLER(GridSampler3D, grid_sampler_3d)

OP(Im2col, (In self, Ints kernelSize, Ints dilation, Ints padding, Ints stride, Out out), (rank(self, 3, 4)),
   out = at::im2col(wide(self), kernelSize, dilation, padding, stride))
OP(Im2colBackward,
   (In gradOutput, Ints inputSize, Ints kernelSize, Ints dilation, Ints padding, Ints stride, Out out),
   (rank(gradOutput, 2, 3)), out = at::col2im(wide(gradOutput), inputSize, kernelSize, dilation, padding, stride))
OP(ChannelShuffle, (In self, int64_t groups, Out out), (rank(self, 3, 7), same_shape(out, self)),
   out = at::channel_shuffle(self, groups))
