"""`ascendchat report`: curves, tables and samples of a run in one file."""
