"""--preview: rows as the model will see them, with what it learns marked."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from ascendchat.data.chat.preview import colours, preview_mixture, shown
from ascendchat.data.chat.render import Rendered, render
from ascendchat.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from ascendchat.tasks.chat_mixture import open_chat_mixture
from ascendchat.tasks.pair_mixture import open_pair_mixture


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The smallest that knows these words."""
    return train_tokenizer(["who is it? it is nobody. 你好"], 270)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_learnt_is_marked_and_the_rest_is_not(tokenizer: Tokenizer) -> None:
    talk = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "你好 nobody"}]
    row = render(tokenizer, talk)
    text = "<|bos|><|user_start|>who?<|user_end|><|assistant_start|>{}你好 nobody<|assistant_end|>{}"
    assert shown(tokenizer, row, colour=False) == text.format("[[", "]]")
    assert shown(tokenizer, row, colour=True) == text.format("\x1b[32m", "\x1b[0m")
    dangerous = render(tokenizer, [{"role": "assistant", "content": "a\x1b[2Jb"}])
    assert "\x1b[2J" not in shown(tokenizer, dangerous, colour=False), "data cannot command the terminal"
    nothing = Rendered(row.ids, [0] * len(row.ids))
    assert shown(tokenizer, nothing, colour=True) == text.format("", "")


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert colours(Terminal())
    assert not colours(io.StringIO()), "a pipe"
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colours(Terminal())


def test_the_first_rows_of_every_entry_are_shown_in_the_order_of_the_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name in ("a", "b"):
        rows = [{"prompt": f"{name}{n}", "completion": "nobody " * (1 + (n != 1))} for n in range(9)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    data = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    mixture = open_chat_mixture(data, "sft", tokenizer, 64, say=lambda line: None)
    texts = list(preview_mixture(data, mixture.sources, tokenizer, 2, colour=False))
    assert len(texts) == 4
    head, _, body = texts[1].partition("\n")
    ids, mask = render(tokenizer, [{"role": "user", "content": "a1"}, {"role": "assistant", "content": "nobody "}])
    assert head == f"--- {data[0]}, row 2: {len(ids)} tokens, {sum(mask)} learnt"
    assert body.endswith("a1<|user_end|><|assistant_start|>[[nobody <|assistant_end|>]]")
    assert texts[2].startswith(f"--- {data[1]}, row 1:")


def test_both_replies_of_a_pair_are_shown(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "who?", "chosen": "nobody", "rejected": "it"}), encoding="utf-8")
    mixture = open_pair_mixture([str(path)], tokenizer, 64, say=lambda line: None)
    good, bad = preview_mixture([str(path)], mixture.sources, tokenizer, 3, colour=False)
    assert "pair 1, chosen: " in good
    assert good.endswith("[[nobody<|assistant_end|>]]")
    assert "pair 1, rejected: " in bad
    assert bad.endswith("[[it<|assistant_end|>]]")
