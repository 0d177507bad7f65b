"""The tokenizer: learnt from text, kept in a folder."""
