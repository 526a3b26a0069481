"""The engines as fixtures: each is opened once for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.stores.engines import Engines, running_postgres


@pytest.fixture(scope="session")
def postgres_address() -> Iterator[Any]:
    """How to connect to a server that this session started; it is called by the first test that needs one."""
    with ExitStack() as stack:
        known: list[str] = []

        def address() -> str:
            if not known:
                known.append(stack.enter_context(running_postgres()))
            return known[0]

        yield address


@pytest.fixture
def engines(tmp_path: Any, postgres_address: Any) -> Iterator[Engines]:
    """Stores of all engines in a folder of the test."""
    with ExitStack() as stack:

        def connection() -> Any:
            import psycopg

            opened = stack.enter_context(psycopg.connect(postgres_address(), autocommit=True))
            opened.execute("CREATE EXTENSION IF NOT EXISTS vector")
            opened.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public; CREATE EXTENSION IF NOT EXISTS vector")
            return opened

        yield Engines(tmp_path, connection)
