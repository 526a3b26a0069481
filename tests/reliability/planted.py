"""Bugs put in by hand: each was once overlooked by every test, and has one now that fails with it.

`test_mutants.py` puts one after the other into the package and runs its test. `python -m tests.reliability.planted`
puts the list into docs/reliability.md; with `--run` it runs the tests instead.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tests.reliability.changed_code import Change, Runner
from tests.reliability.figures import PAGE, replaced

BEGIN, END = "<!-- planted: begin -->", "<!-- planted: end -->"


@dataclass(frozen=True)
class Planted:
    """A bug, by what it does, as a replacement in a file, and the test that notices it."""

    name: str
    file: str
    before: str
    after: str
    test: str

    @property
    def change(self) -> Change:
        """The replacement; the text must occur once in the file."""
        return Change.of_text(self.file, self.before, self.after)


PLANTED = (
    Planted(
        "AB2 weighs velocities as if all steps were equal",
        "geoflow_fast/flow/solvers.py",
        "h / (2 * before) for before, h",
        "h / (2 * h) for before, h",
        "flow/test_solvers.py::test_ab2_is_exact_for_a_speed_that_is_linear_in_time",
    ),
    Planted(
        "the signs that make orthogonal noise uniform are left out",
        "geoflow_fast/noise.py",
        "(q * r.diagonal().sign()).T",
        "(q * r.diagonal().sign().abs()).T",
        "test_noise.py::test_each_point_of_dependent_noise_is_uniform",
    ),
    Planted(
        "the bound on the risk forgets items that were left out",
        "geoflow_fast/retrieval/entropy.py",
        "(post.entropy - post.entropy_bound).clamp_min(0)",
        "post.entropy.clamp_min(0)",
        "retrieval/test_entropy.py::test_the_risk_bound_allows_for_items_that_were_left_out",
    ),
    Planted(
        "the probability of an answer exceeds one where several items are right",
        "geoflow_fast/retrieval/calibration.py",
        "        return (prob * right_per_query).clamp(max=1.0)\n    slope",
        "        return prob * right_per_query\n    slope",
        "retrieval/test_calibration.py::test_no_probability_exceeds_one_where_several_items_are_right",
    ),
    Planted(
        "the relevance of an item exceeds one",
        "geoflow_fast/retrieval/calibration.py",
        "(prob[:, :-1] * self.right_per_query).clamp(max=1.0)",
        "(prob[:, :-1] * self.right_per_query)",
        "retrieval/test_calibration.py::test_no_probability_exceeds_one_where_several_items_are_right",
    ),
    Planted(
        "the probability of an answer exceeds one in comparisons of methods",
        "geoflow_fast/evaluation/methods.py",
        "exp() * right).clamp(max=1.0)",
        "exp() * right)",
        "evaluation/test_methods.py::test_the_probability_of_an_answer_is_at_most_one",
    ),
    Planted(
        "padding of own items counts as item 0",
        "geoflow_fast/retrieval/held_out.py",
        "self.reranker.nearness(queries, items, None), own >= 0, number",
        "self.reranker.nearness(queries, items, None), own >= -1, number",
        "retrieval/test_evidence.py::TestOwnItems::test_padding_is_no_item",
    ),
    Planted(
        "padding of own items leaves item 0 out of the bank",
        "geoflow_fast/retrieval/held_out.py",
        "left_out.scatter_(1, self.own.masked_fill(self.own < 0, len(bank.items)), True)",
        "left_out.scatter_(1, self.own.clamp(min=0), True)",
        "retrieval/test_evidence.py::TestOwnItems::test_padding_leaves_out_no_item_of_the_bank",
    ),
    Planted(
        "padding of own items makes item 0 right for every query of the bank",
        "geoflow_fast/retrieval/held_out.py",
        "member.scatter_(1, own.masked_fill(own < 0, len(self.known_items)), True)",
        "member.scatter_(1, own.clamp(min=0), True)",
        "retrieval/test_evidence.py::TestOwnItems::test_queries_of_which_item_zero_is_not_right_count_in_its_hub_correction",
    ),
    Planted(
        "alternating steps draw new probes, so that the blocks between the streams do not cancel",
        "geoflow_fast/likelihood/reverse_ode.py",
        "self.draws // 2 if alternating else self.draws",
        "self.draws",
        "likelihood/test_probes.py::test_the_blocks_between_the_streams_cancel",
    ),
    Planted(
        "each solve draws probes of its own",
        "geoflow_fast/likelihood/reverse_ode.py",
        "self.probes.draw(number if self.settings.redraw else 0, stream, x)\n            for (_, stream), x",
        "self.probes.draw((number if self.settings.redraw else 0) + 7 * _, stream, x)\n            for (_, stream), x",
        "likelihood/test_probes.py::test_streams_that_do_not_see_each_other_have_no_noise_in_their_information",
    ),
    Planted(
        "validation pairs are not shuffled against directions, which are sorted",
        "geoflow_fast/training/batches.py",
        'index = index[torch.randperm(rows, generator=generator, device="cpu").numpy()]',
        'torch.randperm(rows, generator=generator, device="cpu")',
        "training/test_training.py::test_validation_shows_every_direction_pairs_from_everywhere",
    ),
    Planted(
        "the level of an odd shortlist is that of its larger half",
        "geoflow_fast/retrieval/evidence.py",
        "(among.sum(1, keepdim=True) // 2).clamp(min=1)",
        "((among.sum(1, keepdim=True) + 1) // 2).clamp(min=1)",
        "retrieval/test_calibration.py::test_levels_are_those_of_the_less_near_half",
    ),
    Planted(
        "the level of a shortlist is that of its nearer half",
        "geoflow_fast/retrieval/evidence.py",
        "self.nearness.masked_fill(~among, math.inf).argsort(1)",
        "self.nearness.masked_fill(~among, -math.inf).argsort(1, descending=True)",
        "retrieval/test_calibration.py::test_levels_are_those_of_the_less_near_half",
    ),
    Planted(
        "the interpolant takes the norm of its start for one",
        "geoflow_fast/geometry.py",
        "squared_norm = inner(a, a)",
        "squared_norm = torch.ones_like(inner(a, a))",
        "test_geometry.py::test_the_departure_is_tangent_at_points_whose_norm_is_not_quite_one",
    ),
    Planted(
        "the compiled interpolant takes the norm of its start for one",
        "csrc/cpu/interpolant_rows.h",
        "(sums.sum - sums.difference) / 4 / sums.aa",
        "(sums.sum - sums.difference) / 4",
        "ops/test_masked_interpolant.py::test_rows_of_norm_nearly_one_that_lean_on_all_axes_alike",
    ),
    Planted(
        "the axis at the antipode is half orthogonalised",
        "geoflow_fast/geometry.py",
        "axis - inner(a, axis) / inner(a, a) * a",
        "axis - 0.5 * inner(a, axis) / inner(a, a) * a",
        "test_geometry.py::test_the_way_from_a_point_that_leans_on_all_axes_alike_to_its_antipode",
    ),
    Planted(
        "the compiled axis at the antipode is half orthogonalised",
        "csrc/cpu/interpolant_rows.h",
        "(k == axis ? 1.0 : 0.0) - along * a[k]",
        "(k == axis ? 1.0 : 0.0) - 0.5 * along * a[k]",
        "ops/test_masked_interpolant.py::test_rows_of_norm_nearly_one_that_lean_on_all_axes_alike",
    ),
    Planted(
        "of two tied items the first leaves the list",
        "csrc/cpu/top_items.h",
        "a.score == b.score && a.index < b.index",
        "a.score == b.score && a.index > b.index",
        "ops/test_gallery_search.py::test_of_tied_items_the_last_leaves_the_list",
    ),
    Planted(
        "of two tied items any stays when lists are merged",
        "geoflow_fast/ops/gallery_statistics.py",
        "index, order = index.sort(dim=1)",
        "index, order = index.sort(dim=1, descending=True)",
        "ops/test_gallery_search.py::test_of_tied_items_the_last_leaves_the_list",
    ),
)


def table() -> str:
    """The list as lines of Markdown."""
    rows = [f"| {bug.name} | `{bug.file}` | `{bug.test}` |" for bug in PLANTED]
    return "\n".join(["| Bug | Where | Noticed by |", "|---|---|---|", *rows])


def run() -> None:
    """Puts in one bug after the other and prints what became of it and which test noticed it."""
    runner = Runner()
    for bug in PLANTED:
        plain = runner.run(None, [f"tests/{bug.test}"])
        if plain.noticed:
            raise SystemExit(f"{bug.test} does not pass as it is: {plain}")
        outcome = runner.run(bug.change, [f"tests/{bug.test}"])
        print(f"{outcome.status}: {bug.name}: {outcome.test}", flush=True)


if __name__ == "__main__":
    if "--run" in sys.argv:
        run()
    else:
        PAGE.write_text(replaced(PAGE.read_text(), BEGIN, END, table()))
