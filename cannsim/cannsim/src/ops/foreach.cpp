// Operators on lists of tensors: item i of the result comes from item i of the inputs.
#include "arithmetic.h"

namespace cannsim {

// out[i] = function(i)
static void each(const Outputs& out, const std::function<at::Tensor(size_t)>& function) {
  for (size_t i = 0; i < out.size(); ++i) out.write(i, function(i));
}

static at::Tensor maximum(const at::Tensor& x, const at::Scalar& bound) { return at::clamp_min(x, bound); }
static at::Tensor minimum(const at::Tensor& x, const at::Scalar& bound) { return at::clamp_max(x, bound); }

// x + alpha * y is one instruction of the vector unit; whether it rounds in between is not public. The official test
// compares float16 with the CPU's, which rounds once (but twice in the last elements), and bfloat16 with float32.
static at::Tensor add_scaled(const at::Tensor& x, const at::Tensor& y, const at::Scalar& alpha) {
  return x.scalar_type() == at::kHalf ? at::add(x, y, alpha) : at::add(wide(x), wide(y), alpha);
}
// Two instructions for float16.
static at::Tensor subtract_scaled(const at::Tensor& x, const at::Tensor& y, const at::Scalar& alpha) {
  if (x.scalar_type() == at::kHalf) return at::sub(x, at::mul(y, rounded(alpha, at::kHalf)));
  return add_scaled(x, y, -alpha);
}

static void same_count(const Tensors& x, size_t scalars) {
  require(x.size() == scalars, "Expected as many scalars as tensors in list ", x.name, ", but ", scalars,
          " does not equal ", x.size(), ".");
}

}  // namespace cannsim

// ---- one list -----------------------------------------------------------------------------------

#define FOREACH_UNARY(name, function)                                                     \
  OP(Foreach##name, (InList x, OutList out), (dtype(x, kForeach), same_shapes(x, out)),   \
     each(out, [&](size_t i) { return at::function(x[i]); }))

FOREACH_UNARY(Abs, abs)
FOREACH_UNARY(Neg, neg)
FOREACH_UNARY(Sign, sign)
FOREACH_UNARY(Reciprocal, reciprocal)
FOREACH_UNARY(Sqrt, sqrt)
FOREACH_UNARY(Exp, exp)
FOREACH_UNARY(Expm1, expm1)
FOREACH_UNARY(Log, log)
FOREACH_UNARY(Log2, log2)
FOREACH_UNARY(Log10, log10)
FOREACH_UNARY(Log1p, log1p)
FOREACH_UNARY(Sin, sin)
FOREACH_UNARY(Cos, cos)
FOREACH_UNARY(Tan, tan)
FOREACH_UNARY(Tanh, tanh)
FOREACH_UNARY(Sigmoid, sigmoid)
FOREACH_UNARY(Erf, erf)
FOREACH_UNARY(Erfc, erfc)

OP(ForeachCopy, (InList x, OutList out), (same_shapes(x, out)), each(out, [&](size_t i) { return x[i]; }))
OP(ForeachZeroInplace, (OutList x), (dtype(x, kReal)), for (const at::Tensor& item : x) item.zero_())
OP(ForeachNorm, (InList x, Num scalar, OutList out), (dtype(x, kFloating), same_lengths(x, out)),
   each(out, [&](size_t i) { return at::linalg_vector_norm(x[i].to(at::kFloat), scalar); }))

// ---- a list and a scalar ------------------------------------------------------------------------

#define FOREACH_SCALAR(name, function)                                                              \
  OP(Foreach##name##Scalar, (InList x, In scalar, OutList out), (dtype(x, kForeach), same_shapes(x, out)), \
     at::Scalar value = scalar.item();                                                              \
     each(out, [&](size_t i) { return function(x[i], value); }))                                    \
  OP(Foreach##name##ScalarV2, (InList x, Num scalar, OutList out), (dtype(x, kForeach), same_shapes(x, out)), \
     each(out, [&](size_t i) { return function(x[i], scalar); }))                                   \
  OP(Foreach##name##ScalarList, (InList x, NumList scalars, OutList out),                           \
     (dtype(x, kForeach), same_shapes(x, out), same_count(x, scalars.size())),                      \
     each(out, [&](size_t i) { return function(x[i], scalars[i]); }))

FOREACH_SCALAR(Add, at::add)
FOREACH_SCALAR(Sub, at::sub)
FOREACH_SCALAR(Mul, at::mul)
FOREACH_SCALAR(Div, at::div)
FOREACH_SCALAR(Pow, at::pow)
FOREACH_SCALAR(Maximum, maximum)
FOREACH_SCALAR(Minimum, minimum)

