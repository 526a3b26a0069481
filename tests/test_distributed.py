"""Several ranks give what one process gives, count what they send, and end when one of them is lost."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.run
import typer

import geoflow_fast as gf
from geoflow_fast import geometry as g
from geoflow_fast.cli.app import app
from geoflow_fast.data.rows import Rows
from geoflow_fast.distributed import ALONE, LOST_SECONDS, RankLost, joined
from geoflow_fast.jobs.entropy import preferred_layout
from geoflow_fast.noise import sample_uniform
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.runtime.parquet import read_columns
from geoflow_fast.training.batches import BatchMaker
from tests import ranks
from tests.ranks import ended, run_ranks
from tests.samples import shaken

QUERIES, ITEMS, PAIRS = 23, 61, 26

Undisturbed = Callable[[str], dict[str, object]]


@pytest.fixture
def folder(tmp_path, flow) -> Path:
    put_inputs(tmp_path, flow)
    return tmp_path


def put_inputs(folder: Path, flow: gf.GeoFlow) -> None:
    """Writes a flow, queries, a gallery in three shards and pairs to `folder`."""
    image_dim, text_dim = flow.config.image_dim, flow.config.text_dim
    flow.save_pretrained(folder / "model")
    np.save(folder / "queries.npy", sample_uniform(QUERIES, text_dim).numpy())
    (folder / "gallery").mkdir()
    for number, part in enumerate(np.array_split(sample_uniform(ITEMS, image_dim).numpy(), 3)):
        np.save(folder / "gallery" / f"img_emb_{number}.npy", part)
    pairs = gf.EmbeddingPairs.from_arrays(sample_uniform(PAIRS, image_dim), sample_uniform(PAIRS, text_dim))
    pairs.save(folder / "pairs", dtype=np.float32)


def assert_same_file(actual: Path, expected: Path) -> None:
    """Integers must be equal, other numbers to 1e-5."""
    mine, theirs = read_columns(actual), read_columns(expected)
    assert list(mine) == list(theirs)
    for name, column in theirs.items():
        ours, wanted = (np.stack(list(x)) for x in (mine[name], column))
        np.testing.assert_allclose(ours, wanted, rtol=0 if wanted.dtype.kind == "i" else 1e-5, atol=1e-5, err_msg=name)


# ---- the calls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_every_call_gives_what_it_promises(size):
    results = run_ranks(size, ranks.use_every_call)
    together = [sum(range(size)), -sum(range(size))]
    for rank, result in enumerate(results):
        assert result["shared"] == {"from": 0, "none": None}
        assert result["sum"] == together
        assert result["max"] == [size - 1, 0]
        assert result["min"] == [0, 1 - size]
        assert result["broadcast"] == 5
        assert result["mean"] == 1.0
        assert result["added"] == size * (size + 1) // 2
        for count in (0, 1, 7):
            own = list(range(count * rank // size, count * (rank + 1) // size))
            assert result[f"swapped {count}"] == [[100.0 * other + row for row in own] for other in range(size)]
        assert result["gathered 1"] == [0.0]
        assert result["gathered 7"] == list(map(float, range(7)))
    assert sorted(number for result in results for number in result["claimed"]) == list(range(9))


def test_one_process_needs_no_torchrun(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined() as world:
        assert (world.rank, world.size, world.is_main) == (0, 1, True)
        assert ranks.use_every_call(world)["gathered 7"] == list(map(float, range(7)))
        assert list(world.claims(3)) == [0, 1, 2]
        assert world.traffic == 0
    assert not torch.distributed.is_initialized()


@pytest.fixture
def torchrun_environment(monkeypatch) -> pytest.MonkeyPatch:
    """Sets what torchrun sets for the second of two ranks; the first rank never comes."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
    for name, text in (("WORLD_SIZE", "2"), ("RANK", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, text)
    monkeypatch.setattr("geoflow_fast.distributed.JOIN_SECONDS", 1.0)
    return monkeypatch


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_an_incomplete_environment_is_an_error(torchrun_environment, name):
    torchrun_environment.delenv(name)
    with pytest.raises(OSError, match=rf"{name}.* is not set.*torchrun"), joined():
        pytest.fail("it joined other ranks")


NOT_NUMBERS = ("x", "", "-1", "1.0", "nan", " ", "²", "1\n", "9" * 5000)
OUT_OF_RANGE = [("WORLD_SIZE", "0"), ("RANK", "2"), ("MASTER_PORT", "0"), ("MASTER_PORT", "65536")]


@pytest.mark.parametrize(
    ("name", "value"),
    [*((name, value) for name in ("WORLD_SIZE", "RANK", "MASTER_PORT") for value in NOT_NUMBERS), *OUT_OF_RANGE],
    ids=lambda text: text[:12],
)
def test_an_error_names_the_wrong_variable_of_the_environment(torchrun_environment, name, value):
    """With a wrong rank or port torch would wait until the time is up."""
    torchrun_environment.setenv(name, value)
    with pytest.raises(ValueError, match=rf"environment variable {name} must be an integer.*torchrun"), joined():
        pytest.fail("it joined other ranks")
    assert not torch.distributed.is_initialized()


@pytest.mark.usefixtures("torchrun_environment")
def test_a_rank_that_does_not_come_is_an_error():
    with pytest.raises(OSError, match=r"could not join the other ranks.*torchrun"), joined():
        pytest.fail("it joined other ranks")


# ---- galleries ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "queries", "items", "top_k"), [(2, 1, 97, 5), (4, 7, 130, 10), (4, 3, 3, 5)])
def test_divided_gallery_has_the_statistics_of_all_items(size, queries, items, top_k):
    """This holds with fewer items than ranks, fewer items than top_k on a rank, and fewer queries than ranks, too."""
    samples, bias = ranks.sample_rows(queries), ranks.bias_of(items)
    weights = ranks.sample_bias_of(queries)
    expected = Gallery(ranks.gallery_rows(items)).statistics(samples, 20.0, top_k, bias, sample_bias=weights)
    names = ("peak", "weight", "moment", "top_score", "top_index")
    for statistics, _ in run_ranks(size, ranks.divided_statistics, queries, items, top_k):
        for name, field in zip(names, statistics):
            np.testing.assert_allclose(field, getattr(expected, name).numpy(), rtol=1e-6, atol=1e-6, err_msg=name)


def test_traffic_of_a_query_block_does_not_depend_on_the_gallery():
    """Twice the queries cost twice the bytes; a hundred times the items cost not one byte more."""

    def traffic(queries: int, items: int) -> int:
        (_, bytes_0), (_, bytes_1) = run_ranks(2, ranks.divided_statistics, queries, items, 5)
        assert bytes_0 == bytes_1
        return int(bytes_0)

    small = traffic(8, 50)
    assert traffic(8, 5000) == small
    assert traffic(16, 50) == 2 * small
    # For each query a row of 3 + 2 top_k doubles is sent and received, then half of the rows sent and all received.
    assert small == 8 * 8 * (3 + 2 * 5) * 7 // 2


def test_digest_does_not_depend_on_ranks_or_reading():
    parts = [sample_uniform(rows, 4).numpy() for rows in (9000, 1, 300)]
    one = Rows(parts, "rows").digest()
    assert set(run_ranks(3, ranks.digest_of, parts)) == {one}
    parts[2][299, 3] += 1e-3
    assert Rows(parts, "rows").digest() != one
    assert Rows([np.concatenate(parts)], "rows").digest() != Rows(parts, "rows").digest()


def test_a_bad_row_is_found_by_the_rank_that_reads_it():
    rows = sample_uniform(40, 4).numpy()
    rows[33] *= 2
    errors = run_ranks(2, ranks.check_rows, rows)
    assert errors[0] is None
    assert "row 33 has norm 2" in errors[1]


# ---- jobs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "layout"), [(2, "gallery"), (2, "queries"), (4, "gallery"), (4, "auto")])
def test_scores_of_ranks_are_those_of_one_process(folder, size, layout):
    ranks.score(ALONE, folder, "one.parquet", "auto")
    run_ranks(size, ranks.score, folder, "many.parquet", layout)
    assert_same_file(folder / "many.parquet", folder / "one.parquet")
    assert not (folder / "many.parquet.blocks").exists()
    # The job has the facts of one process, so its output counts as finished for any number of ranks.
    before = (folder / "many.parquet").stat().st_mtime_ns
    ranks.score(ALONE, folder, "many.parquet", "auto")
    assert (folder / "many.parquet").stat().st_mtime_ns == before


def test_the_layout_depends_on_memory_and_blocks():
    assert preferred_layout(10, 20, 4, 4) == "queries"
    assert preferred_layout(11, 20, 4, 4) == "gallery"
    assert preferred_layout(10, 20, 3, 4) == "gallery"


def test_layout_must_be_known(folder):
    with pytest.raises(ValueError, match="layout must be one of auto, gallery, queries"):
        ranks.score(ALONE, folder, "one.parquet", "rows")


@pytest.mark.parametrize("layout", ["gallery", "queries"])
def test_killed_rank_ends_the_others_and_another_run_finishes(folder, layout):
    ranks.score(ALONE, folder, "one.parquet", "auto")
    start = time.monotonic()
    main, killed = run_ranks(2, ranks.score, folder, "many.parquet", layout, 2, (1, 3), raising=False)
    assert time.monotonic() - start < 60
    assert killed is None
    assert isinstance(main, RankLost)
    assert "rank 0 of 2" in str(main)
    assert "the same command continues" in str(main)
    kept = len(list((folder / "many.parquet.blocks").glob("*.parquet")))
    assert kept >= 3
    assert not (folder / "many.parquet").exists()
    run_ranks(3 if layout == "gallery" else 1, ranks.score, folder, "many.parquet", layout, 2)
    assert_same_file(folder / "many.parquet", folder / "one.parquet")


def test_densities_of_ranks_with_a_slow_one(folder):
    """The other rank makes more blocks while the slow one is at work."""
    ranks.densities(ALONE, folder, "one.parquet")
    made = run_ranks(2, ranks.densities, folder, "many.parquet", 1)
    assert_same_file(folder / "many.parquet", folder / "one.parquet")
    assert sorted(made[0] + made[1]) == list(range(0, PAIRS, 4))
    assert len(made[0]) > len(made[1])


def test_reranking_by_ranks_is_that_of_one_process(tmp_path):
    """One of the ranks makes the calibration."""
    flow = shaken(gf.GeoFlow(gf.GeoFlowConfig(7, 7, hidden=16, depth=1, layer_scale=0.5)))
    put_inputs(tmp_path, flow)
    image = sample_uniform(80, 7)
    held_out = gf.EmbeddingPairs.from_arrays(image, g.normalize(image + 0.2 * torch.randn_like(image)))
    held_out.save(tmp_path / "held_out", dtype=np.float32)
    ranks.rerank(ALONE, tmp_path, "one.parquet")
    run_ranks(2, ranks.rerank, tmp_path, "many.parquet")
    assert_same_file(tmp_path / "many.parquet", tmp_path / "one.parquet")


# ---- training -----------------------------------------------------------------------------------------------------


RULES = [
    {},
    {"coupling": "sample"},
    {"coupling": "exact", "conditional_coupling": "c2ot"},
    {"conditional_coupling": "paper"},
]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("changes", RULES)
def test_ranks_make_the_batch_of_one_process(changes, size):
    """Each has every `size`-th row, with the bits of the batch of one process; a rank sends nothing."""
    whole = ranks.batch_of(0, 1, changes, 40)
    assert sum(whole.counts) == 64
    for rank in range(size):
        part = ranks.batch_of(rank, size, changes, 40)
        for name in ("image", "text", "v_image", "v_text", "t", "codes"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[rank::size]), name


def test_ranks_validate_on_the_rows_of_one_process():
    makers = [
        BatchMaker(ranks.small_flow(), ranks.small_pairs(), gf.TrainConfig(**ranks.SHORT), *who)
        for who in ((0, 1), (0, 3), (1, 3), (2, 3))
    ]
    whole, *parts = (maker.validation(ranks.small_pairs(), 2) for maker in makers)
    for rank, part in enumerate(parts):
        for name in ("image", "text", "v_image", "v_text", "t", "codes"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[rank::3]), name


def losses_of(folder: Path) -> dict[str, np.ndarray]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "loss", "loss_i2t", "loss_joint", "loss_t2i", "gradient_norm", "val_loss")
    return {name: np.array([line[name] for line in lines if name in line]) for name in names}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_train_like_one_process(tmp_path, size):
    """The losses of 50 steps agree to 1e-5 and are logged once; all ranks end with the same bits."""
    one = ranks.train_small(ALONE, tmp_path / "one", {"ema_decay": 0.9})
    many = run_ranks(size, ranks.train_small, tmp_path / "many", {"ema_decay": 0.9})
    expected, losses = losses_of(tmp_path / "one"), losses_of(tmp_path / "many")
    assert list(losses["step"]) == list(range(51))
    for name, values in expected.items():
        np.testing.assert_allclose(losses[name], values, rtol=1e-5, err_msg=name)
    assert all(np.array_equal(rank["weights"], many[0]["weights"]) for rank in many)
    assert many[0]["best"] == pytest.approx(one["best"], rel=1e-5)
    np.testing.assert_allclose(many[0]["weights"], one["weights"], atol=1e-4)


