"""`ascendchat setup`: what to install on machines of every kind, and that --yes installs it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_doctor import atlas, laptop, put

from ascendchat import cli
from ascendchat.config.commands import SetupConfig
from ascendchat.device import smi
from ascendchat.device.cann import install_line
from ascendchat.doctor import setup
from ascendchat.doctor.machine import Machine
from ascendchat.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
OWN_NPU = "pip install -e '.[npu]'"


def commands(machine: Machine, **asked: object) -> list[str]:
    return [step.command for step in setup.steps(machine, SetupConfig(**asked))]  # type: ignore[arg-type]


def bare(tmp_path: Path) -> Machine:
    """An Atlas server with CANN 9.1.0 on its disk, and a shell that knows nothing of it."""
    machine = atlas(tmp_path, versions={})
    return replace(machine, npu=None, environ={"PATH": machine.environ["PATH"]})


def test_a_new_atlas_server_is_told_everything_in_order(tmp_path: Path) -> None:
    machine = bare(tmp_path)
    source, pair, own = commands(machine)
    assert source == "source /usr/local/Ascend/cann/set_env.sh"
    assert pair == install_line("9.1.0")
    assert own == OWN_NPU
    assert [step.by_hand for step in setup.steps(machine, SetupConfig())] == [True, False, False]
    shown = "\n".join(setup.lines(machine, setup.steps(machine, SetupConfig()), "npu"))
    assert "npu: 8 x Ascend910B3" in shown
    assert "9.1.0, not loaded" in shown
    assert "--yes runs 2, 3" in shown


def test_the_pair_follows_the_cann_that_is_there(tmp_path: Path) -> None:
    machine = bare(tmp_path)
    put(tmp_path / "usr/local/Ascend/cann/aarch64-linux/ascend_toolkit_install.info", "version=8.5.0\n")
    assert install_line("8.5.0") in commands(machine)
    assert install_line("8.5.0") != install_line("9.1.0")


@pytest.mark.parametrize(
    ("versions", "wanted"),
    [
        ({"torch": "2.12.0+cpu", "torch_npu": "2.12.0"}, False),
        ({"torch": "2.12.0", "torch_npu": "2.12.0"}, False),
        ({"torch": "2.13.0", "torch_npu": "2.12.0"}, True),
        ({"torch": "2.9.0", "torch_npu": "2.9.0"}, True),  # for CANN 8.5
        ({"torch": "2.12.0"}, True),
    ],
)
def test_a_pair_that_fits_is_kept_and_another_is_replaced(
    tmp_path: Path, versions: dict[str, str], wanted: bool
) -> None:
    assert (install_line("9.1.0") in commands(atlas(tmp_path, versions=versions))) == wanted


def test_without_cann_it_says_where_it_comes_from(tmp_path: Path) -> None:
    machine = bare(tmp_path)
    shutil.rmtree(tmp_path / "usr/local/Ascend/cann")
    first, pair, _ = commands(machine)
    assert "Ascend-cann-toolkit_9.1.0" in first
    assert pair == install_line("")


def test_a_machine_without_an_accelerator_gets_the_tested_versions(tmp_path: Path) -> None:
    assert commands(laptop(tmp_path)) == ["pip install -c constraints.txt -e ."]
    told = commands(laptop(tmp_path), device_type="npu")
    assert (told[0], told[-1]) == ("npu-smi info", OWN_NPU)


def test_a_gpu_gets_torch_unless_it_is_there(tmp_path: Path) -> None:
    device = smi.parse_npu_table((Path(__file__).parents[1] / "device" / "smi_samples" / "a2_25.txt").read_text())
    machine = laptop(tmp_path, nvidia_smi=device)
    assert commands(machine) == ["pip install -e ."]
    assert commands(replace(machine, versions={})) == ["pip install torch", "pip install -e ."]


def test_a_network_without_the_hub_gets_mirrors(tmp_path: Path) -> None:
    machine = laptop(tmp_path, mirror="no answer")
    assert commands(machine)[1:] == [
        "export HF_ENDPOINT=https://hf-mirror.com; export HF_HUB_DOWNLOAD_TIMEOUT=300",
        "pip config set global.index-url URL",
    ]
    own, *rest = commands(machine, index="https://mirror.example/simple", extra_index="https://other.example")
    assert own.endswith("-e . --index-url https://mirror.example/simple --extra-index-url https://other.example")
    assert len(rest) == 1
    chosen = replace(machine, environ={"HF_ENDPOINT": "https://hf-mirror.com/", "PIP_INDEX_URL": "x"})
    assert commands(chosen)[1:] == ["export HF_HUB_OFFLINE=1"]
    assert commands(laptop(tmp_path, mirror=None))[1:] == []


class Pip:
    """Stands for subprocess.run: keeps what pip was told, and where."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.called: list[list[str]] = []

    def __call__(self, words: list[str], cwd: Path, check: bool) -> subprocess.CompletedProcess[str]:
        assert cwd == ROOT
        self.called.append(words)
        return subprocess.CompletedProcess(words, self.status)


