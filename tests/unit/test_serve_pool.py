"""The pool's side of requests and starts, with workers whose words come from here."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ascendchat.config.serve import ServeConfig
from ascendchat.serve.pool import Pool


def test_a_fault_of_ours_ends_the_start_instead_of_keeping_it_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_thread(self: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Pool, "child", no_thread)

    async def test() -> None:
        with pytest.raises(RuntimeError, match="new thread"):
            await asyncio.wait_for(Pool(ServeConfig(device_type="cpu")).start(), 60)

    asyncio.run(test())
