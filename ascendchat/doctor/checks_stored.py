"""Integrity of what is stored under $ASCENDCHAT_HOME: every folder with a manifest.json. For `ascendchat doctor`.

Sizes are always compared, checksums within a few seconds; `doctor --deep` compares every checksum, as does
`ascendchat data verify`.
"""

from __future__ import annotations

import time

from ascendchat.data import verify
from ascendchat.doctor.checks import Check, Machine, gib

BUDGET = 2.0  # seconds of hashing without --deep


def stored(m: Machine) -> Check:
    deadline = None if m.deep else time.monotonic() + BUDGET
    verdicts = verify.verify(list(verify.stored(m.home)), deadline=deadline)
    faults = [fault for verdict in verdicts for fault in verdict.faults]
    files, size, hashed = (sum(getattr(v, name) for v in verdicts) for name in ("files", "bytes", "hashed"))
    if not verdicts:
        return Check("stored data", "skip", m.say(f"nothing in {m.home} yet", f"{m.home} 中尚无数据"))
    if faults:
        more = f" (+{len(faults) - 3})" if len(faults) > 3 else ""
        return Check(
            "stored data",
            "fail",
            "; ".join(f"{fault.file}: {fault.what}" for fault in faults[:3]) + more,
            m.say(
                "a damaged shard, tokenizer or checkpoint gives wrong results or stops a run half-way",
                "损坏的分片、分词器或检查点会导致结果错误或训练中断",
            ),
            "\n".join(dict.fromkeys(fault.fix for fault in faults[:3])),
        )
    found = m.say(
        f"{len(verdicts)} folders, {files} files, {gib(size)}: sizes right, {hashed} checksums right",
        f"{len(verdicts)} 个目录，{files} 个文件，{gib(size)}：大小正确，{hashed} 个校验和正确",
    )
    if hashed < files:
        found += m.say(" (all: ascendchat doctor --deep)", "（全部校验：ascendchat doctor --deep）")
    return Check("stored data", "ok", found)
