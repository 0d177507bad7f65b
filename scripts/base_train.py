"""`python -m scripts.base_train` is `ascendchat base`; under torchrun too."""

import sys

from ascendchat.cli import main

if __name__ == "__main__":  # worker processes import this file
    sys.exit(main(["base", *sys.argv[1:]]))
