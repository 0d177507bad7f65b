"""Model code that `ascendchat export` puts beside the weights of our own models, for transformers to run.

Never imported by ascendchat itself, which opens such a folder as the model it is (models/open.py).
"""
