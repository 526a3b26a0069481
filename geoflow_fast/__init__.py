"""geoflow_fast: joint uncertainty for frozen vision-language embeddings, fast on CPUs and GPUs."""

from geoflow_fast import evaluation, geometry, ops
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.encoders.colours import ColourEncoder
from geoflow_fast.encoders.open_clip import OpenClipEncoder
from geoflow_fast.encoders.protocol import Encoder
from geoflow_fast.flow.config import GeoFlowConfig
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.flow.sampling import FAST_SAMPLING, SamplingSettings, sample
from geoflow_fast.jobs.embed import EmbedSummary, embed_images
from geoflow_fast.likelihood.density import Epistemic, epistemic, log_density, suggest_steps
from geoflow_fast.likelihood.settings import FAST_DENSITY, PAPER_DENSITY
from geoflow_fast.ops.dispatch import BackendUnavailable, backends
from geoflow_fast.retrieval.bandwidth import Bandwidth, fit_bandwidth
from geoflow_fast.retrieval.calibration import Calibration
from geoflow_fast.retrieval.entropy import RetrievalEntropy, RetrievalPosterior, risk_lower_bound
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.retrieval.index import GalleryIndex
from geoflow_fast.retrieval.rerank import BayesReranker, Reranked
from geoflow_fast.training.config import TrainConfig
from geoflow_fast.training.flow_matching import train
from geoflow_fast.training.loop import TrainingDiverged, TrainReport

__version__ = "0.1.0"

__all__ = [
    "FAST_DENSITY",
    "FAST_SAMPLING",
    "PAPER_DENSITY",
    "BackendUnavailable",
    "Bandwidth",
    "BayesReranker",
    "Calibration",
    "ColourEncoder",
    "EmbedSummary",
    "EmbeddingPairs",
    "Encoder",
    "Epistemic",
    "Gallery",
    "GalleryIndex",
    "GeoFlow",
    "GeoFlowConfig",
    "OpenClipEncoder",
    "Reranked",
    "RetrievalEntropy",
    "RetrievalPosterior",
    "SamplingSettings",
    "TrainConfig",
    "TrainReport",
    "TrainingDiverged",
    "__version__",
    "backends",
    "embed_images",
    "epistemic",
    "evaluation",
    "fit_bandwidth",
    "geometry",
    "log_density",
    "ops",
    "risk_lower_bound",
    "sample",
    "suggest_steps",
    "train",
]