@pytest.mark.slow
def test_killed_rank_in_training_and_a_continuation_on_more(tmp_path):
    """A rank is killed at step 24; first two and then four ranks continue from the last checkpoint."""
    run_ranks(2, ranks.train_small, tmp_path / "whole", {})
    start = time.monotonic()
    main, killed = run_ranks(2, ranks.train_small, tmp_path / "run", {}, (1, 24), raising=False)
    assert time.monotonic() - start < 60
    assert killed is None
    assert isinstance(main, RankLost)
    run_ranks(2, ranks.train_small, tmp_path / "run", {}, (0, 34), raising=False)
    (finished, *_) = run_ranks(4, ranks.train_small, tmp_path / "run", {})
    assert finished["finished"]
    expected, losses = losses_of(tmp_path / "whole"), losses_of(tmp_path / "run")
    for name, values in expected.items():
        np.testing.assert_allclose(losses[name], values, rtol=1e-5, err_msg=name)


def test_a_run_is_continued_by_other_numbers_of_ranks(tmp_path):
    """One of two ranks is killed, then one that goes on alone; three finish with the losses of an undisturbed run."""
    changes = {"steps": 30, "val_every": 15}
    ranks.train_small(ALONE, tmp_path / "whole", changes)
    for size, step in ((2, 13), (1, 24)):
        run_ranks(size, ranks.train_small, tmp_path / "run", changes, (0, step), raising=False)
    (finished, *_) = run_ranks(3, ranks.train_small, tmp_path / "run", changes)
    assert finished["finished"]
    expected, losses = losses_of(tmp_path / "whole"), losses_of(tmp_path / "run")
    assert list(losses["step"]) == list(range(31))
    for name, values in expected.items():
        np.testing.assert_allclose(losses[name], values, rtol=1e-5, err_msg=name)


