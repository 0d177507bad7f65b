"""`ascendchat chat` in a real terminal, behind pipes and as one shot, with a tiny checkpoint made here."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import current_thread, main_thread
from types import SimpleNamespace
from typing import Any

import engine_models as make
import pytest
import torch

from ascendchat import cli, files
from ascendchat.checkpoint import Writer
from ascendchat.config import parse
from ascendchat.config.generate import ChatConfig
from ascendchat.device import pick
from ascendchat.engine.open import engine_for, open_for_generation
from ascendchat.errors import UserError, home
from ascendchat.models.open import OpenedModel
from ascendchat.parallel.collectives import World
from ascendchat.parallel.context import Context
from ascendchat.runs.run import run_folder
from ascendchat.serve import terminal

pytestmark = pytest.mark.usefixtures("one_thread")

SPECIAL = make.tokenizer().specials
ENDLESS = make.script([SPECIAL["<|assistant_start|>"], ord("a"), ord("b"), ord("a")])


def save(
    run: str = "tiny",
    stage: str = "sft",
    follows: dict[int, int] | None = None,
    seq_len: int = 256,
    dtype: torch.dtype = torch.float32,
    **changed: torch.Tensor | None,
) -> Path:
    """A run whose model follows a script, and the tokenizer it was trained with. `changed`: weights that are others
    than the model's, or left out."""
    model = make.scripted(make.calculator_script()[0] if follows is None else follows, seq_len)
    state = {"stage": stage, "shape": model.shape.to_dict(), "tokenizer": make.tokenizer().fingerprint}
    weights = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()} | changed
    writer = Writer(run_folder(run, stage))
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    writer.save(1, model=kept, shards={}, state=state)
    writer.wait()
    make.tokenizer().save(home() / "tokenizer")
    return run_folder(run, stage) / "step_000001"


