"""Config of `ascendchat report`."""

from __future__ import annotations

from dataclasses import dataclass

from ascendchat.config import option


@dataclass(frozen=True)
class ReportConfig:
    """Curves, tables, samples and environment of a run, or of several side by side, in one file."""

    run: tuple[str, ...] = option((), words="each")
    """names of runs; by default the newest. Runs that differ in nothing but their seed are shown as their mean and its
    95 % confidence band"""
    out: str = ""
    """file to write; its ending says the form: .html, all in one file, or .md, with plots beside it; by default
    report.html in the folder of the first run"""
    price: float | None = option(None, least=0, most=1e9)
    "price per device-hour, for the cost"
    watch: bool = False
    "serve the page on this machine instead; it follows the run while it trains"
    host: str = "127.0.0.1"
    "address on which --watch listens"
    port: int = option(8008, least=0, most=65535)
    "port on which --watch listens; 0: a free one"
