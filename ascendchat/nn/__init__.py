"""The model and its mathematics: attention.py, gpt.py, loss.py, optim.py. Read gpt.py first."""

from ascendchat.nn.targets import IGNORE

__all__ = ["IGNORE"]
