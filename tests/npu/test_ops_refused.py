"""What the real operator library refuses is refused here, with the documented code and words.

An operator that is refused leaves torch_npu's queue in an error state, so each case is a program of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

HEAD = """
import torch, torch_npu, torch.nn.functional as F
torch.npu.set_compile_mode(jit_compile=False)  # old chips would take the older operators
x = torch.randn(4, 6).npu()
def fails(run, *texts):
    try:
        run()
        torch.npu.synchronize()
    except RuntimeError as error:
        missing = [text for text in texts if text not in str(error)]
        assert not missing, f"{missing} not in: {error}"
        return
    raise AssertionError("was accepted")
def refused(run, *texts):
    fails(run, "161002", *texts)
def half(*shape):
    return torch.randn(*shape).half().npu()
def zeros(*shape, dtype):
    return torch.zeros(*shape, dtype=dtype).npu()
def attention(*, q=(1, 2, 8, 16), k=(1, 2, 8, 16), dtype=torch.float16, heads=2, layout="BNSD", **more):
    query, key = (torch.randn(*shape).to(dtype).npu() for shape in (q, k))
    return torch_npu.npu_fusion_attention(query, key, key.clone(), heads, layout, scale=0.25, **more)[0]
def inference(q, k=None, layout="BNSD", **more):
    k = q if k is None else k
    return torch_npu.npu_fused_infer_attention_score(q, k, k, num_heads=2, input_layout=layout, **more)
def with_sink(q):
    known = {"num_query_heads": 2, "input_layout": "BNSD", "learnable_sink": half(2)}
    return torch_npu.npu_fused_infer_attention_score_v2(q, q, q, **known)
def mask(*shape):
    return torch.ones(*shape, dtype=torch.bool).triu(1).npu()
"""

CASES = {
    "sink of attention": "refused(lambda: with_sink(half(1, 2, 1, 16)), 'learnableSink')",
    "padding on the left": """
padded = {"actual_seq_lengths_kv": [1], "kv_padding_size": torch.tensor([1]).npu()}
refused(lambda: inference(half(1, 2, 1, 16), **padded), "kvPaddingSize")
""",
    "empty kernel of a convolution": """
refused(lambda: F.conv_transpose3d(half(1, 1, 1, 1, 1), half(1, 1, 0, 1, 1)), "a kernel that is not empty")
""",
    "lerp in place that would grow": """
refused(lambda: x[:2, :1].clone().lerp_(x[:2], 0.5), "must match the size of tensor selfRef [2,1]")
""",
    "float into int": """
refused(lambda: zeros(4, dtype=torch.int32).add_(x[:, 0]), "can't be cast to the desired output type DT_INT32")
""",
    "float64 matmul": """
d = zeros(4, 4, dtype=torch.float64)
refused(lambda: d @ d, "DT_DOUBLE", "should be in dtype support list [DT_FLOAT,DT_FLOAT16,DT_BFLOAT16]")
""",
    "integer matmul": "i = zeros(4, 4, dtype=torch.int32); refused(lambda: torch.mm(i, i), 'DT_INT32')",
    "float64 sigmoid": "refused(lambda: torch.sigmoid(zeros(4, dtype=torch.float64)), 'DT_DOUBLE')",
    "compressed mask of the wrong shape": """
said = "The shape of attenMask should be [2048,2048] when sparseMode is 3, but found [8,8]"
refused(lambda: attention(atten_mask=mask(8, 8), sparse_mode=3), "aclnnFlashAttentionScore", said)
""",
    "full mask of the wrong shape": """
refused(lambda: attention(atten_mask=mask(8, 9), sparse_mode=1), "[1,2,8,8]", "but found [8,9]")
""",
    "mask of the wrong dtype": """