OP(ForeachPowScalarAndTensor, (Num scalar, InList x, OutList out), (dtype(x, kForeach), same_shapes(x, out)),
   each(out, [&](size_t i) { return at::pow(scalar, x[i]); }))

// ---- two lists ----------------------------------------------------------------------------------

#define FOREACH_LIST(name, function)                                                                \
  OP(Foreach##name##List, (InList x1, InList x2, OutList out),                                      \
     (dtype(x1, kForeach), same_shapes(x1, x2), same_shapes(x1, out)),                              \
     each(out, [&](size_t i) { return at::function(x1[i], x2[i]); }))

FOREACH_LIST(Mul, mul)
FOREACH_LIST(Div, div)
FOREACH_LIST(Maximum, maximum)
FOREACH_LIST(Minimum, minimum)
FOREACH_LIST(Pow, pow)

#define FOREACH_LIST_ALPHA(name, function)                                                          \
  OP(Foreach##name##List, (InList x1, InList x2, In alpha, OutList out),                            \
     (dtype(x1, kForeach), same_shapes(x1, x2), same_shapes(x1, out)),                              \
     at::Scalar factor = alpha.item();                                                              \
     each(out, [&](size_t i) { return function(x1[i], x2[i], factor); }))                       \
  OP(Foreach##name##ListV2, (InList x1, InList x2, Num alpha, OutList out),                         \
     (dtype(x1, kForeach), same_shapes(x1, x2), same_shapes(x1, out)),                              \
     each(out, [&](size_t i) { return function(x1[i], x2[i], alpha); }))

FOREACH_LIST_ALPHA(Add, add_scaled)
FOREACH_LIST_ALPHA(Sub, subtract_scaled)

OP(ForeachLerpScalar, (InList x1, InList x2, Num weight, OutList out),
   (dtype(x1, kFloating), same_shapes(x1, x2), same_shapes(x1, out)),
   each(out, [&](size_t i) { return at::lerp(x1[i], x2[i], weight); }))
OP(ForeachLerpList, (InList x1, InList x2, InList weight, OutList out),
   (dtype(x1, kFloating), same_shapes(x1, x2), same_shapes(x1, weight), same_shapes(x1, out)),
   each(out, [&](size_t i) { return at::lerp(x1[i], x2[i], weight[i]); }))

// ---- three lists --------------------------------------------------------------------------------

// The list variants take their scalars as one tensor. Kernels differ: those with one scalar compute float16 in float,
// of those with a list all but AddcmulScalarList round each step.
#define FOREACH_FUSED(name, term, list_rounds)                                                      \
  OP(Foreach##name##Scalar, (InList x1, InList x2, InList x3, In scalar, OutList out),              \
     (dtype(x1, kForeach), same_shapes(x1, x2), same_shapes(x1, x3), same_shapes(x1, out)),         \
     at::Scalar value = scalar.item();                                                              \
     each(out, [&](size_t i) { return add_term(Term::term, Rounds::once, x1[i], x2[i], x3[i], value); })) \
  OP(Foreach##name##ScalarV2, (InList x1, InList x2, InList x3, Num scalar, OutList out),           \
     (dtype(x1, kForeach), same_shapes(x1, x2), same_shapes(x1, x3), same_shapes(x1, out)),         \
     each(out, [&](size_t i) { return add_term(Term::term, Rounds::once, x1[i], x2[i], x3[i], scalar); })) \
  OP(Foreach##name##ScalarList, (InList x1, InList x2, InList x3, In scalars, OutList out),         \
     (dtype(x1, kForeach), same_shapes(x1, x2), same_shapes(x1, x3), same_shapes(x1, out),          \
      same_count(x1, scalars.numel())),                                                             \
     each(out, [&](size_t i) {                                                                      \
       return add_term(Term::term, Rounds::list_rounds, x1[i], x2[i], x3[i], scalars[i].item());    \
     }))                                                                                            \
  OP(Foreach##name##List, (InList x1, InList x2, InList x3, In scalars, OutList out),               \
     (dtype(x1, kForeach), same_shapes(x1, x2), same_shapes(x1, x3), same_shapes(x1, out)),         \
     each(out, [&](size_t i) {                                                                      \
       return add_term(Term::term, Rounds::steps, x1[i], x2[i], x3[i], scalars[i].item());          \
     }))

FOREACH_FUSED(Addcmul, product, once)
FOREACH_FUSED(Addcdiv, quotient, steps)
