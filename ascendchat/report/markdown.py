"""A report as Markdown, with its plots as SVG files in a folder beside it.

write_markdown(Path("report.md"), "demo", sections)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ascendchat.files import write_atomic
from ascendchat.report.content import Plot, Section, Table, Text


def write_markdown(path: Path, title: str, sections: Sequence[Section]) -> None:
    folder = path.with_name(f"{path.stem}_files")
    lines = [f"# {title}", ""]
    for section in sections:
        lines += [f"## {section.title}", ""]
        for part in section.parts:
            if isinstance(part, Plot):
                folder.mkdir(exist_ok=True)
                write_atomic(folder / f"{part.name}.svg", part.svg)
            lines += [*written(part, folder.name), ""]
    write_atomic(path, "\n".join(lines))


def written(part: Table | Plot | Text, folder: str) -> list[str]:
    if isinstance(part, Plot):
        return [f"![{part.alt}]({folder}/{part.name}.svg)"]
    if isinstance(part, Text):
        return [f"**{part.label}**", "", "```", *part.text.replace("```", "ʼʼʼ").splitlines(), "```"]
    rows = [part.head, ["---"] * len(part.head), *part.rows]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [*([part.caption, ""] if part.caption else []), *lines]
