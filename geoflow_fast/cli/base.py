"""What all commands of `geoflow` share: flags, config files, errors in one line, signals and exit codes.

Exit codes: 0 done; 2 bad input, file or flag; 3 a guarantee no longer holds (`watch`); 130 interrupted (Ctrl-C); 141
nobody reads the output any more; 143 terminated (SIGTERM); 1 with a traceback: a fault of the program.

The modules of the commands import torch and the rest of the package inside their functions, so that help is fast.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import inspect
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from geoflow_fast.runtime import processors
from geoflow_fast.runtime.words import one_line

if TYPE_CHECKING:
    from geoflow_fast.distributed import World

Function = TypeVar("Function", bound=Callable[..., Any])

COMMAND_ERROR: Any = next(kind for kind in reversed(typer.BadParameter.__mro__) if hasattr(kind, "format_message"))
"""The base of typer's errors about the command line, which is click's own up to typer 0.25."""
BAD_INPUT, INTERRUPTED, BROKEN_PIPE, TERMINATED = 2, 130, 141, 143
FLAG_OF_KEYWORD = {"n_samples": "samples", "n_steps": "steps", "n_probes": "probes", "pca_dim": "pca"}
"""Flags that are not named after the keyword of the library that they set."""


@dataclass
class Session:
    """The state of one run of the command: whether errors show a traceback, whether SIGTERM has arrived, and the flags
    of the command that runs by the names of their parameters."""

    debug: bool = False
    terminated: bool = False
    flags: dict[str, str] = field(default_factory=dict)

    def terminate(self, _number: int, _frame: FrameType | None) -> None:
        """Handles SIGTERM as Ctrl-C would be handled at that moment; only the exit code differs."""
        self.terminated = True
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell does this for commands in the background
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)


def _note_debug(context: typer.Context, value: bool) -> bool:
    """Notes the traceback that was asked for, and which command is about to run."""
    session = context.find_root().ensure_object(Session)
    session.debug |= value
    session.flags = {str(p.name): p.opts[0] for p in context.command.params if p.param_type_name == "option"}
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


def model_option(what: str) -> Any:
    """The option for the folder of a model, `what` it is in words: a path, or the address of a repository on the hub,
    which is downloaded. The function gets a path in either case."""
    return typer.Option(help=f"{what} A path, or hf://user/name.", parser=_model_folder, metavar="FOLDER")


def _model_folder(address: str | Path) -> Path:
    from geoflow_fast.runtime.hub import ADDRESS, HubOptions, addressed_folder

    if not str(address).startswith(ADDRESS):
        return Path(address)
    from geoflow_fast.jobs.hub import HELD_OUT_FILES, RUN_FILES

    return addressed_folder(str(address), (*RUN_FILES, *HELD_OUT_FILES), HubOptions())


ModelFlag = Annotated[Path, model_option("Folder of a trained flow.")]
ScorerFlag = Annotated[Path, model_option("Folder of a trained flow or of a posterior head.")]
OutFileFlag = Annotated[Path, typer.Option(help="Output Parquet file; the same command continues a stopped run.")]
OutFolderFlag = Annotated[Path, typer.Option(help="Folder for results; the same command continues a stopped run.")]
Conditional = Literal["t2i", "i2t"]
DirectionFlag = Annotated[Conditional, typer.Option(help="t2i: texts search images; i2t: images search texts.")]
Preset = Literal["auto", "tiny", "small", "paper"]
PresetFlag = Annotated[
    Preset,
    typer.Option(help="Size of network and run; auto: by pairs and machine. Other flags override single settings."),
]
RankLayout = Literal["auto", "gallery", "queries"]
SeedFlag = Annotated[int, typer.Option(help="Random seed.")]
ProbeSeedFlag = Annotated[int, typer.Option(help="Seed of the probes.")]
BlockFlag = Annotated[int, typer.Option(help="Queries per pass over the gallery.")]
OverwriteFlag = Annotated[bool, typer.Option("--overwrite/--no-overwrite", help="Replace the output of another job.")]
DeviceFlag = Annotated[str, typer.Option(help="cpu, cuda or auto.")]
PrecisionFlag = Annotated[
    Literal["float32", "tf32", "bfloat16", "auto"],
    typer.Option(help="Of a flow's matrix products. auto: bfloat16 where that is faster, else float32."),
]


class _GroupedHelp:
    """Help that fits 80 columns without cutting a name: the options stand below the headings of their groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the arguments and options."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):  # type: ignore[attr-defined]
            heading = "Arguments" if parameter.param_type_name == "argument" else "Options"
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or heading, []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)


