"""Which CANN is installed, and which torch and torch_npu belong to it. Read by `ascendchat doctor`; no torch here.

    cann_version(Path(environ["ASCEND_HOME_PATH"]))     # from the files of its installers: "9.0.0"
    install_line("9.0.0", "x86_64")                     # what to type for it

docs/en/install.md and docs/zh/install.md show the same pairs; a test compares them.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path

# CANN -> the torch_npu that is released for it, the first one recommended. Source: the table of Ascend/pytorch.
PAIRS: dict[str, tuple[str, ...]] = {
    "9.1.0": ("2.12.0", "2.11.0", "2.10.0.post4", "2.9.0.post6", "2.7.1.post8"),
    "9.0.0": ("2.10.0.post2", "2.9.0.post2", "2.8.0.post4", "2.7.1.post4"),
    "8.5.0": ("2.9.0", "2.8.0.post2", "2.7.1.post2", "2.6.0.post5"),
    "8.3.RC1": ("2.8.0", "2.7.1", "2.6.0.post3"),
    "8.2.RC1": ("2.6.0", "2.5.1.post1"),
    "8.1.RC1": ("2.5.1", "2.4.0.post4"),
    "8.0.0": ("2.4.0.post2",),
}
NEWEST = "9.1.0"
# Wheels for which no CANN is published; NEWEST or a newer one. The first is what ascendchat is tested with.
UNPAIRED = ("2.13.0", "2.14.0", "2.12.0.post3", "2.10.0.post7", "2.9.1", "2.7.1.post11")
CPU_BUILDS = (2, 10)  # up to here the wheels for x86_64 want torch==X+cpu, which is not on the usual index
BESIDE = "decorator attrs scipy psutil cloudpickle"  # what CANN's own Python needs


def numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version: (9, 1); (0, 0) where it has none."""
    parts = re.findall(r"\d+", version)
    return (int(parts[0]), int(parts[1])) if len(parts) > 1 else (0, 0)


def cann_for(torch_npu: str) -> str:
    """The CANN that a torch_npu was released for; "" for an unlisted wheel."""
    version = torch_npu.split("+")[0]
    return next((cann for cann, wheels in PAIRS.items() if version in wheels), NEWEST if version in UNPAIRED else "")


def fits(torch_npu: str, cann: str) -> bool:
    """True if the two belong together, or nothing says otherwise."""
    wanted = cann_for(torch_npu)
    if torch_npu.split("+")[0] in UNPAIRED:
        return numbers(cann) >= numbers(wanted)
    return not wanted or numbers(wanted) == numbers(cann)


def torch_npu_for(cann: str) -> str:
    """The torch_npu to install for a CANN; what ascendchat is tested with where it is newer than all pairs."""
    if numbers(cann) > numbers(NEWEST):
        return UNPAIRED[0]
    return next((wheels[0] for known, wheels in PAIRS.items() if numbers(known) == numbers(cann)), PAIRS[NEWEST][0])


def install_line(cann: str, machine: str = "") -> str:
    """The pip command for torch and torch_npu that fit this CANN ("": the newest) on this `machine` (`uname -m`)."""
    return pair_line(torch_npu_for(cann or NEWEST), machine) + f" {BESIDE}"


def pair_line(wheel: str, machine: str = "") -> str:
    """The pip command for a torch_npu and the torch that belongs to it."""
    torch = ".".join(wheel.split(".")[:3])
    own = (machine or platform.machine()) == "x86_64" and numbers(wheel) <= CPU_BUILDS
    return f"pip install torch=={torch}{'+cpu' if own else ''} torch_npu=={wheel}"


def read_version(path: Path) -> str:
    """`version=8.3.RC1` or `Version=25.2.0` in an info file of Huawei's installers."""
    try:
        match = re.search(r"^\s*version\s*=\s*\[?([\w.]+)", path.read_text(errors="replace"), re.I | re.M)
    except OSError:
        return ""
    return match[1] if match else ""


def cann_version(home: Path) -> str:
    """From the installers' files, else from the name of the folder (cann-9.1.0, ascend-toolkit/8.3.RC1)."""
    for pattern in ("ascend_*_install.info", "*/ascend_*_install.info", "share/info/*/version.info", "*/version.info"):
        for path in sorted(home.glob(pattern)):
            version = read_version(path)
            if version:
                return version
    match = re.search(r"(\d+\.\d+(?:\.\w+)*)$", home.resolve().name)
    return match[1] if match else ""