Generate = Callable[..., tuple[str, str]]


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Generate:
    """Runs the command with a text typed behind a pipe: (standard output, standard error)."""

    def asked(typed: str, *flags: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        assert terminal.run(parse(ChatConfig, ["--device-type", "cpu", "-t", "0", *flags])) == 0
        found = capsys.readouterr()
        return found.out, found.err

    return asked


def test_one_shot_prints_the_answer_and_the_machinery_only_when_asked_for(chat: Generate) -> None:
    folder = save()
    assert chat("not read\n", "-p", "What is 17 + 25?") == ("你好!\n", "")
    out, err = chat("", "-p", "hi", "-v")
    assert out == "你好!\n"
    assert [line.split(":")[0] for line in err.splitlines()] == ["cpu", "attention", str(folder)]
    assert chat("", "-p", "hi", "--verbose") == (out, err)


def test_each_line_of_a_pipe_is_a_prompt_of_its_own(
    chat: Generate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save()
    asked, make_prompt = [], terminal.render_prompt
    monkeypatch.setattr(
        terminal,
        "render_prompt",
        lambda tokenizer, talk, room: asked.append(list(talk)) or make_prompt(tokenizer, talk, room),
    )
    out, _ = chat("你是谁？\nand?\n", "--system", "Be brief.")
    assert out == "你好!\n" * 2
    system = {"role": "system", "content": "Be brief."}
    assert asked == [[system, {"role": "user", "content": line}] for line in ("你是谁？", "and?")]


def test_a_pipe_is_answered_line_by_line_and_commands_work(chat: Generate, tmp_path: Path) -> None:
    save()
    lines = ["你是谁？", "", f"/save {tmp_path / 'talk.json'}", "/reset", "/temperature 0.5", "/temperature hot"]
    lines += ["/save", f"/save {tmp_path}/no/where", "/what", "and?", f"/save {tmp_path / 'short.json'}"]
    out, err = chat("\n".join(lines), "--system", "Be brief.")
    assert out == "你好!\n" * 2
    said = ["saved 3 messages", "forgotten", "temperature 0.5", "the temperature is 0.5", "name a file", "cannot write"]
    for sentence in [*said, "there is no command /what", "/help"]:
        assert sentence in err
    talk = json.loads((tmp_path / "talk.json").read_text(encoding="utf-8"))["messages"]
    assert [message["role"] for message in talk] == ["system", "user", "assistant"]
    assert talk[1]["content"] == "你是谁？"
    assert [part["text"] for part in talk[2]["content"]] == ["17+25", "42", "你好!"]
    assert len(json.loads((tmp_path / "short.json").read_text())["messages"]) == 3, "reset keeps the system message"


@pytest.mark.parametrize("name", [".", "/", "..", "~nobody-of-this-name/x", "a\0b", "a" * 300])
def test_a_name_that_is_no_file_ends_no_conversation(chat: Generate, name: str) -> None:
    save()
    out, err = chat(f"hi\n/save {name}\nand?\n")
    assert out == "你好!\n" * 2
    assert f"cannot write {name}: " in err


@pytest.mark.parametrize("flags", [("-p", "hi"), ()])
def test_control_characters_of_the_model_are_shown_and_not_obeyed(
    chat: Generate, flags: tuple[str, ...], tmp_path: Path
) -> None:
    said = "\x1b[31m\x07\x9b\x7f\r\u202e\t!\n"  # byte after byte, each once: the model is a table
    save(follows=make.script([SPECIAL["<|assistant_start|>"], *said.encode(), SPECIAL["<|assistant_end|>"]]))
    out, _ = chat(f"hi\n/save {tmp_path / 'talk.json'}\n", *flags)
    assert out == r"\x1b[31m\x07\x9b\x7f\x0d\u202e" + "\t!\n"
    if not flags:
        assert json.loads((tmp_path / "talk.json").read_text())["messages"][-1]["content"] == said, "as it was said"


def test_a_conversation_longer_than_the_context_goes_on(chat: Generate) -> None:
    save(seq_len=64)
    out, _ = chat("a long question that fills the context\n" * 3, "--max-tokens", "20")
    assert out == "你好!\n" * 3


def test_a_base_model_continues_the_text_with_a_notice(chat: Generate) -> None:
    save(stage="base", follows=make.script([ord("x"), ord("y"), ord("z"), make.tokenizer().bos]))
    assert chat("", "-p", "wx") == ("yz\n", terminal.BASE_NOTICE + "\n")


def test_a_text_for_a_base_model_begins_as_its_tokenizer_begins_texts() -> None:
    generator, tokenizer = SimpleNamespace(context=16), make.tokenizer()
    text = "a long text that does not fit"
    for opening in ((), (3,), (3, 5)):
        tokenizer.opening = opening
        chat = terminal.Chat(generator, tokenizer, ChatConfig(max_tokens=4), False, io.StringIO(), False)  # type: ignore[arg-type]
        ids = list(chat.request(text).prompt)
        assert ids == [*opening, *tokenizer.encode(text)[len(opening) - 12 :]]
        assert list(chat.request("hi").prompt) == [*opening, *tokenizer.encode("hi")]


def opened(**names: str) -> OpenedModel:
    device, config = pick("cpu"), ChatConfig(**names)  # type: ignore[arg-type]
    return open_for_generation(Context(device, World(), device.bind(0), lambda text: None), config, config.stage)


def environment() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C", "TERM": "dumb", "OMP_NUM_THREADS": "1"}


UNNEEDED = "torch._dynamo", "torch._inductor", "transformers", "ascendchat.data.fetch"


@pytest.mark.slow
def test_an_answer_needs_no_compiler_no_other_library_and_no_locale() -> None:
    save()
    code = f"import sys; from ascendchat import cli; cli.main(); print([m for m in {UNNEEDED} if m in sys.modules])"
    command = [sys.executable, "-c", code, "chat", "--device-type", "cpu", "-t", "0"]
    done = subprocess.run(command, input="你好吗？\n".encode(), capture_output=True, env=environment())
    assert (done.returncode, done.stdout.decode()) == (0, "你好!\n[]\n"), done.stderr.decode()


@pytest.mark.parametrize("named", ["run", "stage", "checkpoint"])
def test_the_weights_are_read_for_their_checksum_once_while_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    folder, read, plain = save(), list[tuple[str, bool]](), files._sha256
    monkeypatch.setattr(
        files, "_sha256", lambda path: read.append((path.name, current_thread() is main_thread())) or plain(path)
    )
    monkeypatch.setattr(cli, "_load_with_torch", lambda function: read.append((function, True)) or terminal.run)
    flags = {"run": ["--run", "tiny"], "stage": [], "checkpoint": ["--checkpoint", str(folder)]}[named]
    command = ["chat", "--device-type", "cpu", "-t", "0", "-p", "What is 17 + 25?", *flags]
    assert cli.main(command) == 0
    wanted = [("model.safetensors", False), ("serve.terminal:run", True), ("state.json", True)]
    assert sorted(read) == sorted(wanted)
    assert capsys.readouterr().out == "你好!\n"
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert cli.main(command) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert "model.safetensors does not match its checksum" in found.err


def test_an_engine_on_arm_multiplies_few_rows_without_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    save()
    with torch.backends.mkldnn.flags(enabled=True):
        engine_for(opened(), 1)
        assert not torch.backends.mkldnn.enabled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_take_the_compute_dtype_and_do_not_follow_the_file(dtype: torch.dtype) -> None:
    """Who writes over the file of a model that is in use does not change its answers."""
    file = save(dtype=dtype) / "model.safetensors"
    wanted = make.scripted(make.calculator_script()[0], 256).state_dict()
    model = opened().model
    with file.open("r+b") as stream:
        stream.write(bytes(file.stat().st_size))
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert not parameter.requires_grad
        assert torch.equal(parameter, wanted[name].to(dtype).float()), name


def test_the_last_stage_of_the_run_written_last_is_loaded() -> None:
    with pytest.raises(UserError, match="no model in"):
        opened()
    save("one", "base"), save("one", "sft"), save("two", "base")
    os.utime(run_folder("one", "sft") / "latest", (1, 1))
    os.utime(run_folder("one", "base") / "latest", (1, 1))
    assert opened().source.folder.parent == run_folder("two", "base")
    assert opened(run="one").source.state["stage"] == "sft"
    assert opened(run="one", stage="base").source.folder.parent == run_folder("one", "base")
    assert opened(stage="sft").source.folder.parent == run_folder("one", "sft")
    assert opened(checkpoint=str(run_folder("two", "base"))).source.state["step"] == 1
    aside = home() / "runs" / "three" / "base.old"  # by --resume never
    aside.mkdir(parents=True)
    (aside / "latest").write_text("step_000001")
    with pytest.raises(UserError, match=r"'three' has no checkpoint; runs that have: one, two$"):
        opened(run="three")
    with pytest.raises(UserError, match="no checkpoint in"):
        opened(run="two", stage="rl")


def test_of_many_runs_the_nearest_is_named_and_not_all(tmp_path: Path) -> None:
    for number in range(500):
        folder = run_folder(f"trial-{number}", "base")
        folder.mkdir(parents=True)
        (folder / "latest").write_text("step_000001")
    with pytest.raises(UserError) as caught:
        opened(run="trail-77")
    assert "did you mean trial-77?" in str(caught.value)
    assert len(str(caught.value)) < 200
    with pytest.raises(UserError, match=r"choose from: trial-0, trial-1, trial-10, .*, \.\.\.$") as caught:
        opened(run="wiki")
    assert len(str(caught.value)) < 600


def test_what_does_not_belong_together_is_an_error(tmp_path: Path) -> None:
    folder = save()
    make.Tokenizer(make.MERGES[:-1]).save(tmp_path / "other")
    with pytest.raises(UserError, match=r"was not trained with the tokenizer in .*other"):
        opened(tokenizer=str(tmp_path / "other"))
    for folder_without in (tmp_path / "none", tmp_path):  # to train a new one would be of no use
        with pytest.raises(UserError, match=r"no tokenizer in .*; name the folder of the one that .* was trained with"):
            opened(tokenizer=str(folder_without))
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="bytes instead of"):
        opened(checkpoint=str(folder))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"blocks.0.shift": None}, "was written by another version of ascendchat: missing weight blocks.0.shift; "),
        ({"blocks.0.bias": torch.zeros(1)}, "was written by another version of ascendchat: unknown weight blocks.0.b"),
        ({"smear": torch.zeros(2)}, ": the weight smear does not fit its own state.json; "),
    ],
)
def test_weights_of_another_version_are_refused_in_one_sentence(change: dict[str, Any], says: str) -> None:
    save("old", **change)
    with pytest.raises(UserError, match=re.escape(says)) as error:
        opened(run="old")
    assert "\n" not in str(error.value)


