"""The job files of deploy/: they parse, name what exists, and start the commands that they say."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
SCRIPTS = [*sorted(DEPLOY.rglob("*.sh")), *sorted(DEPLOY.rglob("*.sbatch"))]
DOCKERFILES = sorted((DEPLOY / "docker").glob("Dockerfile.*"))
MANIFESTS = [
    pytest.param(document, id=f"{path.name}:{document['kind']}")
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
]
TOOL = """#!/bin/bash
printf '%s ' "${0##*/}" "$@" >> "$CALLS"
echo "home=$ASCENDCHAT_HOME" >> "$CALLS"
if [ "${0##*/}" = srun ]; then while [[ $1 == --* ]]; do shift; done; exec "$@"; fi
if [ -n "${WAITS:-}" ] && [ "${0##*/}" = ascendchat ]; then
    trap 'echo ended >> "$CALLS"; exit 143' TERM
    touch "$WAITS"; while :; do sleep 0.05; done
fi
exit "${STATUS:-0}"
"""


@pytest.fixture
def tools(tmp_path: Path) -> dict[str, str]:
    """An environment in which the programs that the scripts call write down how."""
    for name in ("srun", "scontrol", "ascendchat", "docker"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(TOOL)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    known = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "HOME": str(tmp_path),
    }
    return {**known, "ASCENDCHAT_HOME": str(tmp_path / "home"), "SLURM_JOB_ID": "7"}


def called(environment: dict[str, str]) -> list[str]:
    path = Path(environment["CALLS"])
    return path.read_text().splitlines() if path.exists() else []


def start(script: str, *words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", str(DEPLOY / script), *words], env=env, capture_output=True, text=True, timeout=60)


def test_scripts_parse_and_can_be_started() -> None:
    for script in SCRIPTS:
        assert subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=60).stderr == ""
        assert script.read_text().startswith("#!/bin/bash\n")
        assert os.access(script, os.X_OK)


def test_slurm_starts_one_launcher_per_node(tools: dict[str, str]) -> None:
    done = start("slurm/train.sbatch", "base", "--depth", "20", env=tools)
    assert done.returncode == 0, done.stderr
    text = (DEPLOY / "slurm" / "train.sbatch").read_text()
    (warned,), (grace,) = re.findall(r"^#SBATCH --signal=B:TERM@(\d+)$", text, re.M), re.findall(r"--grace (\d+)", text)
    assert int(warned) > int(grace), "time to save before Slurm kills it"
    assert "#SBATCH" not in text[text.index("\nset -eo") :], "Slurm reads none behind the first command"
    first, second = called(tools)
    assert first.startswith("srun --ntasks-per-node=1 ascendchat launch")
    assert second.startswith("ascendchat launch --max-restarts 3 --grace 110 base --depth 20 home=")
    assert start("slurm/train.sbatch", "base", env={**tools, "STATUS": "3"}).returncode == 3
    assert "name the command" in start("slurm/train.sbatch", env=tools).stderr
    without = {name: value for name, value in tools.items() if name != "ASCENDCHAT_HOME"}
    assert "a folder that all nodes share" in start("slurm/train.sbatch", "base", env=without).stderr


@pytest.mark.parametrize("script", ["slurm/train.sbatch", "modelarts/boot.sh"])
def test_the_settings_of_cann_are_read_where_nobody_has_set_a_path_before(
    tools: dict[str, str], tmp_path: Path, script: str
) -> None:
    """They append variables that a fresh node does not have."""
    (tmp_path / "set_env.sh").write_text('export PYTHONPATH=/cann:$PYTHONPATH NOT_SET_BEFORE="$NOT_SET_BEFORE"\n')
    text = (DEPLOY / script).read_text()
    (tmp_path / "script").write_text(text.replace("/usr/local/Ascend/ascend-toolkit", str(tmp_path)))
    (tmp_path / "bin" / "ascendchat").write_text('#!/bin/bash\necho "path=$PYTHONPATH" >> "$CALLS"\n')
    done = subprocess.run(
        ["bash", str(tmp_path / "script"), "base"], env=tools, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert called(tools)[-1] == "path=/cann:"


def test_before_its_time_is_over_a_slurm_job_saves_and_goes_back_into_the_queue(
    tools: dict[str, str], tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    words = ["bash", str(DEPLOY / "slurm" / "train.sbatch"), "base"]
    with subprocess.Popen(words, env={**tools, "WAITS": str(ready)}) as job:
        while not ready.exists():
            assert job.poll() is None
            time.sleep(0.01)
        job.terminate()
        assert job.wait(timeout=60) == 0
    assert [line.split(" home=")[0] for line in called(tools)[-2:]] == ["ended", "scontrol requeue 7"]


def test_modelarts_boots_the_launcher_in_the_folder_of_the_job(tools: dict[str, str], tmp_path: Path) -> None:
    env = {name: value for name, value in tools.items() if name != "ASCENDCHAT_HOME"}
    done = start("modelarts/boot.sh", "base", "--depth", "20", env={**env, "MA_JOB_DIR": "/job"})
    assert done.returncode == 0, done.stderr
    assert called(tools) == ["ascendchat launch --max-restarts 3 base --depth 20 home=/job/ascendchat"]
    assert start("modelarts/boot.sh", env=env).returncode == 2


def test_docker_gets_the_cards_and_what_their_driver_needs(tools: dict[str, str]) -> None:
    done = start("docker/run-ascend.sh", "ascendchat", "doctor", env={**tools, "DEVICES": "0,3", "PRINT": "1"})
    words = shlex.split(done.stdout)
    assert words[:2] == ["docker", "run"]
    assert words[-3:] == ["ascendchat:ascend", "ascendchat", "doctor"]
    devices = [words[place + 1] for place, word in enumerate(words) if word == "--device"]
    names = ["davinci0", "davinci3", "davinci_manager", "devmm_svm", "hisi_hdc"]
    assert devices == [f"/dev/{name}" for name in names]
    assert "--ipc=host" in words
    none = start("docker/run-ascend.sh", "ascendchat", "doctor", env=tools)
    if not list(Path("/dev").glob("davinci[0-9]*")):
        assert none.returncode == 2
        assert "no /dev/davinci*" in none.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_copy_what_exists_and_set_every_argument(path: Path) -> None:
    text = re.sub(r"\\\n", " ", path.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    kinds = {line.split()[0] for line in lines}
    assert kinds <= {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "VOLUME", "EXPOSE", "ENTRYPOINT", "CMD"}
    for line in lines:
        if line.startswith("COPY"):
            assert all((ROOT / source).exists() for source in line.split()[1:-1]), line
        if line.startswith(("ENTRYPOINT", "CMD")):
            assert isinstance(yaml.safe_load(line.split(" ", 1)[1]), list)
    arguments = set(re.findall(r"^ARG (\w+)=", text, re.M))
    used = set(re.findall(r"\$\{?([A-Z_]+)", "\n".join(line for line in lines if line.startswith(("FROM", "RUN")))))
    assert used == arguments


def containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a manifest of any kind."""
    spec = document["spec"]
    if document["kind"] == "AscendJob":
        templates = [replica["template"] for replica in spec["replicaSpecs"].values()]
    elif document["apiVersion"].startswith("batch.volcano.sh"):
        templates = [task["template"] for task in spec["tasks"]]
    else:
        templates = [spec["template"]] if "template" in spec else []
    found = []
    for template in templates:
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"  # HCCL and data workers need it
        for container in template["spec"]["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
            found.append(container)
    return found


@pytest.mark.parametrize("document", MANIFESTS)
def test_manifests_are_whole(document: dict[str, Any]) -> None:
    assert {"apiVersion", "kind", "metadata", "spec"} <= set(document)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", document["metadata"]["name"])
    for container in containers(document):
        resources = container["resources"]
        assert resources["requests"] == resources["limits"]  # devices cannot be shared out
        assert set(resources["limits"]) == {"huawei.com/Ascend910"}
        assert all(isinstance(word, str) for word in [*container.get("command", ()), *container["args"]])
        assert all(isinstance(variable.get("value", ""), str) for variable in container["env"])
    if document["kind"] == "AscendJob":
        replicas = document["spec"]["replicaSpecs"].values()
        assert {container["name"] for container in containers(document)} == {"ascend"}  # the operator looks for it
        pods = sum(replica["replicas"] for replica in replicas)
        assert document["spec"]["runPolicy"]["schedulingPolicy"]["minAvailable"] == pods


def test_a_service_finds_its_pods() -> None:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes" / "serve.yaml").read_text())
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    (container,) = containers(deployment)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert str(ports[service["spec"]["ports"][0]["targetPort"]]) in container["args"]
    assert container["readinessProbe"]["httpGet"]["port"] in ports


def test_volcano_gives_the_launcher_its_place(tools: dict[str, str]) -> None:
    (document,) = yaml.safe_load_all((DEPLOY / "kubernetes" / "volcano.yaml").read_text())
    (container,) = containers(document)
    line = container["args"][0].replace("source /usr/local/Ascend/ascend-toolkit/set_env.sh", "true")
    env = {**tools, "VC_TASK_INDEX": "1", "VC_WORKER_HOSTS": "a-0.b,a-1.b"}
    subprocess.run([*container["command"], line], env=env, check=True, timeout=60)
    assert "launch --nnodes 2 --node-rank 1 --master a-0.b:20123 --devices 8" in called(tools)[0]
    assert document["spec"]["tasks"][0]["replicas"] == document["spec"]["minAvailable"] == 2
