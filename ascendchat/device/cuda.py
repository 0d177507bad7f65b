"""NVIDIA GPUs: `ascendchat base --device-type cuda`. Compiled by default (ASCENDCHAT_COMPILE=0 turns that off)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from ascendchat.chips import Chip
from ascendchat.device import DeviceOptions
from ascendchat.device.accelerator import Accelerator, current_chip
from ascendchat.device.attention import Attention
from ascendchat.device.cuda_attention import Flash


def why_unusable(asked: bool) -> str | None:
    """Why no GPU can be used, or None."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda:
        why = f"the driver shows none to torch (CUDA {torch.version.cuda}); check nvidia-smi and CUDA_VISIBLE_DEVICES"
    else:
        why = f"this torch ({torch.__version__}) is built without CUDA; install a CUDA build of it"
    return f"no NVIDIA GPU can be used: {why}, or choose another device, for example --device-type cpu"


def names() -> list[str]:
    """Names of the GPUs that torch sees."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def open_device(options: DeviceOptions) -> CUDA:
    """The GPU of this process."""
    device = CUDA(torch.cuda, current_chip(torch.cuda, "cuda"), options)
    # The few float32 products beside 16-bit ones may lose bits (tf32); who asks for float32 gets all of them.
    torch.set_float32_matmul_precision("highest" if device.dtype == torch.float32 else "high")
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores .* available but not enabled")  # on purpose
    device.compiles = options.compiled is not False
    device.triton = device.compiles and find_spec("triton") is not None
    return device


def attention_kernels() -> Sequence[Attention]:
    """torch's flash kernel, with an optional package for rows of training."""
    return (Flash(),)


class CUDA(Accelerator):
    """A Device on torch.cuda."""

    type = "cuda"
    graph_class = "CUDAGraph"
    captures_training = True

    def __init__(self, api: Any, chip: Chip, options: DeviceOptions) -> None:
        super().__init__(api, chip, options)
        self.fp8_kv_cache = chip.fp8

    def packaged_mlp(self, *sizes: int) -> tuple[Callable[..., torch.Tensor] | None, str | None]:
        """By quack-kernels, in compiled training."""
        if not self.compiles:
            return None, None
        from ascendchat.device import cuda_products

        refusal = cuda_products.refusal(torch.device(self.type), self.dtype, *sizes)
        return None if refusal else cuda_products.mlp, cuda_products.PACKAGE.notice(refusal)

    def software(self) -> dict[str, str]:
        """The CUDA that torch was built with."""
        return {"CUDA": str(torch.version.cuda)}