class Terminal:
    """The command behind a pseudo-terminal."""

    def __init__(self, *flags: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ascendchat", "chat", "--device-type", "cpu", *flags],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment(),
            start_new_session=True,
            preexec_fn=lambda: __import__("fcntl").ioctl(slave, __import__("termios").TIOCSCTTY, 0),  # Ctrl-C arrives
        )
        os.close(slave)
        self.seen = self.before = ""  # not waited for yet; what stood before the text that was waited for last

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for_a_key(self) -> None:
        """Until the command has slept for a while."""
        before, same = "", 0
        while same < 5:
            _, _, now = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")
            state, used = now.split()[0], " ".join(now.split()[11:13])
            before, same = used, same + 1 if used == before and state == "S" else 0
            time.sleep(0.02)

    def wait_for(self, text: str, seconds: float = 120) -> None:
        """Read on until the text appears behind what was waited for before."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} did not come; last: {self.seen[-300:]!r}"
            if select.select([self.master], [], [], 0.5)[0]:
                try:
                    self.seen += os.read(self.master, 65536).decode(errors="replace")
                except OSError:  # the other side has ended
                    assert text in self.seen, f"ended before {text!r}: {self.seen[-300:]!r}"
        self.before, _, self.seen = self.seen.partition(text)


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_ctrl_d_ends() -> None:
    save(follows=ENDLESS, seq_len=16384)
    talk = Terminal("-t", "0", "--max-tokens", "16000")
    try:
        talk.wait_for("tiny/sft/step_000001 on cpu; /help lists the commands, Ctrl-D ends\r\n> ")
        assert talk.before == "", "one line before the first question"
        talk.type("说\n")
        talk.wait_for("ababab")
        talk.type("\x03")
        talk.wait_for("\n> ")
        talk.type("half a line")
        talk.wait_for("half a line")
        talk.wait_for_a_key()  # Python's line editing notices no signal while it echoes one
        talk.type("\x03")
        talk.wait_for("(Ctrl-D ends)")
        talk.wait_for("> ")  # typed earlier, a line may fall between two modes of the terminal
        talk.type("/temperature 0\n")
        talk.wait_for("temperature 0.0")
        talk.wait_for("> ")
        talk.type("again\n")
        talk.wait_for("ababab")
        talk.type("\x03")
        talk.wait_for("\n> ")
        talk.type("\x04")
        assert talk.process.wait(timeout=60) == 0
    finally:
        if talk.process.poll() is None:
            talk.process.send_signal(signal.SIGKILL)
            talk.process.wait()
        os.close(talk.master)


def test_a_terminal_shows_the_tool_call_apart() -> None:
    save()
    loaded, out = opened(), io.StringIO()
    config = ChatConfig(temperature=0.0, seed=1)
    talk = terminal.Chat(engine_for(loaded, 1), loaded.tokenizer, config, loaded.chats, out, colour=True)
    assert talk.answer("hi")
    assert out.getvalue() == f"{terminal.DIM}[17+25 = 42]{terminal.PLAIN} 你好!\n"
