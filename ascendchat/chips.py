"""Facts per chip (CHIPS: memory, peak FLOP/s, bandwidth, links, dtypes) and per type of device (KINDS). No torch here.

Read by `ascendchat plan --chip Ascend910B3`, by device/, sizes/, the config and `ascendchat doctor`.

Names are matched whole, never by a part: a driver says "Ascend910B" for a 2019 chip without bf16, "Ascend910B3" for
a 2023 chip with it. A person who types 910B means the second kind, so `find` asks which one. Other families of chips
are treated in the same way.
Units: bytes, FLOP/s, bytes per second in one direction.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from ascendchat.errors import UserError

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Chip:
    """One device as a process sees it: a card, or one die of an Atlas A3 card."""

    name: str
    device_type: str
    memory: int  # bytes the vendor's tool shows as total
    flops: float  # dense bf16 matrix FLOP/s (fp16 where there is no bf16, fp32 on CPU)
    bandwidth: float  # of the device's memory
    link: float  # per device, to its neighbours in the same node
    node_link: float  # per device, to other nodes
    bf16: bool = True
    fp8: bool = False
    fused_attention: bool = True  # has a fused attention kernel with a backward pass
    graphs: bool = False  # can capture work once and replay it
    fused_adamw: bool = True  # has AdamW as one operator
    trains: bool = True  # False: made and supported for inference only
    jit_default: bool = False  # compiles each operator for each new shape unless told otherwise
    reserved: int = 0  # bytes the driver holds before any process starts
    devices_per_node: int = 8
    source: str = "vendor data sheet"
    known: bool = True  # False: cautious figures for a chip this table does not list
    aliases: tuple[str, ...] = ()

    @property
    def peak(self) -> float | None:
        """FLOP/s that are 100 % of MFU. None where they are not known: `flops` is a cautious figure then, good for a
        plan, and a share of it could be above 100 %. CPUs differ tenfold."""
        return self.flops if self.known and self.device_type != "cpu" else None


# The driver of 64 GB parts holds 2.8 to 3.4 GB when idle.
_A2 = Chip(
    "", "npu", 64 * GIB, 0, 1.6e12, 196e9, 25e9, graphs=True, reserved=3 * GIB, source="Atlas A2: cube bf16 peak"
)
# A3: one device is one die, two dies a card; the same fabric inside and between the nodes of a super node.
_A3 = dataclasses.replace(_A2, node_link=196e9, devices_per_node=16, source="Atlas A3 (910C), per die: cube bf16 peak")
_OLD = Chip(
    name="",
    device_type="npu",
    memory=32 * GIB,
    flops=256e12,
    bandwidth=1.2e12,
    link=90e9,
    node_link=12.5e9,
    bf16=False,
    fused_attention=False,
    fused_adamw=False,
    jit_default=True,
    reserved=2 * GIB,
    source="2019 generation: marketed fp16, secondary sources",
)
_310P = dataclasses.replace(
    _OLD,
    memory=24 * GIB,
    flops=70e12,
    bandwidth=0.2e12,
    link=16e9,
    trains=False,
    source="300I Pro/Duo, inference part: unverified figures",
)
_950 = dataclasses.replace(_A2, fp8=True, link=159e9, node_link=50e9, source="950 series: lowest published bin")
_950DT = dataclasses.replace(_950, memory=96 * GIB, bandwidth=4.0e12)
_950PR = dataclasses.replace(_950, memory=112 * GIB, bandwidth=1.4e12)
_DT_NAMES = (
    "950x 950y 9571 9572 9573 9574 9575 9576 9577 9578 9581 9582 9582x 9583 9584 9585 9586 9587 9588 9591 9592 9595 "
    "9596 95A1 95A2"
)
_PR_NAMES = "950z 9579 957b 957bx 957c 957d 9589 958b 9599"


def _npu(base: Chip, name: str, flops: float = 0.0, aliases: tuple[str, ...] = (), **changes: object) -> Chip:
    """A chip of a generation; npu-smi prints the name without "Ascend", so that spelling is an alias."""
    short = name.removeprefix("Ascend")
    changed = dataclasses.replace(base, name=name, aliases=(short, *aliases), **changes)  # type: ignore[arg-type]
    return dataclasses.replace(changed, flops=flops) if flops else changed


_ASCEND = [
    _npu(_A2, "Ascend910B1", 373.9e12),
    _npu(_A2, "Ascend910B2", 353.9e12),
    _npu(_A2, "Ascend910B2C", 353.9e12),
    _npu(_A2, "Ascend910B3", 294.9e12),
    _npu(_A2, "Ascend910B4", 245.8e12, memory=32 * GIB, bandwidth=0.8e12),
    _npu(_A2, "Ascend910B4-1", 245.8e12),
    _npu(_A3, "Ascend910_9391", 353.9e12),
    _npu(_A3, "Ascend910_9392", 353.9e12),
    *[_npu(_A3, f"Ascend910_{n}", 245.8e12) for n in (9362, 9363, 9372, 9381, 9382)],
    *[_npu(_OLD, f"Ascend910{n}") for n in ("A", "ProA", "ProB", "PremiumA", "B")],
    *[_npu(_310P, f"Ascend310P{n}") for n in (1, 2, 3, 4, 5, 7)],
    _npu(_950DT, "Ascend950DT", 378e12, tuple(f"Ascend950DT_{n}" for n in _DT_NAMES.split())),
    _npu(_950PR, "Ascend950PR", 378e12, tuple(f"Ascend950PR_{n}" for n in _PR_NAMES.split())),
]


def _gpu(
    names: str, gib: float, tflops: float, tb: float, link: float, node: float = 50, generation: str = "hopper"
) -> Chip:
    """names: spellings of nvidia-smi and torch, then short ones, split by "|"; link and node in GB/s one way."""
    first, *rest = names.split("|")
    chip = Chip(first, "cuda", int(gib * GIB), tflops * 1e12, tb * 1e12, link * 1e9, node * 1e9, graphs=True)
    old, fp8 = generation == "volta", generation in ("ada", "hopper", "blackwell")
    return dataclasses.replace(chip, bf16=not old, fp8=fp8, fused_attention=not old, aliases=tuple(rest))


# Memory as nvidia-smi shows it; FLOP/s dense with fp32 accumulation; NVLink is half of the marketed two-way figure.
_NVIDIA = [
    _gpu("NVIDIA H200|H200|H200-SXM", 140.4, 989.4, 4.8, 450),
    _gpu("NVIDIA H200 NVL|H200-NVL", 140.4, 835.5, 4.8, 450),
    _gpu("NVIDIA H100 80GB HBM3|H100|H100-SXM|NVIDIA H100", 79.6, 989.4, 3.35, 450),
    _gpu("NVIDIA H100 PCIe|H100-PCIe", 79.6, 756, 2.0, 32),
    _gpu("NVIDIA H100 NVL|H100-NVL", 93.6, 835.5, 3.9, 300),
    _gpu("NVIDIA GH200 480GB|GH200", 95.6, 989.4, 4.0, 450),
    _gpu("NVIDIA H800|H800", 79.6, 989.4, 3.35, 200),
    _gpu("NVIDIA H20|H20", 95.6, 148, 4.0, 450),
    _gpu("NVIDIA H20-3e|H20-3e", 140.4, 148, 4.8, 450),
    _gpu("NVIDIA B200|B200", 179, 2250, 7.7, 900, generation="blackwell"),
    _gpu("NVIDIA GB200|GB200", 185, 2500, 8.0, 900, generation="blackwell"),
    _gpu("NVIDIA A100-SXM4-80GB|A100-80GB", 80, 312, 2.039, 300, 25, "ampere"),
    _gpu("NVIDIA A100-SXM4-40GB|A100-40GB", 40, 312, 1.555, 300, 25, "ampere"),
    _gpu("NVIDIA A100 80GB PCIe|A100-PCIe-80GB", 80, 312, 1.935, 32, 25, "ampere"),
    _gpu("NVIDIA A100-PCIE-40GB|A100-PCIe-40GB", 40, 312, 1.555, 32, 25, "ampere"),
    _gpu("NVIDIA A800-SXM4-80GB|A800|A800-80GB", 80, 312, 2.039, 200, 25, "ampere"),
    _gpu("NVIDIA A800 80GB PCIe|A800-PCIe", 80, 312, 1.935, 32, 25, "ampere"),
    _gpu("NVIDIA A40|A40", 45, 149.7, 0.696, 32, 12.5, "ampere"),
    _gpu("NVIDIA A30|A30", 24, 165, 0.933, 32, 12.5, "ampere"),
    _gpu("NVIDIA A10|A10", 22.5, 125, 0.6, 32, 12.5, "ampere"),
    _gpu("NVIDIA A10G|A10G", 22.5, 70, 0.6, 32, 12.5, "ampere"),
    _gpu("NVIDIA RTX A6000|A6000", 48, 154.8, 0.768, 32, 12.5, "ampere"),
    _gpu("NVIDIA GeForce RTX 3090|RTX 3090|3090", 24, 71, 0.936, 16, 1.25, "ampere"),
    _gpu("NVIDIA GeForce RTX 3090 Ti|RTX 3090 Ti|3090 Ti", 24, 80, 1.008, 16, 1.25, "ampere"),
    _gpu("NVIDIA L40S|L40S", 45, 362, 0.864, 32, 12.5, "ada"),
    _gpu("NVIDIA L40|L40", 45, 181, 0.864, 32, 12.5, "ada"),
    _gpu("NVIDIA L20|L20", 45, 119.5, 0.864, 32, 12.5, "ada"),
    _gpu("NVIDIA L4|L4", 22.5, 121, 0.3, 32, 12.5, "ada"),
    _gpu("NVIDIA RTX 6000 Ada Generation|RTX 6000 Ada", 48, 364, 0.96, 32, 12.5, "ada"),
    _gpu("NVIDIA GeForce RTX 4090|RTX 4090|4090", 24, 165.2, 1.008, 32, 1.25, "ada"),
    _gpu("NVIDIA GeForce RTX 4090 D|RTX 4090 D|4090D", 24, 147, 1.008, 32, 1.25, "ada"),
    _gpu("NVIDIA GeForce RTX 5090|RTX 5090|5090", 31.8, 209.5, 1.792, 64, 1.25, "blackwell"),
    _gpu("Tesla V100-SXM2-32GB|V100-32GB", 32, 125, 0.9, 150, 12.5, "volta"),
    _gpu("Tesla V100-SXM2-16GB|V100-16GB", 16, 125, 0.9, 150, 12.5, "volta"),
    _gpu("Tesla T4|T4|NVIDIA T4", 15, 65, 0.32, 16, 1.25, "volta"),
]


def _apple(name: str, gib: int, tflops: float, gb: float) -> Chip:
    """Memory is shared with the CPU and differs by machine: this is the smallest one sold."""
    chip = Chip(f"Apple {name}", "mps", gib * GIB, tflops * 1e12, gb * 1e9, 0.0, 1.25e9, source="GPU cores x clock")
    bf16 = not name.startswith("M1")
    return dataclasses.replace(chip, bf16=bf16, fused_attention=False, devices_per_node=1, aliases=(name,))


_APPLE = [
    *[_apple(*row) for row in (("M1", 8, 2.6, 68), ("M1 Pro", 16, 5.2, 200), ("M1 Max", 32, 10.4, 400))],
    *[_apple(*row) for row in (("M1 Ultra", 64, 20.8, 800), ("M2", 8, 3.6, 100), ("M2 Pro", 16, 6.8, 200))],
    *[_apple(*row) for row in (("M2 Max", 32, 13.6, 400), ("M2 Ultra", 64, 27.2, 800), ("M3", 8, 3.5, 100))],
    *[_apple(*row) for row in (("M3 Pro", 18, 6.4, 150), ("M3 Max", 36, 14.1, 300), ("M3 Ultra", 96, 28.2, 819))],
    *[_apple(*row) for row in (("M4", 16, 4.3, 120), ("M4 Pro", 24, 8.5, 273), ("M4 Max", 36, 15.6, 410))],
]

# 69 GFLOP/s fp32 matrix products were measured on two aarch64 server cores.
CPU_CORE_FLOPS = 34.5e9
_CPU = Chip(
    name="cpu",
    device_type="cpu",
    memory=8 * GIB,
    flops=2 * CPU_CORE_FLOPS,
    bandwidth=20e9,
    link=5e9,
    node_link=1.25e9,
    bf16=False,
    fused_attention=False,
    devices_per_node=1,
    source="two aarch64 cores, fp32, measured",
)

CHIPS: dict[str, Chip] = {chip.name: chip for chip in [*_ASCEND, *_NVIDIA, *_APPLE, _CPU]}


@dataclass(frozen=True)
class MemoryTraits:
    """Memory that a type of device needs beside the tensors themselves, for sizes/memory.py."""

    context: int  # runtime and kernels of one process, on top of what the driver holds
    collectives: int = 0  # buffers of one communicator: send and receive
    softmax: int = 4  # bytes per query head and token that fused attention keeps for the backward pass: one fp32 sum
    always_fused: bool = False  # attention never keeps its probabilities, whatever the chip
    rotations: int = 2  # copies of queries and keys that are kept on their way through norm and rotation
    gradient_buffers: bool = False  # the gradient of fused attention is made in float32, beside its result
    compiled: bool = False  # the model is compiled: float32 steps between two 16-bit tensors are not stored


@dataclass(frozen=True)
class Kind:
    """A type of device: everything that depends on it and not on the single chip."""

    title: str  # for sentences
    module: str  # the file with its Device; device/__init__.py says what is in it
    default: Chip  # cautious figures for a chip that CHIPS does not list
    collective: str  # backend of torch.distributed
    memory: MemoryTraits
    mfu: float  # share of the chip's peak that training reaches
    visible: str = ""  # environment variable that lists the devices a process may use; "" where there is none
    tool: str = ""  # the vendor's command-line tool; "" where there is none
    half: bool = True  # trains in 16 bits; False: float32
    emulates_bf16: bool = False  # computes bfloat16 in software, so it may be asked for on any chip
    bitsandbytes: bool = False  # bitsandbytes is used there, to hold the base of adapters in 4 bits
    cann: bool = False  # needs CANN and torch_npu
    vllm: str = ""  # the package by which vLLM generates there; "": it does not
    environment: dict[str, str] = field(default_factory=dict)  # set before torch is imported, unless the user has
    generating: dict[str, str] = field(default_factory=dict)  # ... where the command decodes with captured graphs


KINDS = {  # in the order of preference when no device type is named
    "npu": Kind(
        title="Ascend NPU",
        module="ascendchat.device.npu",
        default=_OLD,
        collective="hccl",
        # A communicator holds 2 x 200 MB; the attention kernel keeps its maxima and its sums as fp32 x 8, 64 bytes
        # together; the fused rotation keeps its input too.
        memory=MemoryTraits(512 * MIB, 400 * MIB, softmax=64, rotations=3, gradient_buffers=True),
        mfu=0.25,  # published ports reach 17-29 %
        visible="ASCEND_RT_VISIBLE_DEVICES",
        tool="npu-smi",
        cann=True,
        vllm="vllm-ascend",
        environment={
            "TASK_QUEUE_ENABLE": "2",  # launches and workspace of operators each get their own host thread
            "CPU_AFFINITY_CONF": "1",  # bind host threads to the cores near their NPU
            "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",  # less fragmentation
            "HCCL_CONNECT_TIMEOUT": "600",  # seconds; 120, the default, is short when ranks load data at other speeds
        },
        generating={"TASK_QUEUE_ENABLE": "1"},  # torch_npu captures no graph in mode 2
    ),
    "cuda": Kind(
        title="NVIDIA GPU",
        module="ascendchat.device.cuda",
        default=CHIPS["Tesla T4"],
        collective="nccl",
        memory=MemoryTraits(1 * GIB, 400 * MIB, rotations=1, compiled=True),  # norm and rotation are one Triton kernel
        mfu=0.46,  # an H200 had 46-48 % at first, since then up to 55 % (bf16, depth 12 and 20, 16 to 64 rows)
        visible="CUDA_VISIBLE_DEVICES",
        tool="nvidia-smi",
        bitsandbytes=True,
        vllm="vllm",
        environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    ),
    "mps": Kind(
        title="Apple GPU",
        module="ascendchat.device.mps",
        default=CHIPS["Apple M1"],
        collective="gloo",
        memory=MemoryTraits(1 * GIB),
        mfu=0.30,  # a cautious guess
        half=False,
    ),
    "cpu": Kind(
        title="CPU",
        module="ascendchat.device.cpu",
        default=_CPU,
        collective="gloo",
        memory=MemoryTraits(1 * GIB, always_fused=True),
        mfu=0.58,  # 58-61 % of the peak of products measured
        half=False,
        emulates_bf16=True,
        bitsandbytes=True,
        vllm="vllm",
    ),
}


def _key(name: str) -> str:
    """Spellings that mean the same: letter case, blanks, `Ascend 910B3`, `昇腾910B3`."""
    words = " ".join(name.casefold().replace("昇腾", "ascend").split())
    return re.sub(r"^ascend[ -]", "ascend", words)


@cache
def _spellings() -> dict[str, tuple[str, Chip]]:
    """Every spelling of every chip, by its key."""
    return {_key(name): (name, chip) for chip in CHIPS.values() for name in (chip.name, *chip.aliases)}


# Names that people use for several chips with different figures: a silent guess between them would be wrong.
_A2_CARDS = "the Atlas A2 cards are Ascend910B1, Ascend910B2, Ascend910B3 (64 GB) and Ascend910B4 (32 GB)"
_A3_CARDS = (
    "a card of Atlas A3 (910C) is two devices, Ascend910_9392 each; lower bins are Ascend910_9382 or Ascend910_9362"
)
_310P_CARDS = "cards of Atlas 300I Pro and Duo are Ascend310P3"
_NPUS = f"{_A2_CARDS}, {_A3_CARDS}"
_FAMILIES = {
    "npu ascend": _NPUS,
    "gpu cuda nvidia": "for example H100, A100-80GB or RTX 4090",
    "910 ascend910": f"{_NPUS}; the chips of 2019 are Ascend910A",
    "910b 910b* ascend910b": f"{_A2_CARDS}; the chip of 2019 with this name has the figures of Ascend910A",
    "a2 atlas-a2 800t-a2 800i-a2 atlas-800t-a2 atlas-800i-a2": _A2_CARDS,
    "910c ascend910c a3 atlas-a3 800t-a3 800i-a3 atlas-800t-a3 atlas-800i-a3": _A3_CARDS,
    "310 310p ascend310 ascend310p 300i-pro 300i-duo atlas-300i-pro atlas-300i-duo": _310P_CARDS,
    "950 ascend950 a5": "Ascend950DT and Ascend950PR differ in memory",
    "a100 nvidia-a100": "A100-40GB or A100-80GB",
    "a100-pcie": "A100-PCIe-40GB or A100-PCIe-80GB",
    "v100 tesla-v100 nvidia-v100": "V100-16GB or V100-32GB",
}
_MEANT = {name: choice for names, choice in _FAMILIES.items() for name in names.split()}


def find(name: str) -> Chip:
    """The chip that a person named, as torch, npu-smi or nvidia-smi spell it; letter case does not matter."""
    meant = _MEANT.get(_key(name).replace(" ", "-"))
    if meant:
        raise UserError(f"{name!r} does not name one chip ({meant}); give one, `ascendchat doctor` shows yours")
    spellings = _spellings()
    if _key(name) in spellings:
        return spellings[_key(name)][1]
    near = [spellings[key][0] for key in difflib.get_close_matches(_key(name), list(spellings), n=3, cutoff=0.6)]
    hint = f"the nearest are {', '.join(near)}" if near else "for example Ascend910B3, Ascend910_9392, H100 or cpu"
    raise UserError(f"there is no chip {name!r} in the table; {hint}")


def unknown(name: str, device_type: str, memory: int) -> Chip:
    """Cautious figures for a chip that is there but not in the table: slow, no bf16, no fused kernels."""
    source = f"{name} is not in the chip table: cautious figures, so plans are only rough and MFU is not shown"
    default = KINDS[device_type].default
    named = dataclasses.replace(default, name=name, memory=memory, source=source, known=False)
    return dataclasses.replace(named, reserved=0, aliases=(), jit_default=False)


def detected(name: str, device_type: str, memory: int) -> Chip:
    """The chip a driver reported, with the memory the driver reported (bytes; 0 where it says nothing)."""
    _, chip = _spellings().get(_key(name), ("", None))
    if chip is None or chip.device_type != device_type:
        return unknown(name, device_type, memory)
    return dataclasses.replace(chip, memory=memory, reserved=0) if memory else chip


def machine_memory() -> int:
    """Bytes of RAM this process may use: the machine's, or its container's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        file = Path(path)
        if file.is_file() and (text := file.read_text().strip()).isdigit():
            total = min(total, int(text))
    return total


def cpu_count() -> int:
    """Cores this process may use, which in a container is fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def this_cpu() -> Chip:
    """The CPU of this machine: its usable cores at the measured rate of one, and its RAM."""
    cores = cpu_count()
    return dataclasses.replace(
        _CPU, memory=machine_memory(), flops=cores * CPU_CORE_FLOPS, source=f"{cores} cores at 34.5 GFLOP/s fp32 each"
    )
