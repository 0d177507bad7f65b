"""`python -m ascendchat COMMAND` and `torchrun -m ascendchat COMMAND` are the same as `ascendchat COMMAND`."""

import sys

from ascendchat.cli import main

sys.exit(main())
