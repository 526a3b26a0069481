"""Models of open_clip with random weights, small enough for tests, saved as a folder that `local-dir:` reads."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

CONFIG: dict[str, Any] = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 8, "heads": 2, "layers": 1},
}


def changed(**parts: Any) -> dict[str, Any]:
    """Returns the configuration with other entries; dictionaries are merged."""
    config = copy.deepcopy(CONFIG)
    for name, value in parts.items():
        config[name] = {**config[name], **value} if isinstance(value, dict) else value
    return config


def save_model(folder: Path, config: dict[str, Any] = CONFIG) -> nn.Module:
    """Writes a configuration and weights, and returns the model as open_clip itself creates it."""
    import open_clip
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    about = {"model_cfg": config, "preprocess_cfg": {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]}}
    (folder / "open_clip_config.json").write_text(json.dumps(about))
    torch.manual_seed(0)
    model: nn.Module = open_clip.create_model(f"local-dir:{folder}", load_weights=False, pretrained_text=False)
    with torch.no_grad():  # as trained ones, towers without a projection or a bias of zero would show nothing
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items()}, folder / "open_clip_model.safetensors"
    )
    return model.eval()
