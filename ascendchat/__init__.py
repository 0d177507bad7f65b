"""ascendchat: from raw text to a chat model, on Ascend NPUs and on anything else. Start with `ascendchat --help`."""

from __future__ import annotations

from ascendchat.compat import old_paths
from ascendchat.version import __version__

__all__ = ["__version__"]

old_paths.keep()
