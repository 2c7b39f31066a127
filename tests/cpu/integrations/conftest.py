import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.linear_layers import name_table, problem, record
from tritongemm.integrations import process
from tritongemm.serving.dispatcher import Dispatcher


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dispatcher]:
    """The dispatcher of a process that has read nothing; its logger is as before afterwards."""
    dispatcher, logger = Dispatcher(), logging.getLogger("tritongemm")
    monkeypatch.setattr("tritongemm.serving.dispatcher.default", dispatcher)
    parent, level = logger.parent, logger.level
    yield dispatcher
    process._Asked.captures = False
    logger.parent = parent
    logger.setLevel(level)


@pytest.fixture
def config(tmp_path: Path, unloaded: Dispatcher, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table for M=16, N=32 and K=64, without a bias."""
    return name_table(tmp_path, monkeypatch, record(problem(16, 32, 64)))
