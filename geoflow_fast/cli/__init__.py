"""The `geoflow` command."""

from geoflow_fast.cli.app import app, main

__all__ = ["app", "main"]
