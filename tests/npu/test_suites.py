"""Other people's test files are run one by one, and what happens to them is sorted by cause.

python -m cannsim run -- pytest tests/npu/test_suites.py
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest

from cannsim import suites_causes, suites_server

HEAD = "import unittest, torch, torch_npu\n\n\nclass T(unittest.TestCase):\n"
STARTED = "torch_npu.npu_random_choice_with_mask(torch.ones(4).npu() > 0, 2)"  # nobody waits for it
MISSING = f"{STARTED}[0].cpu()"
FILES = {
    "passed": "    def test_a(self):\n        self.assertEqual((torch.ones(2).npu() + 1).tolist(), [2, 2])\n",
    "skipped": "    @unittest.skip('another chip')\n    def test_a(self):\n        pass\n",
    "wrong": "    def test_a(self):\n        self.assertEqual((torch.ones(2).npu() + 1).tolist(), [2, 3])\n",
    "missing": f"    def test_a(self):\n        {MISSING}\n",
    "refused": "    def test_a(self):\n        torch.ones(2, dtype=torch.int32).npu().add_(torch.ones(2).npu())\n",
    "dies": "    def test_a(self):\n        import os\n        os.abort()\n",
    "hangs": "    def test_a(self):\n        import time\n        time.sleep(100)\n",
    "error": "    def test_a(self):\n        raise KeyError('x')\n",
}
NONE = "def test_a():\n    pass\n"  # for pytest; unittest finds nothing
FRESH = f"import sys\nTORCH = 'torch' in sys.modules\n{HEAD}    def test_a(self):\n        assert not TORCH\n"
# torch_npu ends the process at an operator that fails in its second thread.
DIES = FILES["dies"].replace("os.abort", "os.write(2, b'EZ3002: Optype [Old] of Ops')\n        os.abort")
UNSEEN = f"    def test_a(self):\n        {STARTED}\n"
SEEN = f"    def test_a(self):\n        with self.assertRaises(RuntimeError):\n            {MISSING}\n"
STOPPED = FILES["passed"] + "        torch.npu.stop_device(0)\n"
# A file goes on behind a test that poisoned the device.
MIXED = FILES["missing"] + "\n    def test_b(self):\n        self.assertEqual(torch.ones(1).npu().item(), 1)\n"


@pytest.mark.slow
def test_files_are_sorted_by_cause_and_not_run_again(tmp_path: Path) -> None:
    for cause, body in {
        **FILES,
        "mixed": MIXED,
        "unseen": UNSEEN,
        "seen": SEEN,
        "stopped": STOPPED,
        "ended": DIES,
    }.items():
        (tmp_path / f"test_{cause}.py").write_text(HEAD + body)
    (tmp_path / "test_none.py").write_text(NONE)
    results = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "cannsim", "suites", str(tmp_path), "--results", str(results), "--timeout", "20"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    rows = {Path(row["file"]).stem: row for row in map(json.loads, results.read_text().splitlines())}
    assert {name: rows[name]["cause"] for name in (f"test_{c}" for c in FILES)} == {f"test_{c}": c for c in FILES}
    assert (rows["test_none"]["cause"], rows["test_none"]["detail"]) == ("error", "no unittest tests")
    assert [cause for _, cause, _ in rows["test_mixed"]["tests"]] == ["missing", "passed"]
    late = [rows[f"test_{name}"]["cause"] for name in ("unseen", "seen", "stopped")]
    assert late == ["missing", "passed", "passed"]
    assert rows["test_ended"]["tests"] == [["test_ended.T.test_a", "missing", "Old"]]
    assert f"| {tmp_path.name}, files | 14 | 3 | 1 | 1 |" in printed
    before = results.read_bytes()
    (tmp_path / "disabled.json").write_text('{"test_a (__main__.T)": ["", [""]]}')
    command += ["--disabled", str(tmp_path / "disabled.json")]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    assert results.read_bytes() == before
    assert f"| {tmp_path.name}, files | 14 | 4 | 9 | 0 |" in printed, "the file without tests is an error still"
    (tmp_path / "disabled.json").write_text("{")
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert "cannot be read" in done.stderr


EARLIER = """import os, unittest
class T(unittest.TestCase):
    def test_a(self):
        os.write(2, b"EZ3002: Optype [Old] of Ops\\n")
    def test_b(self):
        os.abort()
"""


def test_a_process_does_not_die_of_an_operator_that_an_earlier_test_missed(tmp_path: Path) -> None:
    (tmp_path / "test_earlier.py").write_text(EARLIER)
    words = "import json, pathlib, sys; from cannsim.suites_server import File; "
    words += "file = File(pathlib.Path(sys.argv[1]), 60); file.run(); print(json.dumps(file.tests))"
    command = [sys.executable, "-c", words, str(tmp_path / "test_earlier.py")]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    found = json.loads(printed.splitlines()[-1])
    assert [found[f"test_earlier.T.test_{name}"][0] for name in "ab"] == ["passed", "dies"]


LEFT = """
    def test_a(self):
        import subprocess
        process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        open("left.pid", "w").write(str(process.pid))
