"""geoflow_fast: joint uncertainty for frozen vision-language embeddings, fast on CPUs and GPUs."""

from geoflow_fast import evaluation, geometry, ops
from geoflow_fast.bandwidth import Bandwidth, fit_bandwidth
from geoflow_fast.calibration import Calibration
from geoflow_fast.data import EmbeddingPairs
from geoflow_fast.density import FAST_DENSITY, PAPER_DENSITY, Epistemic, epistemic, log_density, suggest_steps
from geoflow_fast.dispatch import BackendUnavailable, backends
from geoflow_fast.embed_job import EmbedSummary, embed_images
from geoflow_fast.encoders import ColourEncoder, Encoder, OpenClipEncoder
from geoflow_fast.entropy import RetrievalEntropy, RetrievalPosterior, risk_lower_bound
from geoflow_fast.gallery import Gallery
from geoflow_fast.gallery_index import GalleryIndex
from geoflow_fast.model import GeoFlow, GeoFlowConfig
from geoflow_fast.rerank import BayesReranker, Reranked
from geoflow_fast.sampling import sample
from geoflow_fast.trainer import TrainingDiverged, TrainReport
from geoflow_fast.training import TrainConfig, train

__version__ = "0.1.0"

__all__ = [
    "FAST_DENSITY",
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
