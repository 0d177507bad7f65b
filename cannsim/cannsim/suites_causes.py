"""Why a test of a public suite did not pass on cannsim, read from its messages. Used by suites.py."""

from __future__ import annotations

import re

# In the order in which one test decides about its file.
CAUSES = {
    "passed": "every test that did not skip itself passed",
    "skipped": "all tests skipped themselves (another chip, another version, too few devices)",
    "wrong": "the result is not the one that the test expects",
    "refused": "a check of a simulated operator refuses what the test does",
    "missing": "an operator or function that is not simulated",
    "hardware": "needs what only the hardware, its tools or a package that is not installed has",
    "hangs": "took longer than the time limit",
    "dies": "the process ended",
    "error": "any other error, most often of the test itself",
}
DECIDE = ("wrong", "dies", "hangs", "refused", "missing", "error", "hardware")

# Tried in this order on the messages of a test that failed; the first group is the detail.
PATTERNS = [
    ("missing", r"EZ3002: Optype \[(\w+)\]"),
    ("missing", r"(aclnn\w+?)(?:GetWorkspaceSize)? or \w+ not in"),
    ("missing", r"(aclnn\w+?)(?:GetWorkspaceSize)? not in libopapi"),
    ("missing", r"(aclCreate\w+: \w+ dtype \d+|aclCreate\w+: dtype \d+) is not simulated"),
    ("missing", r"(\w+) is not simulated"),
    ("missing", r"[Ff]ailed to find function (\w+)"),
    ("hardware", r"No module named '([\w.]+)'"),
    (
        "hardware",
        r"(libatb|libmspti|triton|bishengir|tbe|ge_runner|msprof|atc)\b[^\n]*(?:not found|No such file|cannot)",
    ),
    ("hardware", r"No such file or directory: '([^']*)'"),
    ("error", r"AssertionError: (no unittest tests)"),
    ("error", r"AssertionError: (\"[^\n]*\" does not match)"),  # the text of an error, which versions word differently
    ("refused", r"EZ1001: [^\n]*?Call (aclnn\w+) failed"),
]


def of_text(text: str, assertion: bool) -> tuple[str, str]:
    """(cause, detail) of one failed test from its traceback and what it printed; assertion: an assert failed."""
    for cause, pattern in PATTERNS:
        found = re.search(pattern, text)
        if found:
            return cause, found.group(1)
    fault = re.search(r"fault kernel_name=(\w+), ([^\n]*)", text)
    if fault:
        return "refused", f"{fault.group(1)}: {fault.group(2)[:100]}"
    lines = [line for line in text.strip().splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return "wrong" if assertion else "error", (lines[-1] if lines else text[-200:])[:160]


def of_file(tests: list[list[str]]) -> tuple[str, str]:
    """(cause, detail) of a file from the [test, cause, detail] of its tests."""
    for cause in DECIDE:
        for _, found, detail in tests:
            if found == cause:
                return cause, detail
    return ("passed" if any(cause == "passed" for _, cause, _ in tests) else "skipped"), ""
