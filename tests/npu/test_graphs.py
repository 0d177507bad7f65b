"""Captured graphs (torch.npu.NPUGraph) on the simulated runtime."""

from __future__ import annotations

import pytest

GRAPH = """
import torch, cannsim
static = torch.zeros(4, device="npu")
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    result = static * 2 + 1
before = cannsim.launches()
for value in (1.0, 5.0, -3.0):
    static.fill_(value)
    graph.replay()
    torch.npu.synchronize()
    assert result.cpu().tolist() == [value * 2 + 1] * 4, (value, result.cpu())
after = cannsim.launches()
assert after.get("aclnnMuls") == before.get("aclnnMuls"), "a replay must not launch operators one by one"
assert cannsim.counters()["aclmdlRIExecuteAsync"][0] == 3
"""


PROGRAMS = {
    "replays with new inputs": GRAPH,
    "streams that fork and join": """
import torch
static, side = torch.zeros(4, device="npu"), torch.npu.Stream()
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        doubled = static * 2
    torch.npu.current_stream().wait_stream(side)
    result = doubled + 1
static.fill_(4.0)
graph.replay()
torch.npu.synchronize()
assert result.cpu().tolist() == [9.0] * 4
""",
    "a capture goes on after a synchronisation was refused": """
import torch
static = torch.zeros(4, device="npu")
graph, stream = torch.npu.NPUGraph(), torch.npu.Stream()
torch.npu.synchronize()
with torch.npu.stream(stream):
    graph.capture_begin()
    try:
        (static + 1).sum().item()
    except RuntimeError as error:
        assert "107027" in str(error), error
    else:
        raise AssertionError("not refused")
    result = static + 2
    graph.capture_end()
static.fill_(3.0)
graph.replay()
torch.npu.synchronize()
assert result.cpu().tolist() == [5.0] * 4
""",
    "a captured training step equals the eager one": """
import copy, torch
torch.manual_seed(0)
eager = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).npu()
captured = copy.deepcopy(eager)

def step(model, x):
    loss = model(x).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad.zero_()
    return loss

for parameter in (*eager.parameters(), *captured.parameters()):
    parameter.grad = torch.zeros_like(parameter)
static, start = torch.zeros(4, 8, device="npu"), copy.deepcopy(captured.state_dict())
side = torch.npu.Stream()
side.wait_stream(torch.npu.current_stream())
with torch.npu.stream(side):
    step(captured, static)  # warm up
torch.npu.current_stream().wait_stream(side)
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    loss = step(captured, static)
captured.load_state_dict(start)
for seed in range(3):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).npu()
    wanted = step(eager, x).item()
    static.copy_(x)
    graph.replay()
    assert abs(loss.item() - wanted) < 1e-6, (seed, loss.item(), wanted)
""",
}


@pytest.mark.parametrize("situation", PROGRAMS)
def test_graphs_are_captured_and_replayed(on_npu, situation):
    on_npu(PROGRAMS[situation], TASK_QUEUE_ENABLE=1)  # torch_npu refuses to capture in mode 2


def test_a_graph_is_captured_without_a_launch_queue(on_npu):
    on_npu(GRAPH, TASK_QUEUE_ENABLE=0)


def test_the_dump_of_a_graph_is_a_trace_that_torch_npu_can_align(on_npu, tmp_path):
    on_npu(
        f"""
        import json, torch
        static = torch.zeros(4, device="npu")
        graph = torch.npu.NPUGraph()
        torch.npu.synchronize()
        with torch.npu.graph(graph):
            result = (static + 1) * 2
        graph.debug_dump("{tmp_path}/dump.json")
        raw = json.load(open("{tmp_path}/dump.json"))
        assert [event["name"] for event in raw] == ["aclnnAdds", "aclnnMuls"], raw
        assert len({{event["tid"] for event in raw}}) == 1 and raw[0]["ts"] < raw[1]["ts"], raw
        aligned = json.load(open("{tmp_path}/dump.aligned.json"))  # only when the dump has all that it needs
        assert [event["ts"] for event in aligned] == [0, 0.7], aligned
        """
    )


def test_nothing_is_collected_while_a_graph_is_captured(on_npu):
    """Garbage of that moment, such as an older graph, would be freed in the middle of the capture."""
    on_npu(
        """
        import gc, torch
        from ascendchat.device import pick
        device = pick("npu")
        static, enabled = torch.ones(4, device=device.bind(0)), []

        def double():
            enabled.append(gc.isenabled())
            return static * 2

        replay = device.graph(double)
        assert enabled == [True, True, True, False] and gc.isenabled(), enabled
        assert replay().cpu().tolist() == [2.0] * 4
        """
    )
