"""How good is a model? `ascendchat eval base` (bits per byte and CORE) and `ascendchat eval chat` (ChatCORE).

core.py turns the tasks of the CORE bundle into token rows and judges them, scorer.py runs many rows per forward pass,
base.py is the command. Nothing is imported here.
"""
