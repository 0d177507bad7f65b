"""Other people's test files are run one by one, and what happens to them is sorted by cause."""

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
PASSES = "    def test_a(self):\n        self.assertEqual((torch.ones(2).npu() + 1).tolist(), [2, 2])\n"
LEFT = """    def test_a(self):
        import subprocess
        process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        open("left.pid", "w").write(str(process.pid))
"""
FILES = {  # name: (its tests, the cause of the file)
    "passed": (PASSES, "passed"),
    "skipped": ("    @unittest.skip('another chip')\n    def test_a(self):\n        pass\n", "skipped"),
    "wrong": ("    def test_a(self):\n        self.assertEqual(torch.ones(2).npu().tolist(), [2, 3])\n", "wrong"),
    "missing": (f"    def test_a(self):\n        {MISSING}\n", "missing"),
    "refused": ("    def test_a(self):\n        torch.ones(2).int().npu().add_(torch.ones(2).npu())\n", "refused"),
    "dies": ("    def test_a(self):\n        import os\n        os.abort()\n", "dies"),
    "hangs": ("    def test_a(self):\n        import time\n        time.sleep(1000)\n", "hangs"),
    "error": ("    def test_a(self):\n        raise KeyError('x')\n", "error"),
    # torch_npu ends the process at an operator that fails in its second thread.
    "ended": (
        "    def test_a(self):\n        import os\n        os.write(2, b'EZ3002: Optype [Old] of Ops')\n"
        "        os.abort()\n",
        "missing",
    ),
    "unseen": (f"    def test_a(self):\n        {STARTED}\n", "missing"),
    "seen": (
        f"    def test_a(self):\n        with self.assertRaises(RuntimeError):\n            {MISSING}\n",
        "passed",
    ),
    "stopped": (f"{PASSES}        torch.npu.stop_device(0)\n", "passed"),
    # A file goes on behind a test that poisoned the device.
    "mixed": (f"    def test_a(self):\n        {MISSING}\n{PASSES.replace('test_a', 'test_b')}", "missing"),
    "left": (LEFT, "passed"),
}
NONE = "def test_a():\n    pass\n"  # for pytest; unittest finds nothing
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
        self.assertNotEqual({parent for parent, _ in found}, {os.getpid()}, "forked from one that has torch")

    def test_a(self):
        self.ranks(PORT)

    def test_b(self):
        self.ranks(PORT + 1)
"""
FRESH = """import multiprocessing, os, sys, unittest
TORCH = "torch" in sys.modules


def rank_main(results):
    results.put(os.getppid())


class T(unittest.TestCase):
    def test_a(self):
        assert not TORCH, "who needs it imports it"

    def test_b(self):
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        process = context.Process(target=rank_main, args=(results,))
        process.start()
        assert results.get() == os.getpid(), "spawned as the test says"
        process.join()
"""


def suites(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The command, with its results beside the folder."""
    words = [sys.executable, "-m", "cannsim", "suites", str(folder), "--results", str(folder.parent / "results.jsonl")]
    return subprocess.run([*words, *options], capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_files_are_sorted_by_cause_and_not_run_again(tmp_path: Path) -> None:
    folder, results = tmp_path / "theirs", tmp_path / "results.jsonl"
    folder.mkdir()
    for name, (body, _) in FILES.items():
        (folder / f"test_{name}.py").write_text(HEAD + body)
    (folder / "test_none.py").write_text(NONE)
    (folder / "test_fresh.py").write_text(FRESH)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (folder / "test_ranks.py").write_text(f"PORT = {free.getsockname()[1]}\n{RANKS}")
    done = suites(folder, "--timeout", "30")
    assert done.returncode == 0, done.stderr
    found = map(json.loads, results.read_text().splitlines())
    rows = {Path(row["file"]).stem.removeprefix("test_"): row for row in found}
    assert {name: rows[name]["cause"] for name in FILES} == {name: cause for name, (_, cause) in FILES.items()}
    assert (rows["none"]["cause"], rows["none"]["detail"]) == ("error", "no unittest tests")
    assert [cause for _, cause, _ in rows["mixed"]["tests"]] == ["missing", "passed"]
    assert rows["ended"]["tests"] == [["test_ended.T.test_a", "missing", "Old"]]
    assert [cause for _, cause, _ in rows["ranks"]["tests"]] == ["passed", "passed"], rows["ranks"]
    assert rows["fresh"]["cause"] == "wrong", "torch was imported ahead"
    assert not Path("/proc", (folder / "left.pid").read_text()).exists(), "what a test leaves behind is ended"
    assert "| theirs, files | 17 | 5 | 1 | 2 |" in done.stdout, done.stdout
    before = results.read_bytes()
    (tmp_path / "disabled.json").write_text('{"test_a (__main__.T)": ["", [""]]}')
    done = suites(folder, "--disabled", str(tmp_path / "disabled.json"))
    assert results.read_bytes() == before
    assert "| theirs, files | 17 | 6 | 9 | 1 |" in done.stdout, f"one without tests is an error still: {done.stdout}"
    (tmp_path / "disabled.json").write_text("{")
    done = suites(folder, "--disabled", str(tmp_path / "disabled.json"))
    assert done.returncode == 2
    assert "cannot be read" in done.stderr


def test_fresh_files_import_torch_and_spawn_ranks_themselves(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "test_fresh.py").write_text(FRESH)
    suites(tmp_path / "theirs", "--fresh")
    (row,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert row["cause"] == "passed", row


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
