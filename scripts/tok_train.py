"""`python -m scripts.tok_train` is `ascendchat tokenizer train`; under torchrun too."""

import sys

from ascendchat.cli import main

if __name__ == "__main__":  # worker processes import this file
    sys.exit(main(["tokenizer", "train", *sys.argv[1:]]))
