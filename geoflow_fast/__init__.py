"""geoflow_fast: joint uncertainty for frozen vision-language embeddings, fast on CPUs and GPUs."""

from geoflow_fast import geometry, ops
from geoflow_fast.dispatch import BackendUnavailable, backends

__version__ = "0.1.0"

__all__ = ["BackendUnavailable", "__version__", "backends", "geometry", "ops"]
