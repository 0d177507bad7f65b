"""The model and its mathematics: attention.py, gpt.py, loss.py, optim.py. Read gpt.py first."""
