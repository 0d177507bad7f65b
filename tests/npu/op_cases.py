"""One line per operator case: elementwise operators and reductions. Used by test_ops_all.py, which runs

    python -m cannsim run -- pytest tests/npu/test_ops_all.py

A case is run on the NPU in every dtype it lists, and once on the CPU in float32 on the same rounded
inputs; outputs and gradients must agree, and the named aclnn operators must have been launched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Case:
    name: str
    run: Callable[..., Any]  # tensors -> tensor or tuple of tensors
    inputs: tuple[Any, ...]  # on the CPU; floating tensors are cast to the dtype of the test
    launches: str  # aclnn operators that must run, without the prefix
    grad: bool = True
    dtypes: tuple[str, ...] = FLOATS
    reference: Callable[..., Any] | None = None  # what the CPU computes, if not `run`
    loose: float = 1.0  # factor on the tolerance


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distinct(*shape: int, seed: int = 0) -> torch.Tensor:
    """Values without ties in any dtype, so that orders are unique."""
    count = int(torch.tensor(shape).prod())
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return (order.float() - count / 2).reshape(shape) / 8


X, Y, Z = randn(2, 3, 8, seed=1), randn(2, 3, 8, seed=2), randn(2, 3, 8, seed=3)
POSITIVE = X.abs() + 0.5
UNIT = X.tanh() * 0.9
ROW = randn(8, seed=4)
INTS = torch.tensor([[5, -3, 7], [2, 9, -8]])
SMALL = torch.tensor([[1, 2, 3], [4, 5, 6]])
BOOLS, OTHER_BOOLS = X > 0, Y > 0.3
ONE = ("float32",)


def unary(name: str, function: Callable[..., Any], x: torch.Tensor = X, grad: bool = True, **more: Any) -> Case:
    return Case(name, function, (x,), name, grad, **more)


def inplace(name: str, method: str, *arguments: Any, x: torch.Tensor = X, launches: str = "") -> Case:
    """x.clone().method_(...)"""
    return Case(name, lambda x, *a: getattr(x.clone(), method)(*a), (x, *arguments), launches or name, grad=False)


IN_PLACE = {
    "LeakyRelu": F.leaky_relu,
    "Elu": F.elu,
    "Hardtanh": F.hardtanh,
    "Hardswish": F.hardswish,
    "Hardsigmoid": F.hardsigmoid,
    "Mish": F.mish,
}

UNARY = [
    unary("Abs", torch.abs),
    unary("Neg", torch.neg),
    unary("Sign", torch.sign, grad=False),
    unary("Reciprocal", torch.reciprocal, POSITIVE),
    unary("Sqrt", torch.sqrt, POSITIVE),
    unary("Rsqrt", torch.rsqrt, POSITIVE),
    unary("Exp", torch.exp),
    unary("Exp2", torch.exp2, grad=False),
    unary("Expm1", torch.expm1),
    unary("Log", torch.log, POSITIVE),
    unary("Log2", torch.log2, POSITIVE),
    unary("Log10", torch.log10, POSITIVE),
    unary("Log1p", torch.log1p, POSITIVE),
    unary("Sin", torch.sin),
    unary("Cos", torch.cos),
    unary("Tan", torch.tan, UNIT, grad=False),
    unary("Asin", torch.asin, UNIT, grad=False),
    unary("Acos", torch.acos, UNIT, grad=False),
    unary("Atan", torch.atan, grad=False),
    unary("Sinh", torch.sinh, grad=False),
    unary("Cosh", torch.cosh, grad=False),
    unary("Erf", torch.erf, grad=False),
    unary("Erfc", torch.erfc, grad=False),
    unary("Erfinv", torch.erfinv, UNIT, grad=False, loose=3),
    unary("Floor", torch.floor, grad=False),
    unary("Ceil", torch.ceil, grad=False),
    unary("Round", torch.round, grad=False),
    unary("Trunc", torch.trunc, grad=False),
    unary("Frac", torch.frac, grad=False, loose=8),
    Case("Tanh", torch.tanh, (X,), "Tanh TanhBackward"),
    Case("Sigmoid", torch.sigmoid, (X,), "Sigmoid SigmoidBackward"),
    Case("Relu", F.relu, (X,), "Relu ThresholdBackward"),
    Case("Silu", F.silu, (X,), "Silu SiluBackward"),
    Case("Gelu", lambda x: F.gelu(x, approximate="tanh"), (X,), "Gelu GeluBackward"),
    Case("Mish", F.mish, (X,), "Mish MishBackward"),
    Case("LeakyRelu", lambda x: F.leaky_relu(x, 0.1), (X,), "LeakyRelu LeakyReluBackward"),
    Case("Elu", F.elu, (X,), "Elu EluBackward"),
    Case("Softplus", F.softplus, (X,), "Softplus SoftplusBackward"),
    Case("Hardtanh", F.hardtanh, (X,), "HardtanhBackward"),
    Case("Hardswish", F.hardswish, (X,), "Hardswish"),
    Case("Hardsigmoid", F.hardsigmoid, (X,), "Hardsigmoid HardsigmoidBackward"),
    Case("LogSigmoid", F.logsigmoid, (X,), "LogSigmoidForward LogSigmoidBackward"),
    Case("Glu", lambda x: F.glu(x, -1), (X,), "Glu GluBackward"),
    Case("Threshold", lambda x: F.threshold(x, 0.1, 2.0), (X,), "Threshold ThresholdBackward"),
    unary("LogicalNot", torch.logical_not, BOOLS, grad=False, dtypes=ONE),
    unary("BitwiseNot", torch.bitwise_not, INTS, grad=False, dtypes=ONE),
    unary("IsFinite", lambda x: torch.isfinite(x / (x > 0)), grad=False),
    unary("IsPosInf", lambda x: torch.isposinf(x / (x > 0)), grad=False),
    unary("IsNegInf", lambda x: torch.isneginf(x / (x > 0)), grad=False),
    unary("Signbit", torch.signbit, grad=False),
    unary("NanToNum", lambda x: torch.nan_to_num(x.log(), 1.0, 2.0, -3.0), grad=False),
    Case("isnan", lambda x: (torch.isnan(x.log()), torch.isinf(x)), (X,), "NeTensor", grad=False),
    *(
        inplace(f"Inplace{n}", f"{n.lower()}_", x=POSITIVE)
        for n in (
            "Sqrt",
            "Rsqrt",
            "Exp",
            "Log",
            "Log2",
            "Sin",
            "Cos",
            "Tanh",
            "Sigmoid",
            "Floor",
            "Ceil",
            "Relu",
            "Erf",
        )
    ),
    *(
        Case(f"Inplace{name}", lambda x, f=f: f(x.clone(), inplace=True), (X,), f"Inplace{name}", grad=False)
        for name, f in {
            "LeakyRelu": F.leaky_relu,
            "Elu": F.elu,
            "Hardtanh": F.hardtanh,
            "Hardswish": F.hardswish,
            "Mish": F.mish,
            "Hardsigmoid": F.hardsigmoid,
        }.items()
    ),
    Case("InplaceNanToNum", lambda x: x.log().nan_to_num_(1.0, 2.0, 3.0), (X,), "InplaceNanToNum", grad=False),
    Case("in-place threshold", lambda x: F.threshold_(x.clone(), 0.1, 2.0), (X,), "InplaceThreshold", grad=False),
    inplace("InplaceReciprocal", "reciprocal_", x=POSITIVE),
]

BINARY = [
    Case("Add", lambda a, b: torch.add(a, b, alpha=2), (X, Y), "Add"),
    Case("Add broadcast", torch.add, (X, ROW), "Add ReduceSum"),
    Case("Adds", lambda a: a + 1.5, (X,), "Adds"),
    Case("Sub", lambda a, b: torch.sub(a, b, alpha=3), (X, Y), "Sub"),
    Case("Subs", lambda a: a - 0.25, (X,), "Subs"),
    Case("Rsubs", lambda a: 2 - a, (X,), "Rsubs"),
    Case("Mul", torch.mul, (X, Y), "Mul"),
    Case("Muls", lambda a: a * 3, (X,), "Muls"),
    Case("Div", torch.div, (X, POSITIVE), "Div"),
    Case("Divs", lambda a: a / 3, (X,), "Divs"),
    Case(
        "DivMod", lambda a, b: torch.div(a, b, rounding_mode="floor"), (X, POSITIVE), "DivMod", grad=False, dtypes=ONE
    ),
    Case("DivMods", lambda a: torch.div(a, 2, rounding_mode="trunc"), (INTS,), "DivMods", grad=False, dtypes=ONE),
    Case("FloorDivide", lambda a, b: a // b, (INTS, SMALL), "FloorDivide", grad=False, dtypes=ONE),
    Case("FloorDivides", lambda a: a // 2, (INTS,), "FloorDivides", grad=False, dtypes=ONE),
    Case("int and float", lambda a: (a * 2, a / 4, a + 0.5, a % 3), (INTS,), "Muls Divs Adds", grad=False, dtypes=ONE),
    Case(
        "Remainder",
        lambda a, b: (a % b, a % 3),
        (INTS, SMALL),
        "RemainderTensorTensor RemainderTensorScalar",
        False,
        ONE,
    ),
    Case("RemainderScalarTensor", lambda a: torch.remainder(7, a), (SMALL,), "RemainderScalarTensor", False, ONE),
    Case("Fmod", lambda a, b: (torch.fmod(a, b), torch.fmod(a, 3)), (INTS, SMALL), "FmodTensor FmodScalar", False, ONE),
    Case("PowTensorScalar", lambda a: a**2, (X,), "PowTensorScalar"),
    Case("PowTensorTensor", torch.pow, (POSITIVE, Y), "PowTensorTensor"),
    Case("PowScalarTensor", lambda a: 2.0**a, (X,), "PowScalarTensor"),
    Case("Maximum", torch.maximum, (X, Y), "Maximum", grad=False),
    Case("Minimum", torch.minimum, (X, Y), "Minimum", grad=False),
    Case("Atan2", torch.atan2, (X, Y), "Atan2", grad=False),
    Case("LogAddExp", torch.logaddexp, (X, Y), "LogAddExp", grad=False),
    Case("LogAddExp2", torch.logaddexp2, (X, Y), "LogAddExp2", grad=False),
    Case("XLogY", lambda a, b: torch.special.xlogy(a, b), (X, POSITIVE), "XLogYTensor", grad=False),
    Case("Lerp", torch.lerp, (X, Y, UNIT), "Lerp", grad=False),
    Case("Lerps", lambda a, b: a.lerp(b, 0.3), (X, Y), "Lerps", grad=False),
    Case("Addcmul", lambda a, b, c: torch.addcmul(a, b, c, value=0.5), (X, Y, Z), "Addcmul"),
    Case("Addcdiv", lambda a, b, c: torch.addcdiv(a, b, c, value=0.5), (X, Y, POSITIVE), "Addcdiv"),
    Case("Clamp", lambda a: a.clamp(-0.5, 0.5), (X,), "Clamp"),
    Case("ClampMin", lambda a: a.clamp_min(0.1), (X,), "ClampMin"),
    Case("ClampMax", lambda a: a.clamp_max(0.1), (X,), "ClampMax", grad=False),
    Case("ClampTensor", lambda a, b: torch.clamp(a, min=-b, max=b), (X, POSITIVE), "ClampTensor", grad=False),
    Case("ClampMinTensor", lambda a, b: torch.clamp_min(a, b), (X, Y), "ClampMinTensor", grad=False),
    Case("ClampMaxTensor", lambda a, b: torch.clamp_max(a, b), (X, Y), "ClampMaxTensor", grad=False),
    Case("SWhere", lambda a, b: torch.where(a > b, a, b), (X, Y), "SWhere GtTensor"),
    Case(
        "compare tensors",
        lambda a, b: (a == b, a != b, a < b, a <= b, a > b, a >= b),
        (X, Y),
        "EqTensor NeTensor LtTensor LeTensor GtTensor GeTensor",
        grad=False,
    ),
    Case(
        "compare scalars",
        lambda a: (a == 0, a != 0, a < 0, a <= 0, a > 0, a >= 0),
        (X,),
        "EqScalar NeScalar LtScalar LeScalar GtScalar GeScalar",
        grad=False,
    ),
    Case(
        "compare in place",
        lambda a, b: (a.clone().eq_(b), a.clone().gt_(0), a.clone().le_(b)),
        (X, Y),
        "InplaceEqTensor InplaceGtScalar InplaceLeTensor",
        grad=False,
    ),
    Case(
        "bits",
        lambda a, b: (a & b, a | b, a ^ b, a & 3, a | 1, a ^ 2),
        (INTS, SMALL),
        "BitwiseAndTensor BitwiseOrTensor BitwiseXorTensor BitwiseAndScalar BitwiseOrScalar BitwiseXorScalar",
        False,
        ONE,
    ),
    Case(
        "logic",
        lambda a, b: (a.logical_and(b), a.logical_or(b), a.logical_xor(b)),
        (BOOLS, OTHER_BOOLS),
        "LogicalAnd LogicalOr LogicalXor",
        False,
        ONE,
    ),
    Case(
        "logic in place",
        lambda a, b: (a.clone().logical_and_(b), a.clone().logical_or_(b)),
        (BOOLS, OTHER_BOOLS),
        "InplaceLogicalAnd InplaceLogicalOr",
        False,
        ONE,
    ),
    Case("IsClose", lambda a, b: (torch.isclose(a, b), torch.isclose(a, a)), (X, Y), "IsClose", grad=False),
    Case(
        "Equal", lambda a, b: (torch.tensor(torch.equal(a, b)), torch.tensor(torch.equal(a, a))), (X, Y), "Equal", False
    ),
    inplace("InplaceAdd", "add_", Y),
    inplace("InplaceAdds", "add_", 2.5),
    inplace("InplaceSub", "sub_", Y),
    inplace("InplaceSubs", "sub_", 2.5),
    inplace("InplaceMul", "mul_", Y),
    inplace("InplaceMuls", "mul_", 2.5),
    inplace("InplaceDiv", "div_", POSITIVE),
    inplace("InplaceDivs", "div_", 2.5),
    inplace("InplaceLerps", "lerp_", Y, 0.2),
    inplace("InplaceLerp", "lerp_", Y, UNIT),
    inplace("InplaceAddcmul", "addcmul_", Y, Z),
    inplace("InplaceAddcdiv", "addcdiv_", Y, POSITIVE),
    inplace("InplacePowTensorScalar", "pow_", 2),
    inplace("InplaceClampMax", "clamp_max_", 0.1),
]

REDUCE = [
    Case("ReduceSum", lambda x: (x.sum(), x.sum(-1), x.sum((0, 2), keepdim=True)), (X,), "ReduceSum"),
    Case("Mean", lambda x: (x.mean(), x.mean(1), x.mean((0, 1), keepdim=True)), (X,), "Mean"),
    Case("Prod", lambda x: x.prod(), (POSITIVE[0, :, :2],), "Prod", grad=False, loose=4),
    Case("ProdDim", lambda x: x.prod(-1), (POSITIVE[0],), "ProdDim", grad=False, loose=4),
    Case("Max", lambda x: x.max(), (distinct(4, 8),), "Max", grad=False),
    Case("Min", lambda x: x.min(), (distinct(4, 8),), "Min", grad=False),
    Case("MaxDim", lambda x: tuple(x.max(-1)), (distinct(4, 8),), "MaxDim", grad=False),
    Case("MinDim", lambda x: tuple(x.min(0)), (distinct(4, 8),), "MinDim", grad=False),
    Case("Amax", lambda x: x.amax(-1), (distinct(4, 8),), "Amax"),
    Case("Amin", lambda x: x.amin((0, 1)), (distinct(4, 8),), "Amin", grad=False),
    Case("ArgMax", lambda x: (x.argmax(), x.argmax(-1), x.argmax(0, keepdim=True)), (distinct(4, 8),), "ArgMax", False),
    Case("ArgMin", lambda x: (x.argmin(), x.argmin(-1)), (distinct(4, 8),), "ArgMin", grad=False),
    Case("AnyAll", lambda x: ((x > 0).any(), (x > 0).all(-1), (x > -9).all(), (x > 2).any(0)), (X,), "Any All", False),
    Case(
        "LinalgVectorNorm",
        lambda x: (torch.linalg.vector_norm(x), torch.linalg.vector_norm(x, 1, -1)),
        (X,),
        "LinalgVectorNorm",
        grad=False,
    ),
    Case("norm", lambda x: x.norm(), (X,), "LinalgVectorNorm"),
    Case("LogSumExp", lambda x: x.logsumexp(-1), (X,), "LogSumExp"),
    Case("Var", lambda x: (x.var(-1), x.std(-1)), (X,), "VarCorrection Std", grad=False),
    Case("VarMean", lambda x: torch.var_mean(x, -1), (X,), "VarMean", grad=False),
    Case("Cumsum", lambda x: x.cumsum(-1), (X,), "Cumsum"),
    Case("Cumsum int", lambda x: (x.cumsum(0), x.sum()), (INTS,), "Cumsum ReduceSum", False, ONE),
    Case("Cumprod", lambda x: x.cumprod(-1), (UNIT,), "Cumprod", grad=False, loose=4),
    Case("Cummax", lambda x: tuple(x.cummax(-1)), (distinct(3, 8),), "Cummax", grad=False),
    Case("Cummin", lambda x: tuple(x.cummin(-1)), (distinct(3, 8),), "Cummin", grad=False),
    Case("Bincount", lambda x: torch.bincount(x), (torch.tensor([1, 4, 1, 0]),), "Bincount", False, ONE),
    Case("Histc", lambda x: torch.histc(x, 4, -1, 1), (UNIT,), "Histc", False, ONE),
    Case("Trace", lambda x: torch.trace(x), (X[0, :, :3],), "Trace", False, ONE),
]

CASES = [*UNARY, *BINARY, *REDUCE]
