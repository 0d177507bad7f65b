"""`python -m scripts.chat_rl` is `ascendchat rl`, with nanochat's flags; under torchrun too."""

import sys

from scripts.nanochat import run

if __name__ == "__main__":  # worker processes import this file
    sys.exit(run("chat_rl"))
