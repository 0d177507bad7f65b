"""The marker of a target that counts in no loss. No torch: `ascendchat data prepare` needs it without."""

from __future__ import annotations

IGNORE = -1  # the `ignore_index` of every cross-entropy
