"""`python -m scripts.mid_train` is `ascendchat mid`; under torchrun too."""

import sys

from ascendchat.cli import main

sys.exit(main(["mid", *sys.argv[1:]]))
