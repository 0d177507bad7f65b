// Operators of the older interface for boxes of object detection.
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
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

// (rows of the second, rows of the first). Both sides of every box grow by eps where areas are counted.
OLDER(Iou, float eps = o.attribute("eps", 1.0f); bool of_second = o.attribute<std::string>("mode", "iou") == "iof";
      Corners a = corners(wide(o.in[0]).t(), false), b = corners(wide(o.in[1]).t(), false);
      for (at::Tensor* x : {&b.x1, &b.y1, &b.x2, &b.y2}) *x = x->unsqueeze(1);
      at::Tensor inner = (at::minimum(a.x2, b.x2) - at::maximum(a.x1, b.x1)).clamp(0) *
                         (at::minimum(a.y2, b.y2) - at::maximum(a.y1, b.y1)).clamp(0);
      at::Tensor first = (a.x2 - a.x1 + eps) * (a.y2 - a.y1 + eps), second = (b.x2 - b.x1 + eps) * (b.y2 - b.y1 + eps);
      o.put(0, inner / (of_second ? second.expand_as(inner) : first + second - inner)))

// Boxes (batch, 5, N): two corners and an angle in degrees. Offsets of the centre, the size and the angle.
struct Turned {
  at::Tensor centre, size, angle;
};
static Turned turned_boxes(const at::Tensor& boxes) {
  at::Tensor low = boxes.slice(1, 0, 2), high = boxes.slice(1, 2, 4);
  return {(low + high) / 2, high - low, boxes.slice(1, 4, 5)};
}
static at::Tensor weights(const Older& o) {
  auto values = o.attribute("weight", std::vector<float>(5, 1));
  return at::tensor(at::ArrayRef<float>(values.data(), values.size()), at::kFloat).view({1, -1, 1});
}
OLDER(RotatedBoxEncode, Turned anchor = turned_boxes(wide(o.in[0])), truth = turned_boxes(wide(o.in[1]));
      at::Tensor turn = at::tan(at::deg2rad(truth.angle)) - at::tan(at::deg2rad(anchor.angle));
      at::Tensor moved = (truth.centre - anchor.centre) / anchor.size;
      o.put(0, at::cat({moved, (truth.size / anchor.size).log(), turn}, 1) * weights(o)))
OLDER(RotatedBoxDecode, Turned anchor = turned_boxes(wide(o.in[0])); at::Tensor delta = wide(o.in[1]) / weights(o);
      at::Tensor centre = anchor.centre + delta.slice(1, 0, 2) * anchor.size;
      at::Tensor half = anchor.size * delta.slice(1, 2, 4).exp() / 2;
      at::Tensor angle = at::rad2deg(at::atan(at::tan(at::deg2rad(anchor.angle)) + delta.slice(1, 4, 5)));
      o.put(0, at::cat({centre - half, centre + half, angle}, 1)))

// ---- regions

// (pooled, size): how much each sample of one side of the region takes of each row or column. Samples further than
// one outside count as 0. end_mode 1: the last row or column belongs to the region.
static at::Tensor region_weights(double from, double to, int64_t pooled, int64_t size, int64_t samples) {
  double width = std::max(to - from, 1.0), bin = width / pooled;
  int64_t count = samples > 0 ? samples : static_cast<int64_t>(std::ceil(bin));
  at::Tensor weight = at::zeros({pooled, size}, at::kFloat);
  auto w = weight.accessor<float, 2>();
  for (int64_t i = 0; i < pooled * count; ++i) {
    double at = from + (i + 0.5) * bin / count;
    if (at < -1 || at > size) continue;
    at = std::clamp(at, 0.0, size - 1.0);
    int64_t low = static_cast<int64_t>(at), high = std::min(low + 1, size - 1);
    w[i / count][low] += (1 - (at - low)) / count;
    w[i / count][high] += (at - low) / count;
  }
  return weight;
}

