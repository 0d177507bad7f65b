"""Training: loop.py is the one loop (read it first); pretrain.py and the other stages say what is trained on what."""
