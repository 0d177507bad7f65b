"""What an error text or the name of an operator means to the simulator: is it simulated, what is refused, what next.

    cannsim explain "EZ3002: Optype [Identity] ..."
    cannsim explain aclnnTopKTopPSample
    python train.py 2>&1 | cannsim explain

Reads the sources and tables inside the package; needs neither torch nor a build.
"""

from __future__ import annotations

import difflib
import re
from functools import cache

from cannsim.build import ROOT

# Error codes that are told apart here. The sentences of all others are in src/runtime/errors.cpp.
CODES = {
    "EZ1001": "an argument was refused before the launch, as the documentation of the operator states it: compare the "
    "dtypes, shapes and formats of your call with the text behind the code.",
    "EZ3002": "the operator does not exist here. That is a gap of the simulator and no fault of your program.",
    "161001": "a required argument was a null pointer: an optional tensor was left out where the operator needs it.",
    "161002": "an argument has a dtype, shape or format that the operator does not take; bfloat16 on a chip without it "
    "(910A, 310P) ends here too.",
    "207000": "the simulator does not have this function: custom kernels (Triton, Ascend C), memory shared between "
    "processes and dumps need a real device. Leave these tests to a real NPU.",
    "207001": "device memory ran out: give the simulated NPU more with --memory-gb, or look for what holds it with "
    "cannsim trace.",
    "EL0004": "device memory ran out: give the simulated NPU more with --memory-gb, or look for what holds it with "
    "cannsim trace.",
    "107002": "a thread used the device without setting one: call torch.npu.set_device first in that thread.",
    "507015": "an operator failed while it ran. The text names it as kernel_name; everything after it on that device "
    "is dropped. Find the line of your program with cannsim run --stop-at-first-error.",
    "507048": "a collective waited in vain: a rank never entered it; cannsim trace shows the collectives per rank.",
    "EI0002": "a collective waited in vain: a rank never entered it; cannsim trace shows the collectives per rank.",
    "EI0005": "the ranks entered a collective with different arguments; the text says which.",
    "EI0003": "a collective was refused for an argument of this rank; the text says which.",
}
FORMATS = ("Identity", "TransData", "Cast", "Transpose", "Slice", "StridedSlice", "NPUAllocFloatStatus")


@cache
def simulated() -> dict[str, tuple[str, str]]:
    """Operator -> (types of its parameters, source of its signature)."""
    lines = (ROOT / "signatures.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return {name: (types, source) for name, types, source in rows}


@cache
def boxed() -> set[str]:
    """The operators of torch that CANNSIM_BOXED=1 sends to the CPU."""
    return set(re.findall(r'"(\w+)"', (ROOT / "src" / "ops" / "boxed_names.h").read_text(encoding="utf-8")))


@cache
def unsupported() -> set[str]:
    """Functions that exist only so that torch_npu can be loaded."""
    return set(re.findall(r"UNSUPPORTED\((\w+),", (ROOT / "src" / "runtime" / "unsupported.cpp").read_text()))


@cache
def sentences() -> dict[str, str]:
    """Error code, CANN's or the number -> its sentence, from the table of the runtime."""
    table = (ROOT / "src" / "runtime" / "errors.cpp").read_text(encoding="utf-8")
    rows = re.findall(r'\{(\d+), "(\w+)", "([^"]*)"\}', table)
    found: dict[str, str] = {}
    for number, code, sentence in rows:
        if len(number) == 6:  # the small numbers of HCCL are too common in texts
            found[number] = sentence.replace("%s", "...")
        found.setdefault(code, sentence.replace("%s", "..."))
    return found


def source_of(operator: str) -> str:
    """The file of an OP line, relative to the package; "" when a macro made the name."""
    wanted = re.compile(rf"\b{re.escape(operator.removeprefix('aclnn'))}\b")
    for path in sorted((ROOT / "src" / "ops").glob("*.cpp")):
        if wanted.search(path.read_text(encoding="utf-8")):
            return f"src/ops/{path.name}"
    return ""


def about_aclnn(name: str) -> str:
    if name in simulated():
        types, source = simulated()[name]
        where = f" in {source_of(name)}" if source_of(name) else ""
        return (
            f"{name} is simulated{where}; it takes ({types.replace(' ', ', ')}), after {source}. An error of it is "
            "about the arguments: the text behind EZ1001 says what it refuses, cannsim operators lists its checks."
        )
    stem = re.sub(r"V\d+$", "", name)
    relatives = sorted(other for other in simulated() if re.sub(r"V\d+$", "", other) == stem)
    near = relatives or difflib.get_close_matches(name, simulated(), n=3, cutoff=0.8)
    beside = f" Simulated: {', '.join(near)}." if near else ""
    return f"{name} is not simulated.{beside} {needed(name)}"


def needed(name: str) -> str:
    return (
        "What it needs: an OP line in a file of src/ops (parameters, checks, the same in ATen), its prototype "
        "in signatures.txt, and a case that compares it with the CPU. To go on without: CANNSIM_BOXED=1 lets torch's "
        f"CPU kernels stand in for {name.removeprefix('aclnn')} where torch has one; they check nothing and count no "
        "launch."
    )


@cache
def older() -> set[str]:
    """Operators of the older interface that are simulated."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "src" / "ops").glob("older*.cpp"))]
    return {name for text in texts for name in re.findall(r"^OLDER\((\w+),", text, flags=re.M)}


def about_aclop(name: str) -> str:
    """An operator of the older interface, aclopCompileAndExecute."""
    if name in older():
        return f"{name} is an operator of the older interface (aclop) and is simulated in {source_of(name)}."
    why = "torch_npu calls it when the aclnn operator is missing, for private formats, and when jit_compile is on"
    if name in FORMATS:
        why = "torch_npu calls it to change a private format (NZ, NC1HWC0) or when jit_compile is on"
    advice = "set torch.npu.set_compile_mode(jit_compile=False) and torch.npu.config.allow_internal_format = False"
    return f"{name} is an operator of the older interface (aclop): {why}. First {advice}. {needed(name)}"


def about_aten(name: str) -> str:
    if name in boxed():
        return f"aten::{name} needs an aclnn operator that is not simulated; with CANNSIM_BOXED=1 it runs on the CPU."
    return f"aten::{name} is not among those that lack an operator; the name of the aclnn function would tell more."


def explain(text: str) -> str:
    """One paragraph for each operator and error code in the text; "" when there is none."""
    answers = [about_aclnn(re.sub("GetWorkspaceSize$", "", name)) for name in re.findall(r"\baclnn[A-Z]\w*", text)]
    optypes = re.findall(r"Optype \[(\w+)\]", text)
    answers += [about_aclop(name) for name in optypes]
    answers += [about_aten(name) for name in re.findall(r"\baten::(\w+)", text)]
    answers += [
        f"{name} is not supported by the simulator: {CODES['207000']}"
        for name in re.findall(r"\b(?:aclrt|rt)[A-Z]\w+", text)
        if name in unsupported()
    ]
    for code in re.findall(r"\b(?:E[A-Z]\d{4}|E3\d{4}|[125]0[67]\d{3}|16100\d)\b", text):
        if code in CODES:
            answers.append(f"{code}: {CODES[code]}")
        elif code in sentences():
            answers.append(f"{code}: {sentences()[code]}")
    words = text.split()
    if not answers and len(words) == 1 and re.fullmatch(r"\w+", text.strip()):
        word = words[0]
        if word in boxed():
            return about_aten(word)
        return about_aclnn(f"aclnn{word}") if word[0].isupper() else ""
    return "\n".join(dict.fromkeys(answers))
