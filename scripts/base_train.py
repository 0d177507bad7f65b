"""`python -m scripts.base_train` is `ascendchat base`; under torchrun too."""

import sys

from ascendchat.cli import main

sys.exit(main(["base", *sys.argv[1:]]))
