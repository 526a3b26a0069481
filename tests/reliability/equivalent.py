"""Mutants that compute the same as the source, or differ only in time, by name, each with the reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Equivalent:
    """The file of the core and the line that a mutant changes, and why no test can tell it from the source."""

    file: str
    line: str
    why: str


EQUIVALENT: dict[str, Equivalent] = {
    "2b37e3ee96": Equivalent(
        "geoflow_fast/decisions/drift.py",
        "weighted = sparse.csr_matrix(listed @ sparse.diags(1 / np.maximum(np.asarray(listed.sum(0)).ravel(), 1)))",
        "an item that one query alone has counts for no other fold, so that its weight is never used",
    ),
    "5cd4c01d76": Equivalent(
        "geoflow_fast/geometry.py",
        "far = w > math.pi / 2",
        "between pi/3 and pi/2 both forms of the departure hold and differ by rounding alone",
    ),
    "45c7d4b998": Equivalent(
        "geoflow_fast/ops/masked_interpolant.py",
        "return bad_row if arguments[-1] else -1",
        "any negative number says that no row is bad",
    ),
    "48a38599d1": Equivalent(
        "geoflow_fast/likelihood/density.py",
        "others = _marginals(field, given.queries(image, text), partners, given, settings, "
        "seed if nearest else seed + 1)",
        "the seed of the other marginal must differ from that of the first, and any other number does",
    ),
    "8402ae5d89": Equivalent(
        "geoflow_fast/ops/transport_solvers.py",
        "while now > 2 * least and min(stage, total - done) > 0:",
        "it differs only if one number is exactly twice another, and then by one stage of a warm start",
    ),
    "e50077af8a": Equivalent(
        "geoflow_fast/ops/transport_solvers.py",
        "most = most - 1 if self.stage.eps == self._settings.eps else min(most - 1, self.iterations + most // 16)",
        "it decides after how many iterations float64 takes over, which ends with the same plan",
    ),
    "c1ea9694b5": Equivalent(
        "geoflow_fast/retrieval/evidence.py",
        "while float(after := total(weights - size * step)) > float(loss) - 1e-4 * size * decrease:",
        "the constant of a line search: any small number leads to the same optimum",
    ),
    "0c2305df40": Equivalent(
        "geoflow_fast/retrieval/calibration.py",
        "return (logit, against, constant) if gain > stderr and logit + against > 0 else None",
        "it differs only if two fitted numbers are exactly opposite",
    ),
    "c7eb34e794": Equivalent(
        "geoflow_fast/retrieval/rerank.py",
        "if not len(few) or hits <= length:",
        "where the whole gallery is listed already it is searched once more, with the same result",
    ),
    "deb6e59344": Equivalent(
        "geoflow_fast/retrieval/copies.py",
        "near &= (seen[axis, :, step:] - seen[axis, :, :-step]).abs() <= farthest",
        "it differs only if a measured distance equals the limit to the last bit",
    ),
    "5ce40f2cd5": Equivalent(
        "geoflow_fast/decisions/certify.py",
        "return int(np.searchsorted(np.cumsum(self.prob), confidence - 1e-12))",
        "a tolerance of rounding, which sums of probabilities exceed by far or not at all",
    ),
    "53890cd31b": Equivalent(
        "geoflow_fast/evaluation/statistics.py",
        "return np.clip(stats.pearsonr(x, y, axis=-1).statistic, -1, 1)",
        "scipy keeps correlations between -1 and 1 itself",
    ),
    "c9b08e7914": Equivalent(
        "csrc/cpu/network_rows.h",
        "x = x > 88.0f ? 88.0f : x;",
        "at the limit both branches give the limit",
    ),
    "358ef7adfd": Equivalent(
        "kernels/geodesic.py",
        "inverse = 1.0 / tl.maximum(aa, 1e-30)",
        "it keeps a division by zero away from rows of zeros, which are refused",
    ),
    "9ab430c34d": Equivalent(
        "kernels/network.py",
        "factor = 1.0 + tl.load(scale + parameter, mask=present, other=0.0).to(tl.float32)[None, :]",
        "it fills lanes past the end of a row, which are never stored",
    ),
    "e6874d206f": Equivalent(
        "csrc/cpu/search_rows.h",
        "return least(1024, most(4 * kLanes, geoflow::caches().second / 4 / row_bytes / kLanes * kLanes));",
        "it decides how many items are scored at a time, and results do not depend on that",
    ),
    "e0cab1cb0e": Equivalent(
        "geoflow_fast/retrieval/sources.py",
        "bias = points.log_weights + math.log(points.points.shape[1])",
        "a constant that all items of a query share cancels in its posterior",
    ),
    "e84440d00e": Equivalent(
        "geoflow_fast/retrieval/held_out.py",
        "keys, member = torch.unique(fold.unsqueeze(1) * span + near.number + 1, return_inverse=True)",
        "all keys are moved by the same number, and only their equality counts",
    ),
    "a665b6be7d": Equivalent(
        "csrc/cpu/gemm_rows.h",
        "for (std::int64_t r = i + ahead; r < i + ahead + count; ++r) {",
        "it decides which cache lines are asked for ahead of time",
    ),
    "ba8e03be15": Equivalent(
        "geoflow_fast/flow/sampling.py",
        "numbers = 2 * (8 * config.hidden + 3 * config.inner) + 8 * sum(config.flow_dims)",
        "it decides how many rows are computed at once, and results do not depend on that",
    ),
    "e7165ed504": Equivalent(
        "kernels/probes.py",
        "sign = tl.where(along > 0, 1.0, tl.where(along < 0, -1.0, 0.0))",
        "the projection is zero only where there is no direction yet, and then it multiplies zero",
    ),
    "64bdf7aa50": Equivalent(
        "geoflow_fast/decisions/watch.py",
        "last = int(reference.row.max(initial=-1))",
        "the number for a rule without judged rows is below zero either way, and every table has more rows",
    ),
    "b6177086bd": Equivalent(
        "csrc/cpu/search_codes.cpp",
        "const Scratch packed_room(few ? 0 : padded * stride / 4);",
        "it reserves 16 times the room that the packed queries take, and writes the same part of it",
    ),
    "9fd75f1e23": Equivalent(
        "csrc/cpu/gemm_rows.h",
        "for (std::int64_t c = 0; c < depth_; c += line) __builtin_prefetch(row + c, 0, 2);",
        "it asks for one more cache line of a row ahead of time, which no result depends on",
    ),
    "6b851e97a1": Equivalent(
        "csrc/cpu/gemm_rows.h",
        "last_width = columns <= kFewColumns ? kFewColumns : vectors * kLanes - (strips - 1) * kStripColumns;",
        "eight columns are multiplied as a vector of 16 with zeros behind them, which gives the same sums",
    ),
    "4bf7baaab7": Equivalent(
        "csrc/cpu/gemm_rows.h",
        "static constexpr bool kCopied = !std::is_same<Element, float>::value || kLanes == 16;",
        "with 16 lanes rows of floats are read where they lie instead of copied, for the same sums; with eight lanes "
        "it does not compile",
    ),
    "a5a7d36c6e": Equivalent(
        "csrc/cpu/gallery_tiles.h",
        "for (std::int64_t query = 0; query < params_.queries; query += scorer_.block_queries())",
        "where the queries fill their last block, another one of no queries follows, which adds nothing to any",
    ),
    "6c151610bb": Equivalent(
        "kernels/network.py",
        "tangent += along_gate * tl.load(d_gate + there, mask=valid, other=0.0).to(tl.float32)",
        "it fills lanes past the end of a row, which are never stored",
    ),
    "b3a7e70aa9": Equivalent(
        "csrc/cpu/interpolant_rows.h",
        "for (; k + kLanes <= width; k += kLanes) store_past_cache(out + k, vp * load(a + k) + vq * load(b + k));",
        "the last vector of a row is left to the loop over single entries, which computes the same products and sums",
    ),
    "919fc4de2e": Equivalent(
        "csrc/cpu/search_rows.h",
        "return kLanes == 16 ? (part[0] + part[2 % (kLanes / 4)]) + (part[1] + part[3 % (kLanes / 4)]) : "
        "part[0] + part[1];",
        "3 modulo 64 is 3, as is 3 modulo 4, and with eight lanes the expression is not evaluated",
    ),
    "5f80eef993": Equivalent(
        "geoflow_fast/manifolds.py",
        'return tangent_stage_rows(x, at, v.v, h, v.free, v.guidance, None, 0.0, "auto")[0]',
        "without a total there is nothing that its weight could multiply",
    ),
    "efa95655ed": Equivalent(
        "geoflow_fast/flow/sampling.py",
        "at_once = network_rows_at_once(flow, start[0], n)",
        "of the tensor only the device is read, and both streams are on the same one",
    ),
    "cc91513c01": Equivalent(
        "geoflow_fast/flow/sampling.py",
        "numbers = 2 * (8 * config.hidden + 3 * config.inner) + 8 * sum(config.flow_dims)",
        "it estimates the memory of a row, by which only GPUs choose how many rows they take at once",
    ),
    "7f0accf9f7": Equivalent(
        "geoflow_fast/flow/forward_mode.py",
        "product_into(out.view(2, counts[0], -1), x.view(2, counts[0], -1), weight)",
        "in this branch both streams have the same number of rows",
    ),
    "cecf17fe21": Equivalent(
        "geoflow_fast/flow/forward_mode.py",
        "product_into(out.view(2, counts[0], -1), x.view(2, counts[0], -1), weight)",
        "in this branch both streams have the same number of rows",
    ),
    "9c4860168f": Equivalent(
        "geoflow_fast/ops/gallery_search.py",
        "left = (kept < top_k).nonzero()[:, 0]",
        "where exactly as many items were scored as are asked for they are searched once more, with the same result",
    ),
    "c42c1e596e": Equivalent(
        "geoflow_fast/decisions/trust.py",
        'share = 0.0 if isinstance(no_match_share, str) else checks.number(no_match_share, "no_match_share", 0, 0.99)',
        "a share that is to be estimated comes with live lists, and beside these the number is never read",
    ),
    "7ef3bca8a2": Equivalent(
        "geoflow_fast/decisions/drift.py",
        "size = 4 * ENOUGH",
        "permutations are drawn one after another however many are drawn at once, so that the p-value of a test is the "
        "same, and only those that later tests draw are others",
    ),
    "0a426bb0dc": Equivalent(
        "geoflow_fast/retrieval/copies.py",
        "farthest = DISTANCE * min(1.0, DEVIATIONS / items.shape[2] ** 0.5) + ROUNDING",
        "with a wider limit more pairs of items are compared by their cosine, which decides",
    ),
    "36b6f49b6b": Equivalent(
        "geoflow_fast/retrieval/no_match.py",
        "loss = torch.full((2 * count,), math.log(2.0), dtype=torch.float64, device=group.device)",
        "the first features are used whatever they gain, and their loss replaces this one",
    ),
    "b3e4089351": Equivalent(
        "geoflow_fast/head/fitting.py",
        "image, text = (x.to(self.device, non_blocking=True) for x in self.pairs[index])",
        "it decides whether the host waits for a copy to a GPU, and the rows are the same",
    ),
    "de0ccffae0": Equivalent(
        "geoflow_fast/head/fitting.py",
        "chosen = np.sort(np.random.default_rng((seed, 3)).permutation(len(pairs))[:rows])",
        "a random draw of its own, for which any number serves that no other draw of the head has",
    ),
    "64c4d77a56": Equivalent(
        "geoflow_fast/head/loss.py",
        "step = rows_at_once(points.device, 2 * points.element_size() * products, max(1, TILE // products))",
        "it decides how many queries a GPU scores at a time, and results do not depend on that",
    ),
    "47c77e3416": Equivalent(
        "geoflow_fast/evaluation/metrics.py",
        "value = np.where(np.isfinite(value).all(-1, keepdims=True), value, math.nan)",
        "the correlation of numbers of which one is not finite is NaN by itself",
    ),
    "c5e9363000": Equivalent(
        "csrc/cpu/gemm_rows.h",
        "const std::int64_t ahead = !kCopied ? count : is_last ? kPanelRows : 0, k = !kCopied ? k_ : is_last "
        "? 0 : k_ + depth_;",
        "it decides which cache lines are asked for ahead of time",
    ),
    "ac4c5a3dc3": Equivalent(
        "csrc/cpu/gemm_rows.h",
        "for (std::int64_t r = i + ahead; r < i + ahead + count; ++r) {",
        "it decides which cache lines are asked for ahead of time",
    ),
    "b83ab6d547": Equivalent(
        "kernels/network.py",
        "before = tl.load(residual + row[:, None] * residual_stride + column[None, :], mask=valid, "
        "other=0.0).to(tl.float32)",
        "it fills lanes past the end of a row, which are never stored",
    ),
    "446cd0542d": Equivalent(
        "geoflow_fast/ops/swiglu.py",
        "d_value = native.empty_rows(*(gate.shape if value is not None else (0,)))",
        "it stands for the gradient of an absent argument, and nobody reads it",
    ),
    "0939d0d0d8": Equivalent(
        "csrc/cpu/top_items.h",
        "return a.score > b.score || (a.score == b.score && a.index < b.index);",
        "no two candidates of a list have the same index",
    ),
    "8bae622004": Equivalent(
        "csrc/cpu/sinkhorn_passes.h",
        "range.low = low < range.low ? low : range.low;",
        "of two equal numbers either one is the smaller",
    ),
    "b46bab4713": Equivalent(
        "geoflow_fast/flow/forward_mode.py",
        "return shift.to(self.work), scale.to(self.work) - 1, norms[0].eps",
        "both norms of a pair have the same eps",
    ),
    "f56582490f": Equivalent(
        "geoflow_fast/flow/forward_mode.py",
        "with torch.autocast(self.device.type, enabled=False), tf32_products(self.tf32):",
        "autocast changes nothing that is called inside: all products write to memory that is given",
    ),
    "f37038edaf": Equivalent(
        "geoflow_fast/likelihood/probes.py",
        "for _ in range(1 if 2 * len(frame) < vector.shape[-1] else 2):",
        "it decides from when on vectors are made orthogonal twice, which differs by rounding",
    ),
    "c5c572cda3": Equivalent(
        "geoflow_fast/ops/transport_solvers.py",
        "g.copy_(eps * (math.log(goal) - self._column_logsumexp(f, eps)))",
        "a constant that all columns share is taken up by the potentials of the rows",
    ),
}
