"""Talking to a model: terminal.py (`ascendchat chat`)."""
