"""The model and its mathematics: attention.py, gpt.py, loss.py, optim.py. Read gpt.py first."""

IGNORE = -1  # a target that counts in no loss; here, because `data prepare` needs it without torch
