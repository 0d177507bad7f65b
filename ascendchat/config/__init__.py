"""One frozen dataclass per command, with its own settings only; flags.py reads flags and YAML files into them."""

from __future__ import annotations

from ascendchat.config.flags import (
    accept,
    accept_all,
    as_dict,
    convert,
    dump,
    flags_of,
    flags_set,
    load_yaml,
    option,
    parse,
    spelling,
    stored_settings,
    wants_help,
)

__all__ = [
    "accept",
    "accept_all",
    "as_dict",
    "convert",
    "dump",
    "flags_of",
    "flags_set",
    "load_yaml",
    "option",
    "parse",
    "spelling",
    "stored_settings",
    "wants_help",
]
