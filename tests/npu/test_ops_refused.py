"""What the real operator library refuses is refused here, with the documented code and words.

python -m cannsim run -- pytest tests/npu/test_ops_refused.py

An operator that is refused leaves torch_npu's queue in an error state, so each case is a program of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

HEAD = """
import torch, torch_npu, torch.nn.functional as F
torch.npu.set_compile_mode(jit_compile=False)  # old chips would take the older operators
x = torch.randn(4, 6).npu()
def refused(run, *texts):
    try:
        run()
        torch.npu.synchronize()
    except RuntimeError as error:
        missing = [text for text in texts if text not in str(error)]
        assert not missing, f"{missing} not in: {error}"
        return
    raise AssertionError("was accepted")
def attention(*, q=(1, 2, 8, 16), k=(1, 2, 8, 16), dtype=torch.float16, heads=2, layout="BNSD", **more):
    query, key = (torch.randn(*shape).to(dtype).npu() for shape in (q, k))
    return torch_npu.npu_fusion_attention(query, key, key.clone(), heads, layout, scale=0.25, **more)[0]
def mask(*shape):
    return torch.ones(*shape, dtype=torch.bool).triu(1).npu()
"""

CASES = {
    "sink of attention": (
        "q, sink = torch.randn(1, 2, 1, 16).half().npu(), torch.zeros(2).half().npu(); "
        "refused(lambda: torch_npu.npu_fused_infer_attention_score_v2(q, q, q, num_query_heads=2, input_layout='BNSD', "
        "learnable_sink=sink), '161002', 'learnableSink')"
    ),
    "padding on the left": (
        "q = torch.randn(1, 2, 1, 16).half().npu(); refused(lambda: torch_npu.npu_fused_infer_attention_score(q, q, q, "
        "num_heads=2, input_layout='BNSD', actual_seq_lengths_kv=[1], "
        "kv_padding_size=torch.tensor([1]).npu()), '161002', 'kvPaddingSize')"
    ),
    "empty kernel of a convolution": (
        "x, w = torch.zeros(1, 1, 1, 1, 1).half().npu(), torch.zeros(1, 1, 0, 1, 1).half().npu(); "
        "refused(lambda: torch.nn.functional.conv_transpose3d(x, w), '161002', 'a kernel that is not empty')"
    ),
    "lerp in place that would grow": (
        "x, y = torch.ones(2, 1).npu(), torch.ones(2, 6).npu(); "
        "refused(lambda: x.lerp_(y, 0.5), '161002', 'must match the size of tensor selfRef [2,1]')"
    ),
    "float into int": (
        "i = torch.ones(4, dtype=torch.int32).npu(); refused(lambda: i.add_(torch.ones(4).npu()), '161002', "
        '"can\'t be cast to the desired output type DT_INT32")'
    ),
    "float64 matmul": (
        "d = torch.zeros(4, 4, dtype=torch.float64).npu(); "
        "refused(lambda: torch.mm(d, d), '161002', 'DT_DOUBLE', "
        "'should be in dtype support list [DT_FLOAT,DT_FLOAT16,DT_BFLOAT16]')"
    ),
    "integer matmul": (
        "i = torch.ones(4, 4, dtype=torch.int32).npu(); refused(lambda: torch.mm(i, i), '161002', 'DT_INT32')"
    ),
    "float64 sigmoid": (
        "d = torch.zeros(4, dtype=torch.float64).npu(); refused(lambda: torch.sigmoid(d), '161002', 'DT_DOUBLE')"
    ),
    "compressed mask of the wrong shape": (
        "refused(lambda: attention(atten_mask=mask(8, 8), sparse_mode=3), '161002', 'aclnnFlashAttentionScore', "
        "'The shape of attenMask should be [2048,2048] when sparseMode is 3, but found [8,8]')"
    ),
    "full mask of the wrong shape": (
        "refused(lambda: attention(atten_mask=mask(8, 9), sparse_mode=1), '161002', '[1,2,8,8]', 'but found [8,9]')"
    ),
    "mask of the wrong dtype": (
        "refused(lambda: attention(atten_mask=torch.zeros(8, 8).npu()), '161002', 'attenMask', 'DT_FLOAT')"
    ),
    "heads not a multiple": "refused(lambda: attention(q=(1, 3, 8, 16), heads=3), '161002', 'should be a multiple')",
    "wrong head number": "refused(lambda: attention(heads=4), '161002', 'should equal headNum 4')",
    "different head dimension": "refused(lambda: attention(k=(1, 2, 8, 32)), '161002', 'Head dimension of key')",
    "different batch": "refused(lambda: attention(k=(2, 2, 8, 16)), '161002', 'batch size')",
    "packed lengths that do not end at T": (
        "refused(lambda: attention(q=(8, 2, 16), k=(8, 2, 16), layout='TND', "
        "actual_seq_qlen=[3, 7], actual_seq_kvlen=[3, 8]), "
        "'161002', 'should equal T, 8')"
    ),
    "mixed dtypes": (
        "q = torch.randn(1, 2, 8, 16).npu(); "
        "refused(lambda: torch_npu.npu_fusion_attention(q.half(), q, q, 2, 'BNSD')[0], "
        "'161002', 'same dtype')"
    ),
    "float32 inference attention": (
        "q = torch.randn(1, 2, 1, 16).npu(); refused(lambda: torch_npu.npu_incre_flash_attention(q, q, q, num_heads=2, "
        "input_layout='BNSD'), '161002', 'DT_FLOAT')"
    ),
    "unaligned inference head": (
        "q = torch.randn(1, 2, 1, 12).half().npu(); refused(lambda: torch_npu.npu_fused_infer_attention_score(q, q, q, "
        "num_heads=2, input_layout='BNSD'), '161002', '16-byte aligned')"
    ),
    "strided inference key": (
        "q = torch.randn(1, 2, 1, 16).half().npu(); k = torch.randn(1, 4, 2, 16).half().npu().transpose(1, 2); "
        "refused(lambda: torch_npu.npu_fused_infer_attention_score(q, k, k, num_heads=2, input_layout='BNSD'), "
        "'161002', 'must be contiguous')"
    ),
    "page size": (
        "q = torch.randn(1, 1, 32).half().npu(); c = torch.zeros(2, 20, 32).half().npu(); "
        "refused(lambda: torch_npu.npu_fused_infer_attention_score(q, c, c, num_heads=2, input_layout='BSH', "
        "block_size=20, "
        "block_table=torch.zeros(1, 1, dtype=torch.int32).npu(), actual_seq_lengths_kv=[3]), '161002', 'blockSize')"
    ),
    "gamma of the wrong shape": (
        "refused(lambda: torch_npu.npu_rms_norm(x, torch.ones(4).npu()), '161002', 'aclnnRmsNorm', 'gamma [4]')"
    ),
    "gamma of the wrong dtype": (
        "refused(lambda: torch_npu.npu_rms_norm(x, torch.ones(6).half().npu()), '161002', 'gamma', 'DT_FLOAT16')"
    ),
    "odd rotary dimension": (
        "q = torch.randn(1, 2, 3, 7).npu(); c = torch.randn(1, 2, 1, 7).npu(); "
        "refused(lambda: torch_npu.npu_rotary_mul(q, c, c), '161002', 'must be even')"
    ),
    "odd swiglu": "refused(lambda: torch_npu.npu_swiglu(torch.randn(2, 5).npu()), '161002', 'must be even')",
    "z-loss": (
        "t = torch.tensor([1, 2, 3, 0]).npu(); refused(lambda: torch_npu.npu_cross_entropy_loss(x, t, "
        "lse_square_scale_for_zloss=0.1), '161002', 'lseSquareScaleForZloss')"
    ),
    "top-k larger than the dimension": "refused(lambda: x.topk(7, -1), '7')",
    "multinomial without enough choices": "refused(lambda: torch.multinomial(x.abs(), 7), 'numsamples', '161002')",
    "foreach dtypes": (
        "l = [torch.zeros(3, dtype=torch.float64).npu()]; refused(lambda: torch_npu.npu.synchronize() or "
        "torch.ops.aten._foreach_norm(l), 'DT_DOUBLE')"
    ),
    "index out of range fails on the device": (
        "t = torch.randn(4, 6).npu(); refused(lambda: F.embedding(torch.tensor([4]).npu(), t).cpu(), '507015')"
    ),
    "label out of range fails on the device": (
        "refused(lambda: F.cross_entropy(x, torch.tensor([1, 2, 6, 0]).npu()).cpu(), '507015')"
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_is_refused_with_the_documented_text(case: str, on_npu: Callable[..., list[object]]) -> None:
    on_npu(HEAD + CASES[case], ASCEND_LAUNCH_BLOCKING=1)


@pytest.mark.parametrize("chip", ["Ascend910A", "Ascend310P3"])
def test_bfloat16_is_refused_on_chips_without_it(chip: str, on_npu: Callable[..., list[object]]) -> None:
    code = """
