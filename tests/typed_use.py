"""The public surface as a type checker sees it: read by mypy in `make lint`, never run.

What a call returns must not be Any, or nobody's editor could say that a posterior has an entropy.
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import assert_type

import geoflow_fast as gf


def train_and_score(image: Tensor, text: Tensor) -> None:
    pairs = gf.EmbeddingPairs.from_arrays(image, text)
    assert_type(pairs, gf.EmbeddingPairs)
    assert_type(pairs.split(0.2, seed=0), tuple[gf.EmbeddingPairs, gf.EmbeddingPairs])
    flow = gf.GeoFlow(gf.GeoFlowConfig.tiny(pairs.image_dim, pairs.text_dim))
    assert_type(gf.train(flow, pairs, gf.TrainConfig.tiny(), out="run"), gf.TrainReport)
    assert_type(gf.GeoFlow.from_pretrained("run"), gf.GeoFlow)
    assert_type(flow.velocity(image, text, 0.5, "joint"), tuple[Tensor, Tensor])

    fitted = gf.fit_bandwidth(flow, pairs, direction="t2i")
    assert_type(fitted.kappa, float)
    scorer = gf.RetrievalEntropy.fast(flow, image, "t2i", kappa=fitted.kappa, guidance=fitted.guidance)
    assert_type(scorer(text), gf.RetrievalPosterior)
    assert_type(scorer(text).entropy, Tensor)

    reranker = gf.BayesReranker(flow, image, "t2i")
    assert_type(reranker.calibrate(pairs), gf.Calibration)
    assert_type(reranker(text), gf.Reranked)
    assert_type(reranker(text).p_answer, Tensor)

    assert_type(gf.epistemic(flow, image, text), gf.Epistemic)
    assert_type(gf.epistemic(flow, image, text).score, Tensor)


def judge(uncertainty: Tensor, correct: Tensor) -> None:
    assert_type(gf.evaluation.auroc(uncertainty, correct), float)
    assert_type(gf.evaluation.retrieval_calibration(uncertainty, correct).auroc, float)


def operate(samples: Tensor, gallery: Tensor) -> None:
    assert_type(gf.ops.gallery_posterior(samples, gallery, 50.0), gf.ops.GalleryPosterior)
    assert_type(gf.ops.ot_assign(gallery, gallery, gallery, gallery), Tensor)
    assert_type(gf.backends()["sinkhorn"], dict[str, str])
