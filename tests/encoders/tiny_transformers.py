"""Models of transformers and sentence-transformers with random weights, small enough for tests, saved as folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

WORDS = ["a", "red", "green", "blue", "circle", "square", "something", "else", "photo", "of"]


def tokenizer(length: int) -> Any:
    """Knows a few words; others are unknown."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<unk>", "<s>", "</s>", *WORDS]
    inner = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)])
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=length, **special)


def save_clip(folder: Path, kind: str = "clip") -> Any:
    """Writes a CLIPModel or SiglipModel with its processor and tokenizer, and returns the model."""
    import transformers

    text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"vocab_size": 4 + len(WORDS), "max_position_embeddings": 12, "pad_token_id": 0, "bos_token_id": 2}
    text |= {"eos_token_id": 3}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 32, "patch_size": 16}
    torch.manual_seed(0)
    if kind == "clip":
        config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=12)
        model, processor = transformers.CLIPModel(config), transformers.CLIPImageProcessor
    else:
        config = transformers.SiglipConfig(text_config=text, vision_config=vision)
        model, processor = transformers.SiglipModel(config), transformers.SiglipImageProcessor
    model.save_pretrained(folder, safe_serialization=True)
    options = {"size": {"height": 32, "width": 32}} if kind == "siglip" else {}
    options |= {"size": {"shortest_edge": 32}, "crop_size": 32} if kind == "clip" else {}
    processor(**options).save_pretrained(folder)
    tokenizer(12).save_pretrained(folder)
    return model.eval()


def save_sentences(folder: Path) -> Any:
    """Writes a SentenceTransformer, and returns it."""
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    config = transformers.BertConfig(
        vocab_size=4 + len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    inner = folder.with_name(f"{folder.name}-inner")
    transformers.BertModel(config).save_pretrained(inner, safe_serialization=True)
    tokenizer(16).save_pretrained(inner)
    model = SentenceTransformer(modules=[Transformer(str(inner)), Pooling(16)], device="cpu")
    model.save(str(folder))
    return model.eval()
