"""geoflow_fast: joint uncertainty for frozen vision-language embeddings, fast on CPUs and GPUs.

The public names are imported when they are first used, so that `import geoflow_fast` alone does not import torch.
`__init__.pyi` shows the same names to type checkers.
"""

from importlib import import_module

__version__ = "0.1.0"

_MODULES = ("distributed", "evaluation", "geometry", "ops", "stores", "worlds")
_HOMES = {
    "BackendUnavailable": "ops.dispatch",
    "Bandwidth": "retrieval.bandwidth",
    "BayesReranker": "retrieval.rerank",
    "Calibration": "retrieval.calibration",
    "ColourEncoder": "encoders.colours",
    "Direction": "directions",
    "DensitySettings": "likelihood.settings",
    "EmbedSummary": "jobs.embed",
    "EmbeddingPairs": "data.pairs",
    "Embeddings": "data.embeddings",
    "Encoder": "encoders.protocol",
    "Epistemic": "likelihood.density",
    "FAST_DENSITY": "likelihood.settings",
    "FAST_SAMPLING": "flow.sampling",
    "Gallery": "retrieval.gallery",
    "GeoFlow": "flow.model",
    "GeoFlowConfig": "flow.config",
    "Health": "decisions.watch",
    "HeadConfig": "head.config",
    "OpenClipEncoder": "encoders.open_clip",
    "PAPER_DENSITY": "likelihood.settings",
    "PosteriorHead": "head.model",
    "Qrels": "data.qrels",
    "Reranked": "retrieval.rerank",
    "RetrievalEntropy": "retrieval.entropy",
    "RetrievalPosterior": "retrieval.entropy",
    "Rule": "decisions.rules",
    "SamplingSettings": "flow.sampling",
    "SentenceEncoder": "encoders.sentences",
    "TrainConfig": "training.config",
    "TrainReport": "training.loop",
    "TrainingDiverged": "training.loop",
    "TransformersEncoder": "encoders.transformers",
    "Trust": "decisions.trust",
    "backends": "ops.dispatch",
    "embed_images": "jobs.embed",
    "embed_sides": "jobs.embed_columns",
    "embed_texts": "jobs.embed_columns",
    "epistemic": "likelihood.density",
    "fit_bandwidth": "retrieval.bandwidth",
    "log_density": "likelihood.density",
    "push_to_hub": "jobs.hub",
    "risk_lower_bound": "retrieval.entropy",
    "sample": "flow.sampling",
    "train": "training.flow_matching",
    "watch": "decisions.watch",
}
"""The module in which each public name is defined."""

__all__ = ["__version__", *_MODULES, *_HOMES]


def __getattr__(name: str) -> object:
    """Imports a public name and keeps it, so that this function is called once for each."""
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")  # the import itself makes it an attribute
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
