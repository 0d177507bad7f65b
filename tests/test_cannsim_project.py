"""From an empty folder: two commands install cannsim and run a program, a third runs a project's tests on two NPUs.

The environment is new, the installation and pytest are real; the libraries are those that `make cannsim` built, found
through the cache folder.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import cannsim
from cannsim import build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux" or not cannsim.built(), reason="make cannsim has built no libraries"),
]

PROJECT = {
    "tests/here/conftest.py": "import torch, torch_npu\n",
    "pytest.ini": "[pytest]\naddopts = -q --strict-markers -p no:cacheprovider\n",
    "tests/here/test_here.py": """
        import torch

        def test_two_npus_compute():
            assert torch.npu.device_count() == 2
            assert "Ascend910B3" in torch.npu.get_device_name(1)
            assert (torch.ones(2, device="npu:1") + 1).tolist() == [2, 2]

        def test_fails():
            assert torch.npu.device_count() == 1
    """,
    "tests/test_elsewhere.py": """
        import os, pytest

        @pytest.mark.npu(chip="Ascend910A", devices=3)
        class TestOtherMachine:
            def test_its_chip(self):
                assert (os.environ["CANNSIM_DEVICES"], os.environ["CANNSIM_CHIP"]) == ("3", "Ascend910A")

            def test_it_fails_and_says_where(self):
                assert os.environ["CANNSIM_DEVICES"] == "2", "seen from here"

            @pytest.mark.skip(reason="not today")
            def test_skipped(self): ...

        def test_a_process_that_dies(npu_fault):
            import torch, torch_npu
            npu_fault("aclnnInplaceOne:1:kill")
            torch.ones(4, device="npu")
            torch.npu.synchronize()

        def test_ranks(npu_ranks):
            code = '''
                import os, torch, torch_npu
                torch.npu.set_device(int(os.environ["RANK"]))
                print("rank", os.environ["RANK"], "of", torch.npu.device_count(), (torch.ones(1).npu() + 1).item())
            '''
            first, second = npu_ranks(code, ranks=2, fault="aclnnAdds:1:kill@1")
            assert first.ok and "rank 0 of 2 2.0" in first.output, first
            assert second.status == "signal SIGKILL", second
    """,
}
THREE_LINES = """import torch, torch_npu
x = torch.arange(3.0).npu()
print((x * 2).tolist(), torch.npu.get_device_name())
import cannsim
print(cannsim.__file__, cannsim.build.in_clone())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Empty but for a new environment that sees the torch, torch_npu and pytest of this one."""
    folder = tmp_path_factory.mktemp("project")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    found = [importlib.util.find_spec(name) for name in ("torch", "torch_npu", "pytest", "pip", "setuptools")]
    packages = {str(Path(spec.origin).parent.parent) for spec in found if spec and spec.origin}
    (site / "shared.pth").write_text("\n".join(packages))
    (folder / "cache").mkdir()
    (folder / "cache" / build.key()).symlink_to(build.ensure())
    return folder


@pytest.fixture(scope="module")
def environment(folder: Path) -> dict[str, str]:
    """Variables of a user who knows nothing of this repository. The compiler fails: nothing is built anew."""
    unwanted = ("CANNSIM_", "ASCEND_", "PYTHONPATH", "LD_LIBRARY_PATH", "TORCH_DEVICE", "PYTEST_", "RANK")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    path = f"{folder / 'venv' / 'bin'}:{kept['PATH']}"
    return kept | {"PATH": path, "CANNSIM_CACHE": str(folder / "cache"), "CXX": "false"}


@pytest.fixture(scope="module")
def installed(folder: Path, environment: dict[str, str]) -> Path:
    """pip install ./cannsim, with the setuptools that is here instead of one from the network."""
    left_out = shutil.ignore_patterns("build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(cannsim.ROOT.parent, folder / "cannsim", ignore=left_out)
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet"]
    python = str(folder / "venv" / "bin" / "python")
    command = [python, "-m", "pip", "install", *offline, "./cannsim"]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder


def test_two_commands_install_it_and_run_a_program(installed: Path, environment: dict[str, str]) -> None:
    (installed / "three.py").write_text(THREE_LINES)
    command = ["cannsim", "run", "--", "python", "three.py"]
    done = subprocess.run(command, env=environment, cwd=installed, capture_output=True, text=True, timeout=600)
    computed, where = done.stdout.splitlines()
    assert computed == "[0.0, 2.0, 4.0] Ascend910B3", done.stderr
    assert where.startswith(str(installed / "venv"))
    assert where.endswith("False")


def test_a_third_runs_a_projects_tests_on_two_npus(installed: Path, environment: dict[str, str]) -> None:
    for name, text in PROJECT.items():
        (installed / "app" / name).parent.mkdir(parents=True, exist_ok=True)
        (installed / "app" / name).write_text(textwrap.dedent(text))
    command = ["python", "-m", "pytest", "--npu-devices", "2", "-rA", "tests"]
    done = subprocess.run(command, env=environment, cwd=installed / "app", capture_output=True, text=True, timeout=900)
    ends = dict(line.split(" ")[1::-1] for line in done.stdout.splitlines() if line.startswith(("PASSED", "FAILED")))
    assert ends == {
        "tests/here/test_here.py::test_two_npus_compute": "PASSED",
        "tests/here/test_here.py::test_fails": "FAILED",
        "tests/test_elsewhere.py::TestOtherMachine::test_its_chip": "PASSED",
        "tests/test_elsewhere.py::TestOtherMachine::test_it_fails_and_says_where": "FAILED",
        "tests/test_elsewhere.py::test_a_process_that_dies": "FAILED",
        "tests/test_elsewhere.py::test_ranks": "PASSED",
    }, done.stdout + done.stderr
    assert done.returncode == 1
    assert "3 failed, 3 passed, 1 skipped" in done.stdout
    assert "seen from here" in done.stdout
    assert "ended early, with signal SIGKILL" in done.stdout


def test_the_plugin_is_idle_unless_asked_and_tells_wrong_marks(installed: Path, environment: dict[str, str]) -> None:
    test = installed / "test_marks.py"
    test.write_text(
        "import os, pytest\n"
        "@pytest.mark.npu(chip='Ascend910A')\n"
        "def test_a(): assert 'CANNSIM_HOME' not in os.environ\n"
        "def test_b(npu_fault): ...\n"
    )
    command = ["python", "-m", "pytest", "-rs", "-p", "no:cacheprovider", str(test)]

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        whole = [*command, *options]
        return subprocess.run(whole, env=environment, cwd=installed, capture_output=True, text=True, timeout=600)

    done = run()
    assert "1 passed, 1 skipped" in done.stdout, done.stdout
    assert "needs simulated NPUs: run pytest --npu-devices 1" in done.stdout
    test.write_text(test.read_text().replace("Ascend910A", "A100"))
    done = run("--npu-devices", "1")
    assert done.returncode == 4
    assert "test_marks.py::test_a: chip A100 is not one of Ascend910A, " in done.stderr + done.stdout


@pytest.mark.long(short="test_a_third_runs_a_projects_tests_on_two_npus")
def test_workers_of_xdist_have_machines_of_their_own(installed: Path, environment: dict[str, str]) -> None:
    folder = installed / "parallel"
    folder.mkdir()
    (folder / "test_parallel.py").write_text(
        "import os, pytest\n"
        "@pytest.mark.parametrize('number', range(2))\n"
        "def test_here(number, tmp_path):\n"
        "    (tmp_path / 'mark').touch()\n"
        "    assert os.environ['CANNSIM_DEVICES'] == '2'\n"
        "    assert os.environ['CANNSIM_STATE'].endswith(os.environ['PYTEST_XDIST_WORKER'])\n"
        "@pytest.mark.npu(devices=5)\n"
        "def test_there(tmp_path): assert os.environ['CANNSIM_DEVICES'] == '5'\n"
        "@pytest.mark.npu(chip='Ascend310P3')\n"
        "@pytest.mark.xfail(reason='known')\n"
        "def test_known(): assert os.environ['CANNSIM_CHIP'] == 'Ascend910A'\n"
        "@pytest.mark.slow\n"
        "@pytest.mark.npu(devices=3)\n"
        "def test_deselected_without_the_arguments(): assert os.environ['CANNSIM_DEVICES'] == '3'\n"
    )
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -m 'not slow'\nmarkers = slow\n")
    options = ["--npu-devices", "2", "-n", "2", "-p", "no:cacheprovider", "-m", "", "--basetemp=tmp"]
    command = ["python", "-m", "pytest", *options]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
    assert "4 passed, 1 xfailed" in done.stdout, done.stdout + done.stderr
    assert len([*(folder / "tmp").rglob("mark")]) == 2, "kept, although the others had temporary folders too"
