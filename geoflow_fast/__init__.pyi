"""The public names of geoflow_fast as type checkers see them; `__init__.py` imports them on first use."""

from geoflow_fast import baselines as baselines
from geoflow_fast import distributed as distributed
from geoflow_fast import evaluation as evaluation
from geoflow_fast import geometry as geometry
from geoflow_fast import ops as ops
from geoflow_fast import plan as plan
from geoflow_fast import worlds as worlds
from geoflow_fast.data.pairs import EmbeddingPairs as EmbeddingPairs
from geoflow_fast.directions import Direction as Direction
from geoflow_fast.encoders.colours import ColourEncoder as ColourEncoder
from geoflow_fast.encoders.open_clip import OpenClipEncoder as OpenClipEncoder
from geoflow_fast.encoders.protocol import Encoder as Encoder
from geoflow_fast.flow.config import GeoFlowConfig as GeoFlowConfig
from geoflow_fast.flow.model import GeoFlow as GeoFlow
from geoflow_fast.flow.sampling import FAST_SAMPLING as FAST_SAMPLING
from geoflow_fast.flow.sampling import SamplingSettings as SamplingSettings
from geoflow_fast.flow.sampling import sample as sample
from geoflow_fast.head.config import HeadConfig as HeadConfig
from geoflow_fast.head.model import PosteriorHead as PosteriorHead
from geoflow_fast.jobs.embed import EmbedSummary as EmbedSummary
from geoflow_fast.jobs.embed import embed_images as embed_images
from geoflow_fast.likelihood.density import Epistemic as Epistemic
from geoflow_fast.likelihood.density import epistemic as epistemic
from geoflow_fast.likelihood.density import log_density as log_density
from geoflow_fast.likelihood.density import suggest_steps as suggest_steps
from geoflow_fast.likelihood.settings import FAST_DENSITY as FAST_DENSITY
from geoflow_fast.likelihood.settings import PAPER_DENSITY as PAPER_DENSITY
from geoflow_fast.likelihood.settings import DensitySettings as DensitySettings
from geoflow_fast.ops.dispatch import BackendUnavailable as BackendUnavailable
from geoflow_fast.ops.dispatch import backends as backends
from geoflow_fast.retrieval.bandwidth import Bandwidth as Bandwidth
from geoflow_fast.retrieval.bandwidth import fit_bandwidth as fit_bandwidth
from geoflow_fast.retrieval.calibration import Calibration as Calibration
from geoflow_fast.retrieval.entropy import RetrievalEntropy as RetrievalEntropy
from geoflow_fast.retrieval.entropy import RetrievalPosterior as RetrievalPosterior
from geoflow_fast.retrieval.entropy import risk_lower_bound as risk_lower_bound
from geoflow_fast.retrieval.gallery import Gallery as Gallery
from geoflow_fast.retrieval.index import GalleryIndex as GalleryIndex
from geoflow_fast.retrieval.rerank import BayesReranker as BayesReranker
from geoflow_fast.retrieval.rerank import Reranked as Reranked
from geoflow_fast.training.config import TrainConfig as TrainConfig
from geoflow_fast.training.flow_matching import train as train
from geoflow_fast.training.loop import TrainingDiverged as TrainingDiverged
from geoflow_fast.training.loop import TrainReport as TrainReport

__version__: str
