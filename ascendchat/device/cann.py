"""Which CANN is installed, from the files of its installers: `cann_version(Path(environ["ASCEND_HOME_PATH"]))`."""

from __future__ import annotations

import re
from pathlib import Path


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