def test_a_slow_rank_is_waited_for(tmp_path):
    """The others wait for it longer than for a rank without a heartbeat."""
    reports = run_ranks(2, ranks.train_slowly, tmp_path, {"steps": 4, "val_every": 4}, 1)
    assert all(rank["finished"] for rank in reports)


def test_batch_must_be_large_enough_for_the_ranks():
    with pytest.raises(ValueError, match="batch_size=64 is too small for 65 ranks"):
        ranks.batch_of(0, 65, {}, 0)


# ---- as a user starts it ------------------------------------------------------------------------------------------


def entropy_words(folder: Path, out: str, **changes: object) -> list[str | Path]:
    options = {"samples": 4, "steps": 2, "kappa": 15, "top-k": 3, "block": 5, **changes}
    files = {"model": "model", "queries": "queries.npy", "gallery": "gallery", "out": out}
    options |= {name: folder / value for name, value in files.items()}
    return ["entropy", *(f"--{name}={value}" for name, value in options.items())]


def test_torchrun_starts_the_same_command(folder):
    ranks.score(ALONE, folder, "one.parquet", "auto")
    code, shown, errors = ended(ranks.torchrun(2, *entropy_words(folder, "many.parquet", layout="gallery")))
    assert code == 0, errors
    assert_same_file(folder / "many.parquet", folder / "one.parquet")
    assert shown.count("Wrote") == 1


