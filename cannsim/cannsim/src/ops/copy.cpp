// Copies and casts, fills, and tensors made from nothing (arange, eye, triangles).
#include "checks.h"

OP(InplaceCopy, (Out selfRef, In src), (expands_to(src, selfRef)), selfRef.copy_(src))
OP(Cast, (In self, aclDataType dtype_, Out out), (same_shape(out, self)), out.copy_(self))

OP(InplaceZero, (Out selfRef), (), selfRef.zero_())
OP(InplaceOne, (Out selfRef), (), selfRef.fill_(1))
OP(InplaceFillScalar, (Out selfRef, Num value), (), selfRef.fill_(value))
OP(InplaceFillTensor, (Out selfRef, In value),
   (require(value.numel() == 1, "Expected tensor for value to have one element, but found shape ",
            shape_text(value.sizes()), ".")),
   selfRef.fill_(value.reshape({})))
OP(InplaceFillDiagonal, (Out selfRef, Num fillValue, bool wrap), (rank(selfRef, 2, 8)),
   selfRef.fill_diagonal_(fillValue, wrap))

namespace cannsim {
static const Dtypes kArange{{at::kHalf, at::kFloat, at::kDouble, at::kInt, at::kLong, kBf16}};
}
OP(Arange, (Num start, Num end, Num step, Out out),
   (dtype(out, kArange), rank(out, 1, 1), require(step.toDouble() != 0, "Expected step to be nonzero, but found 0.")),
   out = at::arange(start, end, step, out.options()))
OP(Range, (Num start, Num end, Num step, Out out), (dtype(out, kArange)),
   out = at::range(start, end, step, out.options()))
OP(Linspace, (Num start, Num end, int64_t steps, Out out), (), out = at::linspace(start, end, steps, out.options()))
OP(LogSpace, (Num start, Num end, int64_t steps, double base, Out result), (),
   result = at::logspace(start, end, steps, base, result.options()))
OP(Eye, (int64_t n, int64_t m, Out out), (rank(out, 2, 2)), out = at::eye(n, m, out.options()))

OP(Triu, (In self, int64_t diagonal, Out out), (rank(self, 2, 8), same_shape(out, self)),
   out = at::triu(self, diagonal))
OP(Tril, (In self, int64_t diagonal, Out out), (rank(self, 2, 8), same_shape(out, self)),
   out = at::tril(self, diagonal))
OP(InplaceTriu, (Out selfRef, int64_t diagonal), (rank(selfRef, 2, 8)), selfRef.triu_(diagonal))
OP(InplaceTril, (Out selfRef, int64_t diagonal), (rank(selfRef, 2, 8)), selfRef.tril_(diagonal))
