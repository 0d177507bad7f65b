"""The dial: from one depth to shape (shape.py), batch and hours (batch.py), rates (schedule.py), bytes (memory.py).

Pure functions without torch, for the training commands, the engine and `ascendchat plan`; hf.py reads the sizes of
Hugging Face models.
"""
