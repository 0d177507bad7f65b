"""`python -m scripts.base_eval` is `ascendchat eval base`; under torchrun too."""

import sys

from ascendchat.cli import main

sys.exit(main(["eval", "base", *sys.argv[1:]]))