b = torch.ones(4, 4, dtype=torch.bfloat16).npu()
refused(lambda: b + b, '161002', 'not implemented for DT_BFLOAT16', 'dtype support list [DT_FLOAT,DT_FLOAT16')
"""
    on_npu(HEAD + code, chip=chip, ASCEND_LAUNCH_BLOCKING=1)


def test_half_saturates_on_chips_without_infinity(on_npu: Callable[..., list[object]]) -> None:
    code = """
h = torch.tensor([60000.0, -60000.0, 1.0]).half().npu()
assert (h * 2).tolist() == [65504.0, -65504.0, 2.0], (h * 2).tolist()
"""
    on_npu(HEAD + code, chip="Ascend910A")


def test_half_overflows_to_infinity_on_newer_chips(on_npu: Callable[..., list[object]]) -> None:
    on_npu(HEAD + "assert (torch.tensor([60000.0]).half().npu() * 2).isinf().all()")


def test_null_arguments_are_refused(on_npu: Callable[..., list[object]]) -> None:
    code = """
import ctypes
library, size, executor = ctypes.CDLL('libopapi.so'), ctypes.c_uint64(), ctypes.c_void_p()
assert library.aclnnAbsGetWorkspaceSize(None, None, ctypes.byref(size), ctypes.byref(executor)) == 161001
text = ctypes.CDLL('libascendcl.so').aclGetRecentErrMsg
text.restype = ctypes.c_char_p
assert b'Expected a value for argument [self] but instead found nullptr' in text()
"""
    on_npu(HEAD + code)


def test_missing_mask_means_full_attention(on_npu: Callable[..., list[object]]) -> None:
    """Documented: without atten_mask the sparse mode has no effect. Silently not causal."""
    code = """
q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
found = torch_npu.npu_fusion_attention(q.npu(), k.npu(), v.npu(), 2, 'BNSD', scale=0.25, sparse_mode=3)[0].cpu()
torch.testing.assert_close(found, torch.softmax(q @ k.mT * 0.25, -1) @ v, rtol=1e-4, atol=1e-5)
"""
    on_npu(HEAD + code)
