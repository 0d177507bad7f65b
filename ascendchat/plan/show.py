"""A plan as sections of `label value` lines for people: rich on a terminal, plain text elsewhere, 100 columns."""

from __future__ import annotations

import sys
from typing import Any

from ascendchat.config.language import pad, translate, wrap
from ascendchat.sizes.batch import COLLECTIVES
from ascendchat.sizes.memory import bytes_text

WIDTH = 100
Section = tuple[str, list[tuple[str, str]]]


def count(value: float) -> str:
    """1234567 -> 1.23 M"""
    for size, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " K")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"


def span(hours: float) -> str:
    """Hours in the unit that reads best."""
    if hours >= 48:
        return translate(f"{hours / 24:.1f} days ({hours:.0f} h)")
    return f"{hours:.2f} h" if hours >= 1 else f"{hours * 60:.1f} min" if hours > 1 / 60 else f"{hours * 3600:.1f} s"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _memory(title: str, memory: dict[str, Any]) -> Section:
    rows = [(_words(name), bytes_text(value)) for name, value in memory["parts"].items() if value]
    share = memory["total"] / memory["device"]
    rows.append(("total", f"{bytes_text(memory['total'])} of {bytes_text(memory['device'])} ({share:.0%})"))
    return title, rows


def _verdict(total: int, fits: bool) -> str:
    return f"{bytes_text(total)} per device: {'fits' if fits else 'does not fit'}"


def _model(model: dict[str, Any]) -> list[Section]:
    shape = model["shape"]
    widths = f"{shape['depth']} layers x {shape['dim']}, {shape['heads']} heads of {shape['head_dim']}"
    if shape["kv_heads"] != shape["heads"]:
        widths += f" on {shape['kv_heads']} key-value heads"
    rows = [("size", widths), ("vocabulary, row", f"{shape['vocab']:,} tokens, {shape['seq_len']:,}")]
    rows += [(_words(name), count(value)) for name, value in model["parameters"].items() if value >= 1e3]
    rows.append(("total parameters", f"{count(model['total_parameters'])} ({model['total_parameters']:,})"))
    for name in ("scaling_parameters", "active_parameters"):
        if model.get(name, model["total_parameters"]) != model["total_parameters"]:  # dense models use all of them
            rows.append((_words(name), count(model[name])))
    rows.append(("training FLOPs per token", f"{model['train_flops_per_token']:.3g}"))
    return [("model", rows)]


def _batch(plan: dict[str, Any]) -> list[Section]:
    b, run, time = plan["batch"], plan["run"], plan["time"]
    rows = [
        ("total batch", f"{b['total_tokens']:,} tokens per step"),
        (
            "split",
            f"{b['devices']} x {b['device_rows']} rows x {b['seq_len']} tokens x {b['accumulation']} micro-batches",
        ),
        ("largest rows that fit", str(b["largest_device_rows"])),
        ("tokens, steps", f"{count(run['tokens'])} in {run['steps']:,} steps"),
    ]
    if "tokens_per_second" in time:
        rows.append(("speed", f"{count(time['tokens_per_second'])} tokens/s at {time['mfu']:.0%} of the peak"))
        rows.append(("step", f"{time['step_seconds']:.3g} s, of it {time['communication_seconds']:.2g} s exchange"))
    else:
        rows.append(("step", f"{time['rollout_seconds']:.3g} s rollout, {time['train_seconds']:.3g} s training"))
    rows.append(("time", f"{span(time['hours'])}; {time['device_hours']:.4g} device-hours"))
    if time["cost"] is not None:
        rows.append(("cost", f"{time['cost']:,.2f}"))
    return [("run", rows)]


def _scale(many: dict[str, Any]) -> list[Section]:
    """Two sections: what being many costs, with the formulas, and the step from one node on."""
    one, last = many["growth"][0], many["growth"][-1]
    whole, rest = divmod(last["devices"], one["devices"])
    rows = [
        ("nodes x devices", f"{whole} x {one['devices']}{f' + 1 x {rest}' if rest else ''}"),
        (
            "exchange per step",
            f"{bytes_text(many['exchanged'])}: B (g-1)/g / link + B/g (n-1)/n / node link + {COLLECTIVES} log2(n) hop "
            f"= {last['communication_seconds']:.3g} s",
        ),
        (
            "waiting for the slowest",
            f"jitter x computing x (sqrt(2 ln N) - sqrt(2 ln g)) = {last['waiting_seconds']:.3g} s",
        ),
        ("failures per day", f"24 N / MTBF = {many['failures_per_day']:.3g}"),
        ("checkpoint", f"{bytes_text(many['checkpoint_bytes'])}; training stands still {many['pause_seconds']:.2g} s"),
        (
            "time to recover",
            f"restart + checkpoint / storage = {span(many['restart_seconds'] / 3600)}; with half of the steps since "
            f"the last checkpoint {span(many['recover_seconds'] / 3600)}",
        ),
        (
            "lost by failures",
            f"pause / interval + (restart + interval / 2) N / MTBF = {many['lost_share']:.2%} with --save-every "
            f"{many['save_every']}",
        ),
        (
            "best interval",
            f"sqrt(2 pause MTBF / N): --save-every {many['best_save_every']}, then "
            f"{many['best_lost_share']:.2%} is lost",
        ),
    ]
    table = [
        (
            f"{row['devices']:,}",
            f"{row['step_seconds']:.4g} s a step, {count(row['tokens_per_second'])} tokens/s, "
            f"{row['efficiency']:.1%} of the speed of one node",
        )
        for row in many["growth"]
    ]
    return [("beyond one node", rows), ("step time by devices, same work for each", table)]