@pytest.mark.slow
def test_torchrun_trains_a_flow_and_its_head(folder):
    words = ["train", "--preset=tiny", "--steps=2", "--batch-size=16", "--points=1", "--device=cpu", "--seed=1"]
    pairs = [f"--{name}={folder / 'pairs'}" for name in ("pairs", "val")]
    code, shown, errors = ended(ranks.torchrun(2, *words, *pairs, f"--out={folder / 'out'}"))
    assert code == 0, errors
    assert shown.count("Wrote") == 2
    head = gf.PosteriorHead.from_pretrained(folder / "out/head")
    assert head.report["finished"]
    assert gf.GeoFlow.from_pretrained(folder / "out").config.image_dim == head.image_dim


def documented_launches() -> dict[str, list[str]]:
    """The words after `torchrun` in the documented examples for clusters."""
    page = (Path(gf.__file__).parents[1] / "docs/scaling.md").read_text()
    (line,) = re.findall(r"^srun torchrun (.*?[^\\])$", page, re.DOTALL | re.MULTILINE)
    (command,), (arguments,) = (re.findall(rf"^ *{key}: \[(.*)\]$", page, re.MULTILINE) for key in ("command", "args"))
    program, *words = [*command.split(", "), *arguments.split(", ")]
    assert program == "torchrun"
    return {"slurm": shlex.split(line.replace("\\\n", " ")), "kubernetes": words}


