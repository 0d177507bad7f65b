"""`ascendchat explain LOG`: the errors that ascendchat raises itself (exit status 2). Each is already one sentence with
the next step, so the explanation repeats it; commands in `backquotes` inside it become the commands to run."""

from __future__ import annotations

import re

from ascendchat.doctor.explain_rules import CAUSE, Rule, Text

RULE = Rule(
    id="own-error",
    level=CAUSE,
    patterns=[
        # What the launcher says while all is well, or about a rank whose own log holds the reason, is no error; that
        # the loss diverged has a rule of its own.
        (
            r"^(?:\[[^\]]{1,40}\]:? ?)?ascendchat [a-z][a-z-]*(?: [a-z][a-z-]*)?: "
            r"(?!stopped\b|\d+ process|card \d|starting again|rank \d+ (?:failed|was killed)|the port of the rend|"
            r"the loss of step \d)"
            r"(?P<message>\S.*)"
        ),
        # an exception class of this package
        r"\bascendchat\.[\w.]+\.(?!MissingRanks|Diverged)[A-Z]\w+: (?P<message>\S.*)",
    ],
    en=Text(
        title="ascendchat stopped and says why",
        cause="{message}",
        check=["Do what the sentence says; `ascendchat COMMAND --help` lists the flags of the command."],
    ),
    zh=Text(
        title="ascendchat 自己停止并说明了原因",
        cause="原文：{message}",
        check=["按这句话所说的去做；`ascendchat COMMAND --help` 会列出该命令的参数。"],
    ),
    commands=[],
)


def quoted_commands(message: str) -> list[str]:
    """The commands that a sentence of ours holds between backquotes."""
    return list(dict.fromkeys(re.findall(r"`((?:ascendchat|pip|python|source|export|npu-smi) [^`]+)`", message)))
