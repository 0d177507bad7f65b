"""Log-probabilities of the reference of DPO, kept in the folder of a run: `finetune --stage dpo`.

    reference = Reference(folder, [start, data])             # what they are a function of
    table = reference.read_or_make(stage.reference_table, here)
    reference.write(table)

reference.safetensors has them, reference.json what they belong to and the checksum of the file. Another model, other
data or a damaged file: they are computed again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ascendchat.checkpoint import UNWRITTEN, Damaged, read_file, write_weights
from ascendchat.files import flush, sha256, write_atomic
from ascendchat.parallel import collectives
from ascendchat.parallel.context import Context

NAME = "logprobs"


class Reference:
    """(pairs, 2) log-probabilities of the chosen and rejected replies, on disk."""

    def __init__(self, folder: Path, belongs_to: Sequence[str]) -> None:
        self.path, self.about = folder / "reference.safetensors", folder / "reference.json"
        self.fingerprint = hashlib.sha256("\n".join(belongs_to).encode()).hexdigest()[:16]

    def read(self) -> Tensor | None:
        """What was written for the same model and pairs, if it is whole."""
        try:
            about = json.loads(self.about.read_text(encoding="utf-8"))
            if about["fingerprint"] != self.fingerprint or about["sha256"] != sha256(self.path):
                return None
            return read_file(self.path)[NAME].clone()
        except (OSError, ValueError, RecursionError, KeyError, TypeError, Damaged):
            return None

    def read_or_make(self, make: Callable[[], Tensor], here: Context) -> Tensor:
        """On all ranks; `make` is asked on all of them, or on none."""
        found: Tensor | None = collectives.broadcast_object(self.read() if here.main else None)
        if found is not None:
            here.say(f"log-probabilities of the reference: read from {self.path}")
            return found
        here.say("log-probabilities of the reference: computed once, for all pairs")
        return make()

    def write(self, table: Tensor, say: Callable[[str], None] = print) -> None:
        """Unless it is there already. Without the file it is computed again when the run goes on."""
        try:
            self._write(table)
        except UNWRITTEN as error:
            say(f"log-probabilities of the reference: not kept in {self.path} ({error}); training goes on")

    def _write(self, table: Tensor) -> None:
        known = self.read()
        if known is not None and torch.equal(known, table):
            return
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        write_weights(beside, {NAME: table})
        flush(beside)
        checksum = sha256(beside)
        os.replace(beside, self.path)
        write_atomic(self.about, json.dumps({"fingerprint": self.fingerprint, "sha256": checksum}))
