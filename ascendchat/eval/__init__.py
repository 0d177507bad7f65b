"""Evaluates a model: `ascendchat eval base` (bits per byte and CORE) and `ascendchat eval chat` (ChatCORE).

base.py and chat.py are the commands. core_benchmark.py writes the prompts of CORE and judges the scores, bits.py
computes bits per byte, and scorer.py runs many rows in a forward pass for both. chat_tasks.py asks a chat model,
stages.py makes the table of a run's stages. Nothing is imported here.
"""
