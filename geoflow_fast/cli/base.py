"""What all commands of `geoflow` share: config files, `--debug`, errors in one line, signals and exit codes.

Exit codes: 0 done; 2 bad input, file or flag; 130 interrupted (Ctrl-C); 141 nobody reads the output any more; 143
terminated (SIGTERM); 1 with a traceback: a fault of the program.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from geoflow_fast.distributed import World, joined
from geoflow_fast.runtime.files import read_toml

Function = TypeVar("Function", bound=Callable[..., Any])


BAD_INPUT, INTERRUPTED, BROKEN_PIPE, TERMINATED = 2, 130, 141, 143


@dataclass
class Session:
    """What one run of the command is told from outside."""

    debug: bool = False
    terminated: bool = False

    def terminate(self, _number: int, _frame: FrameType | None) -> None:
        """SIGTERM does what Ctrl-C does at that moment; the exit code tells them apart."""
        self.terminated = True
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a script
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)


def _note_debug(context: typer.Context, value: bool) -> bool:
    if value:
        context.find_root().ensure_object(Session).debug = True
    return value


def _take_config(context: typer.Context, path: Path | None) -> Path | None:
    if path is not None:
        context.default_map = config_values(path, context)
    return path


DebugFlag = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error.", callback=_note_debug, is_eager=True)
]


ConfigFlag = Annotated[
    Path | None,
    typer.Option(
        help="TOML file with values for flags; flags given on the command line override it.",
        callback=_take_config,
        is_eager=True,
    ),
]


JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


class Preset(str, Enum):
    """Sizes of network and run."""

    tiny = "tiny"
    small = "small"
    paper = "paper"


class Direction(str, Enum):
    """What the queries are and what the gallery holds."""

    t2i = "t2i"
    i2t = "i2t"


class Commands(typer.Typer):
    """An app all of whose commands take `--config FILE` and `--debug`."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Function], Function]:
        """Registers a function as a command, as in typer, with the shared flags added."""
        register = super().command(name, **settings)

        def decorate(function: Function) -> Function:
            register(_with_shared_flags(function))
            return function

        return decorate


def _with_shared_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def command(*, config: Path | None, debug: bool, **flags: Any) -> Any:  # noqa: ARG001, their callbacks act
        return function(**flags)

    own = inspect.signature(function, eval_str=True)
    shared = [
        inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigFlag),
        inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=DebugFlag),
    ]
    every = [*own.parameters.values(), *shared]
    command.__signature__ = own.replace(parameters=every)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
    return command


def config_values(path: Path, context: typer.Context) -> dict[str, Any]:
    """Values by parameter that the TOML file `path` gives to the command of `context`, checked as its flags are.

    Keys are the names of flags. Those of a table named after the command come before those above all tables; tables of
    other commands are passed over, so that one file may serve several.
    """
    found = read_toml(path)
    tables = {key: value for key, value in found.items() if isinstance(value, dict)}
    commands = getattr(context.parent and context.parent.command, "commands", {})
    for name in tables:
        if name not in commands:
            raise ValueError(f"{path}: table [{name}] is not a command of geoflow; they are {', '.join(commands)}")
    given = {key: value for key, value in found.items() if key not in tables}
    parts = [(key, value) for part in (given, tables.get(str(context.info_name), {})) for key, value in part.items()]
    flags = {
        option.removeprefix("--"): parameter
        for parameter in context.command.params
        if parameter.param_type_name == "option" and not parameter.is_eager
        for option in parameter.opts
    }
    values = {}
    for key, value in parts:
        parameter = flags.get(key.replace("_", "-"))
        if parameter is None:
            raise ValueError(f"{path}: key {key!r} is not a flag of {context.command_path}{_did_you_mean(key, flags)}")
        values[parameter.name] = _as_given_on_the_line(path, key, value, parameter, context)
    return values


def _did_you_mean(key: str, flags: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(key.replace("_", "-"), flags, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _as_given_on_the_line(path: Path, key: str, value: Any, parameter: Any, context: typer.Context) -> Any:
    """The value as the parser would find it among the flags; ValueError if it would refuse it."""
    several = parameter.multiple and isinstance(value, list)
    for part in value if several else [value]:
        wanted = "true or false" if parameter.is_flag else "a number or a string"
        if parameter.is_flag != isinstance(part, bool) or not isinstance(part, (bool, int, float, str)):
            raise ValueError(f"{path}: key {key!r} must be {wanted}, got {value!r}")
    words = [str(part) for part in value] if several else value if parameter.is_flag else str(value)
    words = [words] if parameter.multiple and not several else words
    try:
        parameter.process_value(context, words)
    except typer.BadParameter as error:
        raise ValueError(f"{path}: key {key!r}: {error.message}") from error
    return words


@contextlib.contextmanager
def continued_later() -> Iterator[World]:
    """The ranks of a job that keeps its finished blocks; Ctrl-C ends with a word about them."""
    try:
        with joined() as world:
            yield world
    except KeyboardInterrupt:
        typer.echo("stopped; finished blocks are kept, run the same command to continue", err=True)
        raise typer.Exit(INTERRUPTED) from None


def run(app: typer.Typer) -> NoReturn:
    """Runs the command line of this process and exits."""
    session = Session()
    signal.signal(signal.SIGTERM, session.terminate)
    try:
        code = app(prog_name="geoflow", standalone_mode=False, obj=session) or 0
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as stop:
        # rich and typer turn a broken pipe into an exit with 1.
        if not isinstance(stop, BrokenPipeError) and not isinstance(stop.__context__, BrokenPipeError):
            raise
        _close_stdout()
        code = BROKEN_PIPE
    except KeyboardInterrupt:
        code = INTERRUPTED
    except (typer.TyperException, ValueError, TypeError, OSError) as error:
        if session.debug:
            traceback.print_exc()
        typer.echo(f"geoflow: error: {one_line(error)}", err=True)
        code = BAD_INPUT
    code = TERMINATED if session.terminated and code == INTERRUPTED else code
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Everything is on disk, and the interpreter is not taken down: ranks were seen to abort there ("terminate
        # called without an active exception") after whole jobs. A thread that asks for the interpreter's lock at that
        # time is ended by force, which C++ answers so. Those that may be left: gloo's, if an error kept the groups from
        # being destroyed (pytorch issue 190489), and the ones Arrow reads Parquet files with (arrow issue 34314). Which
        # of them it was is not known.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def one_line(error: Exception) -> str:
    """What an error says, on one line, without the number that the system gives it."""
    words = str(error)
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        words = error.format_message() + (f" See {context.command_path} --help." if context is not None else "")
    elif isinstance(error, OSError) and error.strerror:
        words = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return " ".join(words.split())


def _close_stdout() -> None:
    """Nobody reads: what is still buffered goes nowhere, and the interpreter does not stumble over it at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