"""


@pytest.mark.slow
def test_processes_that_a_test_leaves_behind_are_ended(tmp_path: Path) -> None:
    (tmp_path / "test_left.py").write_text(HEAD + LEFT)
    results = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "cannsim", "suites", str(tmp_path), "--results", str(results)]
    subprocess.run(command, capture_output=True, timeout=600, check=True)
    assert json.loads(results.read_text())["cause"] == "passed"
    assert not Path("/proc", (tmp_path / "left.pid").read_text()).exists()


RANKS = """import os, unittest, torch, torch_npu
import torch.distributed as dist, torch.multiprocessing as mp


def rank_main(rank, world, port, results):
    assert os.environ["SET_BY_THE_TEST"] == str(port)
    torch.npu.set_device(rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("hccl", rank=rank, world_size=world)
    x = torch.full((3,), rank + 1.0, device="npu")
    dist.all_reduce(x)
    results.put((os.getppid(), x.tolist()))
    dist.destroy_process_group()


class T(unittest.TestCase):
    def ranks(self, port):
        os.environ["SET_BY_THE_TEST"] = str(port)
        context = mp.get_context("spawn")
        results = context.Queue()
        processes = [context.Process(target=rank_main, args=(rank, 2, port, results)) for rank in range(2)]
        for process in processes: process.start()
        found = [results.get() for _ in processes]
        for process in processes: process.join()
        self.assertEqual([process.exitcode for process in processes], [0, 0])
        self.assertEqual([x for _, x in found], [[3.0] * 3] * 2)
        return {parent for parent, _ in found}

    def test_a(self):
        self.assertEqual(self.ranks(PORT) == {os.getpid()}, FRESH)

    def test_b(self):
        self.ranks(PORT + 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("option", [[], ["--fresh"]])
def test_ranks_that_a_test_spawns_get_its_variables(tmp_path: Path, option: list[str]) -> None:
    """Forked from a process that has torch imported; with --fresh spawned as the test says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        head = f"PORT, FRESH = {free.getsockname()[1]}, {bool(option)}\n"
    (tmp_path / "test_ranks.py").write_text(head + RANKS)
    results = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "cannsim", "suites", str(tmp_path), "--results", str(results), *option]
    subprocess.run(command, capture_output=True, timeout=600, check=True)
    assert [cause for _, cause, _ in json.loads(results.read_text())["tests"]] == ["passed", "passed"], (
        results.read_text()
    )


@pytest.mark.slow
@pytest.mark.parametrize(("option", "cause"), [([], "wrong"), (["--fresh"], "passed")])
def test_fresh_files_import_torch_themselves(tmp_path: Path, option: list[str], cause: str) -> None:
    (tmp_path / "test_fresh.py").write_text(FRESH)
    results = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "cannsim", "suites", str(tmp_path), "--results", str(results), *option]
    subprocess.run(command, capture_output=True, timeout=600, check=True)
    assert json.loads(results.read_text())["cause"] == cause


def test_what_a_file_does_before_its_tests_is_done_and_the_tests_are_left_to_us(tmp_path: Path) -> None:
    """Seeds and switches of torch_npu stand in the block that only a program runs."""
    lines = ["import random", "VALUE = 0", "if __name__ == '__main__':", "    VALUE = 1", "    random.seed(3)"]
    lines += ["    unittest.main()", "    VALUE = 2"]
    path = tmp_path / "test_main.py"
    path.write_text("\n".join(lines))
    module = types.ModuleType("test_main")
    exec(path.read_text(), module.__dict__)
    suites_server.start_as_main(module, path)
    assert module.VALUE == 1
    assert random.random() == random.Random(3).random()


@pytest.mark.parametrize(
    ("text", "cause", "detail"),
    [
        ("EZ3002: Optype [AvgPoolV2] of Ops kernel is unsupported.", "missing", "AvgPoolV2"),
        ("RuntimeError: aclnnGRU or aclnnGRUGetWorkspaceSize not in libopapi.so", "missing", "aclnnGRU"),
        ("ModuleNotFoundError: No module named 'torchvision'", "hardware", "torchvision"),
        ("EZ1001: [PID: 7] Call aclnnAdd failed. Tensor self", "refused", "aclnnAdd"),
        ('AssertionError: "abc" does not match "abd"', "error", '"abc" does not match'),
        ("Traceback\nAssertionError: 1 != 2", "wrong", "AssertionError: 1 != 2"),
    ],
)
def test_the_cause_is_read_from_the_messages(text: str, cause: str, detail: str) -> None:
    assert suites_causes.of_text(text, assertion=True) == (cause, detail)


def test_one_wrong_test_decides_about_its_file() -> None:
    tests = [["a", "passed", ""], ["b", "missing", "X"], ["c", "wrong", "1 != 2"]]
    assert suites_causes.of_file(tests) == ("wrong", "1 != 2")
    assert suites_causes.of_file(tests[:1]) == ("passed", "")
    assert suites_causes.of_file([["a", "skipped", ""]]) == ("skipped", "")
