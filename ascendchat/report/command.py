"""`ascendchat report --run demo`: curves, tables, samples and environment of runs, in one file. No torch.

gather.py reads the run folders, content.py says what is shown, plots.py draws, html.py and markdown.py write.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ascendchat.config import UserError
from ascendchat.config.report import ReportConfig
from ascendchat.files import write_atomic
from ascendchat.runs.run import run_folder

if TYPE_CHECKING:
    from ascendchat.report.content import Section


def run(config: ReportConfig) -> int:
    """The command."""
    from ascendchat.report.content import content
    from ascendchat.report.gather import gather, newest_run
    from ascendchat.report.html import page
    from ascendchat.report.markdown import write_markdown

    names = config.run or (newest_run(),)
    title = ", ".join(names)

    def make() -> list[Section]:
        return content([gather(name) for name in names], config.price)

    if config.watch:
        return watch(title, make, config)
    path = Path(config.out).expanduser() if config.out else run_folder(names[0], "report.html")
    if path.suffix not in (".html", ".md"):
        raise UserError(f"{path}: a report is written as .html or .md; give --out such an ending")
    sections = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            write_markdown(path, title, sections)
        else:
            write_atomic(path, page(title, sections))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; name another file: --out") from None
    print(path)
    return 0


def watch(title: str, make: Callable[[], list[Section]], config: ReportConfig) -> int:
    """Until Ctrl-C."""
    from ascendchat.report.watch import Watched, server

    with server(Watched(title, make), config.host, config.port) as listening:
        print(f"the report of {title}: http://{config.host}:{listening.server_address[1]} (Ctrl-C ends it)", flush=True)
        try:
            listening.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0
