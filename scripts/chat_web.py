"""`python -m scripts.chat_web` is `ascendchat serve`, with nanochat's flags; it starts its processes itself."""

import sys

from scripts.nanochat import run

if __name__ == "__main__":  # worker processes import this file
    sys.exit(run("chat_web"))
