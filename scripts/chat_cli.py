"""`python -m scripts.chat_cli` is `ascendchat chat`; under torchrun too."""

import sys

from ascendchat.cli import main

sys.exit(main(["chat", *sys.argv[1:]]))
