"""`ascendchat COMMAND --flags`: the table of commands. Nothing is imported before its command is known."""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import io
import os
import sys
import traceback
from typing import Any

from ascendchat.config import install_command, parse, wants_help
from ascendchat.config.help import help_page
from ascendchat.config.language import language, translate
from ascendchat.errors import UserError, nearest
from ascendchat.processes import record_error
from ascendchat.version import __version__

# command: (config class, function, one line of help)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "doctor": ("commands:DoctorConfig", "doctor.command:run", "check this machine and say how to mend what is wrong"),
    "selftest": ("commands:SelftestConfig", "doctor.selftest:run", "prove a device in an hour; one file to send"),
    "explain": (
        "commands:ExplainConfig",
        "doctor.explain:run",
        "turn an error text or a symptom into cause, checks and fix",
    ),
    "plan": ("commands:PlanConfig", "plan.command:run", "parameters, memory, batch, hours and cost of a run"),
    "clean": (
        "commands:CleanConfig",
        "doctor.clean:run",
        "free devices, shared memory and partial downloads",
    ),
    "setup": ("commands:SetupConfig", "doctor.setup:run", "what to install on this machine, or install it"),
    "data fetch": ("data:DataFetchConfig", "data.fetch:run", "bring data sets to this machine"),
    "data prepare": ("data:DataPrepareConfig", "data.prepare:run", "turn documents into token shards"),
    "data verify": ("data:DataVerifyConfig", "data.verify:run", "check everything stored against its checksums"),
    "tokenizer train": ("data:TokenizerTrainConfig", "data.tokenizer.commands:train_command", "train a tokenizer"),
    "tokenizer eval": (
        "data:TokenizerEvalConfig",
        "data.tokenizer.commands:eval_command",
        "bytes per token, against others",
    ),
    "base": ("train:BaseConfig", "train.pretrain:run", "pretrain a model from raw text"),
    "mid": ("train:MidConfig", "train.chat:run_mid", "teach a base model the form of conversations"),
    "sft": ("train:SftConfig", "train.chat:run_sft", "fine-tune on conversations"),
    "finetune": (
        "finetune:FinetuneConfig",
        "train.finetune:run",
        "fine-tune an existing model: all weights or LoRA",
    ),
    "rl": ("rl:RlConfig", "rl.command:run", "reinforcement learning on questions with checkable answers"),
    "export": ("generate:ExportConfig", "models.export:run", "write a trained model as a Hugging Face folder"),
    "import nanochat": (
        "generate:ImportNanochatConfig",
        "models.nanochat:run",
        "make a run of checkpoints of nanochat",
    ),
    "eval base": ("generate:EvalBaseConfig", "eval.base:run", "bits per byte and CORE of a base model"),
    "chat": ("generate:ChatConfig", "serve.terminal:run", "talk to a model in the terminal"),
    "serve": ("serve:ServeConfig", "serve.command:run", "a web chat and an OpenAI-compatible API for a model"),
    "rollout-server": (
        "rl:RolloutServerConfig",
        "remote.vllm_server:run",
        "start vLLM for the rollouts of rl, with all that a weight sync needs",
    ),
    "bench serve": ("serve:BenchServeConfig", "bench.serve:run", "load a running server and time its answers"),
    "bench decode": ("generate:BenchDecodeConfig", "bench.decode:run", "time the generation of text on this device"),
    "eval chat": ("generate:EvalChatConfig", "eval.chat:run", "ChatCORE, its Chinese counterpart and the toy world"),
    "bench train": ("train:BenchTrainConfig", "bench.train:run", "time training steps on this device"),
    "report": ("commands:ReportConfig", "report.command:run", "curves, tables and samples of a run in one file"),
    "speedrun": (
        "commands:SpeedrunConfig",
        "speedrun.command:run",
        "every stage of a recipe, from text to a chat model",
    ),
    "launch": ("commands:LaunchConfig", "launch.command:run", "run a command on many devices or nodes"),
}


