"""What one would first write in plain torch: the peers that every user has."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

import geoflow_fast as gf
from geoflow_fast.geometry import exp_map, log_area

Points = tuple[Tensor, Tensor, Tensor, Tensor]
"""image and text of the noise, then of the data."""


def textbook(noise: Tensor, data: Tensor, t: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """The paper's interpolant and target velocity for one stream, as one would first write it."""
    t, given = t[:, None], given[:, None]
    w = torch.acos((noise * data).sum(-1, keepdim=True).clamp(-1, 1))
    sin = torch.sin(w)
    point = torch.sin((1 - t) * w) / sin * noise + torch.sin(t * w) / sin * data
    velocity = w / sin * (torch.cos(t * w) * data - torch.cos((1 - t) * w) * noise)
    return torch.where(given, data, point), torch.where(given, 0, velocity)


def textbook_interpolant(points: Points, t: Tensor, direction: Tensor) -> Points:
    """Points and velocities of both streams."""
    image = textbook(points[0], points[2], t, direction == 1)
    text = textbook(points[1], points[3], t, direction == 2)
    return image[0], text[0], image[1], text[1]


class PlainBlock(nn.Module):
    """One dual-stream block, stream by stream."""

    def __init__(self, config: gf.GeoFlowConfig) -> None:
        super().__init__()
        h, width = config.hidden, config.hidden // config.heads
        self.heads = config.heads
        self.norm = nn.LayerNorm(h, elementwise_affine=False)
        self.first = nn.ModuleList(nn.Linear(h, 2 * h) for _ in range(2))
        self.second = nn.ModuleList(nn.Linear(h, 2 * h) for _ in range(2))
        self.gate = nn.ParameterList(torch.zeros(config.heads, width, width) for _ in range(2))
        self.value = nn.ParameterList(torch.zeros(config.heads, width, width) for _ in range(2))
        self.gate_in = nn.ModuleList(nn.Linear(h, config.inner, bias=False) for _ in range(2))
        self.value_in = nn.ModuleList(nn.Linear(h, config.inner, bias=False) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(config.inner, h, bias=False) for _ in range(2))
        self.scales = nn.ParameterList(torch.zeros(h) for _ in range(4))
        self.dropout = nn.Dropout(config.dropout)

    def per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("bhi,hio->bho", x.view(len(x), self.heads, -1), weight).reshape(x.shape)

    def modulate(self, x: Tensor, c: Tensor, layer: nn.Module) -> Tensor:
        shift, scale = layer(c).chunk(2, dim=-1)
        return self.norm(x) * (1 + scale) + shift

    def forward(self, h: list[Tensor], c: list[Tensor]) -> list[Tensor]:
        x = [self.modulate(h[s], c[s], self.first[s]) for s in range(2)]
        gated = [
            torch.sigmoid(self.per_head(x[s], self.gate[s])) * self.per_head(x[1 - s], self.value[1 - s])
            for s in range(2)
        ]
        h = [h[s] + self.scales[s] * self.dropout(gated[s]) for s in range(2)]
        x = [self.modulate(h[s], c[s], self.second[s]) for s in range(2)]
        fed = [self.out[s](functional.silu(self.gate_in[s](x[s])) * self.value_in[s](x[s])) for s in range(2)]
        return [h[s] + self.scales[2 + s] * self.dropout(fed[s]) for s in range(2)]


