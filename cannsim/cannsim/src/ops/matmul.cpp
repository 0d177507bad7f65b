// Matrix multiplication and other linear algebra. Half and bfloat16 inputs are multiplied in float
// and rounded once, as the cube unit does.
#include "checks.h"

namespace cannsim {

static at::Tensor in_float(const at::Tensor& x) {
  return x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16 ? x.to(at::kFloat) : x;
}

static void multiply(Out& out, const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() == at::kFloat && out.scalar_type() == at::kFloat && out.is_contiguous()) {
    at::matmul_out(out, a, b);
  } else {
    out = at::matmul(in_float(a), in_float(b));
  }
}

// cubeMathType: 0 keep the dtype, 1 allow lower precision for float, 2 half, 3 HF32, 4 float add.
static void cube(const In& a, const In& b, int8_t math_type) {
  dtype(a, kFloating);
  dtype(b, kFloating);
  require(math_type >= 0 && math_type <= 4, "cubeMathType should be in [0,4], but found ", int(math_type), ".");
  std::string family = chip().family;
  bool half_only = family == "910A" || family == "310P";
  require(!half_only || a.scalar_type() != at::kFloat || math_type == 1 || math_type == 2,
          "The soc version does not support DT_FLOAT for tensor ", a.name, " when cubeMathType is ",
          int(math_type), ".");
}

static void inner(const In& a, const In& b) {
  rank(a, 1, 6);
  rank(b, 1, 6);
  int64_t k = b.size(b.dim() == 1 ? 0 : b.dim() - 2);
  require(a.size(-1) == k, "The k-axis of the two inputs are different, ", a.name, " ", shape_text(a.sizes()),
          ", ", b.name, " ", shape_text(b.sizes()), ".");
}

// Rows of x per group: group_list holds counts (type 1) or running totals (type 0).
static std::vector<int64_t> group_ends(const at::Tensor& group_list, int64_t type) {
  at::Tensor list = group_list.to(at::kLong).contiguous();
  std::vector<int64_t> ends(list.data_ptr<int64_t>(), list.data_ptr<int64_t>() + list.numel());
  for (size_t i = 1; type == 1 && i < ends.size(); ++i) ends[i] += ends[i - 1];
  return ends;
}

// group_type -1: one product per pair; 0: rows of x are split; 2: the inner axis is split (weight
// gradients of a mixture of experts).
static void grouped(const Tensors& x, const Tensors& weight, const MaybeTensors& bias, const OptIn& group_list,
                    int64_t group_type, int64_t list_type, const Outputs& out) {
  auto product = [&](const at::Tensor& a, const at::Tensor& b, size_t i) {
    at::Tensor y = at::matmul(in_float(a), in_float(b));
    return bias.given() && i < bias.size() ? y + bias[i].to(y.scalar_type()) : y;
  };
  if (group_type == -1 || !group_list.given()) {
    for (size_t i = 0; i < out.size(); ++i) out.write(i, product(x[i], weight[i], i));
    return;
  }
  auto ends = group_ends(group_list, list_type);
  for (size_t g = 0; g < ends.size(); ++g) {
    int64_t start = g ? ends[g - 1] : 0;
    if (group_type == 2) {
      out[0].select(0, g).copy_(product(x[0].slice(1, start, ends[g]), weight[0].slice(0, start, ends[g]), g));
      continue;
    }
    at::Tensor w = weight.size() == 1 && weight[0].dim() == 3 ? weight[0].select(0, g) : weight[g];
    at::Tensor y = product(x[0].slice(0, start, ends[g]), w, g);
    if (out.size() == 1) {
      out[0].slice(0, start, ends[g]).copy_(y);
    } else {
      out.write(g, y);
    }
  }
}

}  // namespace cannsim

