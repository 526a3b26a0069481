"""The scores and the loss of a head against naive ones in float64, their gradients, and the memory that they need."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.profiler import profile

from geoflow_fast.head import loss
from geoflow_fast.head.loss import contrastive_losses, log_mean_exp, point_scores
from geoflow_fast.noise import sample_uniform

SIZES = [(1, 1, 1), (1, 3, 7), (7, 1, 129), (7, 4, 1), (129, 3, 7), (7, 8, 129), (0, 2, 5)]


def problem(queries: int, points: int, items: int, width: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Points of lengths up to 30, log-weights, and items."""
    centre = sample_uniform(queries * points, width, dtype=torch.float64).view(queries, points, width)
    length = 30 * torch.rand(queries, points, 1, dtype=torch.float64)
    weights = torch.randn(queries, points, dtype=torch.float64).log_softmax(1)
    return centre * length, weights, sample_uniform(items, width, dtype=torch.float64)


def naive_scores(points: Tensor, log_weights: Tensor, items: Tensor) -> Tensor:
    return torch.logsumexp(log_weights.unsqueeze(2) + torch.einsum("qkd,nd->qkn", points, items), dim=1)


@pytest.fixture(params=[1, 100, 1 << 21], ids=lambda size: f"tile{size}")
def _tile(request, monkeypatch) -> None:
    """Tiles of one query each, of some queries, and of all."""
    monkeypatch.setattr(loss, "TILE", request.param)


@pytest.mark.usefixtures("_tile")
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_scores_and_their_gradients_are_those_of_all_products_at_once(size):
    points, weights, items = problem(*size)
    own, naive = ([x.clone().requires_grad_() for x in (points, weights)] for _ in range(2))
    scores, wanted = point_scores(*own, items), naive_scores(*naive, items)
    torch.testing.assert_close(scores, wanted, rtol=1e-12, atol=1e-12)
    towards = torch.randn_like(wanted)
    for mine, theirs in zip(torch.autograd.grad(scores, own, towards), torch.autograd.grad(wanted, naive, towards)):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("tile", [1, 40, 1 << 21])
def test_gradients_of_scores_by_finite_differences(monkeypatch, tile):
    monkeypatch.setattr(loss, "TILE", tile)
    points, weights, items = problem(4, 3, 5)
    inputs = [x.requires_grad_() for x in (points, weights)]
    assert torch.autograd.gradcheck(lambda p, w: point_scores(p, w, items), inputs)


def test_strided_points_and_expanded_gradients():
    points, weights, items = problem(6, 4, 9)
    strided = points.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    assert not strided.is_contiguous()
    point_scores(strided, weights.T.contiguous().T, items[::2]).sum().backward()
    naive = points.clone().requires_grad_()
    naive_scores(naive, weights, items[::2]).sum().backward()
    torch.testing.assert_close(strided.grad, naive.grad)


def right_items(queries: int, items: int) -> Tensor:
    """One right item for each query and some more for some."""
    right = torch.rand(queries, items) < 0.2
    right[torch.arange(queries), torch.randint(items, (queries,))] = True
    return right


def naive_losses(scores: Tensor, right: Tensor, copies: Tensor) -> Tensor:
    """Item by item: -log of the share of a right item among itself and the wrong ones, each counted once."""
    losses = []
    for row in range(len(scores)):
        wrong = [math.exp(s) / c for s, r, c in zip(*(x.tolist() for x in (scores[row], right[row], copies))) if not r]
        own = [(float(scores[row, j]), 1 / float(copies[j])) for j in right[row].nonzero().flatten()]
        each = [-math.log(math.exp(s) / (math.exp(s) + sum(wrong))) * weight for s, weight in own]
        losses.append(sum(each) / sum(weight for _, weight in own))
    return torch.tensor(losses, dtype=torch.float64)


@pytest.mark.parametrize(("queries", "items"), [(1, 1), (1, 7), (7, 1), (7, 129), (129, 7)])
def test_losses_are_those_written_out_item_by_item(queries, items):
    scores = 3 * torch.randn(queries, items, dtype=torch.float64)
    right, copies = right_items(queries, items), torch.randint(1, 4, (items,)).double()
    torch.testing.assert_close(contrastive_losses(scores, right, copies), naive_losses(scores, right, copies))


def test_gradients_of_losses_by_finite_differences():
    scores = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    right, copies = right_items(5, 8), torch.randint(1, 4, (8,)).double()
    right[3] = True  # nothing is wrong for this query
    assert torch.autograd.gradcheck(lambda s: contrastive_losses(s, right, copies), [scores])


def test_the_other_right_items_are_no_negatives():
    """However high another right item scores, the loss of a query stays what it is without that item."""
    scores = torch.tensor([[1.0, 0.5, -1.0]], dtype=torch.float64)
    alone = contrastive_losses(scores[:, :2], torch.tensor([[True, False]]), torch.ones(2).double())
    high = scores.clone()
    high[0, 2] = 50.0  # its own share of the loss is zero
    both = contrastive_losses(high, torch.tensor([[True, False, True]]), torch.ones(3).double())
    torch.testing.assert_close(both, alone / 2)


def test_copies_of_an_item_count_as_one():
    scores = torch.randn(3, 4, dtype=torch.float64)
    right = torch.eye(3, 4, dtype=torch.bool)
    once = contrastive_losses(scores, right, torch.ones(4).double())
    times = torch.tensor([2, 1, 3, 5])
    repeated = contrastive_losses(
        scores.repeat_interleave(times, 1), right.repeat_interleave(times, 1), times.repeat_interleave(times).double()
    )
    torch.testing.assert_close(repeated, once)


def test_a_batch_without_a_wrong_item_teaches_nothing():
    scores = torch.randn(4, 3, requires_grad=True)
    losses = contrastive_losses(scores, torch.ones(4, 3, dtype=torch.bool), torch.full((3,), 3.0))
    assert losses.tolist() == [0.0] * 4
    losses.sum().backward()
    assert not scores.grad.any()


def test_large_scores_stay_finite():
    scores = torch.tensor([[3e4, -3e4], [-3e4, 3e4]], requires_grad=True)
    losses = contrastive_losses(scores, torch.tensor([[True, False]] * 2), torch.ones(2))
    assert losses.tolist() == [0.0, 6e4]
    losses.sum().backward()
    assert scores.grad.tolist() == [[0.0, 0.0], [-1.0, 1.0]]


def test_the_mean_of_exponentials_does_not_overflow():
    scores = torch.tensor([[800.0, -800.0], [801.0, -801.0]], dtype=torch.float64)
    wanted = torch.tensor([800 + math.log((1 + math.e) / 2), -800 + math.log((1 + 1 / math.e) / 2)]).double()
    torch.testing.assert_close(log_mean_exp(scores), wanted)


def largest_allocation(points: Tensor, weights: Tensor, items: Tensor) -> int:
    """Numbers in the largest piece of memory that scores and their gradients ask for."""
    with profile(profile_memory=True) as recorded:
        point_scores(points, weights, items).sum().backward()
    events = recorded.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]") // points.element_size()


def test_scores_of_all_points_are_never_in_memory_at_once(monkeypatch):
    queries, points, items = 64, 8, 129
    inputs = problem(queries, points, items)
    tensors = [x.requires_grad_() for x in inputs[:2]]
    assert largest_allocation(*tensors, inputs[2]) == queries * points * items  # one tile has room for all
    monkeypatch.setattr(loss, "TILE", 4 * points * items)
    assert largest_allocation(*tensors, inputs[2]) == queries * items  # the result
