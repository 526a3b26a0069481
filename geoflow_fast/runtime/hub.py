"""Models by name: a folder, or a repository of the Hugging Face hub with its address, "hf://user/name".

A repository holds `config.json`, `model.safetensors` and `README.md`, the model card. What is downloaded goes to the
hub's own cache; HF_HUB_OFFLINE, HF_TOKEN, HF_HOME and HF_ENDPOINT are obeyed. An upload consists of files that are
named one by one.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geoflow_fast.runtime import checks
from geoflow_fast.runtime.extras import needs
from geoflow_fast.runtime.files import write_atomic
from geoflow_fast.runtime.words import one_line

CONFIG_FILE, WEIGHTS_FILE, CARD_FILE = "config.json", "model.safetensors", "README.md"
MODEL_FILES = (CONFIG_FILE, WEIGHTS_FILE, CARD_FILE)
"""The files of a model; no others are uploaded with it."""
MARK = "<!-- written by geoflow_fast; without this line it is left alone -->"
REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
ADDRESS = "hf://"
"""How the address of a repository begins; every other name of a model is a path."""
PLAIN_TEXT = re.compile(r"[A-Za-z0-9_ ,;:%()=+-]*", re.ASCII)
"""Text that has no meaning in Markdown, HTML and the links that renderers make of bare addresses."""


@dataclass(frozen=True)
class HubOptions:
    """Where and how a repository is read."""

    revision: str | None = None
    cache_dir: str | Path | None = None
    token: str | bool | None = None
    local_files_only: bool = False
    force_download: bool = False


def model_folder(name: str | Path, what: str, files: tuple[str, ...], options: HubOptions) -> Path:
    """The folder of a model: `name` itself, or a copy of these `files` of the repository with the address
    "hf://user/name" or "hf://user/name@revision". An OSError says why there is neither."""
    if isinstance(name, str) and name.startswith(ADDRESS):
        return addressed_folder(name, files, options)
    path = checks.path(name, what)
    if options.revision is not None:
        raise ValueError(f"revision= is for models of the hub; {path} is a folder on this machine")
    if not path.exists() and REPOSITORY.fullmatch(str(path)) and not str(path).startswith("."):
        raise FileNotFoundError(f"{path} does not exist; the address of a repository on the hub is {ADDRESS}{path}")
    return path


def addressed_folder(address: str, files: tuple[str, ...], options: HubOptions) -> Path:
    """A copy of these `files`, names or patterns, of the repository with the address "hf://user/name" or
    "hf://user/name@revision"."""
    name, revision = repository_of(address)
    if revision is not None and options.revision not in (None, revision):
        raise ValueError(f"{address} names another revision than revision={options.revision!r}")
    return download(name, files, dataclasses.replace(options, revision=revision or options.revision))


def repository_of(address: str) -> tuple[str, str | None]:
    """The name and the revision of the repository with the address "hf://user/name" or "hf://user/name@revision"."""
    name, at, revision = address.removeprefix(ADDRESS).partition("@")
    if not REPOSITORY.fullmatch(name) or (at and not revision):
        raise ValueError(f"the address of a repository is hf://user/name or hf://user/name@revision, got {address!r}")
    return name, revision or None


def download(text: str, files: tuple[str, ...], options: HubOptions) -> Path:
    """The folder in the cache with these `files`, names or patterns, of the repository of that name."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        hint = needs(f"reading {text} from the hub", "huggingface_hub", "hub")
        raise ValueError(hint) from error
    try:
        return Path(
            snapshot_download(
                text,
                revision=options.revision,
                cache_dir=options.cache_dir,
                token=options.token,
                local_files_only=options.local_files_only,
                force_download=options.force_download,
                allow_patterns=list(files),
                endpoint=os.environ.get("HF_ENDPOINT"),
            )
        )
    except _errors() as error:
        words = " ".join(str(error).split())[:300]
        where = f" at revision {options.revision}" if options.revision else ""
        raise OSError(f"{text} could not be read from the hub{where}: {type(error).__name__}: {words}") from error


def push_folder(
    folder: Path,
    repository: str,
    files: tuple[str, ...],
    *,
    message: str,
    private: bool | None,
    token: str | None,
    branch: str | None,
) -> str:
    """Uploads these `files` of a folder, names or patterns, to a repository of the hub, which is created if it does not
    exist, in one commit, and returns the address of the commit. Nothing else in the folder is uploaded."""
    if not REPOSITORY.fullmatch(checks.words(repository, "repo_id")):
        raise ValueError(f"repo_id must be user/name, got {repository!r}")
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ValueError(needs("push_to_hub", "huggingface_hub", "hub")) from error
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        if branch is not None:
            api.create_branch(repository, branch=branch, exist_ok=True)
        made = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message=checks.words(message, "commit_message"),
            revision=branch,
            allow_patterns=list(files),
        )
    except _errors() as error:
        words = " ".join(str(error).split())[:300]
        raise OSError(f"{repository} could not be written on the hub: {type(error).__name__}: {words}") from error
    return str(getattr(made, "commit_url", made))


def _errors() -> tuple[type[Exception], ...]:
    """What the hub's client raises: its own errors, and those of the library by which it speaks with the hub."""
    from huggingface_hub.errors import HfHubHTTPError

    network = [kind for kind in HfHubHTTPError.__mro__ if kind.__name__ in ("HTTPError", "RequestException")]
    return (OSError, ValueError, RuntimeError, HfHubHTTPError, *network)


def write_card(folder: Path, card: str) -> None:
    """Writes the model card, unless there is one that somebody else has written."""
    file = folder / CARD_FILE
    if file.is_file() and MARK not in file.read_text("utf-8", errors="replace"):
        return
    write_atomic(file, card.encode())


def card_of(title: str, kind: str, tags: tuple[str, ...], sections: Mapping[str, list[str]]) -> str:
    """The text of a model card: a header that the hub reads, and a list of lines for each heading. All of it is
    Markdown: free text must be `escaped`."""
    header = ["---", "library_name: geoflow_fast", "tags:", *(f"- {tag}" for tag in tags), "---", MARK, ""]
    lines = [f"# {title}", "", kind, ""]
    for heading, entries in sections.items():
        lines += [f"## {heading}", "", *entries, ""]
    return "\n".join([*header, *lines])


def rows(values: Mapping[str, Any]) -> list[str]:
    """Names and values, any text, as the lines of a table."""
    lines = [f"| {escaped(name)} | {escaped(_shown(value))} |" for name, value in values.items()]
    return ["| | |", "|---|---|", *lines]


def escaped(text: object) -> str:
    """Text in one line of Markdown that shows it and has no other effect: as it is, or in a code span."""
    line = one_line(text)
    if PLAIN_TEXT.fullmatch(line):
        return line
    inside = line.replace("`", "'").replace("|", "/")
    return f"`{inside}`"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
