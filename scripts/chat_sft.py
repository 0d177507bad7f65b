"""`python -m scripts.chat_sft` is `ascendchat sft`; under torchrun too."""

import sys

from ascendchat.cli import main

sys.exit(main(["sft", *sys.argv[1:]]))
