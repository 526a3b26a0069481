"""Guards, each with a change that takes it out and a test that must fail then.

`test_mutations.py` applies each change to a copy of the repository. `python -m tests.reliability.mutations` puts
the list into docs/reliability.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.reliability.figures import PAGE, replaced

BEGIN, END = "<!-- guards: begin -->", "<!-- guards: end -->"


@dataclass(frozen=True)
class Guard:
    """What keeps a fault out: `text`, which stands once in `file`, and `without`, the same without it."""

    name: str
    file: str
    text: str
    without: str
    test: str


GUARDS = (
    Guard(
        "arrays are never unpickled",
        "geoflow_fast/data/rows.py",
        'array: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")',
        "array: NDArray[Any] = np.load(path, allow_pickle=True)",
        "tests/reliability/test_untrusted.py::test_a_pickle_in_disguise_is_refused_and_not_executed",
    ),
    Guard(
        "weights of encoders are tensors, not code",
        "geoflow_fast/encoders/open_clip.py",
        'torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))',
        'torch.load(path, map_location="cpu", weights_only=False)',
        "tests/encoders/test_encoders.py::test_wrong_checkpoints_are_refused_and_execute_nothing",
    ),
    Guard(
        "files carry a checksum",
        "geoflow_fast/runtime/files.py",
        "if digest.hexdigest() != expected:",
        "if digest.hexdigest() == '':",
        "tests/retrieval/test_index.py::test_damaged_and_foreign_indexes_are_refused",
    ),
    Guard(
        "a JSON file has a largest size",
        "geoflow_fast/runtime/files.py",
        "if len(text) > JSON_BYTES:",
        "if len(text) > 2 * JSON_BYTES:",
        "tests/reliability/test_untrusted.py::test_json_that_is_none",
    ),
    Guard(
        "sizes of a network have limits",
        "geoflow_fast/flow/model.py",
        "if not least <= value <= most:",
        "if not least <= value:",
        "tests/reliability/test_untrusted.py::test_a_configuration_that_asks_for_the_impossible",
    ),
    Guard(
        "Parquet files may not unpack to far more than their size",
        "geoflow_fast/jobs/job.py",
        "if unpacked > max(PARQUET_BYTES, PARQUET_FACTOR * path.stat().st_size):",
        "if unpacked < 0:",
        "tests/reliability/test_untrusted.py::test_parquet_that_unpacks_to_far_more_than_its_size",
    ),
    Guard(
        "a file is replaced by a rename",
        "geoflow_fast/runtime/files.py",
        "        os.replace(temporary, path)\n",
        "        path.write_bytes(temporary.read_bytes())\n",
        "tests/reliability/test_untrusted.py::test_an_output_that_is_a_link_is_replaced_and_its_target_kept",
    ),
    Guard(
        "a temporary file is a fresh one",
        "geoflow_fast/runtime/files.py",
        "        temporary.unlink(missing_ok=True)\n        # A fresh",
        "        # A fresh",
        "tests/reliability/test_untrusted.py::test_links_in_the_place_of_our_own_files_are_not_followed",
    ),
    Guard(
        "a lock follows no link",
        "geoflow_fast/runtime/files.py",
        "os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC",
        "os.O_RDWR | os.O_CREAT | os.O_CLOEXEC",
        "tests/reliability/test_untrusted.py::test_links_in_the_place_of_our_own_files_are_not_followed",
    ),
    Guard(
        "one writer at a time",
        "geoflow_fast/runtime/files.py",
        "fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(file, fcntl.LOCK_UN)",
        "tests/jobs/test_job.py::test_two_runs_at_once_are_refused",
    ),
    Guard(
        "a job continues its own blocks alone",
        "geoflow_fast/jobs/job.py",
        "if left is not None and left != self.identity:",
        "if left is None and left != self.identity:",
        "tests/jobs/test_job.py::test_another_job_is_refused_or_replaced",
    ),
    Guard(
        "a run is continued by its own settings alone",
        "geoflow_fast/training/loop.py",
        "            if differing:\n",
        "            if differing is None:\n",
        "tests/training/test_training.py::test_another_run_is_not_continued",
    ),
    Guard(
        "a run is continued on its own pairs alone",
        "geoflow_fast/training/loop.py",
        "if info[part] != fingerprint:",
        "if info[part] is None:",
        "tests/training/test_training.py::test_other_validation_pairs_are_not_continued",
    ),
    Guard(
        "a loss that is not finite stops a run",
        "geoflow_fast/training/loop.py",
        "if not (math.isfinite(norm) and math.isfinite(float(total))):",
        "if norm is None:",
        "tests/training/test_training.py::test_divergence_names_the_step_and_keeps_the_checkpoint",
    ),
    Guard(
        "rows on disk are finite and of unit norm",
        "geoflow_fast/data/rows.py",
        "            if bad.any():\n                row = int(bad.argmax())\n                if not",
        "            if bad is None:\n                row = int(bad.argmax())\n                if not",
        "tests/data/test_data.py::test_bad_rows_are_named",
    ),
    Guard(
        "rows in memory are finite and of unit norm",
        "geoflow_fast/geometry.py",
        "    if not bool(bad.any()):\n        return\n",
        "    if bad is not None:\n        return\n",
        "tests/test_geometry.py::test_normalize_names_the_bad_row",
    ),
    Guard(
        "no shard is missing between others",
        "geoflow_fast/data/rows.py",
        "        if number != expected:\n",
        "        if number < 0:\n",
        "tests/data/test_data.py::test_shards_that_do_not_match",
    ),
    Guard(
        "an index belongs to its gallery",
        "geoflow_fast/retrieval/index.py",
        "if self.digest != gallery.digest():",
        "if self.digest is None:",
        "tests/retrieval/test_index.py::test_damaged_and_foreign_indexes_are_refused",
    ),
    Guard(
        "a recipe's names are those of folders",
        "geoflow_fast/evaluation/recipe.py",
        'if self.name in ("", ".", "..") or',
        "if",
        "tests/reliability/test_untrusted.py::test_a_recipe_leads_nowhere_else",
    ),
    Guard(
        "a baseline takes no memory that its file does not hold",
        "geoflow_fast/baselines/base.py",
        '            cls._check_sizes(path, tensors, facts["settings"])\n',
        "",
        "tests/reliability/test_untrusted.py::test_a_baseline_that_asks_for_the_impossible",
    ),
    Guard(
        "images have a largest size",
        "geoflow_fast/encoders/sources.py",
        "if width * height > MAX_PIXELS:",
        "if width * height < 0:",
        "tests/encoders/test_sources.py::test_bad_images_give_a_reason",
    ),
    Guard(
        "links in tar files are not followed",
        "geoflow_fast/encoders/sources.py",
        "if not member.isreg() or member.issparse():",
        "if member.issparse():",
        "tests/encoders/test_sources.py::test_tar_links_are_not_followed",
    ),
    Guard(
        "only plain files are opened as images",
        "geoflow_fast/encoders/sources.py",
        "if not stat.S_ISREG(about.st_mode):",
        "if about is None:",
        "tests/encoders/test_sources.py::test_only_plain_files_are_opened",
    ),
    Guard(
        "memory is checked before a pointer crosses",
        "geoflow_fast/ops/native.py",
        "        if not tensor.is_contiguous():\n",
        "        if tensor is None:\n",
        "tests/ops/test_dispatch.py::test_native_layer_guards_memory_itself",
    ),
    Guard(
        "counts are integers, not NaN",
        "geoflow_fast/runtime/checks.py",
        "    if isinstance(x, bool) or not isinstance(x, (int, np.integer)):\n",
        "    if isinstance(x, bool):\n",
        "tests/reliability/test_fuzz.py::test_counts_are_integers",
    ),
    Guard(
        "SIGTERM saves as Ctrl-C does",
        "geoflow_fast/cli/base.py",
        "        signal.raise_signal(signal.SIGINT)\n",
        "        os._exit(TERMINATED)\n",
        "tests/cli/test_cli.py::test_a_terminated_job_keeps_its_blocks_and_is_continued",
    ),
    Guard(
        "steps that are made again are logged once",
        "geoflow_fast/training/loop.py",
        '            truncate_jsonl(self.path, lambda line: line["step"] <= step)\n',
        "            pass\n",
        "tests/reliability/test_faults.py::test_steps_after_the_checkpoint_are_logged_once",
    ),
    Guard(
        "lines are on disk before the checkpoint",
        "geoflow_fast/training/loop.py",
        "                        metrics.sync()\n",
        "",
        "tests/reliability/test_faults.py::test_lines_are_on_disk_before_the_checkpoint",
    ),
    Guard(
        "a job that was killed at once is not in its own way",
        "geoflow_fast/jobs/embed.py",
        "begun = {LOCK_FILE, temporary_of(self.folder / jobs.FACTS_FILE).name}",
        "begun = {LOCK_FILE}",
        "tests/reliability/test_faults.py::test_killed_before_it_has_said_what_it_is",
    ),
    Guard(
        "a disk without room for the last bytes is heard of",
        "geoflow_fast/runtime/files.py",
        "        file.write(plain.reshape(-1).view(np.uint8).data)\n",
        "        plain.tofile(file)\n",
        "tests/reliability/test_faults.py::test_what_was_there_survives_a_disk_that_refuses",
    ),
    Guard(
        "an error of the disk names the file",
        "geoflow_fast/runtime/files.py",
        "        why = error.strerror or error\n",
        "        raise\n",
        "tests/reliability/test_faults.py::test_what_was_there_survives_a_disk_that_refuses",
    ),
    Guard(
        "a signal ends a job after its block",
        "geoflow_fast/jobs/job.py",
        "                    if world.any(stop.asked):\n",
        "                    if stop is None:\n",
        "tests/reliability/test_faults.py::test_a_signal_finishes_the_unit_saves_and_says_how_it_ended",
    ),
    Guard(
        "noise belongs to the row, not to its place in a piece",
        "geoflow_fast/likelihood/reverse_ode.py",
        "            first = first_row + number * at_once\n",
        "            first = number * at_once\n",
        "tests/reliability/test_determinism.py::test_pieces_change_nothing_but_rounding",
    ),
)


def table() -> str:
    """The list as lines of Markdown."""
    rows = [f"| {guard.name} | `{guard.file}` | `{guard.test.removeprefix('tests/')}` |" for guard in GUARDS]
    return "\n".join(["| Guard | Where | Without it fails |", "|---|---|---|", *rows])


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text(), BEGIN, END, table()))
