"""GroVE: each pair has one latent vector, and two sparse Gaussian processes map it to the embeddings (Venkataramanan et
al., 2025)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.methods.baselines.base import FitTask
from benchmarks.methods.baselines.trained import PUBLISHED, PairObjective, TrainedBaseline
from geoflow_fast.data.pairs import EmbeddingPairs
from geoflow_fast.directions import Direction
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.runtime import checks, extras
from geoflow_fast.training.batches import RowBatch
from geoflow_fast.training.config import RunConfig
from geoflow_fast.training.loop import Run, TrainReport, complete

PCA_ROWS = 20_000
STARTS = ("regression", "zero")
NOISE_SHARE = 0.1
"""Share of the embeddings' variance that counts as noise at the start."""
RIDGE = 1e-2
"""Ridge of the regression that guesses latents, as a share of the embeddings' variance."""


def gaussian_kl(mean: Tensor, variance: Tensor, other_mean: Tensor, other_variance: Tensor) -> Tensor:
    """KL(first | other) of diagonal Gaussians, summed over the last dimension."""
    ratio = variance / other_variance
    return 0.5 * (ratio + (mean - other_mean).square() / other_variance - 1 - ratio.log()).sum(-1)


def expected_log_likelihood(mean: Tensor, variance: Tensor, noise: Tensor, target: Tensor) -> Tensor:
    """E log N(target; f, noise) over f ~ N(mean, variance), summed over the last dimension."""
    error = (target - mean).square() + variance
    return -0.5 * (error / noise + noise.log() + 1.8378770664093453).sum(-1)


def sparse_process(inducing: int, latent: int, outputs: int) -> nn.Module:
    """A GPyTorch variational process of `outputs` coordinates over R^latent: RBF kernel with a scale.

    Coordinates share the kernel and the inducing points; each has its own variational distribution, of independent
    inducing values.
    """
    import gpytorch

    variational = gpytorch.variational

    class SparseProcess(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            law = variational.MeanFieldVariationalDistribution(inducing, batch_shape=torch.Size([outputs]))
            points = torch.randn(inducing, latent, dtype=torch.float32)
            super().__init__(variational.VariationalStrategy(self, points, law, learn_inducing_locations=True))
            self.mean_module = gpytorch.means.ConstantMean(batch_shape=torch.Size([outputs]))
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=latent))

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    return SparseProcess().float()  # GPyTorch follows the default dtype


