"""`ascendchat explain`: order of causes, no false alarms, any input, both languages, the command itself."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendchat import cli
from ascendchat.config.commands import ExplainConfig
from ascendchat.doctor import explain as module
from ascendchat.doctor.explain import explain, print_findings, run
from ascendchat.doctor.explain_rules import all_rules
from ascendchat.errors import UserError

SAMPLES = Path(__file__).parent / "explain_samples"


def rules_of(text: str) -> list[str]:
    return [finding.rule for finding in explain(text)]


OOM = (
    "[rank3]: torch.OutOfMemoryError: NPU out of memory. Tried to allocate 2.50 GiB (NPU 3; 60.97 GiB total capacity; "
    "55.12 GiB already allocated; 1.02 GiB free; 57.80 GiB reserved in total by PyTorch)\n"
    "[ERROR] 2026-03-02-10:00:07 (PID:104, Device:3, RankID:3) ERR99999 UNKNOWN applicaiton exception\n"
)
TIMEOUT = (
    "[ERROR] 2026-03-02-10:30:41 (PID:10{0}, Device:{0}, RankID:{0}) ERR02200 DIST call hccl api failed.\n"
    "EI0002: [PID: 10{0}] 2026-03-02-10:30:41.12.34 The wait execution of the Notify register times out.\n"
    "RuntimeError: NPU function error: aclrtSynchronizeStream, error code is 507048\n"
)
LAUNCHER = (
    "W0302 10:31:00 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 100 closing signal SIGTERM\n"
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
    "Root Cause (first observed failure):\n  rank      : 3 (local_rank: 3)\n  exitcode  : 1 (pid: 104)\n"
)


@pytest.mark.parametrize("oom_first", [True, False])
def test_the_fault_of_one_rank_comes_before_the_timeouts_of_the_others(oom_first: bool) -> None:
    others = TIMEOUT.format(0) + TIMEOUT.format(1) + TIMEOUT.format(2)
    found = explain((OOM + others if oom_first else others + OOM) + LAUNCHER)
    assert found[0].rule == "npu-oom"
    assert found[0].line.startswith("[rank3]: torch.OutOfMemoryError")
    counts = {f.rule: f.count for f in found[1:]}  # EI0002 and 507048 of three ranks; the code ERR02200 adds nothing
    assert counts == {"hccl-exec-timeout": 6, "rank-ended": 1, "child-failed": 2}


def test_the_first_fault_by_the_clock_comes_first_and_that_of_the_last_attempt() -> None:
    late = "2026-03-02 10:05:00 RuntimeError: NPU out of memory. Tried to allocate 2.50 GiB\n"
    early = "2026-03-02 10:01:00 OSError: [Errno 28] No space left on device\n"
    assert rules_of(late + early) == ["disk-full", "npu-oom"]
    first = "RuntimeError: NPU out of memory. Tried to allocate 2.50 GiB\n"
    again = "[default] Worker group FAILED. 2/3 attempts left; will restart worker group\n"
    second = "OSError: [Errno 28] No space left on device\n"
    assert rules_of(first + again + second) == ["disk-full", "npu-oom"]
    assert rules_of(first + second) == ["npu-oom", "disk-full"]
    assert rules_of(first + "ascendchat launch: starting again (1 of 3)\n" + second) == ["disk-full", "npu-oom"]


def test_in_a_run_folder_the_logs_of_the_last_attempt_come_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for attempt, text in enumerate([OOM, TIMEOUT.format(1), OOM.replace("2.50", "9.75") + TIMEOUT.format(0)]):
        (tmp_path / f"attempt_{attempt}").mkdir()
        (tmp_path / f"attempt_{attempt}" / "rank_0.log").write_text(text)
    assert run(ExplainConfig(log=(str(tmp_path),), json=True)) == 0
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [f["rule"] for f in found] == ["npu-oom", "hccl-exec-timeout"]
    assert "9.75" in found[0]["line"]
    assert found[0]["count"] == 2


BENIGN = """\
ascendchat 0.1.0: from raw text to a chat model, on Ascend NPUs and on anything else
device npu Ascend910B3 x8, bf16, HCCL_CONNECT_TIMEOUT=600 TASK_QUEUE_ENABLE=2 HCCL_EXEC_TIMEOUT=1836
attention: npu_fusion_attention, sparse_mode 3, atten_mask 2048x2048; parity with the reference 1.2e-3
torch.cuda.is_available(): False
tokens seen: 507015, loss 3.107002, 207001 documents, 161002 rows, zip code 507035, result 507011
step 507015 | loss 2.9112 | grad norm 0.107002 | 507048 tok/s | mfu 41.2% | best loss: inf | error rate 0.02
best_val_loss: inf -> 3.21; epoch 1 error code 0; ret = 0; status 0; exit code 0
INFO: 10.0.0.7:50112 - "GET /favicon.ico HTTP/1.1" 404 Not Found
| 0     910B3               | OK            | 97.5        41                0    / 0             |
| 0                         | 0000:C1:00.0  | AICore(%)   0    / 0          3379 / 65536         |
sample: The king was killed in 1649. Killed in action, the captain's context is full of errors; no space is left here.
sample: Timeout is a magazine. He asked permission and was denied. The disk was full of water.
sample: nan bread, finance, banana
sample: 问：世界上最高的山是什么？ 答：珠穆朗玛峰，海拔 8848 米。
saved runs/d20/base/step_000500 (checksum ok), kept 3, 0 errors, 0 failed, port 41873
ascendchat launch: 8 processes; logs in runs/d20/logs
rollout logprobs: mean gap 0.0003, mismatch_kl 0.0001, clip 0.01, reward 0.61
evaluated CORE 0.2167 in 91 s; connection pool 8; wrote report.html
base64 RUlFMDAwNkVaOTk5OQ== commit EE1001 and part EL0004b and ERR1 and ERR123456
"""


def test_a_good_training_log_gives_no_findings() -> None:
    assert rules_of(BENIGN) == []
    assert rules_of(BENIGN.replace("\n", "\r\n")) == []
    for line in BENIGN.splitlines():
        assert rules_of(line) == [], line


def test_a_note_never_comes_before_a_failure() -> None:
    slow = (SAMPLES / "cpu-fallback.log").read_text()
    assert rules_of(slow + TIMEOUT.format(0)) == ["hccl-exec-timeout", "cpu-fallback", "code-ERR02200"]


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_any_text_is_read_without_a_crash(text: str) -> None:
    for lang in ("en", "zh"):
        stream = io.StringIO()
        print_findings(text, stream, lang)
        assert stream.getvalue().strip()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([rule.id for rule in all_rules()[0]]), min_size=1, max_size=4), st.binary(max_size=60))
def test_a_known_error_is_found_among_damaged_bytes(names: list[str], noise: bytes) -> None:
    data = b"\n".join(b"\xff\xfe" + noise + b"\n" + (SAMPLES / f"{n}.log").read_bytes() for n in names)
    scan = module._Scan()
    scan.read(io.BytesIO(data))
    assert set(names) <= set(scan.hits)


def test_a_log_with_two_bytes_per_letter_is_read() -> None:
    scan = module._Scan()
    scan.read(io.BytesIO(OOM.encode("utf-16")))
    assert "npu-oom" in scan.hits


def test_findings_across_the_edge_of_a_block_are_found_with_their_line() -> None:
    filler = "step 1 loss 3.2\n" * (module.BLOCK_BYTES // 16 - 1)
    text = filler + "x OSError: [Errno 28] No space left on device\n" + "step 2 loss 3.1\n"
    found = explain(text)
    assert [(f.rule, f.line_number, f.count) for f in found] == [("disk-full", filler.count("\n") + 1, 1)]


def test_a_line_of_many_megabytes_is_read_in_bounded_memory() -> None:
    text = "ab " * (module.BLOCK_BYTES // 2) + " CUDA out of memory. Tried " + "cd " * 100000
    found = explain(text)
    assert [f.rule for f in found] == ["cuda-oom"]
    assert len(found[0].line) <= module.MAX_SHOWN_CHARS


def test_colours_and_progress_bars_do_not_hide_an_error() -> None:
    text = "\x1b[32m 10%|###\r 20%|####\rKilled\r\n\x1b[31mOSError: [Errno 28] No space \x1b[1mleft on device\x1b[0m\n"
    found = explain(text)
    assert [(f.rule, f.line_number) for f in found] == [("disk-full", 2), ("killed", 1)]
    assert "\x1b" not in found[0].line


def test_an_error_of_our_own_is_repeated_with_its_command() -> None:
    (found,) = explain(
        "ascendchat base: no NPU was found on this machine; run `ascendchat doctor` and read its report\n"
    )
    assert found.rule == "own-error"
    assert found.cause == "no NPU was found on this machine; run `ascendchat doctor` and read its report"
    assert found.commands == ["ascendchat doctor"]
    assert rules_of("  raise UserError(...)\nascendchat.config.UserError: --depth must be positive\n") == ["own-error"]
    assert rules_of("ascendchat launch: rank 3 failed with status 1; its output is above\n") == ["child-failed"]


def test_an_unknown_error_is_called_unknown_and_says_where_to_look() -> None:
    for lang in ("en", "zh"):
        stream = io.StringIO()
        print_findings("ZorkError: the grue ate the flux\n", stream, lang)
        for word in ("$HOME/ascend/log", "--npu-debug", "ascendchat doctor"):
            assert word in stream.getvalue()
    assert explain("ZorkError: the grue ate the flux") == []


def test_chinese_on_a_console_that_cannot_show_it_does_not_crash() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    print_findings(OOM, stream, "zh")
    assert b"npu-oom" in raw.getvalue()


def test_the_command_reads_files_folders_and_gzip_and_prints_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank0.log").write_text(TIMEOUT.format(0))
    with gzip.open(tmp_path / "rank3.log.gz", "wt") as stream:
        stream.write(OOM)
    assert run(ExplainConfig(log=(str(tmp_path),), json=True, lang="en")) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["known"] is True
    assert [f["rule"] for f in answer["findings"]] == ["npu-oom", "hccl-exec-timeout"]
    assert answer["findings"][0]["file"].endswith("rank3.log.gz")
    assert cli.main(["explain", str(tmp_path / "rank0.log"), "--lang", "zh"]) == 0
    assert "集合通信" in capsys.readouterr().out


def test_a_compressed_log_that_was_cut_off_gives_what_it_has(tmp_path: Path) -> None:
    packed = gzip.compress((OOM + "filler 12345\n" * 200000).encode())
    (tmp_path / "cut.log.gz").write_bytes(packed[: len(packed) // 2])
    assert run(ExplainConfig(log=(str(tmp_path / "cut.log.gz"),), lang="en")) == 0


def test_the_command_reads_standard_input_and_exits_1_when_unknown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(OOM.encode())))
    assert cli.main(["explain", "--lang", "en"]) == 0
    assert "The NPU ran out of memory" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\x00\x80hello")))
    assert cli.main(["explain", "-", "--lang", "en"]) == 1
    assert "does not know this error" in capsys.readouterr().out


def test_a_missing_file_is_an_error_with_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no file .*ascendchat explain"):
        run(ExplainConfig(log=(str(tmp_path / "none.log"),)))
    with pytest.raises(UserError, match=r"no \*\.log file"):
        run(ExplainConfig(log=(str(tmp_path),)))


def test_an_uncaught_error_of_a_command_is_explained_under_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(config: object) -> int:
        raise IndexError("index out of range in self")

    assert cli.execute(broken, None) == 1
    shown = capsys.readouterr().err
    assert shown.index("Traceback") < shown.index("token-range")


def test_a_line_without_an_end_costs_no_more_the_longer_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 1 << 16)
    looked: list[int] = []
    block = module._Scan._block
    monkeypatch.setattr(module._Scan, "_block", lambda scan, data: looked.append(len(data)) or block(scan, data))
    error = "torch.OutOfMemoryError: NPU out of memory. Tried to allocate 2.00 GiB"

    def cost(kilobytes: int) -> int:
        looked.clear()
        assert explain("x" * (kilobytes << 10) + f" {error}"), "the end of a line is looked at"
        assert explain(f"{error} " + "x" * (kilobytes << 10)), "and its beginning"
        assert explain("x" * (kilobytes << 10) + f"\n{error}\n")[0].line_number == 2
        return sum(looked)

    assert cost(600) < 1.1 * cost(300)
