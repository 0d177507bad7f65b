"""Curves, tables and samples of a run in one file: `ascendchat report`."""
