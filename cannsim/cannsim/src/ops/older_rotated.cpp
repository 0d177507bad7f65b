// Operators of the older interface for boxes that are turned: what two of them share.
#include <cmath>
#include <vector>

#include "older.h"

namespace cannsim {

struct Point {
  double x, y;
};
struct TurnedBox {
  std::vector<Point> corners;  // counter-clockwise; none: a box without an area
  double area;
};

// Column i of (5, N): centre and size, or (trans) two corners, and an angle in degrees, counter-clockwise.
static TurnedBox turned_box(const at::TensorAccessor<double, 2>& boxes, int64_t i, bool trans) {
  double x = boxes[0][i], y = boxes[1][i], width = boxes[2][i], height = boxes[3][i];
  if (trans) {
    width -= x, height -= y;
    x += width / 2, y += height / 2;
  }
  if (!(width > 0 && height > 0)) return {{}, 0};
  double angle = std::fmod(boxes[4][i], 360.0) * M_PI / 180, cosine = std::cos(angle) / 2, sine = std::sin(angle) / 2;
  TurnedBox box{{}, width * height};
  for (auto [right, up] : {Point{-1, -1}, Point{1, -1}, Point{1, 1}, Point{-1, 1}}) {
    double along = right * width, across = up * height;
    box.corners.push_back({x + along * cosine - across * sine, y + along * sine + across * cosine});
  }
  return box;
}

static double side(const Point& from, const Point& to, const Point& point) {  // positive: left of the edge
  return (to.x - from.x) * (point.y - from.y) - (to.y - from.y) * (point.x - from.x);
}

// Cuts one box with each edge of the other; what is left is measured as a fan of triangles.
static double shared_area(const TurnedBox& box, const TurnedBox& other) {
  std::vector<Point> left = other.corners.empty() ? other.corners : box.corners;
  for (size_t i = 0; i < other.corners.size(); ++i) {
    const Point &from = other.corners[i], &to = other.corners[(i + 1) % other.corners.size()];
    std::vector<Point> kept;
    for (size_t j = 0; j < left.size(); ++j) {
      const Point &a = left[j], &b = left[(j + 1) % left.size()];
      double start = side(from, to, a), end = side(from, to, b);
      if (start >= 0) kept.push_back(a);
      if ((start >= 0) != (end >= 0)) {
        double share = start / (start - end);
        kept.push_back({a.x + share * (b.x - a.x), a.y + share * (b.y - a.y)});
      }
    }
    left = std::move(kept);
  }
  double twice = 0;
  for (size_t j = 2; j < left.size(); ++j) twice += side(left[0], left[j - 1], left[j]);
  return twice / 2;
}

// (batch, N, K) from boxes (batch, 5, N) and (batch, 5, K).
static at::Tensor each_pair(const Older& o, double (*measure)(const TurnedBox&, const TurnedBox&)) {
  bool trans = o.attribute("trans", false);
  at::Tensor boxes = o.in[0].to(at::kDouble).contiguous(), others = o.in[1].to(at::kDouble).contiguous();
  at::Tensor result = at::zeros({boxes.size(0), boxes.size(2), others.size(2)}, at::kDouble);
  auto from = boxes.accessor<double, 3>(), to = others.accessor<double, 3>(), found = result.accessor<double, 3>();
  for (int64_t n = 0; n < boxes.size(0); ++n) {
    for (int64_t i = 0; i < boxes.size(2); ++i) {
      TurnedBox box = turned_box(from[n], i, trans);
      for (int64_t j = 0; j < others.size(2); ++j) found[n][i][j] = measure(box, turned_box(to[n], j, trans));
    }
  }
  return result;
}

OLDER(RotatedOverlaps, o.put(0, each_pair(o, shared_area)))
OLDER(RotatedIou, require(o.attribute<std::string>("mode", "iou") == "iou" && o.attribute("is_cross", true),
                          "RotatedIou: cannsim knows only mode iou of every box with every other");
      o.put(0, each_pair(o, [](const TurnedBox& box, const TurnedBox& other) {
              double shared = shared_area(box, other);
              return shared > 0 ? shared / (box.area + other.area - shared) : 0;
            })))

}  // namespace cannsim
