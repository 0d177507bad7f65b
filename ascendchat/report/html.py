"""Write a report as one HTML file: no other file, no request to anywhere.

text = page("demo", sections)
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from pathlib import Path

from ascendchat.config.language import language, translate
from ascendchat.files import write_atomic
from ascendchat.report.content import Plot, ReportTable, Section, Text
from ascendchat.version import __version__

STYLE = """
:root { color-scheme: light }
* { box-sizing: border-box }
body { margin: 0; background: #fff; color: #1b2733;
  font: 15px/1.5 system-ui, "PingFang SC", "Microsoft YaHei", sans-serif }
header, main, footer { max-width: 1180px; margin: 0 auto; padding: 0 20px }
header { padding-top: 28px; border-bottom: 2px solid #0b62a8; margin-bottom: 18px }
h1 { font-size: 24px; margin: 0 0 4px } h2 { font-size: 18px; margin: 34px 0 10px }
header p, footer { color: #55626f; font-size: 13px } footer { padding-bottom: 30px; margin-top: 30px }
.wide { overflow-x: auto; display: inline-block; vertical-align: top; max-width: 100%; margin-right: 28px }
table { border-collapse: collapse; font-size: 13px; margin: 6px 0 14px; font-variant-numeric: tabular-nums }
caption { text-align: left; color: #55626f; padding: 4px 0 }
th, td { padding: 5px 10px; border-bottom: 1px solid #d5dbe1; text-align: right; white-space: nowrap }
th { background: #f5f7f9; font-weight: 600 } th:first-child { text-align: left }
th[scope=row] { white-space: normal; overflow-wrap: anywhere; min-width: 6em }
td.text { text-align: left; white-space: normal; min-width: 14em }
figure { margin: 0 } figure img { width: 100%; height: auto; max-width: 1140px }
figure.narrow img { width: auto; max-width: 100% }
pre { background: #f5f7f9; border: 1px solid #d5dbe1; border-radius: 6px; padding: 10px 12px; font-size: 13px;
  white-space: pre-wrap; overflow-wrap: anywhere; margin: 4px 0 14px }
h3 { font-size: 13px; color: #55626f; margin: 12px 0 0; font-weight: 600 }
summary { cursor: pointer; font-size: 13px; padding: 4px 0 }
@media print { details { display: none } h2 { break-after: avoid } figure, table { break-inside: avoid } }
"""
# Script of the live report: asks for the content every few seconds, and replaces it when it has changed.
FOLLOW = """
let seen = document.querySelector("main").dataset.mark;
setInterval(async () => {
  try {
    const answer = await fetch("content?seen=" + seen);
    if (answer.status !== 200) return;
    const open = new Set([...document.querySelectorAll("details[open] > summary")].map((s) => s.textContent));
    const main = document.querySelector("main");
    main.innerHTML = await answer.text();
    seen = answer.headers.get("x-mark");
    document.querySelectorAll("details > summary").forEach((s) => { s.parentNode.open = open.has(s.textContent); });
  } catch (error) { /* the report has ended; the page stays as it is */ }
}, 3000);
"""


def content_hash(body: str) -> str:
    """Hash by which the page sees that the content has changed."""
    return hashlib.sha256(body.encode()).hexdigest()[:16]


def page(title: str, sections: Sequence[Section], *, follows: bool = False) -> str:
    """Write the whole file; `follows`: it asks its server for news."""
    inner, lang = body(sections), "zh" if language() == "zh" else "en"
    return (
        f'<!doctype html>\n<html lang="{lang}">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f'<link rel="icon" href="data:,">\n<style>{STYLE}</style>\n</head>\n<body>\n'
        f"<header><h1>{escape(title)}</h1><p>{escape(translate('a report of ascendchat'))} {__version__}</p></header>\n"
        f'<main data-mark="{content_hash(inner)}">{inner}</main>\n'
        + (f"<script>{FOLLOW}</script>\n" if follows else "")
        + "</body>\n</html>\n"
    )


def body(sections: Sequence[Section]) -> str:
    parts = []
    for number, section in enumerate(sections):
        inner = "\n".join(part_html(part) for part in section.parts)
        name = f"section-{number}"
        parts.append(
            f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(section.title)}</h2>\n{inner}\n</section>'
        )
    return "\n".join(parts)


def part_html(part: ReportTable | Plot | Text) -> str:
    if isinstance(part, ReportTable):
        return table(part)
    if isinstance(part, Plot):
        data = base64.b64encode(part.svg.encode()).decode()
        return f'<figure><img src="data:image/svg+xml;base64,{data}" alt="{escape(part.alt)}"></figure>'
    if part.folded:
        return f"<details><summary>{escape(part.label)}</summary><pre>{escape(part.text)}</pre></details>"
    return f"<h3>{escape(part.label)}</h3><pre>{escape(part.text)}</pre>"


def table(part: ReportTable) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in part.head)
    rows = []
    for row in part.rows:
        first, *rest = row
        cells = "".join(f'<td class="text">{escape(c)}</td>' if len(c) > 24 else f"<td>{escape(c)}</td>" for c in rest)
        rows.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    caption = f"<caption>{escape(part.caption)}</caption>" if part.caption else ""
    inner = f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return (
        f'<div class="wide" tabindex="0" role="group" aria-label="{escape(part.caption or part.head[0])}">{inner}</div>'
    )


# A report as Markdown, with its plots as SVG files in a folder beside it.
#
# write_markdown(Path("report.md"), "demo", sections)


def write_markdown(path: Path, title: str, sections: Sequence[Section]) -> None:
    folder = path.with_name(f"{path.stem}_files")
    lines = [f"# {title}", ""]
    for section in sections:
        lines += [f"## {section.title}", ""]
        for part in section.parts:
            if isinstance(part, Plot):
                folder.mkdir(exist_ok=True)
                write_atomic(folder / f"{part.name}.svg", part.svg)
            lines += [*markdown_lines(part, folder.name), ""]
    write_atomic(path, "\n".join(lines))


def markdown_lines(part: ReportTable | Plot | Text, folder: str) -> list[str]:
    if isinstance(part, Plot):
        return [f"![{part.alt}]({folder}/{part.name}.svg)"]
    if isinstance(part, Text):
        return [f"**{part.label}**", "", "```", *part.text.replace("```", "ʼʼʼ").splitlines(), "```"]
    rows = [part.head, ["---"] * len(part.head), *part.rows]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [*([part.caption, ""] if part.caption else []), *lines]
