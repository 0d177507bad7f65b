"""`python -m ascendchat COMMAND` and `torchrun -m ascendchat COMMAND` are the same as `ascendchat COMMAND`."""

import sys

MIN_PYTHON = (3, 10)
if sys.version_info[:2] < MIN_PYTHON:  # checked here, before anything that an older Python cannot import
    sys.stderr.write(
        f"ascendchat needs Python 3.10 or newer, this is {sys.version_info[0]}.{sys.version_info[1]}; make an "
        "environment with one: python3.12 -m venv .venv && .venv/bin/python -m ascendchat setup\n"
    )
    sys.exit(2)

from ascendchat.cli import main  # noqa: E402 (not before the check)

sys.exit(main())