# Modules of the packages in pyproject.toml, one of which may be missing where the wheel was installed alone.
NEEDED = set(
    "torch numpy yaml rich safetensors httpx pyarrow zstandard regex tiktoken tokenizers fastapi uvicorn httptools "
    "prometheus_client llguidance matplotlib".split()
)


class _Printed(io.RawIOBase):
    """Standard output or error: what finds no room is lost, which is said once, so that a full disk below a log does
    not end days of training; nor does a reader who is gone, if `trains`."""

    def __init__(self, number: int, trains: bool) -> None:
        self.number, self.lost = number, False
        self.endured = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, *([errno.EPIPE] if trains else [])}

    def write(self, data: Any) -> int:
        try:
            return os.write(self.number, data)
        except OSError as error:
            if error.errno not in self.endured:
                raise
            if not self.lost and self.number == 1 and error.errno != errno.EPIPE:
                text = f"what is printed is lost from here on ({error.strerror}); make room there, or send it elsewhere"
                with contextlib.suppress(OSError):
                    os.write(2, f"ascendchat: {translate(text)}\n".encode(errors="replace"))
            self.lost = True
            return len(data)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.number

    def isatty(self) -> bool:
        return os.isatty(self.number)


def _settle_streams(trains: bool) -> list[_Printed]:
    """Closed streams lead nowhere, or the next file that is opened would get their numbers and what is printed; and a
    stream that finds no room is no error. Streams that a program has replaced are left alone."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 (as long as the process)
    found = []
    for number, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        if isinstance(old, io.TextIOWrapper) and old is getattr(sys, f"__{name}__") and old.fileno() == number:
            old.flush()
            printed, direct = _Printed(number, trains), old.write_through
            buffer: Any = printed if direct else io.BufferedWriter(printed)
            ways: dict[str, Any] = {
                "encoding": old.encoding,
                "errors": old.errors,
                "line_buffering": old.line_buffering,
            }
            setattr(sys, name, io.TextIOWrapper(buffer, write_through=direct, **ways))
            found.append(printed)
    return found


def _load(prefix: str, target: str) -> Any:
    module, name = target.split(":")
    return getattr(importlib.import_module(f"ascendchat.{prefix}{module}"), name)


def overview(group: str = "") -> str:
    """The page of `ascendchat --help`, or of a group of commands: `ascendchat data --help`."""
    shown = [(name, translate(text)) for name, (_, _, text) in COMMANDS.items() if name.startswith(group)]
    rows = "\n".join(f"  {name:<18} {text}" for name, text in shown)
    head = translate(f"ascendchat {__version__}: from raw text to a chat model, on Ascend NPUs and on anything else")
    return (
        f"{head}\n\n{translate('usage: ')}ascendchat COMMAND [--flags]      ascendchat COMMAND --help\n\n{rows}\n\n"
        f"{translate('Start with: ascendchat doctor')}\n"
    )


def _group(word: str) -> list[str]:
    return [name for name in COMMANDS if name.startswith(word + " ")]


def split_command(argv: list[str]) -> tuple[str, list[str]]:
    """Split argv into the command (one or two words) and its arguments, or say which command was nearest."""
    for words in (2, 1):
        name = " ".join(argv[:words])
        if name in COMMANDS:
            return name, argv[words:]
    if group := _group(argv[0]):
        raise UserError(f"{argv[0]} needs a second word; choose from: {', '.join(group)}")
    raise UserError(f"there is no command {argv[0]!r}; {nearest(argv[0], list(COMMANDS))}")


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit status is 0, 1 for a failure that was reported, 2 for wrong input, 130 for Ctrl-C,
    71 where a device's memory ran out and only a new process can go on, 75 for what could not be saved."""
    argv = sys.argv[1:] if argv is None else argv
    trains = _trains(argv)  # what it did is in its run folder
    streams = _settle_streams(trains)
    if language() == "zh" and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a console may not know every character
    code = 0
    try:
        code = _main(argv)
        sys.stdout.flush()  # here, where a closed pipe can be handled, not when Python ends
    except BrokenPipeError:  # `ascendchat plan | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code or int(not trains and any(stream.lost and stream.number == 1 for stream in streams))


