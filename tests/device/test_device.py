"""device/: what `pick` gives, and the one sentence it gives when a device is not there. Real on the CPU; the NPU device
is tested on the simulated CANN in tests/npu/test_device_npu.py."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_process

from ascendchat.chips import CHIPS, find, unknown
from ascendchat.device import DTYPES, Device, DeviceOptions, Scaling, choose_dtype, cuda, describe, pick
from ascendchat.device.cpu import CPU
from ascendchat.device.cuda import CUDA
from ascendchat.device.env import look
from ascendchat.device.npu import NPU
from ascendchat.errors import UserError
from ascendchat.sizes.memory import compute_dtype

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _no_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the developer's shell asks for a device."""
    for name in ("ASCENDCHAT_DEVICE", "ASCENDCHAT_DTYPE", "ASCENDCHAT_COMPILE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("chip", "asked", "expected"),
    [
        ("Ascend910B3", None, "bf16"),
        ("Ascend910_9392", "auto", "bf16"),
        ("Ascend910A", None, "fp16"),
        ("Ascend910A", "fp32", "fp32"),
        ("H100", "float16", "fp16"),
        ("Apple M2", None, "fp32"),
        ("Apple M2", "bf16", "bf16"),
        ("cpu", "BF16", "bf16"),
        ("Ascend910A", "bf16", UserError("Ascend910A has no bf16; use fp16")),
        ("Ascend910B", "bfloat16", UserError("Ascend910B has no bf16")),
        ("Apple M1", "bf16", UserError("use fp32")),
        ("cpu", "fp16", UserError("fp16 is not used on CPU; use fp32")),
        ("H100", "int4", UserError("'int4' is not a dtype")),
    ],
)
def test_the_dtype_is_what_was_asked_for_if_the_chip_supports_it(
    chip: str, asked: str | None, expected: str | UserError
) -> None:
    known = CHIPS.get(chip) or find(chip)
    if isinstance(expected, str):
        assert choose_dtype(known, asked) == expected
    else:
        with pytest.raises(UserError, match=str(expected)):
            choose_dtype(known, asked)


def test_every_chip_trains_in_the_dtype_that_a_plan_counts_with_and_in_bf16_only_if_it_has_it() -> None:
    for chip in CHIPS.values():
        assert DTYPES[compute_dtype(chip)] == choose_dtype(chip), chip.name
        assert chip.bf16 or choose_dtype(chip) != "bf16", chip.name
    assert choose_dtype(unknown("Ascend999", "npu", 1 << 34)) == "fp16", "until the runtime says it has bf16"


@pytest.mark.parametrize(
    ("kind", "chip", "saturates", "scaling"),
    [
        (NPU, "Ascend910B3", False, Scaling(False, "none")),
        (NPU, "Ascend910A", True, Scaling(True, "flag")),
        (CUDA, "V100-32GB", False, Scaling(True, "inf")),
        (CUDA, "H100", False, Scaling(False, "none")),
    ],
)
def test_only_fp16_is_scaled_and_saturating_chips_are_watched_by_their_flag(kind, chip, saturates, scaling) -> None:  # type: ignore[no-untyped-def]
    device = kind(None, find(chip), DeviceOptions())
    device.saturates = saturates
    assert device.scaling == scaling


@pytest.mark.parametrize(
    "device", [CPU(DeviceOptions()), CUDA(None, find("V100-32GB"), DeviceOptions())], ids=["cpu", "cuda"]
)
def test_overflow_is_inf_or_nan_in_any_gradient(device: Device) -> None:
    good = torch.ones(3)
    assert not device.overflowed([])
    assert not device.overflowed([good, good])
    assert device.overflowed([good, torch.tensor([1.0, float("inf")])])
    assert device.overflowed([torch.tensor([float("nan")]), good])


def test_the_cpu_is_picked_by_name_argument_and_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    device = pick("cpu")
    assert (device.type, device.collective, device.dtype, device.pin) == ("cpu", "gloo", torch.float32, False)
    assert device.bind(5) == torch.device("cpu")
    monkeypatch.setenv("ASCENDCHAT_DEVICE", "cpu")
    monkeypatch.setenv("ASCENDCHAT_DTYPE", "bf16")
    assert pick().dtype == torch.bfloat16
    assert pick(dtype="fp32").dtype == torch.float32


def test_what_is_fetched_keeps_the_value_of_that_moment_and_a_seed_draws_the_same_again() -> None:
    device = pick("cpu")
    device.seed(7)
    drawn = torch.rand(5)
    fetched = device.fetch(drawn)
    drawn.fill_(2.0)
    device.seed(7)
    assert torch.equal(fetched(), torch.rand(5))
    assert not torch.equal(fetched(), torch.rand(5))


NO_GPU = pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="a GPU is here")