class ModalityProcess(nn.Module):
    """The process of one modality, the noise of its embeddings around it, and a linear guess at their latents."""

    guess_weight: Tensor
    guess_bias: Tensor

    def __init__(self, dim: int, inducing: int, latent: int) -> None:
        super().__init__()
        self.process = sparse_process(inducing, latent, dim)
        self.log_noise = nn.Parameter(torch.tensor(-4.0, dtype=torch.float32))
        self.register_buffer("guess_weight", torch.zeros(dim, latent, dtype=torch.float32))
        self.register_buffer("guess_bias", torch.zeros(latent, dtype=torch.float32))

    @torch.no_grad()
    def begin(self, latent: Tensor, embedding: Tensor, pairs: int) -> None:
        """Starts from latents [n, q] of unit variance and embeddings [n, d]; the n rows stand for all `pairs`.

        GPyTorch's own start has a mean of zero and a lengthscale of 0.7, with which no two rows in 10 dimensions are
        correlated.
        """
        process: Any = self.process
        mean = embedding.mean(0)
        rest = embedding - mean
        variance = rest.square().mean()
        process.mean_module.constant.copy_(mean)
        process.covar_module.outputscale = variance
        process.covar_module.base_kernel.lengthscale = latent.new_tensor(latent.shape[1] ** 0.5)
        self.log_noise.copy_((NOISE_SHARE * variance).log())
        ridge = RIDGE * variance * torch.eye(len(mean), dtype=mean.dtype, device=mean.device)
        self.guess_weight.copy_(torch.linalg.solve(rest.T @ rest / len(rest) + ridge, rest.T @ latent / len(rest)))
        self.guess_bias.copy_(latent.mean(0) - mean @ self.guess_weight)
        self._fit_inducing_values(latent, rest.double(), pairs / len(latent))

    def _fit_inducing_values(self, latent: Tensor, rest: Tensor, weight: float) -> None:
        """Sets the inducing values to their best distribution for rows that count `weight` times each.

        Inducing values are L v, where L L^T is their prior covariance, so this is a regression of the embeddings on v.
        """
        process: Any = self.process
        strategy, law = process.variational_strategy, process.variational_strategy._variational_distribution
        rows = torch.linspace(
            0, len(latent) - 1, len(strategy.inducing_points), dtype=torch.float32, device="cpu"
        ).long()
        points = latent[rows.to(latent.device)]
        strategy.inducing_points.copy_(points)
        prior, cross = (process.covar_module(points, x).to_dense().double() for x in (points, latent))
        one = torch.eye(len(points), dtype=torch.float64, device=latent.device)
        root = torch.linalg.cholesky(prior + strategy.jitter_val * one)
        basis = torch.linalg.solve_triangular(root, cross, upper=False)
        scaled = weight / self.noise().double() * basis
        precision = one + scaled @ basis.T
        law.variational_mean.copy_(torch.linalg.solve(precision, scaled @ rest).T)
        law._variational_stddev.copy_(precision.diagonal().rsqrt().expand_as(law._variational_stddev))
        strategy.variational_params_initialized.fill_(1)  # otherwise the first call would overwrite them with the prior

    def guess(self, embedding: Tensor) -> Tensor:
        """Latents [B, q] of embeddings [B, d], guessed by a regression of the initial latents on the embeddings."""
        return embedding @ self.guess_weight + self.guess_bias

    def predict(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the process at latents [B, q]: [B, d] each."""
        self.process.train()  # in eval mode GPyTorch keeps parts of the graph from one call to the next
        predicted = self.process(latent)
        return predicted.mean.T, predicted.variance.T

    def noise(self) -> Tensor:
        """Variance of the embeddings around the process."""
        return self.log_noise.exp() + 1e-6

    def kl(self) -> Tensor:
        """KL divergence of the variational distributions from their prior, summed over coordinates."""
        strategy: Any = self.process.variational_strategy
        return strategy.kl_divergence().sum()


class GroVE(TrainedBaseline):
    """GroVE: predictive variance of a Gaussian process for the query's modality, averaged over coordinates.

    One sparse process per modality maps latent vectors to embeddings. A query gets its latent by `adam_steps`
    steps of Adam on the likelihood of its embedding and a standard normal prior, starting from a linear regression on
    the embedding or, with `latent_start="zero"`, from zero. The latents of training pairs are learned, starting from
    principal components, and are not stored.
    """

    method: ClassVar[str] = "grove"
    title: ClassVar[str] = "GroVE"
    ONE_WIDTH_FOR: ClassVar[str | None] = "alignment of the predictions"
    RECIPE: ClassVar[RunConfig] = dataclasses.replace(PUBLISHED, batch_size=128, weight_decay=0.0)
    LEARNING_RATES: ClassVar[dict[str, float]] = {"paper": 1e-5, "small": 1e-3, "tiny": 1e-2}
    INDUCING: ClassVar[dict[str, int]] = {"paper": 250, "small": 100, "tiny": 40}

    @classmethod
    def _check_sizes(cls, path: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
        """Compares widths alone, because GPyTorch cannot build its modules without values."""
        largest = max((size for x in tensors.values() for size in x.shape), default=0)
        for name in ("image_dim", "text_dim", "latent"):
            if checks.integer(settings[name], name, 1) > largest:
                raise ValueError(f"{path} is damaged: none of its tensors has the size {name}={settings[name]}")

    def __init__(
        self,
        image_dim: int,
        text_dim: int,
        size: str = "auto",
        latent: int = 10,
        elbo_weight: float = 0.01,
        kl_weight: float = 400.0,
        adam_steps: int = 20,
        adam_lr: float = 0.1,
        latent_start: str = "regression",
    ) -> None:
        if reason := self.missing():
            raise ValueError(reason)
        weights = {"elbo_weight": elbo_weight, "kl_weight": kl_weight, "adam_steps": adam_steps, "adam_lr": adam_lr}
        super().__init__(image_dim, text_dim, size, latent=latent, latent_start=latent_start, **weights)
        checks.one_of(latent_start, "latent_start", STARTS)
        if not 1 <= latent <= image_dim:
            raise ValueError(f"latent={latent} must be between 1 and the width {image_dim}")
        self.latent, self.elbo_weight, self.kl_weight = latent, elbo_weight, kl_weight
        self.adam_steps, self.adam_lr, self.latent_start = adam_steps, adam_lr, latent_start
        inducing = self.INDUCING[self.size]
        self.image, self.text = (
            ModalityProcess(image_dim, inducing, latent),
            ModalityProcess(text_dim, inducing, latent),
        )
        # Coordinates of unit rows have a variance of about 1 / d, but GPyTorch adds a jitter of 1e-4 to covariances.
        self.unit = image_dim**0.5
        self.pairs_seen = 1

    @classmethod
    def missing(cls) -> str | None:
        """Names GPyTorch if it is not installed."""
        return extras.missing("grove", "gpytorch", "gpytorch", "test")

    def make_batch(self, image: Tensor, text: Tensor, index: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Embeddings in the processes' units, and the numbers of the pairs, which select their latents."""
        return image * self.unit, text * self.unit, index

    def losses(self, *tensors: Tensor) -> Tensor:
        """Loss [B]: `elbo_weight` (-ELBO of both modalities) + `kl_weight` (KL both ways between the predictions).

        The KL is a mean over coordinates; if it were summed, it would drive both processes to the same constant.
        """
        image, text, latent = tensors
        predicted = [side.predict(latent) for side in (self.image, self.text)]
        fits = [
            expected_log_likelihood(*law, side.noise(), target)
            for law, side, target in zip(predicted, (self.image, self.text), (image, text))
        ]
        prior = (self.image.kl() + self.text.kl()) / self.pairs_seen + 0.5 * latent.square().sum(1)
        aligned = gaussian_kl(*predicted[0], *predicted[1]) + gaussian_kl(*predicted[1], *predicted[0])
        return self.elbo_weight * (prior - fits[0] - fits[1]) + self.kl_weight * aligned / image.shape[1]

    def infer(self, targets: Iterable[tuple[ModalityProcess, Tensor]]) -> Tensor:
        """Latents [B, q] of rows whose embeddings are given for one or both modalities, optimised by Adam."""
        observed = list(targets)
        start = torch.stack([side.guess(x) for side, x in observed]).mean(0)
        with torch.enable_grad():
            latent = (start if self.latent_start == "regression" else torch.zeros_like(start)).requires_grad_()
            optimizer = torch.optim.Adam([latent], self.adam_lr)
            for _ in range(self.adam_steps):
                fit = sum(expected_log_likelihood(*side.predict(latent), side.noise(), x) for side, x in observed)
                loss = (0.5 * latent.square().sum(1) - fit).sum()
                (latent.grad,) = torch.autograd.grad(loss, [latent])
                optimizer.step()
        return latent.detach()

    def _fit(self, task: FitTask) -> TrainReport:
        self.pairs_seen = len(task.pairs)
        objective = _WithLatents(self, task)
        return complete(Run(objective), task.out, resume=task.resume, progress=task.progress)

    def _score(self, queries: Tensor, gallery: Gallery, direction: Direction) -> Tensor:  # noqa: ARG002
        side = direction.queries(self.image, self.text)
        return side.predict(self.infer([(side, queries * self.unit)]))[1].mean(1) / self.unit**2


class _TrainedTogether(nn.Module):
    """The method and the latents [N, q] of its training pairs, which are trained together."""

    def __init__(self, method: GroVE, pairs: int) -> None:
        super().__init__()
        self.method = method
        self.latents = nn.Parameter(torch.zeros(pairs, method.latent, device=method.device, dtype=torch.float32))


class _WithLatents(PairObjective):
    """The latents of training pairs are learned; those of validation pairs are inferred from both embeddings."""

    def __init__(self, method: GroVE, task: FitTask) -> None:
        self.together = _TrainedTogether(method, len(task.pairs))
        super().__init__(self.together, method, task)
        self.grove = method

    def prepare(self) -> None:
        """Starts the latents at the principal components of the pairs, with unit variance, and fits the processes."""
        with torch.no_grad():
            self.together.latents.copy_(principal_components(self.pairs, self.grove.latent, self.config.seed))
            rows = some_rows(self.pairs, self.config.seed)
            latent = self.together.latents[torch.from_numpy(rows).to(self.device)]
            for side, embedding in zip((self.grove.image, self.grove.text), self.pairs[rows]):
                side.begin(latent, self.grove.unit * embedding.to(self.device), len(self.pairs))

    def losses(self, batch: RowBatch) -> Tensor:
        """Uses learned latents in training and inferred ones in validation."""
        image, text, index = batch.tensors
        grove = self.grove
        latent = (
            self.together.latents[index]
            if self.together.training
            else grove.infer([(grove.image, image), (grove.text, text)])
        )
        return grove.losses(image, text, latent)

    def export(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Exports the method without the latents."""
        own = {name.removeprefix("method."): x for name, x in weights.items() if name.startswith("method.")}
        super().export(folder, own)


def some_rows(pairs: EmbeddingPairs, seed: int) -> np.ndarray:
    """Numbers of at most `PCA_ROWS` pairs drawn by the seed, in their order."""
    return np.sort(np.random.default_rng(seed).permutation(len(pairs))[:PCA_ROWS])


def principal_components(pairs: EmbeddingPairs, count: int, seed: int) -> Tensor:
    """Scores [N, count] of the pairs (both sides together) on their leading components, each of unit variance."""
    x = torch.cat(pairs[some_rows(pairs, seed)], dim=1).double()
    mean = x.mean(0)
    _, _, basis = torch.linalg.svd(x - mean, full_matrices=False)
    basis = basis[:count] * basis[:count].gather(1, basis[:count].abs().argmax(1, keepdim=True)).sign()
    blocks = np.array_split(np.arange(len(pairs)), max(1, len(pairs) // PCA_ROWS))
    scores = torch.cat([(torch.cat(pairs[rows], dim=1).double() - mean) @ basis.T for rows in blocks])
    return (scores / scores.std(0).clamp(min=1e-12)).float()
