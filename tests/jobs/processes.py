"""Helpers that run commands in this process and work in child processes."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess

import pytest
import torch

from geoflow_fast.cli.app import main


def run_geoflow(monkeypatch: pytest.MonkeyPatch, command: str, *words: object, **options: object) -> int:
    """Runs `geoflow command` in this process with `options` as flags, and returns its exit status."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    monkeypatch.setattr(sys, "argv", ["geoflow", command, *flags, *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def start_child(work: Callable[..., object], *arguments: object) -> BaseProcess:
    """Starts `work(*arguments)` in a forked process with one thread: threads of OpenMP do not survive a fork."""

    def on_one_thread() -> None:
        torch.set_num_threads(1)
        work(*arguments)

    child = multiprocessing.get_context("fork").Process(target=on_one_thread)
    child.start()
    return child
