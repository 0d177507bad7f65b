"""device/env.py: profiles are set before torch, never over the user's own; harmful settings are only reported."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ascendchat.chips import KINDS
from ascendchat.device import env
from ascendchat.device.env import (
    AUTOLOAD,
    MachineFacts,
    PreparedEnvironment,
    announce,
    devices_behind,
    harmful_settings,
    known_harmful,
    load_problem,
    look,
    prepare_environment,
    without_own_settings,
)
from ascendchat.errors import UserError

BARE = MachineFacts(torch_npu=False, cann=False, driver=False, nodes=(), nvidia=False)
NPU = MachineFacts(torch_npu=True, cann=True, driver=True, nodes=("/dev/davinci0", "/dev/davinci1"), nvidia=False)
NPU_PROFILE = {
    "TASK_QUEUE_ENABLE": "2",
    "CPU_AFFINITY_CONF": "1",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    "HCCL_CONNECT_TIMEOUT": "600",
}


def test_an_npu_gets_the_training_profile_and_nothing_else() -> None:
    for asked in ("npu", None):
        environ: dict[str, str] = {}
        done = prepare_environment(asked, environ=environ, machine=NPU)
        assert environ == done.set == NPU_PROFILE
        assert done.warnings == []


@pytest.mark.parametrize("asked", ["cpu", "cuda", "mps"])
def test_other_devices_keep_torch_npu_from_being_loaded(asked: str) -> None:
    environ: dict[str, str] = {}
    prepare_environment(asked, environ=environ, machine=NPU)
    assert environ[AUTOLOAD] == "0"
    assert "TASK_QUEUE_ENABLE" not in environ
    assert ("PYTORCH_CUDA_ALLOC_CONF" in environ) == (asked == "cuda")


def test_the_environment_variable_names_the_device_and_the_argument_wins() -> None:
    assert prepare_environment(None, environ={"ASCENDCHAT_DEVICE": "cpu"}, machine=NPU).device_type == "cpu"
    assert prepare_environment("npu", environ={"ASCENDCHAT_DEVICE": "cpu"}, machine=NPU).device_type == "npu"
    assert prepare_environment(None, environ={"ASCENDCHAT_DEVICE": "auto"}, machine=NPU).device_type is None
    with pytest.raises(UserError, match=r"ASCENDCHAT_DEVICE: 'cuba' is not a device type; did you mean cuda"):
        prepare_environment(None, environ={"ASCENDCHAT_DEVICE": "cuba"}, machine=NPU)


@pytest.mark.parametrize(("cann", "said"), [(False, "CANN is not loaded"), (True, "driver")])
def test_torch_npu_without_cann_or_driver_is_left_alone_with_a_notice(cann: bool, said: str) -> None:
    environ: dict[str, str] = {}
    done = prepare_environment(None, environ=environ, machine=replace(BARE, torch_npu=True, cann=cann))
    assert environ == {AUTOLOAD: "0"}
    assert len(done.warnings) == 1
    assert said in done.warnings[0]
    asking: dict[str, str] = {}
    prepare_environment("npu", environ=asking, machine=replace(BARE, torch_npu=True, cann=cann))
    assert asking[AUTOLOAD] == "0", "torch can be imported; that there is no NPU says `pick`"


def test_npus_whose_cann_is_not_sourced_end_with_the_command_to_type() -> None:
    seen = replace(NPU, cann=False)
    with pytest.raises(UserError) as caught:
        prepare_environment(None, environ={}, machine=seen)
    for part in ("2 device(s)", "cann/set_env.sh", "ascend-toolkit/set_env.sh", f"{AUTOLOAD}=0", "--device-type cpu"):
        assert part in str(caught.value)
    assert prepare_environment(None, environ={AUTOLOAD: "0"}, machine=seen).set == {}  # the user has already said no


def test_npus_without_torch_npu_are_mentioned_and_who_asks_for_one_is_told_what_to_install() -> None:
    done = prepare_environment(None, environ={}, machine=replace(NPU, torch_npu=False))
    assert "pip install -e '.[npu]' in your clone" in done.warnings[0]
    assert "TASK_QUEUE_ENABLE" not in done.set
    with pytest.raises(UserError, match=r"torch_npu is not installed .*pip install -e '.\[npu\]' in your clone"):
        prepare_environment("npu", environ={}, machine=BARE)


def test_the_debug_profile_blocks_and_talks_and_does_not_warn_about_itself() -> None:
    environ: dict[str, str] = {}
    done = prepare_environment("npu", debug=True, environ=environ, machine=NPU)
    assert environ["ASCEND_LAUNCH_BLOCKING"] == "1"
    assert environ["TASK_QUEUE_ENABLE"] == "0"
    assert environ["ASCEND_GLOBAL_LOG_LEVEL"] == "1"
    assert done.warnings == []
    again = prepare_environment("npu", debug=True, environ=environ, machine=NPU)  # a child process inherits all of it
    assert (again.set, again.kept, again.warnings) == ({}, {}, [])


def test_the_debug_profile_says_when_it_is_incomplete_or_changes_nothing() -> None:
    done = prepare_environment("npu", debug=True, environ={"TASK_QUEUE_ENABLE": "2"}, machine=NPU)
    assert done.kept == {"TASK_QUEUE_ENABLE": "2"}
    assert any("TASK_QUEUE_ENABLE=2 was already set" in line for line in done.warnings)
    done = prepare_environment("cpu", debug=True, environ={}, machine=BARE)
    assert any("--npu-debug changes nothing" in line for line in done.warnings)


def test_the_allocator_is_left_alone_when_its_general_variable_is_set() -> None:
    for asked in ("npu", "cuda"):
        environ = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
        done = prepare_environment(asked, environ=environ, machine=NPU)
        assert not {"PYTORCH_NPU_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(environ)
        assert done.kept == {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}


def test_both_allocator_variables_are_refused_before_torch_npu_dies_of_them() -> None:
    both = {"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_NPU_ALLOC_CONF": "b:2"}
    with pytest.raises(UserError, match="both set"):
        prepare_environment("npu", environ=both, machine=NPU)
    assert [h.kind for h in harmful_settings(both)] == ["breaks"]
    prepare_environment("cpu", environ=both, machine=NPU)  # nothing reads them there


OURS = [*env.NPU_DEBUG, *KINDS["cuda"].environment, AUTOLOAD, "PYTORCH_ALLOC_CONF", "PATH"]
OUTSIDES = st.builds(
    MachineFacts, st.booleans(), st.booleans(), st.booleans(), st.sampled_from([(), NPU.nodes]), st.booleans()
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # judged by the clock of a busy machine
@given(
    st.dictionaries(st.sampled_from(OURS), st.sampled_from(["0", "1", "2", "7200", "expandable_segments:False", ""])),
    OUTSIDES,
    st.sampled_from([None, "npu", "cuda", "mps", "cpu"]),
    st.booleans(),
)
def test_no_variable_of_the_user_is_ever_changed(
    users: dict[str, str], outside: MachineFacts, asked: str | None, debug: bool
) -> None:
    environ = dict(users)
    try:
        done = prepare_environment(asked, debug=debug, environ=environ, machine=outside)
    except UserError:
        assert environ == users
        return
    assert {name: environ[name] for name in users} == users
    assert set(environ) - set(users) == set(done.set)
    assert all(done.kept[name] == users[name] for name in done.kept)
    assert not ("PYTORCH_ALLOC_CONF" in environ and "PYTORCH_NPU_ALLOC_CONF" in done.set)
    again = prepare_environment(asked, debug=debug, environ=environ, machine=outside)
    assert again.set == {}


HARMFUL = {
    "slow": "ASCEND_LAUNCH_BLOCKING=1 TASK_QUEUE_ENABLE=0 ASCEND_GLOBAL_LOG_LEVEL=0 ASCEND_GLOBAL_LOG_LEVEL=1 "
    "ASCEND_SLOG_PRINT_TO_STDOUT=1 TORCH_HCCL_BLOCKING_WAIT=1",
    "breaks": "HCCL_CONNECT_TIMEOUT=60 HCCL_CONNECT_TIMEOUT=ten ASCEND_RT_VISIBLE_DEVICES=0, 1 "
    "ASCEND_RT_VISIBLE_DEVICES=1,0 ASCEND_RT_VISIBLE_DEVICES=0-7 INF_NAN_MODE_ENABLE=0 TORCH_TRANSFER_TO_NPU=1",
    "hides faults": "HCCL_CONNECT_TIMEOUT=7200 HCCL_EXEC_TIMEOUT=100 HCCL_EXEC_TIMEOUT=7200 HCCL_EXEC_TIMEOUT=0 "
    "HCCL_EVENT_TIMEOUT=1800 HCCL_ASYNC_ERROR_HANDLING=0 TORCH_HCCL_ASYNC_ERROR_HANDLING=0 HCCL_OP_EXPANSION_MODE=AIV",
    "memory": "HCCL_BUFFSIZE=2048 MULTI_STREAM_MEMORY_REUSE=2",
    "no effect": "HCCL_INTRA_ROCE_ENABLE=1 HCCL_WHITELIST_DISABLE=1 ASCEND_VISIBLE_DEVICES=0 ASCEND_DEVICE_ID=0",
    "does not exist": "NPU_VISIBLE_DEVICES=0 TORCH_NPU_ALLOC_CONF=x ASCEND_GEMM_FooTiling=1",
}


@pytest.mark.parametrize("kind", HARMFUL)
def test_a_harmful_setting_is_reported_with_its_cost_in_both_languages(kind: str) -> None:
    settings = [setting.partition("=")[::2] for setting in re.split(r" (?=[A-Z])", HARMFUL[kind])]
    if kind == "does not exist":
        settings += [(name, "1") for name in known_harmful()["nonexistent"] if "*" not in name]
    for name, value in settings:
        environ = {name: value}
        found = harmful_settings(environ)
        assert [(h.name, h.value, h.kind) for h in found] == [(name, value, kind)]
        assert environ == {name: value}
        assert found[0].cost in found[0].sentence()
        chinese = found[0].sentence("zh")
        assert any("\u4e00" <= letter <= "\u9fff" for letter in chinese)
        assert found[0].advice_zh in chinese


def test_every_rule_has_a_case() -> None:
    """That of the allocator is in test_both_allocator_variables_are_refused_before_torch_npu_dies_of_them."""
    cases = " ".join(HARMFUL.values())
    rules = {rule["name"] for rule in known_harmful()["rules"]} - {"PYTORCH_NPU_ALLOC_CONF"}
    assert [name for name in rules if f"{name}=" not in cases] == []


@pytest.mark.parametrize(
    "environ",
    [
        NPU_PROFILE,
        {"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,10"},
        {"ASCEND_GLOBAL_LOG_LEVEL": "3", "HCCL_EXEC_TIMEOUT": "1836", "HCCL_CONNECT_TIMEOUT": "1200"},
        {"HCCL_DETERMINISTIC": "true", "HCCL_BUFFSIZE": "200", "PATH": "/bin"},
    ],
)
def test_sound_settings_are_not_reported(environ: dict[str, str]) -> None:
    assert harmful_settings(environ) == []
    harmful = environ | {"HCCL_WHITELIST_DISABLE": "1"}
    assert len(prepare_environment("npu", environ=dict(harmful), machine=NPU).warnings) == 1
    assert prepare_environment("cpu", environ=dict(harmful), machine=NPU).warnings == [], "nothing reads it there"


def test_look_finds_libraries_where_the_loader_would(tmp_path: Path) -> None:
    assert look({}).cann is False or env._where("libhccl.so", {}) == "libhccl.so"
    for library in ("libhccl.so", "libascendcl.so"):
        (tmp_path / library).write_bytes(b"not a library")
    seen = look({"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"})
    assert seen.cann
    assert seen.driver == bool(seen.nodes or env._where("libascend_hal.so", {}))  # the files cannot be loaded
    (tmp_path / "libascend_hal.so").touch()
    assert look({"LD_LIBRARY_PATH": str(tmp_path)}).driver


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("libhccl.so: cannot open shared object file: No such file or directory", "set_env.sh"),
        ("libascend_hal.so: cannot open shared object file: No such file or directory", "driver"),
        ("libtorch_npu.so: undefined symbol: _ZN3c10", "versions must be equal"),
        ("Two accelerators cannot be used at the same time in PyTorch: npu and cuda.", "CPU build of torch"),
        ("something else\n[ERROR] ERR00001", r"something else\); run: ascendchat doctor"),
    ],
)
def test_a_failed_load_of_torch_npu_becomes_one_sentence(text: str, expected: str) -> None:
    error = RuntimeError("Failed to load the backend extension: torch_npu.")
    error.__cause__ = ImportError(text)
    sentence = load_problem(error, BARE)
    assert re.search(expected, sentence)
    assert "\n" not in sentence


def test_only_the_first_rank_of_a_node_speaks() -> None:
    prepared = PreparedEnvironment("npu", warnings=["hear me"])
    for local_rank, speaks in (("0", True), ("3", False), ("0,1,2,3", True)):
        out = io.StringIO()
        announce(prepared, out, {"LOCAL_RANK": local_rank})
        assert ("hear me" in out.getvalue()) == speaks


def test_a_server_beside_a_trainer_sees_the_devices_behind_it() -> None:
    assert devices_behind("npu", 2, 2, 4, {}) == {"ASCEND_RT_VISIBLE_DEVICES": "2,3"}
    assert devices_behind("npu", 1, 2, 3, {"ASCEND_RT_VISIBLE_DEVICES": "4,5,7"}) == {
        "ASCEND_RT_VISIBLE_DEVICES": "5,7"
    }
    assert devices_behind("cuda", 1, 1, 2, {}) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert devices_behind("cpu", 1, 4, 1, {}) == {}, "processes have no numbers"
    with pytest.raises(UserError, match=r"3 device.s. for training and 2 for rollouts .* 4 Ascend NPU"):
        devices_behind("npu", 3, 2, 4, {})


def test_a_server_beside_a_trainer_prepares_its_own_environment() -> None:
    own = {"TASK_QUEUE_ENABLE": "2", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}
    own |= {"RANK_ID": "1", "RANK_SIZE": "8", "PET_NPROC_PER_NODE": "8", "MA_NUM_HOSTS": "2", "SLURM_NNODES": "2"}
    kept = {"PATH": "/bin", "OMP_NUM_THREADS": "3", "HCCL_CONNECT_TIMEOUT": "1200", "LD_LIBRARY_PATH": "/lib"}
    assert without_own_settings({**own, **kept}) == kept
