"""How an executable file in Python begins: as pip writes it, so that the path of Python may have a space."""

import sys

START = f"""#!/bin/sh
'''exec' "{sys.executable}" "$0" "$@"
' '''
"""
