"""API keys and rates; with which flags a server does not start; and one that other machines can reach."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from pathlib import Path

import pytest
from running_server import CHAT, make, question, save, serving

from ascendchat.config import parse
from ascendchat.config.serve import ServeConfig
from ascendchat.errors import UserError
from ascendchat.serve import command, guard

FIRST, SECOND, THIRD = "first-key-0123456789", "second-key-0123456789", "third-key-0123456789"


@pytest.mark.slow
def test_chat_web_serves_with_keys_from_as_many_processes_as_were_asked_for(tmp_path: Path) -> None:
    """`python -m scripts.chat_web` with nanochat's flags, and with what a server needs that others can reach."""
    save(tmp_path, make.scripted(make.calculator_script()[0]))
    file, log = tmp_path / "keys", tmp_path / "access"
    file.write_text(f"# of the team\n{FIRST}\n\n  {SECOND}  \n")
    flags = ["--num-gpus=2", *"-i sft -g tiny".split(), "--host=0.0.0.0", f"--api-key-file={file}", "--log-messages"]
    with serving(tmp_path, *flags, f"--access-log={log}", module="scripts.chat_web") as server:
        key = {"Authorization": f"Bearer {SECOND}"}
        assert server.ask("GET", "/").status == server.ask("GET", "/health").status == 200
        for path in ("/v1/models", "/web/%2e%2e/v1/models", "/health%2f..%2fmetrics", "/%2fv1/models", "/health%0a"):
            assert server.ask("GET", path).status == 401, path
        card = server.ask("GET", "/v1/models", **key).json["data"][0]
        assert (card["id"], card["ascendchat"]["devices"]) == ("tiny/sft", 2)
        body = question(40)
        answer = server.ask("POST", CHAT, body, **key)
        assert answer.json["choices"][0]["message"]["content"] == "你好!"
        line = server.logged(answer, log)
        assert line["key"] == hashlib.sha256(SECOND.encode()).hexdigest()[:8]
        assert (json.loads(line["request"]), line["answer"]) == (body, "17+2542你好!")
        usage = answer.json["usage"]
        assert (line["prompt_tokens"], line["completion_tokens"]) == (
            usage["prompt_tokens"],
            usage["completion_tokens"],
        )
        said = log.read_text() + server.said
        assert FIRST not in said
        assert SECOND not in said


@pytest.mark.slow
def test_nobody_learns_from_the_prefix_cache_what_another_key_has_asked(tmp_path: Path) -> None:
    """Alice's PIN is in her prompt; Mallory asks the same with every PIN, and looks at `cached_tokens`."""
    save(tmp_path, make.model(seq_len=512))
    file = tmp_path / "keys"
    file.write_text(f"{FIRST}\n{SECOND}\n")
    with serving(tmp_path, f"--api-key-file={file}", "--slots=8") as server:

        def cached(key: str, pin: int, path: str = CHAT, **fields: object) -> int:
            text = f"My account number is 1234567890123456789012345678901234567890 and my PIN is {pin}."
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, **fields}
            if path == "/v1/responses":
                body = {"input": text, "max_output_tokens": 1, **fields}
            usage = server.ask("POST", path, body, Authorization=f"Bearer {key}").json["usage"]
            return int((usage.get("prompt_tokens_details") or usage["input_tokens_details"])["cached_tokens"])

        assert [cached(FIRST, 4242) > 80 for _ in range(2)] == [False, True], "her own second time"
        assert [cached(SECOND, pin) > 0 for pin in (4242, 1111)] == [False, True], "only what is his own"
        assert cached(FIRST, 4242, "/v1/responses") > 80
        for path, salt in ((CHAT, "a"), ("/v1/responses", "b")):
            assert [cached(FIRST, 4242, path, cache_salt=salt) > 80 for _ in range(2)] == [False, True]