def _trains(argv: list[str]) -> bool:
    with contextlib.suppress(UserError, IndexError):
        name, _ = split_command(argv)
        return hasattr(_load("config.", COMMANDS[name][0]), "save_every")
    return False


def _missing(error: ModuleNotFoundError) -> UserError | None:
    """The sentence for a package of ours that is not installed."""
    name = (error.name or "").partition(".")[0]
    return UserError(f"{name} is not installed; type: {install_command()}") if name in NEEDED else None


def _main(argv: list[str]) -> int:
    if argv and argv[0] == "help":  # `help plan` is `plan --help`
        argv = [*argv[1:], "--help"]
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(overview())
        return 0
    if argv[0] in ("-V", "--version", "version"):
        print(f"ascendchat {__version__}")
        return 0
    name = argv[0]
    if _group(name) and wants_help(argv[1:2]):
        sys.stdout.write(overview(name + " "))
        return 0
    try:
        name, rest = split_command(argv)
        config_class, function, _ = COMMANDS[name]
        cls = _load("config.", config_class)
        if wants_help(rest):
            sys.stdout.write(help_page(f"ascendchat {name}", cls))
            return 0
        config = parse(cls, rest)
        return execute(
            _load("", function) if not hasattr(config, "npu_debug") else _computing(config, function), config
        )
    except (UserError, ModuleNotFoundError) as raised:
        error = raised if isinstance(raised, UserError) else _missing(raised)
        if error is None:
            raise
        print(f"ascendchat {name}: {translate(str(error))}", file=sys.stderr)
        record_error(error)
        return error.status
    except KeyboardInterrupt:
        print(f"ascendchat {name}: stopped", file=sys.stderr)
        return 130


def _computing(config: Any, function: str) -> Any:
    """Commands that import torch first get the environment of their device."""
    from ascendchat.device.env import announce, prepare_environment
    from ascendchat.runs.run import read_ahead

    announce(prepare_environment(config.device_type, debug=config.npu_debug, generates=config.generates))
    opens = hasattr(config, "checkpoint") and function != "serve.command:run"  # whose workers open the model
    if opens and os.environ.get("RANK", "0") == "0":
        read_ahead(config.run, getattr(config, "stage", "base"), config.checkpoint)
    return _load_with_torch(function)


def _load_with_torch(function: str) -> Any:
    """The quarter of a million objects that importing torch makes stay: they are never searched for garbage,
    which took 0.3 s until a command began, and 0.1 s of each full search in training."""
    first = "torch" not in sys.modules
    gc.disable()
    try:
        return _load("", function)
    finally:
        if first:
            gc.freeze()
        gc.enable()


def execute(function: Any, config: Any) -> int:
    """Call the command; an uncaught error is shown whole, then explained if we know it."""
    try:
        return int(function(config) or 0)
    except (UserError, KeyboardInterrupt, BrokenPipeError):
        raise
    except Exception as error:  # noqa: BLE001 (everything is shown whole, then explained)
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            raise UserError(
                f"{str(error.filename)[:60]}...: no file can have so long a name; give a shorter one"
            ) from None
        if isinstance(error, RuntimeError) and str(error).startswith("Could not determine home"):  # of expanduser()
            raise UserError("a name begins with ~ and a user whom this machine does not know; write the path") from None
        if isinstance(error, ModuleNotFoundError) and (missing := _missing(error)):
            raise missing from None
        text = traceback.format_exc()
        record_error(error)
        sys.stderr.write(text)
        from ascendchat.doctor.explain import print_findings

        print_findings(text, stream=sys.stderr)
        return 1
