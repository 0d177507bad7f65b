"""Shared by all tests: the environment before torch is imported, and the folder of real data."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# torch_npu may be installed here without a CANN; only the tests under tests/npu load it.
if "CANNSIM_HOME" not in os.environ:
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are tiny: six files took 37 s of CPU time, 51 s with two
# Hundreds of processes would compile our modules anew, and every start of pytest all tests: 0.5 s and 10 s of CPU time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Texts are compared in English, whatever the developer's shell speaks; tests of Chinese set these themselves.
for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
    os.environ.pop(name, None)
# A suite that was started in the background of a shell may have inherited an ignored Ctrl-C, and pass it on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# torch's compiler imports it on CPUs, and it refuses to be imported behind what else a process of tests has imported.
with contextlib.suppress(ImportError):
    import setuptools  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
pytest_plugins = ["seconds"]


# Seconds of processor time, of files with few slow tests that take long; of others 3 s for each.
LONG = {
    "test_cannsim_project.py": 31, "test_rl.py": 30, "test_rl_elsewhere.py": 30, "test_hf_compiled.py": 24,
    "test_servers_killed.py": 20, "test_preference_runs.py": 19, "test_fleet.py": 18, "test_launch_ranks.py": 14,
    "test_rl_hf.py": 12, "test_device.py": 10, "test_engine_prefix.py": 9,
}  # fmt: skip


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long first: processes that take one file after the other end at the same time."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -max(3 * slow[item.path], LONG.get(item.path.name, 0)))  # stable: files stay together


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole files, in this order, unless --dist asks for another way. Else every process makes what the tests of a file
    share, imports what one of them needs, and a long file may be the last that one of them is given."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


def pytest_collection_finish() -> None:
    """The collector need not look again and again at thousands of tests and at the modules they have imported."""
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None  # a training ends with it, and the next one begins with a collection of all there is


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Real evaluation sets and text: $ASCENDCHAT_TEST_DATA, else ../shared/data beside the checkout."""
    folder = Path(os.environ.get("ASCENDCHAT_TEST_DATA") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip("real data not found: set ASCENDCHAT_TEST_DATA to its folder to run this test")
    return folder


@pytest.fixture(scope="session")
def _homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """New folders. pytest's own would be searched for a free number at every test, among thousands."""
    folder = tmp_path_factory.mktemp("homes")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def _own_home(_homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has its own $ASCENDCHAT_HOME."""
    folder = next(_homes)
    folder.mkdir()
    monkeypatch.setenv("ASCENDCHAT_HOME", str(folder))


@pytest.fixture(scope="session")
def api_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints: `random`, which says anything; `sums`, which calls the calculator for 17+25 and then says 你好!;
    `base`, which has not learned to chat."""
    from running_server import make, random_model, save

    home = tmp_path_factory.mktemp("serve")
    save(home, random_model(), "random")
    save(home, make.scripted(make.calculator_script()[0], 256), "sums")
    save(home, make.model(), "raw", "base")
    return home


@pytest.fixture(scope="session")
def server(api_home: Path) -> Iterator[Any]:
    """For tests of several folders: the random model; greedy where nothing is said, and all tokens are in play."""
    from running_server import serving

    with serving(api_home, "--run=random", "--temperature=0", "--top-k=0", "--max-tokens=24") as running:
        yield running


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tiny tensors: a second thread only gets in the way."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
