"""ascendchat: from raw text to a chat model, on Ascend NPUs and on anything else. Start with `ascendchat --help`."""

from ascendchat.compat import old_paths  # importing it makes the import paths of the last release work
from ascendchat.version import __version__

__all__ = ["__version__", "old_paths"]
