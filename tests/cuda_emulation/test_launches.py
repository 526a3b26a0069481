"""The counter of kernels, and what the GPU path may ask of a GPU at most."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="the CUDA path needs triton")
from geoflow_fast import ops
from tools import launches
from tools.launches import counted, fake_rows, list_launches, on_gpu, training


def test_kernels_bytes_and_operations_of_a_product_and_a_sum():
    with counted() as count:
        a, b = fake_rows(8, 16), fake_rows(16, 4)
        c = a @ b
        c.relu()
    assert dict(count.kernels) == {"torch:mm": 1, "torch:relu": 1}
    assert count.flops == {"float32": 2 * 8 * 16 * 4}
    assert count.bytes == 4 * (8 * 16 + 16 * 4 + 8 * 4) + 4 * 2 * 8 * 4
    assert not count.synchronisations


def test_views_and_host_work_are_free():
    with counted() as count:
        x = fake_rows(6, 10)
        x.view(3, 20).T[1:].unsqueeze(0).expand(5, -1, -1).detach()
        host = torch.arange(6.0).square().sum()
        assert float(host) == 55.0  # tensors on the host have values
    assert not count.kernels
    assert not count.synchronisations


def test_own_kernels_are_counted_with_what_their_wrappers_do():
    with counted() as count:
        rows = fake_rows(6, 10)
        ops.adaln(rows, fake_rows(10), fake_rows(10))
        ops.adaln(fake_rows(10, 6).T, fake_rows(10), fake_rows(10))
    assert count.kernels == {"triton:adaln_kernel": 2, "torch:clone": 1}


@pytest.mark.parametrize(
    ("wait", "name"),
    [
        (lambda x: x.sum().item(), "item"),
        (lambda x: bool((x > 0).all()), "item"),
        (lambda x: x.cpu(), "copy to the host"),
        (lambda x: x + torch.ones(4, device="cpu").to(x.device), "copy to the device"),
        (lambda x: torch.tensor([1.0, 2.0], device=x.device), "copy to the device"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "index by a mask"),
    ],
)
def test_what_the_host_waits_for(wait, name):
    with counted() as count:
        wait(fake_rows(4))
    assert dict(count.synchronisations) == {name: 1}


def test_copies_of_pinned_memory_do_not_wait():
    with counted() as count:
        torch.ones(4, device="cpu").pin_memory().to("cuda", non_blocking=True)
        fake_rows(4).to("cpu", non_blocking=True)
    assert not count.synchronisations
    assert count.copied == 32


def test_backward_passes_and_lists_of_tensors():
    with counted() as count:
        layer = on_gpu(nn.Linear(8, 4, device="meta"))
        optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
        layer(fake_rows(16, 8)).sum().backward()
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
    assert count.kernels["torch:addmm"] == 1
    assert count.kernels["torch:mm"] == 1  # the gradient of the weight
    assert count.kernels["torch:_fused_adamw_"] == 1
    assert count.kernels["torch:_foreach_norm"] == 2


def test_launches_over_lists():
    small, large = torch.empty(10, device="meta"), torch.empty(65536 * 320, device="meta")
    assert list_launches([[small] * 110]) == 1
    assert list_launches([[small] * 111]) == 2
    assert list_launches([[small] * 65] * 2) == 2
    assert list_launches([[large]]) == 1
    assert list_launches([[large, small]]) == 2


def test_a_training_step_waits_for_nothing_and_starts_at_most_450_kernels():
    """The paper's run: noise, gathering, coupling, network, loss, optimiser. 1,060 kernels and 8 waits before."""
    step = training(3) - training(2)
    assert not step.synchronisations
    assert step.kernels.total() <= 450
    assert step.of("counter_noise") == step.of("unit_rows") == 2
    assert step.of("sinkhorn_kernel") == 1


@pytest.mark.parametrize("resident", [True, False])
def test_pairs_are_kept_on_the_device_or_sent_without_a_wait(monkeypatch, resident):
    if not resident:
        monkeypatch.setattr("geoflow_fast.training.device_rows.RESIDENT_SHARE", 0.0)
    step = training(2, batch_size=64) - training(1, batch_size=64)
    assert not step.synchronisations
    assert step.of("unit_rows") == 2
    # Times, directions and row numbers alone, or the rows too.
    assert (step.copied > 64 * 1024 * 4) != resident


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_guided_velocity_is_at_most_70_kernels_and_never_waits(precision):
    count = launches.sampling(4, precision) - launches.sampling(3, precision)
    assert count.kernels.total() <= 70
    assert not count.synchronisations
    assert count.flops[precision] > 0.99 * sum(count.flops.values())  # but for the shifts and scales of a time


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_likelihood_evaluation_is_at_most_180_kernels_and_never_waits(precision):
    count = launches.likelihood(4, precision) - launches.likelihood(3, precision)
    assert count.kernels.total() <= 180
    assert not count.synchronisations
    assert count.flops[precision] > 0.99 * sum(count.flops.values())  # but for the shifts and scales of a time


def test_a_solve_waits_once_at_its_end():
    """Beside the check of what comes in, a solve of any length asks once whether all states were finite."""
    assert dict(launches.likelihood(2).synchronisations) == {"item": 2}  # of states and of divergences
