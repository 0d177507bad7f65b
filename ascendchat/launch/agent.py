"""torchrun that reports why it failed: `python -m ascendchat.launch.agent RESULT.json TORCHRUN-ARGUMENTS...`.

torchrun turns every failure into exit status 1. This runs the same code and writes which rank failed with which
status, or that the port was taken, into RESULT.json for `ascendchat launch`. torch is imported inside the function.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascendchat.processes import die_with_parent

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def report(path: Path, result: dict[str, Any]) -> None:
    """Write the result so that a reader sees all of it or nothing."""
    beside = path.with_suffix(".part")
    with open(beside, "w", encoding="utf-8") as file:
        json.dump(result, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def killed(failures: Mapping[int, ProcessFailure]) -> list[int]:
    """Ranks that torchrun had to kill, which is the last that it does: a second at least after the first failure."""
    first = min(failure.timestamp for failure in failures.values())
    return [
        rank for rank, failure in failures.items() if failure.exitcode == -signal.SIGKILL and failure.timestamp > first
    ]


def main(argv: list[str]) -> int:
    """Run torchrun's own main function with its own arguments; 0, 1 for a failure, 128 + n for signal n."""
    die_with_parent(signal.SIGTERM)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    result = Path(argv[0])
    try:
        run(parse_args(argv[1:]))
    except ChildFailedError as error:
        failed = {str(rank): failure.exitcode for rank, failure in error.failures.items()}
        report(result, {"failed": failed, "killed": killed(error.failures)})
        return 1
    except SignalException as error:
        report(result, {"signal": int(error.sigval)})
        return 128 + int(error.sigval)
    except Exception:  # noqa: BLE001 (shown whole in the log, and told to the launcher)
        text = traceback.format_exc()
        print(text, file=sys.stderr, flush=True)
        taken = "EADDRINUSE" in text or "ddress already in use" in text
        report(result, {"error": text.strip().splitlines()[-1], "port_taken": taken})
        return 1
    report(result, {})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
