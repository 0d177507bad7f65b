"""The tokenizer: learnt from text, stored in a folder."""
