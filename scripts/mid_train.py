"""`python -m scripts.mid_train` is `ascendchat mid`; under torchrun too."""

import sys

from ascendchat.cli import main

if __name__ == "__main__":  # worker processes import this file
    sys.exit(main(["mid", *sys.argv[1:]]))
