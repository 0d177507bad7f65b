// Operators of the older interface for boxes of object detection.
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "older.h"

namespace cannsim {

struct Corners {
  at::Tensor x1, y1, x2, y2;
};

// Boxes (4, N) as two corners, or (trans) as centre and size.
static Corners corners(const at::Tensor& boxes, bool trans) {
  at::Tensor b[] = {boxes[0], boxes[1], boxes[2], boxes[3]};
  if (!trans) return {b[0], b[1], b[2], b[3]};
  return {b[0] - b[2] / 2, b[1] - b[3] / 2, b[0] + b[2] / 2, b[1] + b[3] / 2};
}

enum class Penalty { centres, enclosing, shape };  // DIoU, GIoU, CIoU

// How much wider the second box is for its height: a difference of angles.
static at::Tensor leaning(const Corners& a, const Corners& b) {
  constexpr double kEps = 1e-9;
  return at::atan((b.x2 - b.x1) / (b.y2 - b.y1 + kEps)) - at::atan((a.x2 - a.x1) / (a.y2 - a.y1 + kEps));
}

// Overlap of box i and box j (is_cross), or of box i and box i, less its penalty.
static at::Tensor overlap(const at::Tensor& boxes, const at::Tensor& others, const Older& o, Penalty penalty) {
  constexpr double kEps = 1e-9;
  bool trans = o.attribute("trans", false), cross = o.attribute("is_cross", false);
  require(o.attribute<std::string>("mode", "iou") == "iou", "cannsim knows only mode iou");
  Corners a = corners(boxes, trans), b = corners(others, trans);
  if (cross) {
    for (at::Tensor* x : {&a.x1, &a.y1, &a.x2, &a.y2}) *x = x->unsqueeze(1);
  }
  at::Tensor inner = (at::minimum(a.x2, b.x2) - at::maximum(a.x1, b.x1)).clamp(0) *
                     (at::minimum(a.y2, b.y2) - at::maximum(a.y1, b.y1)).clamp(0);
  at::Tensor both = (a.x2 - a.x1) * (a.y2 - a.y1 + kEps) + (b.x2 - b.x1) * (b.y2 - b.y1 + kEps) - inner + kEps;
  at::Tensor width = at::maximum(a.x2, b.x2) - at::minimum(a.x1, b.x1);
  at::Tensor height = at::maximum(a.y2, b.y2) - at::minimum(a.y1, b.y1);
  if (penalty == Penalty::enclosing) {
    at::Tensor around = width * height + kEps;
    return inner / both - (around - both) / around;
  }
  at::Tensor distance = ((b.x1 + b.x2 - a.x1 - a.x2).square() + (b.y1 + b.y2 - a.y1 - a.y2).square()) / 4;
  distance = distance / (width.square() + height.square() + kEps);
  if (penalty == Penalty::centres) return inner / both - distance;
  at::Tensor shape = leaning(a, b).square() * (4 / (M_PI * M_PI));
  at::Tensor weight = shape / (1 + kEps - inner / both + shape);
  return inner / both - distance - shape * weight;
}

static void gradients(const Older& o, Penalty penalty) {
  c10::impl::ForceDispatchKeyGuard with_autograd(c10::default_included_set, c10::default_excluded_set);
  at::AutoGradMode recording(true);
  at::Tensor boxes = wide(o.in[1]).detach().clone().requires_grad_();
  at::Tensor others = wide(o.in[2]).detach().clone().requires_grad_();
  at::Tensor result = overlap(boxes, others, o, penalty);
  auto found = torch::autograd::grad({result}, {boxes, others}, {wide(o.in[0]).reshape(result.sizes())});
  at::NoGradGuard done;
  o.put(0, found[0]);
  o.put(1, found[1]);
}

OLDER(DIoU, o.put(0, overlap(wide(o.in[0]), wide(o.in[1]), o, Penalty::centres)))
OLDER(DIoUGrad, gradients(o, Penalty::centres))
OLDER(GIoU, o.put(0, overlap(wide(o.in[0]), wide(o.in[1]), o, Penalty::enclosing)))
OLDER(GIoUGrad, gradients(o, Penalty::enclosing))
OLDER(CIoU, at::Tensor boxes = wide(o.in[0]), others = wide(o.in[1]); bool trans = o.attribute("trans", false);
      require(!o.attribute("is_cross", false), "CIoU: cannsim knows only boxes one by one");
      o.put(0, overlap(boxes, others, o, Penalty::shape));
      o.put(1, leaning(corners(boxes, trans), corners(others, trans))))
// No CIoUGrad: what it takes as constant is not public.

// ---- offsets from anchors to boxes, and back

static at::Tensor list(const Older& o, const char* name, float otherwise) {
  auto values = o.attribute(name, std::vector<float>(4, otherwise));
  return at::tensor(at::ArrayRef<float>(values.data(), values.size()), at::kFloat);
}

// Both ends belong to a box: its width is x2 - x1 + 1.
OLDER(BoundingBoxDecode, at::Tensor rois = wide(o.in[0]);
      at::Tensor delta = wide(o.in[1]) * list(o, "stds", 1) + list(o, "means", 0);
      double most = std::abs(std::log(o.attribute("wh_ratio_clip", 0.016f)));
      auto limit = o.attribute("max_shape", std::vector<int64_t>());
      at::Tensor low = rois.slice(1, 0, 2), size = rois.slice(1, 2, 4) - low + 1;
      at::Tensor centre = (low + rois.slice(1, 2, 4)) / 2 + size * delta.slice(1, 0, 2);
      at::Tensor half = size * delta.slice(1, 2, 4).clamp(-most, most).exp() / 2 - 0.5;
      at::Tensor boxes = at::cat({centre - half, centre + half}, 1);
      if (limit.size() >= 2) {  // (height, width) of the image
        auto far = at::tensor({double(limit[1] - 1), double(limit[0] - 1)}, at::kFloat).repeat({2});
        boxes = at::minimum(boxes.clamp(0), far);
      } o.put(0, boxes))

// Computed in half precision, in every dtype.
OLDER(BoundingBoxEncode, at::Tensor anchor = o.in[0].to(at::kHalf), truth = o.in[1].to(at::kHalf);
      at::Tensor low = anchor.slice(1, 0, 2), high = anchor.slice(1, 2, 4), size = high - low + 1;
      at::Tensor true_low = truth.slice(1, 0, 2), true_high = truth.slice(1, 2, 4);
      at::Tensor true_size = true_high - true_low + 1;
      at::Tensor moved = ((true_low + true_high) / 2 - (low + high) / 2) / size;
      at::Tensor delta = at::cat({moved, (true_size / size).log()}, 1);
      o.put(0, (delta - list(o, "means", 0).to(at::kHalf)) * (1 / list(o, "stds", 1)).to(at::kHalf)))

OLDER(YoloBoxesEncode, constexpr double kEps = 1e-6; at::Tensor anchor = wide(o.in[0]), truth = wide(o.in[1]);
      at::Tensor size = anchor.slice(1, 2, 4) - anchor.slice(1, 0, 2);
      at::Tensor centre = (anchor.slice(1, 2, 4) + anchor.slice(1, 0, 2)) / 2;
      at::Tensor true_size = truth.slice(1, 2, 4) - truth.slice(1, 0, 2);
      at::Tensor true_centre = (truth.slice(1, 2, 4) + truth.slice(1, 0, 2)) / 2;
      at::Tensor moved = ((true_centre - centre) / o.in[2].to(at::kFloat).unsqueeze(1) + 0.5).clamp(kEps, 1 - kEps);
      o.put(0, at::cat({moved, (true_size / size).clamp_min(kEps).log()}, 1)))

// Marks the anchors of the cells in which the centre of a box lies.
OLDER(AnchorResponseFlags, at::Tensor boxes = wide(o.in[0]);
      auto cells = o.attribute("featmap_size", std::vector<int64_t>()), stride = o.attribute("strides", cells);
      at::Tensor x = at::floor((boxes.select(1, 0) + boxes.select(1, 2)) * 0.5 / stride.at(0)).to(at::kLong);
      at::Tensor y = at::floor((boxes.select(1, 1) + boxes.select(1, 3)) * 0.5 / stride.at(1)).to(at::kLong);
      at::Tensor marked = at::zeros({cells.at(0) * cells.at(1)}, at::kByte);
      at::Tensor cell = y * cells[1] + x;
      marked.index_fill_(0, cell.masked_select(cell.ge(0).logical_and(cell.lt(marked.numel()))), 1);
      o.put(0, marked.repeat_interleave(o.attribute<int64_t>("num_base_anchors", 1))))

}  // namespace cannsim
