"""The machine that `ascendchat doctor` judges: its packages, devices and environment; and the result of a check."""

from __future__ import annotations

import functools
import json
import platform
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ascendchat.chips import KINDS, find
from ascendchat.device import smi
from ascendchat.doctor.probe import Probe
from ascendchat.errors import UserError

Status = Literal["ok", "warn", "fail", "skip"]


REQUIRED = ["numpy", "yaml", "rich", "safetensors", "regex", "tiktoken"]  # no stage of any recipe works without these


OPTIONAL = {  # module -> the feature that needs it and says so when it is used
    "httpx": "data fetch",
    "pyarrow": ".parquet",
    "zstandard": ".zst",
    "tokenizers": "Hugging Face tokenizers",
    "rustbpe": "tokenizer train (fast)",
}


VENDOR = ["decorator", "attr", "scipy", "psutil", "cloudpickle"]  # CANN's Python tools import these


@dataclass(frozen=True)
class CheckResult:
    """One line of the report. `why` and `fix` are empty when there is nothing to mend."""

    name: str
    status: Status
    found: str
    why: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Machine:
    """Everything that the checks read."""

    lang: str
    environ: Mapping[str, str]
    home: Path
    torch: Probe
    npu: Probe | None  # None: torch_npu is not installed
    wheels: Probe
    npu_smi: smi.Readings | smi.Problem
    nvidia_smi: smi.Readings | smi.Problem
    mirror: str | None  # None: offline on purpose; "": reachable; else why not
    versions: Mapping[str, str]  # installed distributions: torch, torch_npu, torch-npu ...
    root: Path = Path("/")
    deep: bool = False
    python: tuple[int, ...] = sys.version_info[:3]
    system: str = platform.system()

    def say(self, en: str, zh: str) -> str:
        return zh if self.lang == "zh" else en

    def fault(self, name: str, kind: str, status: Status | None = None, **values: object) -> CheckResult:
        """Build a failed check from the words of faults.json, with its {holes} filled from `values`."""
        entry = faults()[name][kind]
        texts = [text if isinstance(text := entry[key], str) else text[self.lang] for key in ("found", "why", "fix")]
        found, why, fix = (re.sub(r"\{(\w+)\}", lambda hole: str(values[hole[1]]), text) for text in texts)
        return CheckResult(name, status or entry["status"], found, why, fix)

    @property
    def nodes(self) -> list[str]:
        """/dev/davinci0 ...: the devices the driver has given to this machine or container."""
        names = [p.name for p in (self.root / "dev").glob("davinci[0-9]*")]
        return sorted(names, key=lambda name: int("".join(filter(str.isdigit, name)) or 0))

    @property
    def npus(self) -> int:
        """Number of NPUs that torch can use."""
        return int(self.npu.values.get("count", 0)) if self.npu else 0

    @property
    def has_chip(self) -> bool:
        """True if there is an Ascend chip here, usable by the software or not."""
        tool = isinstance(self.npu_smi, smi.Readings) or not self.npu_smi.missing
        return bool(self.npus or self.nodes or tool or self._on_pci())

    def _on_pci(self) -> bool:
        """True if a Huawei (0x19e5) processing accelerator (class 0x12) is plugged in, even without a driver."""
        for device in (self.root / "sys/bus/pci/devices").glob("*"):
            try:
                vendor = (device / "vendor").read_text().strip()
                if vendor == "0x19e5" and (device / "class").read_text().strip().startswith("0x12"):
                    return True
            except OSError:
                continue
        return False

    @property
    def simulated(self) -> bool:
        """True if the NPUs are those of cannsim."""
        return bool(self.environ.get("CANNSIM_HOME")) and self.npus > 0

    @property
    def chip_name(self) -> str:
        """Name of the first NPU: from torch where it works, else from npu-smi, else empty."""
        if self.npu and self.npu.values.get("names"):
            return str(self.npu.values["names"][0])
        if isinstance(self.npu_smi, smi.Readings) and self.npu_smi.devices:
            return self.npu_smi.devices[0].name
        return ""

    def choice(self) -> tuple[str, str, int]:
        """(type, name, count) of the devices that training would use."""
        names = {kind: [str(name) for name in self.torch.values.get(kind) or []] for kind in KINDS}
        names |= {"npu": [self.chip_name] * self.npus, "cpu": [platform.machine()]}  # also where torch cannot be asked
        wanted = self.environ.get("ASCENDCHAT_DEVICE", "")
        kind = wanted if names.get(wanted) else next(k for k in KINDS if names[k])
        return kind, names[kind][0], len(names[kind])


@functools.cache
def faults() -> dict[str, Any]:
    """{check: {fault: {status, found, why, fix}}}; where the languages differ, a text is {"en": ..., "zh": ...}."""
    return dict(json.loads(Path(__file__).with_name("faults.json").read_text(encoding="utf-8")))


def plan_flag(name: str) -> str:
    """The --chip flag with which `ascendchat plan` plans the chip that a driver calls `name`; "" when its table has
    none."""
    try:
        # Typed by a person, the name of this 2019 chip would mean others; Ascend910A has the same figures.
        return f" --chip {shlex.quote(find('Ascend910A' if name == 'Ascend910B' else name).name)}"
    except UserError:
        return ""


def gib(size: float) -> str:
    """Format bytes for people: 3.2 GiB, 512 MiB."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
