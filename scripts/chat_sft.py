"""`python -m scripts.chat_sft` is `ascendchat sft`; under torchrun too."""

import sys

from ascendchat.cli import main

if __name__ == "__main__":  # worker processes import this file
    sys.exit(main(["sft", *sys.argv[1:]]))