@pytest.mark.parametrize("cluster", ["slurm", "kubernetes"])
def test_documented_clusters_start_commands_with_flags_that_exist(cluster):
    launch = torch.distributed.run.parse_args(documented_launches()[cluster])
    assert launch.module
    assert launch.training_script == "geoflow_fast"
    name, *flags = launch.training_script_args
    context = typer.main.get_command(app).commands[name].make_context(name, flags)
    assert context.params["out"] == Path({"slurm": "scores.parquet", "kubernetes": "/data/runs/first"}[cluster])


class LongCommand:
    """A command under torchrun that takes a few seconds: its words and its output."""

    def __init__(self, name: str, folder: Path, out: str = "out") -> None:
        self.name, self.folder, self.out = name, folder, folder / out
        if name == "train":
            options = {"preset": "tiny", "steps": 200, "batch-size": 16, "checkpoint-every": 10, "val-every": 50}
            options |= {"pairs": folder / "pairs", "val": folder / "pairs", "out": self.out}
            self.words: list[str | Path] = ["train", "--no-head", *(f"--{key}={x}" for key, x in options.items())]
        else:  # entropy, by its layout
            self.words = entropy_words(folder, out, layout=name, samples=20, steps=150, block=1)

    def start(self, *options: str) -> subprocess.Popen[str]:
        return ranks.torchrun(2, *self.words, options=options)

    def under_way(self) -> bool:
        """True once some of the work is on disk, and long before all of it is."""
        if self.name == "train":
            return (self.out / "last.safetensors").is_file()
        return len(list(Path(f"{self.out}.blocks").glob("*.parquet"))) >= 3

    def result(self) -> dict[str, object]:
        """Everything that the command wrote, except times."""
        if self.name != "train":
            assert not Path(f"{self.out}.blocks").exists()
            return {"scores": self.out.read_bytes()}
        losses = {name: values.tolist() for name, values in losses_of(self.out).items()}
        return losses | {name: (self.out / name).read_bytes() for name in ("model.safetensors", "last.safetensors")}


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, object]]:
    """The results of undisturbed commands, by name. Every test has the same inputs."""
    return {}


