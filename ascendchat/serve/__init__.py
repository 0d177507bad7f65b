"""Talking to a model: the server (command.py, app.py) and the terminal (terminal.py)."""
