"""Models that are saved to folders, loaded from folders and from the hub, and uploaded."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from geoflow_fast.runtime import checks
from geoflow_fast.runtime.files import contents_of
from geoflow_fast.runtime.hub import (
    CONFIG_FILE,
    MODEL_FILES,
    WEIGHTS_FILE,
    HubOptions,
    model_folder,
    push_folder,
    write_card,
)
from geoflow_fast.runtime.tensors import load_tensors

Model = TypeVar("Model", bound="Pretrained")


class Pretrained(nn.Module, ABC):
    """What models have in common that are saved to a folder, loaded from there or from the hub, and uploaded."""

    KIND: ClassVar[str]
    """What a file of weights calls the model."""

    @classmethod
    @abstractmethod
    def described(cls: type[Model], info: Mapping[str, Any]) -> Model:
        """A model with any weights that has what `write_files` has stored beside them."""

    @abstractmethod
    def write_files(self, folder: Path) -> None:
        """Writes all that is needed to load the model again."""

    @abstractmethod
    def card(self) -> str:
        """The text of the model card."""

    @property
    def training_rows(self) -> int:
        """How many pairs of embeddings from the training data are part of the weights."""
        return 0

    def save_pretrained(self, folder: str | Path, *, push_to_hub: bool = False, repo_id: str | None = None) -> None:
        """Writes `config.json`, `model.safetensors` and the model card `README.md` to `folder`. The second is replaced
        atomically and is all that `from_pretrained` needs; a card that somebody has edited is left alone. With
        `push_to_hub` the folder's files are also uploaded, to the repository `repo_id`."""
        path = checks.path(folder, "folder")
        self.write_files(path)
        write_card(path, self.card())
        if push_to_hub:
            self.push_to_hub(repo_id or path.name)

    @classmethod
    def from_pretrained(
        cls: type[Model],
        folder: str | Path,
        *,
        device: torch.device | str = "cpu",
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
    ) -> Model:
        """Loads what `save_pretrained` wrote, with the stored dtype and in eval mode: from a folder, or from a
        repository of the Hugging Face hub, "hf://user/name", at a `revision` (branch, tag or commit).

        Repositories are downloaded once into the hub's cache, or into `cache_dir`; `local_files_only` does not ask the
        network, and neither does HF_HUB_OFFLINE=1. A damaged file, or one that does not match its configuration, raises
        a ValueError; a model whose training was killed or interrupted comes with a warning if it lacks something.
        """
        options = HubOptions(revision, cache_dir, token, local_files_only, force_download)
        path = model_folder(folder, "folder", (WEIGHTS_FILE, CONFIG_FILE), options) / WEIGHTS_FILE
        tensors, info = load_tensors(path, kind=cls.KIND, device=device)
        # On the meta device nothing is allocated until the tensors are known to fit, and no weights are drawn in vain.
        with contents_of(path), torch.device("meta"):
            model = cls.described(info)
        check_tensors(path, tensors, model.state_dict())
        model.load_state_dict(tensors, assign=True)
        model.warn_of(path.parent)
        return model.eval()

    def warn_of(self, folder: Path) -> None:
        """Warns of what the model that was loaded from this folder lacks."""

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        private: bool | None = None,
        token: str | None = None,
        branch: str | None = None,
        training_rows: bool = False,
    ) -> str:
        """Uploads the model with its card to the repository `repo_id` ("user/name") of the Hugging Face hub, which is
        created if need be, and returns the address of the commit. `gf.push_to_hub` uploads the folder of a run, with
        flow and head. It needs the extra `hub`.

        The weights of a head contain some of its training pairs, those of its bank. A head with a bank is uploaded only
        with `training_rows`.
        """
        refuse_training_rows(self, f"the {type(self).__name__}", allowed=training_rows)
        message = commit_message or f"Upload a {type(self).__name__}"
        options: dict[str, Any] = {"message": message, "private": private, "token": token, "branch": branch}
        with tempfile.TemporaryDirectory() as name:
            self.save_pretrained(name)
            return push_folder(Path(name), repo_id, MODEL_FILES, **options)


def refuse_training_rows(model: Pretrained, what: str, *, allowed: bool) -> None:
    """Raises a ValueError if the weights of the model contain embeddings of the training data, unless it is allowed to
    upload them. `what` is the model in the message."""
    if model.training_rows and not allowed:
        raise ValueError(
            f"the bank of {what} holds the embeddings of {model.training_rows:,} training pairs, which would be "
            "uploaded with the weights; call push_to_hub with training_rows=True to allow that"
        )


def check_tensors(path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises a ValueError unless `tensors` have the names, shapes and kinds of number of the `expected` ones, and one
    floating-point dtype."""
    for name in sorted(set(tensors) | set(expected)):
        stored, wanted = (tuple(x[name].shape) if name in x else "nothing" for x in (tensors, expected))
        if stored != wanted:
            raise ValueError(f"{path} holds {stored} as {name}, but its configuration asks for {wanted}")
    dtypes = {tensors[name].dtype for name, x in expected.items() if x.is_floating_point()}
    for name, x in expected.items():
        if not x.is_floating_point() and tensors[name].dtype != x.dtype:
            raise ValueError(f"{path} holds {tensors[name].dtype} as {name}, but its configuration asks for {x.dtype}")
    if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
        raise ValueError(f"{path} must hold tensors of one floating-point dtype, got {sorted(map(str, dtypes))}")
