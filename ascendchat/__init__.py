"""ascendchat: from raw text to a chat model, on Ascend NPUs and on anything else. Start with `ascendchat --help`."""

__version__ = "0.1.0"
