"""Commands under the names that users of existing guides know: `python -m scripts.base_train` is `ascendchat base`."""