class _Command(_GroupedHelp, TyperCommand):
    """A command with grouped help."""


class _Group(_GroupedHelp, TyperGroup):
    """A group of commands with grouped help."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the options and the commands."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes what each command does, in its whole first sentence."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            first = {name: (command.help or "").split("\n\n")[0] for name, command in commands.items() if command}
            formatter.write_dl([(name, " ".join(words.split())) for name, words in first.items()])


class Commands(typer.Typer):
    """An app all of whose commands take `--config FILE` and `--debug`, and have grouped help."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=_Group, rich_markup_mode=None, **settings)

    def command(
        self,
        name: str | None = None,
        *,
        groups: Mapping[str, str] | None = None,
        reads: Mapping[str, Callable[..., Any]] | None = None,
        **settings: Any,
    ) -> Callable[[Function], Function]:
        """Registers a function as a command, as in typer, with the shared flags added. `groups` has the headings of its
        help, each with the names of parameters, separated by spaces. `reads` has a function for each parameter that
        is made from flags which several commands share: they are the parameters of that function, and stand last."""
        register = super().command(name, cls=_Command, **settings)
        headings = {part: heading for heading, parts in (groups or {}).items() for part in parts.split()}

        def decorate(function: Function) -> Function:
            register(_with_shared_flags(function, headings, reads or {}))
            return function

        return decorate


