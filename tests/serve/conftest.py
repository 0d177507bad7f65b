"""Servers that many tests share: one start each per session. `server` and `api_home` are in tests/conftest.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from running_server import PATIENCE, Server, serving


@pytest.fixture(scope="session")
def sums(api_home: Path) -> Iterator[Server]:
    """The model that calculates."""
    with serving(api_home, "--run=sums", "--temperature=0") as running:
        yield running


@pytest.fixture(scope="session")
def base(api_home: Path) -> Iterator[Server]:
    """A base model."""
    with serving(api_home, "--run=raw", "--temperature=0") as running:
        yield running


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    """The official client of the random model."""
    return client_of(server)


@pytest.fixture
def sums_client(sums: Server) -> openai.OpenAI:
    """The official client of the model that calculates."""
    return client_of(sums)
