"""Check this machine and say how to mend what is wrong: `ascendchat doctor [--json]`.

Read checks.py first (what a check is, and the list of them); probe.py asks torch in a subprocess, because
`import torch` itself may fail. `ascendchat doctor --devices 8` (collective.py) proves the devices together,
`doctor --watch` shows them live, `ascendchat clean` (clean.py) frees them, `ascendchat explain` reads error texts.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the other commands of this package start faster without the checks
    from ascendchat.config.commands import DoctorConfig
    from ascendchat.doctor.machine import CheckResult, Machine

MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "red"), "skip": ("-", "dim")}


def run(config: DoctorConfig) -> int:
    """Run `ascendchat doctor`; exit status 1 when a check failed, else 0."""
    from ascendchat.config.language import language
    from ascendchat.doctor.checks import gather, run_checks

    lang = language(config.lang)
    if config.watch:
        from ascendchat.doctor.watch import watch_devices

        return watch_devices(config.interval, lang)
    if config.devices is not None:
        from ascendchat.doctor.collective import check_devices

        return check_devices(config.devices, config.device_type, lang, as_json=config.json)
    machine = gather(lang, deep=config.deep)
    checks = run_checks(machine)
    if config.json:
        print(json.dumps(json_report(machine, checks), ensure_ascii=False, indent=2))
    elif sys.stdout.isatty():
        show_table(machine, checks)
    else:
        print("\n".join(plain_lines(machine, checks)))
    return 1 if any(c.status == "fail" for c in checks) else 0


def summarize(machine: Machine, checks: list[CheckResult]) -> tuple[str, str]:
    """Sum up the checks: (one line, the next command to type)."""
    from ascendchat.doctor.machine import plan_flag

    failed = [c for c in checks if c.status == "fail"]
    warned = sum(c.status == "warn" for c in checks)
    kind, name, count = machine.choice()
    if failed:
        names = ", ".join(c.name for c in failed)
        return machine.say(f"{len(failed)} failed: {names}", f"{len(failed)} 项失败：{names}"), failed[0].fix
    simulated = machine.say("simulated ", "模拟 ") if machine.simulated else ""
    devices = f"{kind} ({simulated}{name})" + (f" x {count}" if count > 1 else "")
    text = machine.say(f"ready: training uses {devices}", f"就绪：训练将使用 {devices}")
    if warned:
        text += machine.say(f", {warned} warning(s)", f"，{warned} 个警告")
    if count > 1:
        return text, f"ascendchat doctor --devices {count}"
    if kind == "cpu":
        return text, "ascendchat plan --depth 4 --chip cpu"
    return text, "ascendchat plan --depth 12" + plan_flag(name)


def json_report(machine: Machine, checks: list[CheckResult]) -> dict[str, Any]:
    """Build the object that `--json` prints."""
    kind, name, count = machine.choice()
    text, following = summarize(machine, checks)
    return {
        "ok": not any(c.status == "fail" for c in checks),
        "verdict": text,
        "next": following,
        "device": {"type": kind, "name": name, "count": count},
        "checks": [asdict(c) for c in checks],
    }


def plain_lines(machine: Machine, checks: list[CheckResult]) -> list[str]:
    """Format the checks for a log file; skipped ones are named in one line."""
    lines = []
    for check in checks:
        if check.status == "skip":
            continue
        lines.append(f"{check.status:<5} {check.name:<17} {check.found}")
        if check.why:
            lines += [f"{'':<23} {machine.say('why: ', '原因：')}{check.why}"]
        if check.fix:
            lines += [f"{'':<23} {machine.say('fix: ', '修复：')}{check.fix}"]
    skipped = [c.name for c in checks if c.status == "skip"]
    if skipped:
        lines.append(f"skip  {', '.join(skipped)}")
    text, following = summarize(machine, checks)
    return [*lines, "", text, machine.say("next: ", "下一步：") + following]


def show_table(machine: Machine, checks: list[CheckResult]) -> None:
    """Print the checks as a coloured table on a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        mark, colour = MARKS[check.status]
        cell = Text(check.found, style="dim" if check.status == "skip" else "")
        if check.why:
            cell.append(f"\n{check.why}", style=colour)
        if check.fix:
            cell.append(f"\n$ {check.fix}", style="bold")
        table.add_row(Text(mark, style=colour), check.name, cell)
    console = Console(highlight=False)
    console.print(table)
    text, following = summarize(machine, checks)
    failed = any(c.status == "fail" for c in checks)
    console.print(Text(f"\n{text}", style="bold red" if failed else "bold green"))
    console.print(Text(machine.say("next: ", "下一步：") + following))