class PlainFlow(nn.Module):
    """The same network, written plainly."""

    def __init__(self, flow: gf.GeoFlow) -> None:
        super().__init__()
        config = flow.config
        h = config.hidden
        self.encoders = nn.ModuleList(nn.Sequential(nn.Linear(d, h), nn.LayerNorm(h)) for d in config.flow_dims)
        self.decoders = nn.ModuleList(nn.Sequential(nn.LayerNorm(h), nn.Linear(h, d)) for d in config.flow_dims)
        self.register_buffer("frequencies", flow.conditioning.frequencies.clone())
        self.time, self.direction = nn.Linear(128, h), nn.Embedding(3, h)
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(h, h), nn.SiLU(), nn.Linear(h, h)) for _ in range(2))
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.depth))
        self.copy_weights(flow)

    @torch.no_grad()
    def copy_weights(self, flow: gf.GeoFlow) -> None:
        self.encoders.load_state_dict(flow.encoders.state_dict())
        self.decoders.load_state_dict(flow.decoders.state_dict())
        self.time.load_state_dict(flow.conditioning.time.state_dict())
        self.direction.load_state_dict(flow.conditioning.direction.state_dict())
        for s in range(2):
            for layer, ours in ((0, flow.conditioning.first), (2, flow.conditioning.second)):
                self.mlps[s][layer].weight.copy_(ours.weight[s].T)
                self.mlps[s][layer].bias.copy_(ours.bias[s, 0])
            for number, (plain, block) in enumerate(zip(self.blocks, flow.blocks)):
                weight, bias = flow.modulation.weight[4 * number :, s], flow.modulation.bias[4 * number :, s, 0]
                for half, layer in ((0, plain.first[s]), (2, plain.second[s])):
                    layer.weight.copy_(torch.cat((weight[half], weight[half + 1]), 1).T)
                    layer.bias.copy_(torch.cat((bias[half], bias[half + 1])))
                gate_weight, value_weight = block.cross_weight[s].chunk(2, -1)
                plain.gate[s].copy_(gate_weight)
                plain.value[s].copy_(value_weight)
                gate_in, value_in = block.expand.weight[s].chunk(2, -1)
                plain.gate_in[s].weight.copy_(gate_in.T)
                plain.value_in[s].weight.copy_(value_in.T)
                plain.out[s].weight.copy_(block.contract.weight[s].T)
                plain.scales[s].copy_(block.cross_scale[s, 0])
                plain.scales[2 + s].copy_(block.forward_scale[s, 0])

    def forward(self, image: Tensor, text: Tensor, t: Tensor, direction: Tensor) -> list[Tensor]:
        points, given = (image, text), (direction == 1, direction == 2)
        c = []
        for s in range(2):
            phase = 2 * torch.pi * torch.where(given[s], 0, t)[:, None] * self.frequencies
            features = torch.cat((phase.sin(), phase.cos()), -1)
            c.append(self.mlps[s](self.time(features) + self.direction(direction.long())))
        h = [encoder(x) for encoder, x in zip(self.encoders, points)]
        for block in self.blocks:
            h = block(h, c)
        out = [decoder(x) for decoder, x in zip(self.decoders, h)]
        out = [v - (v * x).sum(-1, keepdim=True) * x for v, x in zip(out, points)]
        return [torch.where(fixed[:, None], 0, v) for v, fixed in zip(out, given)]


def plain_losses(plain: PlainFlow, noise: list[Tensor], data: list[Tensor], t: Tensor, direction: Tensor) -> Tensor:
    """Loss of every row."""
    image, text, v_image, v_text = textbook_interpolant((*noise, *data), t, direction)
    out = plain(image, text, t, direction)
    return (out[0] - v_image).square().sum(1) + (out[1] - v_text).square().sum(1)


def guided(flow: PlainFlow, queries: Tensor, noise: Tensor, guidance: float) -> Callable[[Tensor, float], Tensor]:
    """(images [Q M, d], t) -> their guided velocity for texts [Q, d], in two passes; `noise` [M, d] is what the
    unconditional one sees."""
    text, free = queries.repeat_interleave(len(noise), 0), noise.repeat(len(queries), 1)
    direction = torch.full((len(text),), 2, dtype=torch.int8)

    def velocity(x: Tensor, t: float) -> Tensor:
        times = torch.full((len(x),), float(t))
        conditional, unconditional = (flow(x, given, times, direction)[0] for given in (text, free))
        return conditional + guidance * (conditional - unconditional)

    return velocity


@torch.no_grad()
def plain_samples(
    flow: PlainFlow, queries: Tensor, start: Tensor, noise: Tensor, steps: int, guidance: float
) -> Tensor:
    """Images [Q, M, d] for texts [Q, d] by Euler steps along great circles, every query from `start` [M, d]."""
    velocity, x = guided(flow, queries, noise, guidance), start.repeat(len(queries), 1)
    for step in range(steps):
        v = velocity(x, step / steps) / steps
        angle = v.norm(dim=1, keepdim=True)
        x = torch.cos(angle) * x + torch.sin(angle) * v / angle
        x = x / x.norm(dim=1, keepdim=True)
    return x.view(len(queries), len(start), -1)


def autograd_log_density(
    plain: PlainFlow, image: Tensor, text: Tensor, code: int, steps: int, probes: Callable[[int, int, Tensor], Tensor]
) -> Tensor:
    """What one would first write: Euler back from t=1, one vector-Jacobian product a step, a time for every row."""
    points, rows = [image, text], len(image)
    moving = {0: (0, 1), 1: (1,), 2: (0,)}[code]
    direction = torch.full((rows,), code, dtype=torch.int8)
    total = torch.full((rows,), -sum(log_area(points[s].shape[1]) for s in moving), dtype=torch.float64)
    for step in range(steps):
        points = [x.detach().requires_grad_() for x in points]
        velocity = plain(*points, torch.full((rows,), 1 - step / steps), direction)
        probe = {s: probes(step, s, points[s].detach()) for s in moving}
        along = sum((velocity[s] * probe[s]).sum() for s in moving)
        pulled = torch.autograd.grad(along, [points[s] for s in moving])
        total -= sum((g * probe[s]).sum(1).double() for s, g in zip(moving, pulled)) / steps
        for s in moving:
            points[s] = exp_map(points[s].detach(), -velocity[s].detach() / steps)
    return total


