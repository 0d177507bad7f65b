"""The answer of `ascendchat explain`: what a finding holds, and how it is written in English and Chinese."""

from __future__ import annotations

from dataclasses import dataclass

from ascendchat.doctor.explain_rules import CONSEQUENCE, GENERIC, SYMPTOM


@dataclass(frozen=True)
class Finding:
    """One explained fault; the first of a list is the likely root cause."""

    rule: str
    title: str
    cause: str
    check: list[str]
    commands: list[str]
    line: str
    count: int
    line_number: int
    file: str
    level: int
    symptom: str = ""  # the phrase that the question was like; the text of a log is matched whole instead


WORDS = {
    "en": {
        "head": "What this means:",
        "seen": "Seen: ",
        "cause": "Cause:",
        "check": "Check:",
        "run": "Run:  ",
        "line": "line {}",
        "times": "{} times",
        "maybe": "No error text, so by its symptom. What it may be, the likeliest first:",
        "also": "Also in the log, most likely because of the above:",
        "unknown": "ascendchat does not know this error, so it makes no guess. Where to look next:",
        "next": [
            "the first error in the log (not the last): later lines are often only consequences",
            "on an NPU: the logs of the driver under $HOME/ascend/log/debug/plog (or $ASCEND_PROCESS_LOG_PATH)",
            "the same command with --npu-debug: every launch blocks, and the traceback shows the true line",
            "this machine: ascendchat doctor",
        ],
        "unmatched": "ascendchat knows no error or symptom like this. What to do next:",
        "ask": [
            'say it in other words, in English or Chinese: ascendchat explain "training hangs", "out of memory"',
            "give the log, it says more than a description: ascendchat explain train.log (or the folder of the run)",
            "check this machine: ascendchat doctor",
        ],
    },
    "zh": {
        "head": "这是什么意思：",
        "seen": "位置：",
        "cause": "原因：",
        "check": "检查：",
        "run": "执行：",
        "line": "第 {} 行",
        "times": "{} 次",
        "maybe": "这不是报错原文，按现象查找。可能是以下原因，最可能的在前：",
        "also": "日志中还有以下内容，很可能由上面的问题引起：",
        "unknown": "ascendchat 不认识这个错误，因此不作猜测。接下来可以看：",
        "next": [
            "日志中的第一个错误（而不是最后一个）：后面的往往只是后果",
            "在 NPU 上：$HOME/ascend/log/debug/plog（或 $ASCEND_PROCESS_LOG_PATH）下的日志",
            "加上 --npu-debug 重跑同一命令：每次下发都会同步，调用栈指向真正的行",
            "检查本机：ascendchat doctor",
        ],
        "unmatched": "ascendchat 不认识这样的报错或现象。接下来可以：",
        "ask": [
            '换个说法（中英文都行）：ascendchat explain "训练卡住"、"显存不足"',
            "给出日志，它比描述更有用：ascendchat explain train.log（或运行目录）",
            "检查本机：ascendchat doctor",
        ],
    },
}


def render(findings: list[Finding], lang: str, asked: bool = False) -> str:
    """The answer as plain text. `asked`: to a question instead of a log."""
    words: dict[str, str] = {key: value for key, value in WORDS[lang].items() if isinstance(value, str)}
    if not findings:
        head, steps = ("unmatched", "ask") if asked else ("unknown", "next")
        return "\n".join([words[head], *(f"  - {step}" for step in WORDS[lang][steps])]) + "\n"
    rooted = findings[0].level <= SYMPTOM and not asked
    whole = [f for f in findings if not (rooted and f.level == CONSEQUENCE) and f.level != GENERIC][:5] or findings[:5]
    rest = [f for f in findings if f not in whole]
    lines = [words["maybe" if findings[0].symptom else "head"]]
    for number, found in enumerate(whole, 1):
        times = f", {words['times'].format(found.count)}" if found.count > 1 else ""
        place = f"{found.file}:{found.line_number}" if found.file else words["line"].format(found.line_number)
        lines += ["", f"{number}. {found.title}  [{found.rule}{times}]"]
        if found.line:
            lines += [f"   {words['seen']} {place}: {found.line}"]
        lines += [f"   {words['cause']} {found.cause}"]
        lines += [f"   {words['check']} {check}" for check in found.check]
        lines += [f"   {words['run']} {command}" for command in found.commands]
    if rest:
        decoded = {f.rule: f" {f.cause}" for f in rest if f.level == GENERIC}
        lines += ["", words["also"], *(f"  - {f.title}  [{f.rule}]{decoded.get(f.rule, '')}" for f in rest)]
    return "\n".join(lines) + "\n"
