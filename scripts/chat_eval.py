"""`python -m scripts.chat_eval` is `ascendchat eval chat`; under torchrun too."""

import sys

from ascendchat.cli import main

if __name__ == "__main__":  # worker processes import this file
    sys.exit(main(["eval", "chat", *sys.argv[1:]]))