@NO_GPU
def test_without_any_accelerator_the_cpu_is_picked_and_described() -> None:
    device = pick()
    assert device.type == "cpu"
    assert describe(device).startswith("cpu: cpu, float32, ")
    assert describe(device).endswith("eager, gloo")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        pytest.param("cuda", "no NVIDIA GPU can be used: .*--device-type cpu", marks=NO_GPU),
        pytest.param("mps", "no Apple GPU can be used: .*--device-type cpu", marks=NO_GPU),
        ("cud", "--device-type: 'cud' is not a device type; did you mean cuda"),
    ],
)
def test_a_device_that_is_not_there_is_one_sentence(asked: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        pick(asked)


TRY = """
import sys
from ascendchat.errors import UserError
from ascendchat.device import pick
from ascendchat.device.env import prepare_environment
{before}
try:
    pick({asked!r})
except UserError as error:
    print(error)
    sys.exit(2)
"""


def _try(before: str, asked: str | None, how: Any = warm_process.run) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of another process that prepares (or not) and picks."""
    hidden = ("TORCH_DEVICE_BACKEND_AUTOLOAD", "LD_LIBRARY_PATH", "ASCEND_HOME_PATH")
    clean = {name: value for name, value in os.environ.items() if name not in hidden}
    command = [sys.executable, "-c", TRY.format(before=before, asked=asked)]
    done = how(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


WITHOUT_CANN = pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is None or look({}).cann or bool(look({}).nodes),
    reason="needs torch_npu installed on a machine without CANN",
)


@pytest.mark.slow
@WITHOUT_CANN
@pytest.mark.parametrize(
    ("before", "asked", "how"),
    [("prepare_environment('npu')", "npu", warm_process.run), ("", None, subprocess.run)],
    ids=["prepared", "automatic, import torch fails"],
)
def test_torch_npu_without_cann_is_one_sentence_and_no_traceback(before: str, asked: str | None, how: Any) -> None:
    status, out, err = _try(before, asked, how)
    assert status == 2, err
    assert out.count("\n") == 1
    for part in ("set_env.sh", "TORCH_DEVICE_BACKEND_AUTOLOAD=0", "no /dev/davinci*"):
        assert part in out
    assert "Traceback" not in err


@WITHOUT_CANN
def test_torch_npu_without_cann_does_not_stop_an_automatic_run() -> None:
    status, out, err = _try("prepare_environment(None)", None)
    assert (status, out) == (0, ""), err


def test_without_torch_npu_asking_for_an_npu_says_what_to_install() -> None:
    status, out, err = _try("sys.modules['torch_npu'] = None", "npu")
    assert status == 2, err
    assert "pip install -e '.[npu]' in your clone" in out
    assert out.count("\n") == 1


def test_marks_measure_milliseconds() -> None:
    device = pick("cpu")
    start = device.event()
    time.sleep(0.02)
    assert 19 <= device.event().since(start) < 2000


MEMORY = """
import resource, time, torch
from ascendchat.device import pick

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        [torch.ones(2**21) for _ in range(8)]  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

plain, device = faults(), pick("cpu")
faults()
kept, used = faults(), device.memory().used
device.release()
print(plain, kept, used - device.memory().used)

device.reset_peak()
before = device.memory()
block = torch.ones(64 << 20, dtype=torch.uint8)  # 64 MiB, touched
during = device.memory()
assert during.used - before.used > 48 << 20
assert during.peak >= during.used - (8 << 20)
del block
device.release()
for _ in range(500):  # the allocator of aarch64 wheels gives blocks back a little later, while it is used
    after = device.memory()
    if after.used < during.used - (48 << 20):
        break
    torch.ones(1 << 20)
    time.sleep(0.01)
assert after.used < during.used - (48 << 20)
assert after.peak > after.used + (48 << 20)
device.reset_peak()
assert device.memory().peak < during.peak - (32 << 20)
assert after.used < after.total == device.chip.memory
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells resident memory only on Linux")
def test_memory_of_a_cpu_is_used_again_is_given_back_when_asked_for_and_is_measured() -> None:
    """In a process of its own: the setting is one of the process, and other tests leave behind what is freed later."""
    plain, kept, returned = map(
        int,
        warm_process.run([sys.executable, "-c", MEMORY], text=True, stdout=subprocess.PIPE, check=True).stdout.split(),
    )
    if platform.machine() == "aarch64":  # torch has its own allocator there (mimalloc), which keeps all it ever had
        assert kept < 1000, "a step pays for pages that it had before"
    else:
        assert kept * 10 < plain, "a step pays for pages that it had before"
        assert returned > 32 * 2**20


def test_compiling_is_off_on_the_cpu_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert pick("cpu").compile(double) is double
    assert pick("cpu", compiled=True).compile(double) is not double
    monkeypatch.setenv("ASCENDCHAT_COMPILE", "1")
    assert pick("cpu").compiles
    assert not pick("cpu", compiled=False).compiles
    monkeypatch.setenv("ASCENDCHAT_COMPILE", "yes")
    with pytest.raises(UserError, match="ASCENDCHAT_COMPILE: 'yes' is not 0 or 1"):
        pick("cpu")


def test_a_graph_is_the_function_itself_where_the_chip_has_none() -> None:
    assert pick("cpu").graph(torch.neg, torch.ones(2)) is torch.neg
    assert NPU(None, find("Ascend910A"), DeviceOptions()).graph(torch.neg, torch.ones(2)) is torch.neg


@pytest.mark.parametrize(("asked", "precision"), [("fp32", "highest"), (None, "high")], ids=["float32", "bfloat16"])
def test_who_asks_cuda_for_float32_gets_all_its_bits(
    asked: str | None, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products in tf32 have ten bits behind the point: losses of a CPU and a GPU would part for no other reason."""
    monkeypatch.setattr(cuda, "current_chip", lambda api, kind: find("H100"))
    before = torch.get_float32_matmul_precision()
    try:
        cuda.open_device(DeviceOptions(dtype=asked))
        assert torch.get_float32_matmul_precision() == precision
        with warnings.catch_warnings(record=True) as shown:
            warnings.warn("TensorFloat32 tensor cores for products available but not enabled.", stacklevel=1)
        assert not shown, "the compiler's advice to undo that"
    finally:
        torch.set_float32_matmul_precision(before)
