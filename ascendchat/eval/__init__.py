"""How good is a model? `ascendchat eval base` (bits per byte and CORE) and `ascendchat eval chat` (ChatCORE).

base.py and chat.py are the commands, stages.py makes the table of a run's stages. core.py reads the CORE tasks,
core.py writes their prompts and judges the answers, scorer.py runs many rows per forward pass; examine.py asks a chat
model. Nothing is imported here.
"""