def signs(_step: int, _stream: int, x: Tensor) -> Tensor:
    """The paper's probes: random signs, projected."""
    e = torch.randint(0, 2, x.shape).to(x.dtype).mul_(2).sub_(1)
    return e - (e * x).sum(1, keepdim=True) * x


def autograd_score(plain: PlainFlow, image: Tensor, text: Tensor, steps: int) -> Tensor:
    """The epistemic score from three solves."""
    joint, i2t, t2i = (autograd_log_density(plain, image, text, code, steps, signs) for code in range(3))
    return i2t + t2i - 2 * joint


def torch_cost(points: Points) -> Tensor:
    """Sum of the two arc lengths, with one temporary."""
    image0, text0, image1, text1 = points
    cost = torch.mm(image0, image1.T).clamp_(-1, 1).acos_()
    return cost.add_(torch.mm(text0, text1.T).clamp_(-1, 1).acos_())


def torch_kernel_domain(points: Points, iterations: int, eps: float) -> Tensor:
    """Kernel-domain Sinkhorn as one writes it."""
    image0, text0, image1, text1 = points
    cost = torch.acos((image0 @ image1.T).clamp(-1, 1)) + torch.acos((text0 @ text1.T).clamp(-1, 1))
    kernel = torch.exp((math.pi - cost) / eps)
    return _scale(kernel, iterations)


def torch_kernel_in_place(points: Points, iterations: int, eps: float) -> Tensor:
    """The same without any avoidable allocation or copy."""
    kernel = torch_cost(points).neg_().add_(math.pi).div_(eps).exp_()
    return _scale(kernel, iterations)


def _scale(kernel: Tensor, iterations: int) -> Tensor:
    n = kernel.shape[0]
    v = torch.ones(n)
    for _ in range(iterations):
        u = 1 / (n * (kernel @ v))
        v = 1 / (n * (kernel.T @ u))
    return kernel.mul_(v).argmax(1)


def torch_log_domain(points: Points, iterations: int, eps: float) -> Tensor:
    """Log-domain Sinkhorn."""
    score = torch_cost(points).neg_().div_(eps)
    log_n = math.log(score.shape[0])
    g = torch.zeros(score.shape[1])
    for _ in range(iterations):
        f = -torch.logsumexp(score + g, 1) - log_n
        g = -torch.logsumexp(score + f[:, None], 0) - log_n
    return score.add_(g).argmax(1)


def entropy_of(score: Tensor) -> Tensor:
    """Of the softmax over the items: [Q]."""
    log_pi = torch.log_softmax(score, dim=1)
    return -(log_pi.exp() * log_pi).sum(1)


def dense_entropy(samples: Tensor, gallery: Tensor, kappa: float) -> Tensor:
    """Retrieval entropies [Q] of samples [Q, M, d], with all scores in memory."""
    logits = kappa * torch.einsum("qmd,nd->qmn", samples, gallery)
    return entropy_of(torch.logsumexp(logits, dim=1))


def chunked_entropy(samples: Tensor, gallery: Tensor, kappa: float, chunk: int = 2048) -> Tensor:
    """The same, `chunk` items at a time."""
    flat, shape = samples.flatten(0, 1), samples.shape[:2]
    scores = []
    for items in gallery.split(chunk):
        logits = (flat @ items.to(flat.dtype).T).mul_(kappa).view(*shape, -1)
        scores.append(torch.logsumexp(logits, 1))
    return entropy_of(torch.cat(scores, 1))


def chunked_entropy_in_place(samples: Tensor, gallery: Tensor, kappa: float, chunk: int = 2048) -> Tensor:
    """The same without any avoidable allocation."""
    flat, shape, scores = samples.flatten(0, 1), samples.shape[:2], []
    for items in gallery.split(chunk):
        logits = (flat @ items.T).mul_(kappa).view(*shape, -1)
        peak = logits.amax(1, keepdim=True)
        scores.append(logits.sub_(peak).exp_().sum(1).log_().add_(peak.squeeze(1)))
    return entropy_of(torch.cat(scores, 1))


def chunked_search(queries: Tensor, gallery: Tensor, k: int, chunk: int = 16_384) -> Tensor:
    """Rows [Q, k] of the gallery with the largest cosines."""
    best, index = [], []
    for first, items in enumerate(gallery.split(chunk)):
        nearest = (queries @ items.to(queries.dtype).T).topk(k)
        best.append(nearest.values)
        index.append(nearest.indices + first * chunk)
    return torch.cat(index, 1).gather(1, torch.cat(best, 1).topk(k).indices)