def _with_shared_flags(
    function: Callable[..., Any], headings: Mapping[str, str], reads: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    signature = inspect.signature(function, eval_str=True)
    readers = {name: inspect.signature(reader, eval_str=True).parameters for name, reader in reads.items()}

    @functools.wraps(function)
    def command(*, config: Path | None, debug: bool, **flags: Any) -> Any:  # noqa: ARG001, their callbacks act
        made = {name: reads[name](**{flag: flags.pop(flag) for flag in parts}) for name, parts in readers.items()}
        return function(**flags, **made)

    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [part.replace(kind=keyword) for part in signature.parameters.values() if part.name not in reads]
    read = [part.replace(kind=keyword) for parts in readers.values() for part in parts.values()]
    shared = [
        inspect.Parameter("config", keyword, default=None, annotation=ConfigFlag),
        inspect.Parameter("debug", keyword, default=False, annotation=DebugFlag),
    ]
    parameters = [_under(headings.get(part.name), part) for part in (*own, *read, *shared)]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _under(heading: str | None, parameter: inspect.Parameter) -> inspect.Parameter:
    """The parameter of a command, whose help stands below this heading."""
    if heading is None:
        return parameter
    kind, option = get_args(parameter.annotation)
    option = copy.copy(option)  # commands share some
    option.rich_help_panel = heading
    return parameter.replace(annotation=Annotated[kind, option])


def config_values(path: Path, context: typer.Context) -> dict[str, Any]:
    """Reads the values that the TOML file `path` gives to the flags of the command of `context`, and checks them as
    the parser checks flags.

    A key is the name of a flag. A key in the table named after the command overrides the same key above all tables.
    Tables of other commands are ignored, so that one file can serve several commands.
    """
    from geoflow_fast.runtime.files import read_toml

    content = read_toml(path)
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    commands = getattr(context.parent and context.parent.command, "commands", {})
    for name in tables:
        if name not in commands:
            raise ValueError(f"{path}: table [{name}] is not a command of geoflow; they are {', '.join(commands)}")
    above = {key: value for key, value in content.items() if key not in tables}
    own = tables.get(str(context.info_name), {})
    flags = {
        option.removeprefix("--"): parameter
        for parameter in context.command.params
        if parameter.param_type_name == "option" and not parameter.is_eager
        for option in parameter.opts
    }
    values = {}
    for key, value in (*above.items(), *own.items()):
        parameter = flags.get(key.replace("_", "-"))
        if parameter is None:
            raise ValueError(f"{path}: key {key!r} is not a flag of {context.command_path}{_did_you_mean(key, flags)}")
        values[parameter.name] = _as_given_on_the_line(path, key, value, parameter, context)
    return values


def _did_you_mean(key: str, flags: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(key.replace("_", "-"), flags, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _as_given_on_the_line(path: Path, key: str, value: Any, parameter: Any, context: typer.Context) -> Any:
    """Returns the value in the form in which the parser reads it from the command line; a ValueError if the parser
    would reject it."""
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
    """Joins the ranks of a job that keeps its finished blocks; on Ctrl-C it says how to continue and exits."""
    from geoflow_fast.distributed import joined

    try:
        with joined() as world:
            yield world
    except KeyboardInterrupt:
        typer.echo("stopped; finished blocks are kept, run the same command to continue", err=True)
        raise typer.Exit(INTERRUPTED) from None


def run(app: typer.Typer) -> NoReturn:
    """Runs the command line of this process and exits."""
    if "torch" not in sys.modules:  # which reads the environment when it is loaded
        processors.share_processors(os.environ)
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
    except (COMMAND_ERROR, ValueError, TypeError, OSError) as error:
        if session.debug:
            traceback.print_exc()
        typer.echo(f"geoflow: error: {in_flags(message_of(error), session.flags, sys.argv)}", err=True)
        code = BAD_INPUT
    code = TERMINATED if session.terminated and code == INTERRUPTED else code
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Everything is on disk, so the rank leaves without shutting the interpreter down. Ranks of finished jobs have
        # aborted during shutdown ("terminate called without an active exception"): Python ends a thread by force if it
        # asks for the interpreter's lock at that time, and C++ then aborts. Such threads may belong to gloo, if an
        # error kept the groups from being destroyed (pytorch issue 190489), or to Arrow, which reads Parquet files with
        # them (arrow issue 34314). We do not know which of the two it was.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def message_of(error: Exception) -> str:
    """The message of an error on one line, without the number that the system gives it."""
    words = str(error)
    if isinstance(error, COMMAND_ERROR):
        context = getattr(error, "ctx", None)
        words = str(error.format_message()) + (f" See {context.command_path} --help." if context is not None else "")
    elif isinstance(error, OSError) and error.strerror:
        words = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return one_line(words)


def in_flags(words: str, flags: Mapping[str, str], typed: Sequence[str]) -> str:
    """A message of the library in the words of the command that called it: keywords become `flags`.

    What is a keyword is told by its form, `name=value` or `name_with_underscores`, or by its place at the very
    beginning, as in "steps must be ...". Words that the user has `typed`, such as paths, stay as they are.
    """

    def flag_of(name: str) -> str | None:
        return flags.get(FLAG_OF_KEYWORD.get(name, name))

    def setting(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        flag = flags.get("overwrite") if name == "resume" else flag_of(name)
        if flag is None:
            return match[0]
        if name == "resume" or value == "True":
            return flag
        return flag.replace("--", "--no-", 1) if value == "False" else f"{flag} {value or ''}".rstrip()

    def name(match: re.Match[str]) -> str:
        return match[0] if match[0] in typed else flag_of(match[0]) or match[0]

    words = re.sub(r"\b(?P<name>[a-z_]+)=(?P<value>[\w.'+-]*[\w'])?", setting, words)
    words = re.sub(r"^[a-z_]+(?= must | is | are | has | have )", name, words)
    return re.sub(r"(?<![\w./'-])[a-z]+(?:_[a-z]+)+(?![\w./'=-])", name, words)


def _close_stdout() -> None:
    """Sends what is still buffered to /dev/null, so that the interpreter does not fail on it when it exits."""
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, 1)
    os.close(null_device)


def given(**values: Any) -> dict[str, Any]:
    """The values of the flags that were given, that is, those that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def chosen_flags(context: typer.Context) -> list[str]:
    """The names of the parameters that the command line or a config file gives."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]


def print_json(value: dict[str, Any]) -> None:
    """Prints `value` as indented JSON."""
    print(json.dumps(value, indent=2, default=str))
