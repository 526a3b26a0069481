"""Exact search: the items of a gallery with the largest inner products, with or without bounds from rows in bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from geoflow_fast.geometry import capturing
from geoflow_fast.ops import dispatch, extension, gallery_lists
from geoflow_fast.ops.allowed import Allowed, Mask, Rows, check_finite, kept_blocks
from geoflow_fast.ops.arguments import check_floating, working_dtype
from geoflow_fast.runtime import checks
from geoflow_fast.runtime.batches import put_rows

_TILE_ITEMS = 16_384
_MOST_HITS = 1024
"""Hits that are fetched, or four times as many as are asked for, to find enough that are allowed among them."""
FEWEST_ITEMS = 4096
"""Galleries below this are searched without codes: rotating the queries would take what the bounds save."""


@dataclass(frozen=True)
class RowCodes:
    """Rows of a gallery after a fixed orthogonal rotation, in bytes, a quarter of their size in float32.

    With R the rotation, g a row and c its code less 128, |R g - scale c| <= error. The rotation spreads coordinates far
    larger than the others, as those of CLIP are, so that one scale serves all of a row.
    """

    code: Tensor
    """[N, width rounded up to 64] uint8."""
    scale: Tensor
    """[N] float32."""
    error: Tensor
    """[N] float32, with what rounding did to the rotation."""
    largest_norm: float
    """The largest norm of a row."""

    @staticmethod
    def encode(gallery: Tensor) -> RowCodes:
        """The codes of rows [N, d] in float32, float16 or bfloat16 on the CPU."""
        return RowCodes(*extension.required().encode_rows(gallery.detach().contiguous()))

    def check(self, gallery: Tensor) -> None:
        """Refuses the codes of a gallery of another size."""
        width = extension.required().code_stride(gallery.shape[1])
        if self.code.shape != (len(gallery), width):
            raise ValueError(f"codes are {tuple(self.code.shape)}, but the gallery's would be {(len(gallery), width)}")


def gallery_search(
    queries: Tensor,
    gallery: Tensor,
    top_k: int = 10,
    backend: str = "auto",
    *,
    codes: RowCodes | None = None,
    allowed: Mask | None = None,
) -> tuple[Tensor, Tensor]:
    """The `top_k` items of the largest inner product with each query: (scores, indices), each [Q, top_k], the largest
    first, equal ones by index.

    `queries` [Q, d] and `gallery` [N, d] are floating-point rows; a gallery on the CPU in float16 or bfloat16 is read
    as it is stored, and inner products are in float32. With the gallery's `codes` (`RowCodes.encode`), processors that
    have AVX512-VNNI bound every score by integers and score in float32 only what the bounds do not exclude: the result
    is the same to the last bit. Other processors ignore the codes. GPUs multiply float32 rows in three TF32
    products and list the best items in the same kernel.

    `allowed`: a boolean mask of the items that there are, [N] for all queries or [Q, N]. Where these are fewer than
    `top_k`, lists end with index -1 and score -inf.
    """
    checks.integer(top_k, "top_k", 1)
    if codes is None and allowed is None and isinstance(queries, Tensor) and isinstance(gallery, Tensor):
        queries = queries.detach()
        if queries.dtype != torch.float32:
            queries = queries.to(working_dtype(queries))
        score, index = _search(queries, gallery.detach(), top_k, backend)
        return score, index
    _check(queries, gallery, top_k)
    if codes is not None:
        codes.check(gallery)
    queries, gallery = queries.detach().to(working_dtype(queries)), gallery.detach()
    there = Allowed.of(allowed, len(queries), len(gallery), queries.device)
    if there is not None:

        def among(some: Tensor, kept: Tensor) -> Hits:
            return best_hits(some, ((*block, None) for block in kept_blocks(gallery, 0, kept)), top_k, str(backend))

        def every(some: Tensor, count: int) -> Hits:
            return Hits(*gallery_search(some, gallery, count, backend, codes=codes))

        hits = allowed_hits(there, queries, len(gallery), top_k, among, every)
        return hits.score, hits.index
    if codes is not None and len(queries) and codes_pay(queries, gallery, str(backend)):
        return _by_codes(queries, gallery, top_k, codes)
    score, index = _search(queries, gallery, top_k, str(backend))
    return score, index


def _check(queries: Tensor, gallery: Tensor, top_k: int) -> None:
    check_floating(queries=queries, gallery=gallery)
    if queries.dim() != 2 or gallery.dim() != 2 or queries.shape[1] != gallery.shape[1] or gallery.numel() == 0:
        raise ValueError(
            f"queries must be [Q, d] and gallery [N, d] with N, d > 0, got {tuple(queries.shape)} and "
            f"{tuple(gallery.shape)}"
        )
    checks.integer(top_k, "top_k", 1, len(gallery))
    if not (capturing(queries) or queries.is_meta or is_fake(queries)):
        check_finite(queries, "queries")


@dataclass(frozen=True)
class Hits:
    """The best items of each query."""

    score: Tensor
    """[Q, k], the largest first."""
    index: Tensor
    """[Q, k] int64."""


def allowed_hits(
    allowed: Allowed,
    queries: Tensor,
    items: int,
    top_k: int,
    among: Callable[[Tensor, Tensor], Hits],
    every: Callable[[Tensor, int], Hits],
) -> Hits:
    """The `top_k` best of the items that are `allowed` for each query. `among(queries, kept)` searches the items
    numbered `kept`, and `every(queries, k)` finds the k best of all."""

    def scored(rows: Rows, mask: Tensor) -> Hits:
        """Of rather more hits than are asked for, those that are allowed. Where there are not enough of them, as where
        all allowed items are far away, the query's own items are searched."""
        some, there = queries[rows], mask.sum(1)
        most = min(items, max(_MOST_HITS, 4 * top_k), math.ceil(2 * top_k * items / int(there.min())) + 16)
        found = every(some, most)
        kept = mask.gather(1, found.index)
        order = kept.logical_not().byte().argsort(dim=1, stable=True)[:, :top_k]
        kept, short = kept.gather(1, order), (kept.sum(1) < there.clamp(max=top_k)).nonzero().squeeze(1)
        score = found.score.gather(1, order).masked_fill_(~kept, -math.inf)
        hits = Hits(score, found.index.gather(1, order).masked_fill_(~kept, -1))
        for row in short.tolist():
            one = slice(row, row + 1)
            put_rows(hits, one, among(some[one], mask[row].nonzero().squeeze(1)))
        return hits

    return allowed.serve(len(queries), lambda rows, kept: among(queries[rows], kept), scored)


