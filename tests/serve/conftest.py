"""Servers that many tests share: one start each per session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from running_server import PATIENCE, Server, make, random_model, save, serving


@pytest.fixture(scope="session")
def api_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints: `random`, which says anything; `sums`, which calls the calculator for 17+25 and then says 你好!;
    `base`, which has not learned to chat."""
    home = tmp_path_factory.mktemp("serve")
    save(home, random_model(), "random")
    save(home, make.scripted(make.calculator_script()[0], 256), "sums")
    save(home, make.model(), "raw", "base")
    return home


@pytest.fixture(scope="session")
def server(api_home: Path) -> Iterator[Server]:
    """The random model; greedy where nothing is said, and all tokens are in play."""
    with serving(api_home, "--run=random", "--temperature=0", "--top-k=0", "--max-tokens=24") as running:
        yield running


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
