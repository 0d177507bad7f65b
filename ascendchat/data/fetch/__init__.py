"""Bring data sets to this machine: from hubs, mirrors, URLs or a local folder, verified, once for all processes.

Other packages call `fetch` and `folder_of`; command.py has them, and `ascendchat data fetch`.
"""

from ascendchat.data.fetch.command import fetch, folder_of, run
from ascendchat.data.fetch.http import Policy
from ascendchat.data.fetch.sources import SETS

__all__ = ["SETS", "Policy", "fetch", "folder_of", "run"]
