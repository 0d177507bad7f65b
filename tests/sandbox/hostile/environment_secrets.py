"""Looks for secrets in its environment."""

# ends: ok
import os

if any("SECRET" in name or "secret" in value for name, value in os.environ.items()):
    print("ESCAPED", dict(os.environ))
if set(os.environ) - {"HOME", "TMPDIR", "PATH", "LANG", "LC_CTYPE"}:
    print("ESCAPED", dict(os.environ))
