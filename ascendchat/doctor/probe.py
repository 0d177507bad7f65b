"""Ask another process for facts about this Python, for `ascendchat doctor`. No torch in this process.

`import torch` itself can fail (torch_npu without CANN, a broken wheel), hang on a sick driver, or abort the process;
so each question is a small script run by the same interpreter, which prints one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ascendchat.device.env import AUTOLOAD

ANSWER_PREFIX = "ASCENDCHAT-PROBE "  # libraries print warnings; this marks our line

# torch alone, without vendor extensions: what it is, and the names of the devices of each type that it sees.
TORCH_SCRIPT = """
import importlib, torch, torch.distributed as dist
from ascendchat.chips import KINDS
out.update({kind: importlib.import_module(row.module).names() for kind, row in KINDS.items()})
out.update(version=torch.__version__, cuda_build=torch.version.cuda or "",
           cuda_bf16=bool(out["cuda"]) and torch.cuda.is_bf16_supported(), threads=torch.get_num_threads(),
           gloo=dist.is_available() and dist.is_gloo_available(), nccl=dist.is_available() and dist.is_nccl_available())
"""

# torch as a user sees it who has torch_npu installed.
NPU_SCRIPT = """
import torch, torch_npu, torch.distributed as dist
count = torch.npu.device_count()
out.update(version=torch_npu.__version__, count=count, available=torch.npu.is_available(),
           hccl=dist.is_available() and "hccl" in dist.Backend.backend_list)
try:  # counting needs no device; this does, and another process may hold it
    out["names"] = [torch.npu.get_device_name(i) for i in range(count)]
    out["bf16"] = bool(count) and bool(torch.npu.is_bf16_supported())
    torch.npu.set_compile_mode(jit_compile=False)  # 910A and 310P would first compile the operator
    torch.ones(1, device="npu:0").add_(1).item() if count else None
except RuntimeError as error:
    out["problem"] = str(error)
"""

# Each wheel is imported, not only looked up: one built for another machine fails here and not hours later.
WHEELS_SCRIPT = """
import importlib
for name in {names!r}:
    try:
        module = importlib.import_module(name)
        out[name] = str(getattr(module, "__version__", ""))
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == name
        out[name] = None if missing else "!" + str(error)
"""

SCRIPT = """
import json, sys
out = {{}}
{body}
sys.stdout.flush()
print({mark!r} + json.dumps(out), flush=True)
import os
os._exit(0)  # a vendor library that crashes while Python shuts down must not spoil the answer
"""


@dataclass(frozen=True)
class Probe:
    """Answer of one script: its values, or the text of its failure."""

    values: dict[str, Any]
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error


def run_probe(body: str, environ: Mapping[str, str], timeout: float = 60.0) -> Probe:
    """Run one probe script in a fresh interpreter with this environment."""
    script = SCRIPT.format(body=body, mark=ANSWER_PREFIX)
    try:
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=dict(environ),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Probe({}, f"no answer within {timeout:.0f} s")
    for line in done.stdout.splitlines():
        if line.startswith(ANSWER_PREFIX):
            return Probe(json.loads(line[len(ANSWER_PREFIX) :]))
    output = done.stderr.strip() or done.stdout.strip()
    return Probe({}, output or f"the process ended with status {done.returncode} and said nothing")


def ask_torch(environ: Mapping[str, str]) -> Probe:
    """Probe torch without vendor extensions."""
    return run_probe(TORCH_SCRIPT, {**environ, AUTOLOAD: "0"})


def ask_npu(environ: Mapping[str, str]) -> Probe:
    """Probe torch with torch_npu, loaded as a plain `import torch` would."""
    return run_probe(NPU_SCRIPT, {key: value for key, value in environ.items() if key != AUTOLOAD})


def ask_wheels(names: list[str], environ: Mapping[str, str]) -> Probe:
    """Import each module: {module: version, None when it is not installed, or "!why" when it cannot be imported}."""
    return run_probe(WHEELS_SCRIPT.format(names=names), {**environ, AUTOLOAD: "0"})


def last_line(error: str) -> str:
    """The line of a traceback that tells what happened; the first cause when exceptions are chained."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith(("ImportError", "OSError", "ModuleNotFoundError"))]
    return (causes or lines or [""])[0 if causes else -1]


def reach(url: str, seconds: float = 2.5) -> str:
    """Try `url`: "" when it answers within `seconds`, else the reason. It never blocks longer, not even in a name
    lookup."""
    result: list[str] = []

    def try_once() -> None:
        request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "ascendchat-doctor"})
        try:
            urllib.request.urlopen(request, timeout=seconds).close()
            result.append("")
        except urllib.error.HTTPError as error:  # it answered; 5xx is the proxy or the mirror saying it is down
            result.append("" if error.code < 500 else f"HTTP status {error.code}")
        except (OSError, ValueError) as error:
            result.append(str(getattr(error, "reason", "") or error))

    # A daemon thread: a lookup that hangs in the C library must not hold the process when it wants to end.
    thread = threading.Thread(target=try_once, daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else f"no answer within {seconds:g} s"