// For each region (image, x1, y1, x2, y2): its image, and the weights of rows and columns.
struct Region {
  int64_t image;
  at::Tensor rows, columns;
};
static std::vector<Region> regions(const Older& o, int64_t height, int64_t width) {
  double scale = o.attribute("spatial_scale", 1.0f);
  int64_t samples = o.attribute<int64_t>("sample_num", 2), mode = o.attribute<int64_t>("roi_end_mode", 1);
  require(mode == 0 || mode == 1, "ROIAlign: cannsim knows only roi_end_mode 0 and 1");
  int64_t rows = o.attribute<int64_t>("pooled_height", 1), columns = o.attribute<int64_t>("pooled_width", 1);
  at::Tensor boxes = o.in[1].to(at::kDouble).contiguous();
  auto box = boxes.accessor<double, 2>();
  std::vector<Region> found;
  for (int64_t i = 0; i < boxes.size(0); ++i) {
    found.push_back({static_cast<int64_t>(box[i][0]),
                     region_weights(box[i][2] * scale, (box[i][4] + mode) * scale, rows, height, samples),
                     region_weights(box[i][1] * scale, (box[i][3] + mode) * scale, columns, width, samples)});
  }
  return found;
}
OLDER(ROIAlign, at::Tensor images = wide(o.in[0]); std::vector<at::Tensor> pooled;
      for (const Region& region : regions(o, images.size(2), images.size(3))) {
        pooled.push_back(at::matmul(at::matmul(region.rows, images[region.image]), region.columns.t()));
      } o.put(0, at::stack(pooled)))
OLDER(ROIAlignGrad, at::Tensor grad = wide(o.in[0]), images = at::zeros(o.out[0].sizes(), at::kFloat); int64_t i = 0;
      for (const Region& region : regions(o, images.size(2), images.size(3))) {
        images[region.image] += at::matmul(at::matmul(region.rows.t(), grad[i++]), region.columns);
      } o.put(0, images))

// As TensorFlow has it: the best boxes that overlap none that was chosen by more than the threshold.
OLDER(NonMaxSuppressionV4, at::Tensor boxes = wide(o.in[0]), scores = wide(o.in[1]);
      int64_t most = o.in[2].item<int64_t>();
      double overlapping = o.in[3].item<double>(), least = o.in[4].item<double>();
      at::Tensor y1 = at::minimum(boxes.select(1, 0), boxes.select(1, 2)),
                 y2 = at::maximum(boxes.select(1, 0), boxes.select(1, 2)),
                 x1 = at::minimum(boxes.select(1, 1), boxes.select(1, 3)),
                 x2 = at::maximum(boxes.select(1, 1), boxes.select(1, 3));
      at::Tensor area = (y2 - y1) * (x2 - x1), order = at::argsort(scores, true, 0, true);
      at::Tensor chosen = at::zeros({o.out[0].numel()}, at::kInt); std::vector<int64_t> kept;
      for (int64_t i = 0; i < order.numel() && static_cast<int64_t>(kept.size()) < most; ++i) {
        int64_t next = order[i].item<int64_t>();
        if (scores[next].item<double>() <= least) break;
        auto overlaps = [&](int64_t other) {
          at::Tensor inner = (at::minimum(y2[next], y2[other]) - at::maximum(y1[next], y1[other])).clamp(0) *
                             (at::minimum(x2[next], x2[other]) - at::maximum(x1[next], x1[other])).clamp(0);
          return (inner / (area[next] + area[other] - inner)).item<double>() > overlapping;
        };
        if (std::any_of(kept.begin(), kept.end(), overlaps)) continue;
        chosen[static_cast<int64_t>(kept.size())].fill_(next);
        kept.push_back(next);
      } o.put(0, chosen); o.put(1, at::scalar_tensor(static_cast<int64_t>(kept.size()), at::kInt)))

// All boxes come back in their order, which is that of their scores, with a mark for those that overlap no marked one
// before them by more than the threshold.
OLDER(NMSWithMask, at::Tensor boxes = wide(o.in[0]); Corners b = corners(boxes.t().narrow(0, 0, 4), false);
      at::Tensor area = (b.x2 - b.x1) * (b.y2 - b.y1), marked = at::ones({boxes.size(0)}, at::kByte);
      double most = o.attribute("iou_threshold", 0.5f);
      for (int64_t i = 0; i < boxes.size(0); ++i) {
        if (!marked[i].item<bool>()) continue;
        at::Tensor inner = (at::minimum(b.x2, b.x2[i]) - at::maximum(b.x1, b.x1[i])).clamp(0) *
                           (at::minimum(b.y2, b.y2[i]) - at::maximum(b.y1, b.y1[i])).clamp(0);
        at::Tensor covered = inner.gt((area + area[i] - inner) * most);
        covered.narrow(0, 0, i + 1).zero_();
        marked.masked_fill_(covered, 0);
      } o.put(0, o.in[0]); o.put(1, at::arange(boxes.size(0), at::kInt)); o.put(2, marked))

}  // namespace cannsim
