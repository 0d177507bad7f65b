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

from ascendchat.config.commands import DeviceConfig
from ascendchat.config.flags import UnknownSetting, flags_of, parse, wants_help
from ascendchat.config.generate import EvalChatConfig, ModelConfig, NamedModelConfig
from ascendchat.config.help import help_page
from ascendchat.config.language import language, translate
from ascendchat.config.train import TrainConfig
from ascendchat.errors import UserError, nearest
from ascendchat.processes import record_error
from ascendchat.version import __version__, install_command

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


# Modules of the dependencies in pyproject.toml; one may be missing if the wheel was installed without dependencies.
NEEDED = set(
    "torch numpy yaml rich safetensors httpx pyarrow zstandard regex tiktoken tokenizers fastapi uvicorn httptools "
    "prometheus_client llguidance matplotlib".split()
)


class _Printed(io.RawIOBase):
    """Standard output or error of a command. On a full disk output is dropped with one warning, so that a log does not
    end days of training; with `trains` a closed pipe is ignored too."""

    def __init__(self, number: int, trains: bool) -> None:
        self.number, self.lost = number, False
        self.ignored = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, *([errno.EPIPE] if trains else [])}

    def write(self, data: Any) -> int:
        try:
            return os.write(self.number, data)
        except OSError as error:
            if error.errno not in self.ignored:
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
    """Open closed standard streams on /dev/null, because the next file that is opened would get their number and all
    output; wrap stdout and stderr in _Printed. Streams that a program has replaced stay as they are."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 (as long as the process)
    wrapped = []
    for number, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        if isinstance(old, io.TextIOWrapper) and old is getattr(sys, f"__{name}__") and old.fileno() == number:
            old.flush()
            printed, direct = _Printed(number, trains), old.write_through
            buffer: Any = printed if direct else io.BufferedWriter(printed)
            options: dict[str, Any] = {
                "encoding": old.encoding,
                "errors": old.errors,
                "line_buffering": old.line_buffering,
            }
            setattr(sys, name, io.TextIOWrapper(buffer, write_through=direct, **options))
            wrapped.append(printed)
    return wrapped


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
    """Split argv into the command (one or two words) and its arguments; a UserError names the nearest command."""
    for words in (2, 1):
        name = " ".join(argv[:words])
        if name in COMMANDS:
            return name, argv[words:]
    if group := _group(argv[0]):
        raise UserError(f"{argv[0]} needs a second word; choose from: {', '.join(group)}")
    raise UserError(f"there is no command {argv[0]!r}; {nearest(argv[0], list(COMMANDS))}")


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit status is 0, 1 for a failure that was reported, 2 for wrong input, 130 for Ctrl-C,
    71 if a device's memory ran out and only a new process can go on, 75 if a result could not be saved."""
    argv = sys.argv[1:] if argv is None else argv
    trains = _trains(argv)  # its results are in its run folder
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
        return issubclass(_load("config.", COMMANDS[name][0]), TrainConfig)
    return False


def _missing(error: ModuleNotFoundError) -> UserError | None:
    """A UserError for a package in NEEDED that is not installed."""
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
        computes = isinstance(config, DeviceConfig)
        return execute(_computing(config, function) if computes else _load("", function), config)
    except (UserError, ModuleNotFoundError) as raised:
        error = raised if isinstance(raised, UserError) else _missing(raised)
        if error is None:
            raise
        text = _with_owners(error) if isinstance(error, UnknownSetting) else str(error)
        print(f"ascendchat {name}: {translate(text)}", file=sys.stderr)
        record_error(error)
        return error.status
    except KeyboardInterrupt:
        print(f"ascendchat {name}: stopped", file=sys.stderr)
        return 130


def _with_owners(error: UnknownSetting) -> str:
    """The sentence for a flag that this command does not have, with the commands that have it."""
    owners = [name for name, (config, _, _) in COMMANDS.items() if error.name in flags_of(_load("config.", config))]
    return f"{error}; these commands have it: {', '.join(owners)}" if owners else str(error)


def _computing(config: DeviceConfig, function: str) -> Any:
    """Prepare the environment of the device, then import the command, which imports torch."""
    from ascendchat.device.env import announce, prepare_environment
    from ascendchat.runs.run import read_ahead

    announce(prepare_environment(config.device_type, debug=config.npu_debug, generates=config.generates))
    first = os.environ.get("RANK", "0") == "0" and function != "serve.command:run"  # whose workers open the model
    if first and isinstance(config, NamedModelConfig):
        stage = config.stage if isinstance(config, (ModelConfig, EvalChatConfig)) else "base"
        read_ahead(config.run, stage, config.checkpoint)
    return _load_with_torch(function)


def _load_with_torch(function: str) -> Any:
    """Import the command with its torch, and exclude the quarter of a million objects that this makes from garbage
    collection: it took 0.3 s until a command began, and 0.1 s of each full collection in training."""
    first = "torch" not in sys.modules
    gc.disable()
    try:
        return _load("", function)
    finally:
        if first:
            gc.freeze()
        gc.enable()


def execute(function: Any, config: Any) -> int:
    """Call the command; an uncaught error is printed with its traceback, then explained if a rule of `explain` fits."""
    try:
        return int(function(config) or 0)
    except (UserError, KeyboardInterrupt, BrokenPipeError):
        raise
    except Exception as error:  # noqa: BLE001 (every error is printed, then explained)
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