def test_keys_of_the_environment_are_taken_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers need not know them."""
    monkeypatch.setenv("ASCENDCHAT_API_KEYS", f"{FIRST}, {SECOND}")
    loaded = guard.admission(parse(ServeConfig, ["--host", "0.0.0.0"]))
    assert loaded.owner(f"Bearer {SECOND}".encode())
    assert not loaded.owner(b"Bearer wrong")
    assert "ASCENDCHAT_API_KEYS" not in os.environ


def test_every_key_is_compared_in_constant_time_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def counted(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return real(a, b)

    monkeypatch.setattr(guard.hmac, "compare_digest", counted)
    three = guard.Keys([FIRST, SECOND, THIRD])
    for sent in (FIRST, SECOND, THIRD, "wrong", "", "x" * 10_000, f"{FIRST},{SECOND}"):
        compared.clear()
        assert bool(three.owner(f"Bearer {sent}".encode())) == (sent in (FIRST, SECOND, THIRD))
        assert compared == [(32, 32)] * 3, "digests of equal length, all of them, also after one has fitted"


def test_a_rate_is_a_bucket_that_fills_again() -> None:
    rates = guard.Rates(120)
    assert [rates.take("one", now=1.0) for _ in range(120)] == [0.0] * 120
    assert rates.take("one", now=1.0) == pytest.approx(0.5), "two per second"
    assert rates.take("one", now=1.25) == pytest.approx(0.25)
    assert rates.take("one", now=1.5) == 0
    assert rates.take("one", now=1.5) == pytest.approx(0.5)
    assert rates.take("two", now=1.5) == 0
    assert guard.Rates(0.5).take("one", now=0.0) == 0, "the first request is never too much"


def test_a_flood_of_addresses_is_not_remembered_without_bound() -> None:
    rates = guard.Rates(60)
    for number in range(guard.CLIENTS + 500):
        assert rates.take(str(number), now=0.0) == 0
    assert len(rates.buckets) == guard.CLIENTS
    assert "0" not in rates.buckets, "whoever has not asked for longest is forgotten"


def test_addresses_of_one_ipv6_network_are_one_client() -> None:
    first, second = ({"client": (f"2001:db8::{n}", 1)} for n in ("1", "8000:0:0:2"))
    assert guard.network(first) == guard.network(second) != guard.network({"client": ("2001:db8:0:1::1", 1)})
    assert guard.network({"client": ("10.0.0.1", 1)}) != guard.network({"client": ("10.0.0.2", 1)})
    assert guard.network({"client": None}) == ""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--host", "0.0.0.0"], "--api-key-file"),
        (["--host", "::"], "--no-auth"),
        (["--host", "192.168.0.1"], "--no-auth"),
        (["--host", "example.org"], "--no-auth"),
        (["--weight-updates"], "--weight-updates needs an API key"),
        (["--api-key-file", "/no/such/file"], "No such file"),
        (["--api-key-file", "{empty}"], "no key"),
        (["--api-key-file", "{short}"], "16 characters"),
        (["--api-key-file", "{good}", "--no-auth"], "exclude each other"),
        (["--cors-origin", "*"], "https://example.org"),
        (["--cors-origin", "https://a.example/"], "https://example.org"),
        (["--access-log", "/no/such/folder/log"], "--access-log"),
    ],
)
def test_a_server_that_would_be_open_by_accident_does_not_start(
    flags: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCENDCHAT_API_KEYS", " , ")
    contents = {"empty": "\n# none\n", "short": "short\n", "good": FIRST}
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    named = [flag.format(**{name: tmp_path / name for name in contents}) for flag in flags]
    with pytest.raises(UserError, match=said) as caught:
        command.run(parse(ServeConfig, ["--port", "0", *named]))
    assert "\n" not in str(caught.value)
    assert "short\n" not in str(caught.value), "no key is shown"


def test_warnings_are_one_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    guard.admission(parse(ServeConfig, ["--host", "0.0.0.0", "--no-auth"]))
    assert capsys.readouterr().err.count("\n") == 1
    file = tmp_path / "keys"
    file.write_text(FIRST)
    for mode, warned in ((0o644, True), (0o400, False)):
        file.chmod(mode)
        guard.admission(parse(ServeConfig, ["--api-key-file", str(file)]))
        assert (f"chmod 600 {file}" in capsys.readouterr().err) == warned
