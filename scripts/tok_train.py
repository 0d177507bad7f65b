"""`python -m scripts.tok_train` is `ascendchat tokenizer train`, with nanochat's flags; under torchrun too."""

import sys

from scripts.nanochat import run

if __name__ == "__main__":  # worker processes import this file
    sys.exit(run("tok_train"))