refused(lambda: attention(atten_mask=zeros(8, 8, dtype=torch.float32)), "attenMask", "DT_FLOAT")
""",
    "heads not a multiple": "refused(lambda: attention(q=(1, 3, 8, 16), heads=3), 'should be a multiple')",
    "wrong head number": "refused(lambda: attention(heads=4), 'should equal headNum 4')",
    "different head dimension": "refused(lambda: attention(k=(1, 2, 8, 32)), 'Head dimension of key')",
    "different batch": "refused(lambda: attention(k=(2, 2, 8, 16)), 'batch size')",
    "packed lengths that do not end at T": """
ends = {"actual_seq_qlen": [3, 7], "actual_seq_kvlen": [3, 8]}
refused(lambda: attention(q=(8, 2, 16), k=(8, 2, 16), layout="TND", **ends), "should equal T, 8")
""",
    "mixed dtypes": """
q = torch.randn(1, 2, 8, 16).npu()
refused(lambda: torch_npu.npu_fusion_attention(q.half(), q, q, 2, "BNSD")[0], "same dtype")
""",
    "float32 inference attention": """
q = torch.randn(1, 2, 1, 16).npu()
refused(lambda: torch_npu.npu_incre_flash_attention(q, q, q, num_heads=2, input_layout="BNSD"), "DT_FLOAT")
""",
    "unaligned inference head": "refused(lambda: inference(half(1, 2, 1, 12)), '16-byte aligned')",
    "strided inference key": """
refused(lambda: inference(half(1, 2, 1, 16), half(1, 4, 2, 16).transpose(1, 2)), "must be contiguous")
""",
    "page size": """
paged = {"block_size": 20, "block_table": zeros(1, 1, dtype=torch.int32), "actual_seq_lengths_kv": [3]}
refused(lambda: inference(half(1, 1, 32), half(2, 20, 32), "BSH", **paged), "blockSize")
""",
    "gamma of the wrong shape": """
refused(lambda: torch_npu.npu_rms_norm(x, torch.ones(4).npu()), "aclnnRmsNorm", "gamma [4]")
""",
    "gamma of the wrong dtype": "refused(lambda: torch_npu.npu_rms_norm(x, half(6)), 'gamma', 'DT_FLOAT16')",
    "odd rotary dimension": """
refused(lambda: torch_npu.npu_rotary_mul(half(1, 2, 3, 7), half(1, 2, 1, 7), half(1, 2, 1, 7)), "must be even")
""",
    "odd swiglu": "refused(lambda: torch_npu.npu_swiglu(half(2, 5)), 'must be even')",
    "z-loss": """
labels = torch.tensor([1, 2, 3, 0]).npu()
refused(lambda: torch_npu.npu_cross_entropy_loss(x, labels, lse_square_scale_for_zloss=0.1), "lseSquareScaleForZloss")
""",
    "top-k larger than the dimension": "fails(lambda: x.topk(7, -1), '7')",
    "multinomial without enough choices": "refused(lambda: torch.multinomial(x.abs(), 7), 'numsamples')",
    "foreach dtypes": "fails(lambda: torch.ops.aten._foreach_norm([zeros(3, dtype=torch.float64)]), 'DT_DOUBLE')",
    "an index out of range fails on the device": """
fails(lambda: F.embedding(torch.tensor([4]).npu(), x).cpu(), "507015")
""",
    "a label out of range fails on the device": """
fails(lambda: F.cross_entropy(x, torch.tensor([1, 2, 6, 0]).npu()).cpu(), "507015")
""",
}


@pytest.mark.parametrize("case", CASES)
def test_is_refused_with_the_documented_text(case: str, on_npu: Callable[..., list[object]]) -> None:
    on_npu(HEAD + CASES[case], ASCEND_LAUNCH_BLOCKING=1)


@pytest.mark.parametrize("chip", ["Ascend910A", "Ascend310P3"])
def test_bfloat16_is_refused_on_chips_without_it(chip: str, on_npu: Callable[..., list[object]]) -> None:
    code = """
b = torch.ones(4, 4, dtype=torch.bfloat16).npu()
refused(lambda: b + b, 'not implemented for DT_BFLOAT16', 'dtype support list [DT_FLOAT,DT_FLOAT16')
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
