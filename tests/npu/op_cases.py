"""A row per operator case: elementwise operators and reductions. Run by test_ops_all.py:

    python -m cannsim run -- pytest tests/npu/test_ops_all.py

A case is run on the NPU in every dtype it lists, and once on the CPU in float32 on the same rounded
inputs; outputs and gradients must agree, and the named aclnn operators must have been launched.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

try:
    import torch_npu
except ImportError:  # the tests of this folder are skipped then
    torch_npu = None

FLOATS = ("float32", "float16", "bfloat16")
ONE = ("float32",)


@dataclass(frozen=True)
class Case:
    name: str
    run: Callable[..., Any]  # tensors -> tensor or tuple of tensors
    inputs: tuple[Any, ...]  # on the CPU; floating tensors are cast to the dtype of the test
    launches: str = ""  # aclnn operators that must run, without the prefix; else the one that the case is named after
    grad: bool = True
    dtypes: tuple[str, ...] = FLOATS
    reference: Callable[..., Any] | None = None  # what the CPU computes, if not `run`
    loose: float = 1.0  # factor on the tolerance


def forward(name: str, run: Callable[..., Any], inputs: tuple[Any, ...], launches: str = "", **more: Any) -> Case:
    """Without a gradient."""
    return Case(name, run, inputs, launches, grad=False, **more)


def once(name: str, run: Callable[..., Any], inputs: tuple[Any, ...], launches: str = "", **more: Any) -> Case:
    """Without a gradient, and where there are floating tensors, in float32."""
    return Case(name, run, inputs, launches, grad=False, dtypes=ONE, **more)


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
INSIDE = UNIT.abs() * 0.9 + 0.05  # in (0, 1)
ROW = randn(8, seed=4)
INTS = torch.tensor([[5, -3, 7], [2, 9, -8]])
SMALL = torch.tensor([[1, 2, 3], [4, 5, 6]])
BOOLS, OTHER_BOOLS = X > 0, Y > 0.3
ORDERED = distinct(4, 8)
SEVENTH = 2 * math.pi / 7  # rounded to half precision it is 0.89746, and six of them differ in the third digit


def unary(names: str, x: torch.Tensor = X, **more: Any) -> list[Case]:
    """torch's functions whose names are CANN's in lower case."""
    return [Case(name, getattr(torch, name.lower()), (x,), **more) for name in names.split()]


def inplace(name: str, method: str, *arguments: Any, x: torch.Tensor = X, **more: Any) -> Case:
    """x.clone().method_(...)"""
    return forward(name, lambda x, *a: getattr(x.clone(), method)(*a), (x, *arguments), **more)


UNARY = [
    *unary("Abs Neg Exp Expm1 Sin Cos Asinh"),
    *unary("Reciprocal Sqrt Rsqrt Log Log2 Log10 Log1p Sinc", POSITIVE),
    *unary("Sign Exp2 Atan Sinh Cosh Erf Erfc Floor Ceil Round Trunc Signbit", grad=False),
    *unary("Tan Asin Acos", UNIT, grad=False),
    *unary("Erfinv", UNIT, grad=False, loose=3),
    *unary("Frac", grad=False, loose=8),
    *unary("Acosh", POSITIVE + 1),
    *unary("Atanh", UNIT, loose=4),
    *(Case(name, run, (X,), f"{name} {name}Backward") for name, run in {
        "Tanh": torch.tanh, "Sigmoid": torch.sigmoid, "Silu": F.silu, "Mish": F.mish, "Elu": F.elu,
        "Softplus": F.softplus, "Hardsigmoid": F.hardsigmoid, "Glu": F.glu,
        "Gelu": lambda x: F.gelu(x, approximate="tanh"), "LeakyRelu": lambda x: F.leaky_relu(x, 0.1),
        "Threshold": lambda x: F.threshold(x, 0.1, 2.0), "Hardshrink": lambda x: F.hardshrink(x, 0.3),
        "Softshrink": lambda x: F.softshrink(x, 0.3),
    }.items()),
    Case("Relu", F.relu, (X,), "Relu ThresholdBackward"),
    Case("Hardtanh", F.hardtanh, (X,), "HardtanhBackward"),
    Case("Hardswish", F.hardswish, (X,)),
    Case("LogSigmoid", F.logsigmoid, (X,), "LogSigmoidForward LogSigmoidBackward"),
    Case("Celu", lambda x: F.celu(x, 0.7), (X,)),
    forward("RReluWithNoise", lambda x: F.rrelu(x, 0.1, 0.3), (X,)),
    once("LogicalNot", torch.logical_not, (BOOLS,)),
    once("InplaceLogicalNot", lambda x: x.clone().logical_not_(), (BOOLS,)),
    once("BitwiseNot", torch.bitwise_not, (INTS,)),
    once("RoundDecimals", lambda x: torch.round(x, decimals=1), (X,)),
    once("AngleV2", torch.angle, (X,)),
    forward("IsFinite", lambda x: torch.isfinite(x / (x > 0)), (X,)),
    forward("IsPosInf", lambda x: torch.isposinf(x / (x > 0)), (X,)),
    forward("IsNegInf", lambda x: torch.isneginf(x / (x > 0)), (X,)),
    forward("NanToNum", lambda x: torch.nan_to_num(x.log(), 1.0, 2.0, -3.0), (X,)),
    forward("isnan", lambda x: (torch.isnan(x.log()), torch.isinf(x)), (X,), "NeTensor"),
    once("Hardsigmoid of integers", lambda x: (F.hardsigmoid(x), F.hardsigmoid(x.clone(), inplace=True)),
         (torch.arange(-5, 6, dtype=torch.int32),), "Hardsigmoid InplaceHardsigmoid",
         reference=lambda x: 2 * [F.hardsigmoid(x.float()).int()]),
]  # fmt: skip

UNARY_IN_PLACE = [
    *(inplace(f"Inplace{name}", f"{name.lower()}_", x=POSITIVE)
      for name in "Sqrt Rsqrt Exp Log Log2 Sin Cos Tanh Sigmoid Floor Ceil Relu Erf Reciprocal".split()),
    *(inplace(f"Inplace{name}", f"{name.lower()}_", x=INSIDE)
      for name in "Exp2 Expm1 Log10 Log1p Tan Asin Acos Atan Sinh Cosh Erfc Frac Asinh Atanh Sinc".split()),
    inplace("InplaceAcosh", "acosh_", x=POSITIVE + 1),
    *(forward(f"Inplace{name}", lambda x, run=run: run(x.clone(), inplace=True), (X,)) for name, run in {
        "LeakyRelu": F.leaky_relu, "Elu": F.elu, "Celu": F.celu, "Hardtanh": F.hardtanh, "Hardswish": F.hardswish,
        "Mish": F.mish, "Hardsigmoid": F.hardsigmoid,
    }.items()),
    forward("InplaceNanToNum", lambda x: x.log().nan_to_num_(1.0, 2.0, 3.0), (X,)),
    forward("InplaceThreshold", lambda x: F.threshold_(x.clone(), 0.1, 2.0), (X,)),
]  # fmt: skip

BINARY = [
    Case("Add", lambda a, b: torch.add(a, b, alpha=2), (X, Y)),
    Case("Add broadcast", torch.add, (X, ROW), "Add ReduceSum"),
    Case("Adds", lambda a: a + 1.5, (X,)),
    Case("Sub", lambda a, b: torch.sub(a, b, alpha=3), (X, Y)),
    Case("Subs", lambda a: a - 0.25, (X,)),
    Case("Rsubs", lambda a: 2 - a, (X,)),
    forward("Rsub", torch.rsub, (X, Y)),
    Case("Mul", torch.mul, (X, Y)),
    Case("Muls", lambda a: a * 3, (X,)),
    Case("Div", torch.div, (X, POSITIVE)),
    Case("Divs", lambda a: a / 3, (X,)),
    *(forward(f"{name} rounds its factor", lambda x, method=method: getattr(x.clone(), method)(SEVENTH),
              (torch.arange(64.0),), name, dtypes=("float16",), loose=0,
              reference=lambda x: (x * torch.tensor(SEVENTH).half().float()).half())
      for name, method in {"Muls": "mul", "InplaceMuls": "mul_"}.items()),
    once("DivMod", lambda a, b: torch.div(a, b, rounding_mode="floor"), (X, POSITIVE)),
    once("DivMods", lambda a: torch.div(a, 2, rounding_mode="trunc"), (INTS,)),
    once("FloorDivide", lambda a, b: a // b, (INTS, SMALL)),
    once("FloorDivides", lambda a: a // 2, (INTS,)),
    once("int and float", lambda a: (a * 2, a / 4, a + 0.5, a % 3), (INTS,), "Muls Divs Adds"),
    once("Remainder", lambda a, b: (a % b, a % 3), (INTS, SMALL), "RemainderTensorTensor RemainderTensorScalar"),
    once("RemainderScalarTensor", lambda a: torch.remainder(7, a), (SMALL,)),
    once("Fmod", lambda a, b: (torch.fmod(a, b), torch.fmod(a, 3)), (INTS, SMALL), "FmodTensor FmodScalar"),
    Case("PowTensorScalar", lambda a: a**2, (X,)),
    Case("PowTensorTensor", torch.pow, (POSITIVE, Y)),
    Case("PowScalarTensor", lambda a: 2.0**a, (X,)),
    *(forward(name, getattr(torch, name.lower()), (X, Y)) for name in ("Maximum", "Minimum", "Atan2", "LogAddExp",
                                                                       "LogAddExp2")),
    forward("XLogY", torch.special.xlogy, (X, POSITIVE), "XLogYTensor"),
    forward("XLogYScalarOther", lambda a: torch.special.xlogy(a, 2.0), (X,)),
    forward("XLogYScalarSelf", lambda a: torch.special.xlogy(2.0, a), (POSITIVE,)),
    forward("Lerp", torch.lerp, (X, Y, UNIT)),
    forward("Lerps", lambda a, b: a.lerp(b, 0.3), (X, Y)),
    Case("Addcmul", lambda a, b, c: torch.addcmul(a, b, c, value=0.5), (X, Y, Z)),
    Case("Addcdiv", lambda a, b, c: torch.addcdiv(a, b, c, value=0.5), (X, Y, POSITIVE)),
    Case("Clamp", lambda a: a.clamp(-0.5, 0.5), (X,)),
    Case("ClampMin", lambda a: a.clamp_min(0.1), (X,)),
    forward("ClampMax", lambda a: a.clamp_max(0.1), (X,)),
    forward("ClampTensor", lambda a, b: torch.clamp(a, min=-b, max=b), (X, POSITIVE)),
    forward("ClampMinTensor", torch.clamp_min, (X, Y)),
    forward("ClampMaxTensor", torch.clamp_max, (X, Y)),
    Case("SWhere", lambda a, b: torch.where(a > b, a, b), (X, Y), "SWhere GtTensor"),
    once("Polar", lambda a, b: torch.view_as_real(torch.polar(a, b)), (POSITIVE, X)),
    once("Gcd", torch.gcd, (torch.tensor([12, 18, 7]), torch.tensor([8, 27, 21]))),
    once("LeftShifts", lambda x: x << 2, (torch.tensor([1, 2, 3]),)),
    forward("LinalgCross", lambda x, y: torch.linalg.cross(x, y, dim=1), (X, Y)),
    forward("compare tensors", lambda a, b: (a == b, a != b, a < b, a <= b, a > b, a >= b), (X, Y),
            "EqTensor NeTensor LtTensor LeTensor GtTensor GeTensor"),
    forward("compare scalars", lambda a: (a == 0, a != 0, a < 0, a <= 0, a > 0, a >= 0), (X,),
            "EqScalar NeScalar LtScalar LeScalar GtScalar GeScalar"),
    once("bits", lambda a, b: (a & b, a | b, a ^ b, a & 3, a | 1, a ^ 2), (INTS, SMALL),
         "BitwiseAndTensor BitwiseOrTensor BitwiseXorTensor BitwiseAndScalar BitwiseOrScalar BitwiseXorScalar"),
    once("bits of booleans", lambda a, b: (a & b, a | b, a ^ b), (BOOLS, OTHER_BOOLS), "BitwiseAndTensor"),
    once("logic", lambda a, b: (a.logical_and(b), a.logical_or(b), a.logical_xor(b)), (BOOLS, OTHER_BOOLS),
         "LogicalAnd LogicalOr LogicalXor"),
    once("logic in place", lambda a, b: (a.clone().logical_and_(b), a.clone().logical_or_(b)), (BOOLS, OTHER_BOOLS),
         "InplaceLogicalAnd InplaceLogicalOr"),
    forward("IsClose", lambda a, b: (torch.isclose(a, b), torch.isclose(a, a)), (X, Y)),
    forward("Equal", lambda a, b: (torch.tensor(torch.equal(a, b)), torch.tensor(torch.equal(a, a))), (X, Y)),
]  # fmt: skip

BINARY_IN_PLACE = [
    *(inplace(f"Inplace{name}", *call) for name, call in {
        "Add": ("add_", Y), "Sub": ("sub_", Y), "Mul": ("mul_", Y), "Div": ("div_", POSITIVE),
        "Adds": ("add_", 2.5), "Subs": ("sub_", 2.5), "Muls": ("mul_", 2.5), "Divs": ("div_", 2.5),
        "Lerp": ("lerp_", Y, UNIT), "Lerps": ("lerp_", Y, 0.2), "Atan2": ("atan2_", Y),
        "Addcmul": ("addcmul_", Y, Z), "Addcdiv": ("addcdiv_", Y, POSITIVE), "PowTensorScalar": ("pow_", 2),
        "ClampMax": ("clamp_max_", 0.1), "ClampMinTensor": ("clamp_min_", Y), "ClampMaxTensor": ("clamp_max_", Y),
        "XLogYScalarOther": ("xlogy_", 1.5), "Renorm": ("renorm_", 2, 1, 0.5),
        "EqTensor": ("eq_", Y), "NeTensor": ("ne_", Y), "LtTensor": ("lt_", Y),
        "LeTensor": ("le_", Y), "GtTensor": ("gt_", Y), "GeTensor": ("ge_", Y),
        "EqScalar": ("eq_", 0), "NeScalar": ("ne_", 0), "LtScalar": ("lt_", 0),
        "LeScalar": ("le_", 0), "GtScalar": ("gt_", 0), "GeScalar": ("ge_", 0),
    }.items()),
    inplace("InplacePowTensorTensor", "pow_", Y, x=POSITIVE),
    *(once(f"Inplace{name}", lambda x, a, method=method: getattr(x.clone(), method)(a), (INTS, other))
      for name, (method, other) in {
        "BitwiseAndTensor": ("bitwise_and_", SMALL), "BitwiseXorTensor": ("bitwise_xor_", SMALL),
        "BitwiseAndScalar": ("bitwise_and_", 3), "BitwiseXorScalar": ("bitwise_xor_", 3),
        "FloorDivide": ("floor_divide_", SMALL), "FloorDivides": ("floor_divide_", 2),
        "RemainderTensorTensor": ("remainder_", SMALL), "RemainderTensorScalar": ("remainder_", 3),
        "FmodTensor": ("fmod_", SMALL), "FmodScalar": ("fmod_", 3),
    }.items()),
    once("division in place",
         lambda a, b: (a.clone().div_(b, rounding_mode="floor"), a.clone().div_(2, rounding_mode="trunc")),
         (INTS, SMALL), "InplaceDivMod InplaceDivMods"),
]  # fmt: skip

REDUCE = [
    Case("ReduceSum", lambda x: (x.sum(), x.sum(-1), x.sum((0, 2), keepdim=True)), (X,)),
    forward("ReduceNansum", lambda x: torch.nansum(torch.where(x > 1, x / 0 * 0, x), 1), (X,)),
    Case("Mean", lambda x: (x.mean(), x.mean(1), x.mean((0, 1), keepdim=True)), (X,)),
    forward("Prod", lambda x: x.prod(), (POSITIVE[0, :, :2],), loose=4),
    forward("ProdDim", lambda x: x.prod(-1), (POSITIVE[0],), loose=4),
    forward("Max", lambda x: x.max(), (ORDERED,)),
    forward("Min", lambda x: x.min(), (ORDERED,)),
    forward("MaxDim", lambda x: tuple(x.max(-1)), (ORDERED,)),
    forward("MinDim", lambda x: tuple(x.min(0)), (ORDERED,)),
    forward("Aminmax", lambda x: tuple(torch.aminmax(x, dim=1)), (X,)),
    Case("Amax", lambda x: x.amax(-1), (ORDERED,)),
    forward("Amin", lambda x: x.amin((0, 1)), (ORDERED,)),
    forward("ArgMax", lambda x: (x.argmax(), x.argmax(-1), x.argmax(0, keepdim=True)), (ORDERED,)),
    forward("ArgMin", lambda x: (x.argmin(), x.argmin(-1)), (ORDERED,)),
    forward("AnyAll", lambda x: ((x > 0).any(), (x > 0).all(-1), (x > -9).all(), (x > 2).any(0)), (X,), "Any All"),
    forward("LinalgVectorNorm", lambda x: (torch.linalg.vector_norm(x), torch.linalg.vector_norm(x, 1, -1)), (X,)),
    Case("norm", lambda x: x.norm(), (X,), "LinalgVectorNorm"),
    Case("LogSumExp", lambda x: x.logsumexp(-1), (X,)),
    forward("Var", lambda x: (x.var(-1), x.std(-1)), (X,), "VarCorrection Std"),
    forward("VarMean", lambda x: torch.var_mean(x, -1), (X,)),
    forward("StdMeanCorrection", lambda x: torch.std_mean(x, -1), (X,)),
    forward("other corrections",
            lambda x: [*(torch.var(x, -1, correction=c) for c in (0, 3)),
                       *(torch.std(x, -1, correction=c) for c in (0, 3)),
                       *torch.std_mean(x, -1, correction=-3), *torch.var_mean(x, -1, correction=4)],
            (X,), "VarCorrection Std StdMeanCorrection VarMean"),
    Case("Cumsum", lambda x: x.cumsum(-1), (X,)),
    once("Cumsum int", lambda x: (x.cumsum(0), x.sum()), (INTS,), "Cumsum ReduceSum"),
    forward("Cumprod", lambda x: x.cumprod(-1), (UNIT,), loose=4),
    forward("Cummax", lambda x: tuple(x.cummax(-1)), (ORDERED,)),
    forward("Cummin", lambda x: tuple(x.cummin(-1)), (ORDERED,)),
    once("Bincount", torch.bincount, (torch.tensor([1, 4, 1, 0]),)),
    once("Histc", lambda x: torch.histc(x, 4, -1, 1), (UNIT,)),
    once("Trace", torch.trace, (X[0, :, :3],)),
    forward("NanMedian", lambda x: x.nanmedian(), (distinct(3, 5),)),
    forward("NanMedianDim", lambda x: tuple(x.nanmedian(1)), (distinct(3, 5),)),
    forward("Renorm", lambda x: torch.renorm(x, 2, 1, 0.5), (X,)),
    once("Renorm of counts", lambda x: torch.renorm(x, 0, 0, 5), (X,), "Renorm",
         reference=lambda x: x * 5 / 24),
]  # fmt: skip

CASES = [*UNARY, *UNARY_IN_PLACE, *BINARY, *BINARY_IN_PLACE, *REDUCE]
