"""`python -m scripts.chat_cli` is `ascendchat chat`; under torchrun too."""

import sys

from ascendchat.cli import main

if __name__ == "__main__":  # worker processes import this file
    sys.exit(main(["chat", *sys.argv[1:]]))
