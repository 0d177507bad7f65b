"""`python -m scripts.chat_eval` is `ascendchat eval chat`; under torchrun too."""

import sys

from ascendchat.cli import main

sys.exit(main(["eval", "chat", *sys.argv[1:]]))