// A second matrix in the private format NZ has an operator of its own.
#define PRODUCT(name, parameters, checks, ...) \
  OP(name, parameters, checks, __VA_ARGS__)    \
  OP(name##WeightNz, parameters, checks, __VA_ARGS__)

PRODUCT(Matmul, (In self, In mat2, Out out, int8_t cubeMathType), (cube(self, mat2, cubeMathType), inner(self, mat2)),
        multiply(out, self, mat2))
OP(Mm, (In self, In mat2, Out out, int8_t cubeMathType),
   (rank(self, 2, 2), rank(mat2, 2, 2), cube(self, mat2, cubeMathType), inner(self, mat2),
    shape(out, {self.size(0), mat2.size(1)})),
   multiply(out, self, mat2))
PRODUCT(BatchMatMul, (In self, In mat2, Out out, int8_t cubeMathType),
        (rank(self, 3, 3), rank(mat2, 3, 3), cube(self, mat2, cubeMathType), inner(self, mat2)),
        multiply(out, self, mat2))
OP(Mv, (In self, In vec, Out out, int8_t cubeMathType),
   (rank(self, 2, 2), rank(vec, 1, 1), cube(self, vec, cubeMathType), inner(self, vec)),
   multiply(out, self, vec))
OP(Dot, (In self, In tensor, Out out), (rank(self, 1, 1), dtype(self, kFloating), same_shape(self, tensor)),
   out = at::dot(in_float(self), in_float(tensor)))

// out = beta * self + alpha * mat1 @ mat2
PRODUCT(Addmm, (In self, In mat1, In mat2, Num beta, Num alpha, Out out, int8_t cubeMathType),
        (rank(mat1, 2, 2), rank(mat2, 2, 2), cube(mat1, mat2, cubeMathType), inner(mat1, mat2),
         dtype(self, kFloating), shape(out, {mat1.size(0), mat2.size(1)}), expands_to(self, out)),
        out = at::addmm(in_float(self), in_float(mat1), in_float(mat2), beta, alpha))
OP(InplaceAddmm, (Out selfRef, In mat1, In mat2, Num beta, Num alpha, int8_t cubeMathType),
   (rank(mat1, 2, 2), rank(mat2, 2, 2), cube(mat1, mat2, cubeMathType), inner(mat1, mat2),
    shape(selfRef, {mat1.size(0), mat2.size(1)})),
   selfRef = at::addmm(in_float(selfRef), in_float(mat1), in_float(mat2), beta, alpha))
OP(Baddbmm, (In self, In batch1, In batch2, Num beta, Num alpha, Out out, int8_t cubeMathType),
   (rank(batch1, 3, 3), rank(batch2, 3, 3), cube(batch1, batch2, cubeMathType), inner(batch1, batch2),
    shape(out, {batch1.size(0), batch1.size(1), batch2.size(2)}), expands_to(self, out)),
   out = at::baddbmm(in_float(self), in_float(batch1), in_float(batch2), beta, alpha))
OP(InplaceBaddbmm, (Out selfRef, In batch1, In batch2, Num beta, Num alpha, int8_t cubeMathType),
   (rank(batch1, 3, 3), rank(batch2, 3, 3), cube(batch1, batch2, cubeMathType), inner(batch1, batch2)),
   selfRef = at::baddbmm(in_float(selfRef), in_float(batch1), in_float(batch2), beta, alpha))
OP(Addbmm, (In self, In batch1, In batch2, Num beta, Num alpha, Out out, int8_t cubeMathType),
   (rank(batch1, 3, 3), rank(batch2, 3, 3), cube(batch1, batch2, cubeMathType), inner(batch1, batch2)),
   out = at::addbmm(in_float(self), in_float(batch1), in_float(batch2), beta, alpha))
OP(Addmv, (In self, In mat, In vec, Num alpha, Num beta, Out out, int8_t cubeMathType),
   (rank(mat, 2, 2), cube(mat, vec, cubeMathType), inner(mat, vec)),
   out = at::addmv(in_float(self), in_float(mat), in_float(vec), beta, alpha))
OP(Addr, (In self, In vec1, In vec2, OptNum betaOptional, OptNum alphaOptional, Out out),
   (rank(vec1, 1, 1), rank(vec2, 1, 1)),
   out = at::addr(self, vec1, vec2, betaOptional.value_or(1), alphaOptional.value_or(1)))

// ---- one product per group of rows --------------------------------------------------------------

OP(GroupedMatmulV4,
   (InList x, InList weight, OptInList biasOptional, OptInList scaleOptional, OptInList offsetOptional,
    OptInList antiquantScaleOptional, OptInList antiquantOffsetOptional, OptInList perTokenScaleOptional,
    OptIn groupListOptional, OptInList activationInputOptional, OptInList activationQuantScaleOptional,
    OptInList activationQuantOffsetOptional, int64_t splitItem, int64_t groupType, int64_t groupListType,
    int64_t actType, OutList out, OptInList activationFeatureOutOptional, OptInList dynQuantScaleOutOptional),
   (dtype(x, kFloating), dtype(weight, kFloating),
    require(actType == 0 && !scaleOptional.given() && !antiquantScaleOptional.given() && !perTokenScaleOptional.given() &&
                !offsetOptional.given() && !antiquantOffsetOptional.given() && !activationInputOptional.given(),
            "quantised inputs and activations are not simulated, actType ", actType, ".")),
   grouped(x, weight, biasOptional, groupListOptional, groupType, groupListType, out))
OP(GroupedMatmulV5,
   (InList x, InList weight, OptInList biasOptional, OptInList scaleOptional, OptInList offsetOptional,
    OptInList antiquantScaleOptional, OptInList antiquantOffsetOptional, OptInList perTokenScaleOptional,
    OptIn groupListOptional, OptInList activationInputOptional, OptInList activationQuantScaleOptional,
    OptInList activationQuantOffsetOptional, int64_t splitItem, int64_t groupType, int64_t groupListType,
    int64_t actType, OptInts tuningConfigOptional, OutList out, OptInList activationFeatureOutOptional,
    OptInList dynQuantScaleOutOptional),
   (dtype(x, kFloating), dtype(weight, kFloating),
    require(actType == 0 && !scaleOptional.given() && !antiquantScaleOptional.given() && !perTokenScaleOptional.given() &&
                !offsetOptional.given() && !antiquantOffsetOptional.given() && !activationInputOptional.given(),
            "quantised inputs and activations are not simulated, actType ", actType, ".")),
   grouped(x, weight, biasOptional, groupListOptional, groupType, groupListType, out))

// ---- decompositions -----------------------------------------------------------------------------

OP(Inverse, (In self, Out out), (dtype(self, kFloatingOrDouble)), out = at::inverse(in_float(self)))
OP(LinalgQr, (In self, int64_t mode, Out Q, Out R), (dtype(self, kFloatingOrDouble)),
   auto [q, r] = at::linalg_qr(self, mode == 1 ? "complete" : mode == 2 ? "r" : "reduced");
   Q = q;
   R = r)
OP(LinalgCholesky, (In self, bool upper, Out out), (dtype(self, kFloatingOrDouble)),
   out = at::linalg_cholesky(self, upper))
OP(TriangularSolve, (In self, In A, bool upper, bool transpose, bool unitriangular, Out xOut, Out mOut),
   (dtype(self, kFloatingOrDouble)),
   auto [solution, copy] = at::triangular_solve(self, A, upper, transpose, unitriangular);
   xOut = solution;
   mOut = copy)
OP(Svd, (In input, bool fullMatrices, bool computeUV, Out sigma, Out u, Out v), (dtype(input, kFloatingOrDouble)),
   if (computeUV) {
     auto [left, values, right] = at::linalg_svd(input, fullMatrices);
     sigma = values;
     u = left;
     v = right.mH();
   } else {
     sigma = at::linalg_svdvals(input);
   })
