"""Checks, explains and cleans this machine: `ascendchat doctor`, `selftest`, `explain`, `clean`, `setup`."""