@pytest.fixture
def undisturbed(folder, results) -> Undisturbed:
    """Returns the result of the named command when nothing disturbs it."""

    def result(name: str) -> dict[str, object]:
        if name not in results:
            command = LongCommand(name, folder, "undisturbed")
            code, _, errors = ended(command.start())
            assert code == 0, errors
            results[name] = command.result()
        return results[name]

    return result


COMMANDS = ("train", "gallery", "queries")


def begin(name: str, folder: Path, *options: str) -> tuple[LongCommand, subprocess.Popen[str]]:
    """Starts a command and returns it once it has done a part of its work."""
    command = LongCommand(name, folder)
    job = command.start(*options)
    end = time.monotonic() + 300
    while not command.under_way():
        assert job.poll() is None, ended(job)
        assert time.monotonic() < end, "the command did not begin in time"
        time.sleep(0.02)
    return command, job


def workers(job: subprocess.Popen[str]) -> list[int]:
    """The process numbers of the ranks, in the order of the ranks."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    processes = {}
    for child in children:
        words = dict(entry.partition(b"=")[::2] for entry in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"))
        if b"LOCAL_RANK" in words:
            processes[int(words[b"LOCAL_RANK"])] = int(child)
    return [processes[rank] for rank in sorted(processes)]


def assert_finishes(command: LongCommand, expected: dict[str, object]) -> None:
    """The same command, run again, must give to the last bit what it gives undisturbed."""
    code, shown, errors = ended(command.start())
    assert code == 0, errors
    assert shown.count("Wrote") == 1
    assert command.result() == expected


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_rank_ends_the_job_and_the_same_command_finishes(name, rank, undisturbed, folder):
    command, job = begin(name, folder)
    os.kill(workers(job)[rank], signal.SIGKILL)
    start = time.monotonic()
    code, _, errors = ended(job)
    assert time.monotonic() - start < 60
    assert code != 0
    assert f"Signal {signal.SIGKILL.value} (SIGKILL)" in errors  # torchrun says so, and names the rank
    assert "the same command" in errors  # the other rank says so, when it misses its partner or is told to end
    assert_finishes(command, undisturbed(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "gallery"])
def test_a_rank_that_hangs_ends_the_job(name, undisturbed, folder):
    command, job = begin(name, folder)
    victim = workers(job)[1]
    os.kill(victim, signal.SIGSTOP)
    start = time.monotonic()
    code, _, errors = ended(job)
    # A stopped process ignores SIGTERM: torchrun kills it half a minute after the other one has ended.
    assert LOST_SECONDS < time.monotonic() - start < LOST_SECONDS + 60
    assert code != 0
    assert "rank 1 has not shown itself for 30 seconds; what is finished is kept, the same command continues" in errors
    assert not Path(f"/proc/{victim}").exists()
    assert_finishes(command, undisturbed(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_torchrun_restarts_a_job_that_then_finishes_exactly(name, undisturbed, folder):
    command, job = begin(name, folder, "--max-restarts=1")
    os.kill(workers(job)[1], signal.SIGKILL)
    code, shown, errors = ended(job)
    assert code == 0, errors
    assert shown.count("Wrote") == 1
    assert command.result() == undisturbed(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number"), [("train", signal.SIGINT), ("gallery", signal.SIGINT), ("queries", signal.SIGTERM)]
)
def test_an_interrupted_job_saves_and_the_same_command_continues(name, number, undisturbed, folder):
    """The terminal, or SLURM, signals torchrun and the ranks, and torchrun signals the ranks once more."""
    command, job = begin(name, folder)
    os.killpg(job.pid, number)
    code, shown, errors = ended(job)
    assert code != 0
    if name == "train":
        assert shown.count("stopped; run the same command to continue at step") == 1
    else:
        assert "stopped; finished blocks are kept, run the same command to continue" in errors
    assert "geoflow_fast/" not in errors  # the only traceback is that of torchrun
    assert_finishes(command, undisturbed(name))