def test_yes_runs_what_pip_does_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = Pip()
    monkeypatch.setattr(setup, "look", lambda lang: replace(bare(tmp_path), lang=lang, mirror="no answer"))
    monkeypatch.setattr(setup.subprocess, "run", pip)
    assert cli.main(["setup"]) == 0
    assert pip.called == []
    monkeypatch.setattr(setup.sys, "prefix", "/a/virtual/environment")
    assert cli.main(["setup", "--yes"]) == 0
    assert pip.called == [
        [sys.executable, "-m", *install_line("9.1.0").split()],
        [sys.executable, "-m", "pip", "install", "-e", ".[npu]"],
    ]
    monkeypatch.setattr(setup.subprocess, "run", Pip(status=1))
    capsys.readouterr()
    assert cli.main(["setup", "--yes"]) == 2
    assert "pip ended with status 1" in capsys.readouterr().err


def test_the_password_of_an_index_is_used_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = Pip()
    monkeypatch.setattr(setup, "look", lambda lang: laptop(tmp_path, lang=lang))
    monkeypatch.setattr(setup.subprocess, "run", pip)
    monkeypatch.setattr(setup.sys, "prefix", "/a/virtual/environment")
    assert (
        cli.main(["setup", "--yes", "--device-type", "cpu", "--index", "https://me:s3cret@mirror.example/simple"]) == 0
    )
    assert "https://me:s3cret@mirror.example/simple" in pip.called[-1]
    said = capsys.readouterr().out
    assert "s3cret" not in said
    assert "https://***@mirror.example/simple" in said


def test_an_old_python_is_told_what_it_lacks() -> None:
    """`python3` of many servers is 3.9 or older, which cannot even import the command line."""
    code = "import runpy, sys; sys.version_info = (3, 9, 1); runpy.run_module('ascendchat', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("ascendchat needs Python 3.10 or newer, this is 3.9; ")


def test_a_python_of_the_system_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "EXTERNALLY-MANAGED")
    monkeypatch.setattr(setup.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(setup.sys, "prefix", setup.sys.base_prefix)
    with pytest.raises(UserError, match="-m venv"):
        setup.run_pip_steps([setup.Step("", "pip install torch")])


def test_a_file_of_another_project_beside_the_package_makes_no_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert setup.clone() == ROOT
    monkeypatch.setattr(setup, "__file__", str(tmp_path / "ascendchat" / "doctor" / "setup.py"))
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\n')
    with pytest.raises(UserError, match="installed without its sources"):
        setup.clone()


def test_it_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "ASCENDCHAT_HOME": str(tmp_path)}
    words = [sys.executable, "-S", "-E", "-m", "ascendchat", "setup", "--device-type", "npu", "--lang", "zh"]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert OWN_NPU in done.stdout
    assert "然后：ascendchat doctor" in done.stdout


def test_what_was_installed_from_a_wheel_is_completed_as_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "in_clone", lambda: False)
    assert commands(bare(tmp_path))[-1] == "pip install 'ascendchat[npu]'"
    assert commands(bare(tmp_path), device_type="cpu")[-1] == "pip install ascendchat"
