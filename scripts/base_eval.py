"""`python -m scripts.base_eval` is `ascendchat eval base`; under torchrun too."""

import sys

from ascendchat.cli import main

if __name__ == "__main__":  # worker processes import this file
    sys.exit(main(["eval", "base", *sys.argv[1:]]))