Block = tuple[int | Tensor, Tensor, RowCodes | None]
"""Some items of a gallery in order: the number of the first one, or the ascending numbers of all, their rows, and their
codes."""


def best_hits(queries: Tensor, blocks: Iterable[Block], top_k: int, backend: str = "auto") -> Hits:
    """The `top_k` best of the items in all `blocks`, which come in order, with score -inf and index -1 where there are
    fewer."""
    score = queries.new_empty(len(queries), 0)
    index = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    for numbers, items, codes in blocks:
        scores, found = gallery_search(queries, items, min(top_k, len(items)), backend, codes=codes)
        found = numbers[found] if isinstance(numbers, Tensor) else found + numbers
        if index.shape[1] == 0:
            score, index = scores, found
            continue
        # Blocks come in order, so that a stable sort keeps equal scores by number.
        score, order = torch.cat((score, scores), 1).sort(dim=1, descending=True, stable=True)
        index = torch.cat((index, found), 1).gather(1, order)[:, :top_k]
        score = score[:, :top_k]
    missing = top_k - score.shape[1]
    pad = torch.nn.functional.pad
    return Hits(pad(score, (0, missing), value=-math.inf), pad(index, (0, missing), value=-1))


def codes_pay(queries: Tensor, gallery: Tensor, backend: str = "auto") -> bool:
    """Whether a search of these items makes use of their codes."""
    served = queries.device.type == "cpu" and queries.dtype == torch.float32 and backend in ("auto", "cpu")
    served = served and gallery.dtype in extension.STORAGES and len(gallery) >= FEWEST_ITEMS
    return served and extension.missing_int8() is None


def _by_codes(queries: Tensor, gallery: Tensor, top_k: int, codes: RowCodes) -> tuple[Tensor, Tensor]:
    """The search by bounds; queries whose bounds exclude too little, or are no numbers, are searched without them."""
    arrays = (codes.code, codes.scale, codes.error, codes.largest_norm)
    gallery = gallery.contiguous()
    score, index, kept = extension.required().search_codes(queries.contiguous(), gallery, *arrays, top_k)
    left = (kept < top_k).nonzero()[:, 0]
    if len(left):
        score[left], index[left] = _search(queries[left], gallery, top_k, "cpu")
    return score, index


def gallery_search_reference(queries: Tensor, gallery: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The items with the largest inner products, a tile of items at a time."""
    best = queries.new_empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    for first in range(0, len(gallery), _TILE_ITEMS):
        scores = queries @ gallery[first : first + _TILE_ITEMS].to(queries.dtype).T
        numbers = torch.arange(first, first + scores.shape[1], device=queries.device).expand_as(scores)
        # A stable sort, not topk: equal scores, as of items that occur twice, must be kept in the order of indices.
        scores, order = torch.cat((best[0], scores), 1).sort(dim=1, descending=True, stable=True)
        best = scores[:, :top_k], torch.cat((best[1], numbers), 1).gather(1, order[:, :top_k])
    return best


def _cpu(queries: Tensor, gallery: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    if gallery.dtype not in extension.STORAGES:
        gallery = gallery.to(torch.float32)
    found: tuple[Tensor, Tensor] = extension.required().gallery_search(
        queries.contiguous(), gallery.contiguous(), top_k
    )
    return found


def _triton(queries: Tensor, gallery: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The lists of the gallery's kernel, for queries of one sample and kappa = 1: scores are inner products then."""
    if len(queries) == 0:
        return _shapes(queries, gallery, top_k)
    rows = gallery.to(queries.dtype)
    *_, score, index = gallery_lists.lists(queries.unsqueeze(1), rows, 1.0, top_k, None, None, exact=True)
    return score.to(queries.dtype), index


def _shapes(queries: Tensor, gallery: Tensor, top_k: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    score = queries.new_empty(len(queries), top_k)
    return score, torch.empty_like(score, dtype=torch.int64)


_search = dispatch.operation(
    "gallery_search",
    gallery_search_reference,
    check=_check,
    cpu=replace(extension.bound("gallery_search"), function=_cpu),
    triton=replace(gallery_lists.KERNEL, function=_triton, dtypes=(torch.float32,)),
    fake=_shapes,
    differentiable=False,
)