def sections(plan: dict[str, Any]) -> list[Section]:
    """Everything worth reading, in reading order."""
    chip = plan["chip"]
    device = f"{plan['devices']} x {chip['name']}, {bytes_text(chip['memory'])}, {chip['flops'] / 1e12:.4g} TFLOP/s"
    shown: list[Section] = [
        ("device", [("chip", device), ("computes in", plan["dtype"]), ("figures", chip["source"])]),
        *_model(plan["model"]),
        _memory(f"memory{'' if plan['goal'] == 'inference' else ' in training'}, per device", plan["memory"]),
    ]
    if plan["goal"] == "inference":
        rate = plan["roofline_tokens_per_second"]
        rows = [
            ("context", f"{plan['context']:,} tokens"),
            (
                "cache per sequence",
                f"{bytes_text(plan['kv_bytes_per_sequence'])} ({bytes_text(plan['kv_bytes_per_token'])} a token)",
            ),
            ("sequences", f"{plan['sequences']:,} at once ({plan['sequences_per_device']:,} per device)"),
            ("roofline, 1 sequence", f"{count(rate['one_sequence'])} tokens/s"),
            ("roofline, all", f"{count(rate['all_sequences'])} tokens/s"),
        ]
        shown.append(("decoding", rows))
        return shown
    if plan["goal"] == "rl":
        rollout = plan["rollout"]
        rows = [
            ("devices", f"{rollout['devices']}, {'shared with the trainer' if rollout['shared'] else 'its own'}"),
            ("cache per sequence", f"{bytes_text(rollout['kv_bytes_per_sequence'])} at {rollout['context']:,} tokens"),
            ("sequences", f"{rollout['sequences']:,} at once ({rollout['sequences_per_device']:,} per device)"),
            (
                "samples per step",
                f"{plan['batch']['samples']} in {rollout['waves']} wave{'s' * (rollout['waves'] > 1)}",
            ),
            (
                "speed",
                f"{count(rollout['tokens_per_second'])} tokens/s at {rollout['roofline_share']:.0%} of the roofline",
            ),
        ]
        shown += [_memory("memory in rollout, per device", plan["rollout_memory"]), ("rollout", rows)]
    shown += _batch(plan)
    if "scale" in plan:
        shown += _scale(plan["scale"])
    if "rates" in plan:
        rates = [(_words(name), f"{value:.4g}") for name, value in plan["rates"].items()]
        shown.append(("learning rates", [*rates, ("weight decay", f"{plan['weight_decay']:.4g}")]))
    if "lora" in plan:
        lora = plan["lora"]
        base = f", {lora['bits']} bits" if lora["bits"] else ""
        rows = [
            ("all weights", _verdict(lora["full_total"], lora["full_fits"])),
            (f"LoRA, rank {lora['rank']}{base}", _verdict(lora["total"], lora["fits"])),
            ("LoRA parameters", count(lora["parameters"])),
        ]
        shown.append(("full or LoRA, same rows", rows))
    return shown


def plan_text(plan: dict[str, Any]) -> str:
    """Text without colours."""
    lines = []
    for title, rows in sections(plan):
        lines.append(translate(title))
        for label, value in rows:
            lines += wrap(translate(value), WIDTH, f"  {pad(translate(label), 26)} ", " " * 29)
    for note in plan["notes"]:
        lines += wrap(f"{translate('note: ')}{translate(note)}", WIDTH, following="      ")
    return "\n".join(lines) + "\n"


def show(plan: dict[str, Any]) -> None:
    """Print the plan: tables on a terminal, plain text into a file."""
    if not sys.stdout.isatty():
        sys.stdout.write(plan_text(plan))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(width=min(WIDTH, Console().width))
    for title, rows in sections(plan):
        table = Table(
            title=translate(title),
            title_justify="left",
            title_style="bold",
            show_header=False,
            box=None,
            padding=(0, 2),
        )
        table.add_column(style="cyan", no_wrap=True, min_width=26)
        table.add_column()
        for label, value in rows:
            table.add_row(translate(label), translate(value))
        console.print(table)
    for note in plan["notes"]:
        console.print(f"{translate('note: ')}{translate(note)}", style="yellow", markup=False, highlight=False)
