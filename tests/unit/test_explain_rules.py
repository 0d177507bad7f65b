"""Every rule of `ascendchat explain` on a log excerpt, in both languages; every known failure by its texts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ascendchat.doctor.explain import explain
from ascendchat.doctor.explain_rules import all_rules, code, compiled, literal, matchers

SAMPLES = Path(__file__).parent / "explain_samples"
RULES, CODES = all_rules()
IDS = [rule.id for rule in RULES]
TABLES = {name: rows for rule in CODES for name, rows in rule.tables.items()}
MODULES, REASONS, RANGES, HCCL = (TABLES[name] for name in ("module", "reason", "range", "meaning"))

# The known failures of NPU users: (row, rule, a line of the log)
KNOWN = [
    (1, "missing-cann-library", "ImportError: libhccl.so: cannot open shared object file: No such file or directory"),
    (1, "missing-cann-library", "ImportError: libascendcl.so: cannot open shared object file: No such file"),
    (1, "missing-atb-library", "OSError: libatb.so: cannot open shared object file: No such file or directory"),
    (2, "backend-extension", "RuntimeError: Failed to load the backend extension: torch_npu. You can disable"),
    (2, "undefined-symbol", "ImportError: /x/libtorch_npu.so: undefined symbol: _ZN3c1010TensorImpl"),
    (3, "two-accelerators", "RuntimeError: Two accelerators cannot be used at the same time in PyTorch: npu and cuda."),
    (
        3,
        "two-accelerators",
        "what():  Duplicated key 'pinned_reserve_segment_size_mb' found in device-specific configuration parser hook "
        "registration",
    ),
    (4, "npu-not-visible", "torch.npu.is_available() = False"),
    (5, "npu-context", "RuntimeError: NPU function error: GetDevice, error code is 107002"),
    (5, "npu-context", "[Error]: The context is empty."),
    (6, "device-start", "RuntimeError: NPU error, error code is 107001"),
    (6, "device-start", "NPU function error: aclrtSetDevice, error code is 507033"),
    (6, "device-start", "EL0003: The argument is invalid."),
    (6, "device-start", "EL0005: The resources are busy."),
    (6, "device-start", "E30006: Failed to verify the OPP."),
    (7, "npu-fork", "RuntimeError: Cannot re-initialize NPU in forked subprocess. To use NPU with multiprocessing"),
    (8, "npu-oom", "torch.OutOfMemoryError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB"),
    (8, "npu-oom", "NPU function error: aclrtMalloc, error code is 207001"),
    (8, "npu-oom", "rtMalloc failed, ErrCode=207018, desc=[The memory on the device is exhausted]"),
    (8, "npu-oom", "EL0004: Failed to allocate memory requested by RTS module."),
    (8, "hccl-oom", "Resource_Error_Insufficient_Device_Memory(EI0011): Failed to allocate [419430400] bytes"),
    (
        8,
        "hccl-oom",
        "EI0007: Failed to allocate resource[notify] with info [x]. Reason: Memory resources are exhausted.",
    ),
    (
        9,
        "hccp-busy",
        "EJ0001: Failed to initialize the HCCP process. Reason: Maybe the last training process is running.",
    ),
    (10, "hccl-connect-timeout", "EI0006: Getting socket times out. Reason: x"),
    (10, "hccl-connect-timeout", "wait socket establish timeout, role[1] rank[2] timeout[120 s]"),
    (11, "hccl-rootinfo", "(EI0015): Failed to collect cluster information of the communicator"),
    (11, "hccl-rootinfo", "[Wait] topo exchange server get socket timeout!"),
    (11, "hccl-rootinfo", "Failed to connect agent[3,7]"),
    (12, "hccl-port", "EI0019: socket listen on ip 10.0.0.1 and specific port[60000] fail"),
    (12, "hccl-port", "EJ0003: Failed to bind the IP port. Reason: specific port[16666]"),
    (13, "hccl-exec-timeout", "EI0002: The wait execution of the Notify register times out."),
    (13, "hccl-exec-timeout", "NPU function error: aclrtSynchronizeStream, error code is 507048"),
    (13, "hccl-exec-timeout", "NPU function error: x, error code is 107020"),
    (13, "hccl-exec-timeout", "EE1002: Stream synchronize timeout. stream_id=3"),
    (13, "hccl-exec-timeout", "aclrtSynchronizeStreamWithTimeout failed, runtime result = 507046"),
    (14, "hccl-inconsistent", "EI0005: The arguments for collective communication are inconsistent between ranks"),
    (
        14,
        "hccl-inconsistent",
        "EI0008: The HCCL versions are inconsistent: tag [x], local_version [a], remote_version [b]",
    ),
    (14, "hccl-inconsistent", "EI0016: Value 1 for config TLS is invalid. Expected value: 0."),
    (14, "hccl-inconsistent", "EI0001: Environment variable [HCCL_SOCKET_IFNAME] is invalid. Reason: no such card."),
    (15, "hccl-link", "EI0013: An error CQE occurred during operator execution."),
    (15, "hccl-link", "[run task] error cqe status[12], remote ip 10.0.0.2"),
    (15, "hccl-link", "EI0012: SDMA memory copy task exception occurred. Remote rank: [3]."),
    (15, "hccl-link", "EI0010: P2P communication failed. Reason: x"),
    (16, "hccl-init", "RuntimeError: initialize hccl failed: 500000"),
    (16, "hccl-init", "HCCL function error: hcclCommInitRootInfoConfig(n, &id, rank, &cfg, &comm), error code is 7"),
    (16, "hccl-init", "HCCL function error: HcclCommInitRootInfo(n, &id, rank, &comm), error code is 15"),
    (17, "npu-kernel-fault", "NPU function error: aclrtSynchronizeStream, error code is 507011"),
    (17, "npu-kernel-fault", "rtDeviceSynchronize execute failed, ErrCode=507015, desc=[aicore exception]"),
    (17, "npu-kernel-fault", "NPU function error: x, error code is 507035"),
    (17, "npu-kernel-fault", "NPU function error: x, error code is 507018"),
    (17, "npu-kernel-fault", "NPU function error: x, error code is 507017"),
    (17, "npu-kernel-fault", "NPU function error: x, error code is 507014"),
    (17, "npu-kernel-fault", "EZ9999: Inner Error!"),
    (18, "cann-init", "NPU function error: aclInit, error code is 500001"),
    (18, "cann-init", "NPU function error: aclInit, error code is 500002"),
    (18, "cann-init", "at_npu::native::AclSetCompileopt(aclCompileOpt::ACL_OP_JIT_COMPILE, mode) failed"),
    (18, "cann-init", "EH9999: Inner Error! [Init][Env]init env failed!"),
    (19, "missing-op-binary", "Cannot find bin of op Add, integral key 0/1/|float/ND/"),
    (19, "npu-op-parameter", "call aclnnAdd failed, error code is 161001"),
    (19, "npu-op-parameter", "call aclnnAdd failed, error code is 161002"),
    (19, "npu-op-parameter", "call aclnnAdd failed, error code is 561103"),
    (19, "npu-op-parameter", "EZ1001: The dtype of self is wrong"),
    (19, "npu-op-parameter", "EZ0007: OP[Add] x has incorrect dtype[: int4], it should be float."),
    (
        20,
        "bf16-unsupported",
        "Tensor self not implemented for DT_BFLOAT16, should be in dtype support list [DT_FLOAT,]",
    ),
    (20, "bf16-unsupported", "RuntimeError: bfloat16 is not supported on this device"),
    (21, "fp16-saturation", "INF_NAN_MODE_ENABLE shouldn't be set to 0 on the current device."),
    (22, "cpu-fallback", "The operator 'aten::isin' is not currently supported on the NPU backend and will fall back"),
    (23, "host-bound", "environment: TASK_QUEUE_ENABLE=0"),
    (23, "host-bound", "ASCEND_LAUNCH_BLOCKING=1 ASCEND_GLOBAL_LOG_LEVEL=3"),
    (24, "jit-compile", "torch.npu.set_compile_mode(jit_compile=True)"),
    (25, "attention-mask", "sparseMode is 3, attenMask shape should be [2048, 2048]"),
    (25, "nan-loss", "step 12 loss: nan"),
    (26, "logprob-drift", "the rollout logprobs differ from the training logprobs by 0.2"),
    (27, "npu-streams", "NPU function error: x, error code is 207008"),
    (27, "npu-streams", "EL0009: The stream resources are insufficient."),
    (28, "driver-mismatch", "NPU function error: x, error code is 207000"),
    (
        28,
        "driver-mismatch",
        "Feature is not supported and the possible cause is that driver and firmware packages do not match.",
    ),
    (
        29,
        "port-in-use",
        "[c10d] The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).",
    ),
    (30, "npu-smi-container", "dcmi module initialize failed. ret is -8005"),
    (30, "npu-smi-container", "dcmi model initialized failed, because the device is used. ret is -8020"),
    (31, "npu-permission", "NPU function error: x, error code is 207006"),
    (31, "npu-permission", "EL0007: You have no permission."),
    (31, "npu-permission", "open /dev/davinci0 failed: Permission denied"),
    (32, "npu-hardware", "NPU function error: x, error code is 507053"),
    (32, "npu-hardware", "NPU error: hbm Multi-bit ECC error, error code is 507054"),
    (32, "npu-hardware", "FORCE STOP, error code is 107022"),
]
# Texts of errors that users search for, beyond the excerpts
OTHERS = [
    ("port-in-use", "OSError: [Errno 98] Address already in use"),
    ("host-oom", "[12.3] Out of memory: Killed process 811 (python) total-vm:1kB"),
    ("killed", "  exitcode  : -9 (pid: 811)"),
    ("cuda-fault", "CUDA error: an illegal memory access was encountered"),
    ("nccl-timeout", "[Rank 1] Some HCCL operations have failed or timed out."),
    ("gloo-connect", "[enforce fail at gloo/transport/tcp/device.cc] SO_ERROR: Connection refused"),
    ("tcpstore", "[c10d] The client socket has failed to connect to [h]:1 (errno: 111)"),
    ("rank-ended", "recvValue failed: Connection reset by peer"),
    ("compile", "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised"),
    ("compile", "torch._inductor.exc.InductorError: RuntimeError: Failed to find C compiler."),
    ("hub-network", "httpx.ReadTimeout: The read operation timed out"),
    ("hub-access", "httpx.HTTPStatusError: Client error '404 Not Found' for url"),
    ("hub-ssl", "requests.exceptions.SSLError: HTTPSConnectionPool"),
    ("shared-memory", "  exitcode  : -7 (pid: 811)"),
    ("loader-worker", "RuntimeError: DataLoader worker (pid 81) is killed by signal: Killed. "),
    ("hccl-link", "RuntimeError: SUSPECT REMOTE ERROR"),  # all that torch_npu 2.7.1 says about EI0005 with 507057
    ("hccl-link", "RuntimeError: HCCS LINK ERROR"),
    ("hccl-link", "NPU function error: x, error code is 507057"),
    ("token-range", "IndexError: Target 32768 is out of bounds."),
    ("shape", "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 9x2)"),
    ("glibc", "/lib64/libc.so.6: version `GLIBC_2.34' not found (required by x)"),
    ("safetensors", "Error while deserializing header: MetadataIncompleteBuffer"),
    ("checksum", "OSError: Consistency check failed: file should be of size 10 but has size 9"),
    ("torch-npu-missing", "ImportError: No module named 'torch_npu'"),
    ("torch-npu-missing", "ModuleNotFoundError: No module named 'torch_npu.npu'"),
    ("flash-attn-missing", "ModuleNotFoundError: No module named 'flash_attn.flash_attn_interface'"),
    ("missing-package", "ModuleNotFoundError: No module named 'torch_npu_extra'"),
    ("torch-npu-call", "    if torch_npu.is_available():"),
    ("npu-not-visible", "RuntimeError: Neither NPU nor CUDA is available"),
    ("hccl-if-ip", "HCCL_IF_IP 10.0.0.7 is not an address of this host"),
    (
        "diverged",
        "ascendchat.train.loop.Diverged: the loss of step 9 is 12.31 (running mean 3.1); batch 9 of this data",
    ),
    ("diverged", "ascendchat sft: the loss of step 9 is inf (running mean 3.1); batch 9 of this data and seed"),
    ("host-bound", "Note: ASCEND_LAUNCH_BLOCKING=1 will force ops to run in synchronous mode"),
    ("host-bound", "+ export ASCEND_LAUNCH_BLOCKING=1"),
    ("same-device", "Expected all tensors to be on the same device, but found at least two devices, npu:0 and cpu!"),
]


@pytest.mark.parametrize("name", IDS)
def test_each_rule_is_the_first_finding_on_its_excerpt_in_both_languages(name: str) -> None:
    text = (SAMPLES / f"{name}.log").read_text(encoding="utf-8")
    english, chinese = explain(text, "en")[0], explain(text, "zh")[0]
    assert english.rule == chinese.rule == name
    assert english.line in text
    assert english.commands == chinese.commands
    assert english.commands
    assert len(english.check) == len(chinese.check) >= 1
    for one, two in zip(
        [english.title, english.cause, *english.check], [chinese.title, chinese.cause, *chinese.check], strict=True
    ):
        assert one != two
        assert re.search(r"[\u4e00-\u9fff]", two), two
        assert not re.search(r"[\u3000-\u9fff\uff00-\uffef]", one), one
        assert "{" not in one + two


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_kernel_that_does_not_compile_is_explained_for_every_device(language: str) -> None:
    log = (
        "torch 2.11.0+cu130 on cuda:0\n"
        "torch._inductor.exc.InductorError: CalledProcessError: Command '['/usr/bin/gcc', '/tmp/main.c']' returned 1\n"
    )
    (found,) = explain(log, language)
    assert "npu" not in f"{found.rule} {found.title}".lower()
    assert "--no-compile" in found.cause
    assert "ASCENDCHAT_COMPILE=0" in found.cause
    (npu,) = [part for part in re.split(r"[.。] ?", found.cause) if "triton-ascend" in part]
    assert "NPU" in npu  # said of NPUs alone
    assert all(line.startswith("NPU") for line in found.check if "triton-ascend" in line)
    assert found.commands[0] == "export ASCENDCHAT_COMPILE=0"


def test_there_is_one_excerpt_per_rule_and_no_other() -> None:
    assert {path.stem for path in SAMPLES.glob("*.log")} == set(IDS)
    assert len(IDS) == len(set(IDS))


@pytest.mark.parametrize(("row", "name", "line"), KNOWN)
def test_each_known_failure_is_recognised_by_each_of_its_texts(row: int, name: str, line: str) -> None:
    assert explain(f"step 3 of 9\n{line}\n")[0].rule == name


def test_all_32_known_failures_are_covered() -> None:
    assert {row for row, _, _ in KNOWN} == set(range(1, 33))


@pytest.mark.parametrize(("name", "line"), OTHERS)
def test_other_errors_users_search_for_are_recognised(name: str, line: str) -> None:
    assert explain(line)[0].rule == name


def test_advice_of_torch_npu_to_set_a_variable_is_not_read_as_that_it_is_set() -> None:
    advice = (
        "Since the operator is called asynchronously, the stacktrace may be inaccurate. If you want to get the "
        "accurate stacktrace, please set the environment variable ASCEND_LAUNCH_BLOCKING=1.\n"
    )
    assert explain("ZorkError: the grue ate the flux\n" + advice) == []
    assert explain("set the environment variable\nASCEND_LAUNCH_BLOCKING=1.\n") == []
    assert [f.rule for f in explain("RuntimeError: NPU out of memory. Tried to allocate 2 GiB\n" + advice)] == [
        "npu-oom"
    ]


def test_a_missing_package_gets_the_extra_it_belongs_to() -> None:
    (npu,) = explain("ModuleNotFoundError: No module named 'torch_npu'")
    assert any(".[npu]" in command for command in npu.commands)
    assert not any(".[hf]" in text for text in [*npu.check, *npu.commands])
    (flash,) = explain("ModuleNotFoundError: No module named 'flash_attn'")
    assert "cannot be installed for an NPU" in flash.cause
    (other,) = explain("ModuleNotFoundError: No module named 'einops'")
    assert "python -m pip install einops" in other.commands[1]


def test_the_loss_that_the_training_loop_refuses_gets_a_cause() -> None:
    from ascendchat.train.loop import Diverged

    text = f"{Diverged.__module__}.{Diverged.__name__}: the loss of step 120 is nan (running mean 3.2); batch 120"
    for line in (text, "ascendchat base: the loss of step 120 is 14.2 (running mean 3.2); batch 120 of this data"):
        (found,) = explain(line)
        assert found.rule == "diverged"
        assert "learning rate" in found.cause


def test_every_pattern_has_plain_text_for_the_scan_and_every_hole_is_filled() -> None:
    for needle, _, pattern, rule in matchers():
        assert len(needle) >= 2, pattern
        texts = [*rule.title.values(), *rule.cause.values(), *(text for check in rule.check for text in check.values())]
        holes = set(re.findall(r"{(\w+)}", " ".join([*texts, *rule.commands]))) - {"code" if rule.code else ""}
        assert holes <= set(compiled(pattern, rule.where).groupindex), rule.id


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("abc def", "abc def"),
        (r"ab(?:cd|ef)ghi", "ghi"),
        (r"[Aa]bcd?e", "bc"),
        (r"x\.so[.\d]*: cannot", ": cannot"),
        (r"[^\]]{1,40}yes\b", "yes"),
        ("one|two", ""),
        (code(507015), "507015"),
    ],
)
def test_the_plain_text_of_a_pattern_is_the_longest_run_every_match_holds(pattern: str, expected: str) -> None:
    assert literal(pattern) == expected


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("reason", REASONS)
def test_every_code_of_torch_npu_is_decoded(module: str, reason: str) -> None:
    line = f"[ERROR] 2026-03-02-10:13:12 (PID:7, Device:0, RankID:0) ERR{module}{reason} X y"
    english, chinese = explain(line, "en"), explain(line, "zh")
    assert len(english) == len(chinese) == 1
    if (module, reason) == ("99", "999"):
        assert "Python" in english[0].title
        assert "traceback above" in english[0].check[0]
    elif english[0].rule.startswith("code-"):
        assert english[0].cause == f"{MODULES[module]['en']} reports {REASONS[reason]['en']}."
        assert REASONS[reason]["zh"] in chinese[0].cause


def test_unlisted_codes_of_cann_and_hccl_are_decoded() -> None:
    for family in ("EI", "EJ", "EE", "EH", "EL", "EZ", "EK", "E3"):
        (found,) = explain(f"{family}7777: something new")
        assert found.rule == f"code-{family}7777"
        (rule,) = [rule for rule in CODES if rule.code.startswith(family)]
        assert found.cause == rule.cause["en"]
    for start, meaning in RANGES.items():
        if start not in ("161", "361", "561"):
            assert meaning["en"] in explain(f"NPU function error: x, error code is {start}777")[0].cause
    assert set(HCCL) == {str(number) for number in range(1, 25)}
    for number, meaning in HCCL.items():
        found = explain(f"HCCL function error: HcclAllReduce(x), error code is {number}")[0]
        assert (found.rule, meaning["en"] in found.cause) == (f"code-HCCL-{number}", True)
        assert explain(f"[AllReduce]errNo[0x000000000500{int(number):04x}] failed")[0].cause == found.cause
    for unknown in ("ERR77001", "error code is 199777", "HCCL error code is 25", "errNo[0x05000063]"):
        assert explain(unknown) == []


def test_a_code_is_decoded_only_when_no_rule_explains_the_log() -> None:
    text = "ERR02200 DIST call hccl api failed\n"
    assert [f.rule for f in explain(text)] == ["code-ERR02200"]
    assert [f.rule for f in explain(text + "OSError: [Errno 28] No space left on device\n")] == ["disk-full"]
