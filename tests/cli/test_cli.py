"""The command line as a user runs it: help, config files, errors, pipes, signals, exit codes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
import typer.main

import geoflow_fast as gf
from geoflow_fast.cli import app, training
from geoflow_fast.cli.base import in_flags
from geoflow_fast.flow.sampling import FAST_SAMPLING
from geoflow_fast.head import fitting
from geoflow_fast.ops import extension
from geoflow_fast.training.loop import Run, TrainReport
from tests.read_only import read_only

COMMANDS = sorted(typer.main.get_command(app).commands)

HERE = {**os.environ, "PYTHONPATH": str(Path(gf.__file__).parents[1])}
"""The environment in which a process in another folder runs the code under test."""


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "geoflow_fast", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, env={**HERE, **environment})


SMALL = ["--preset", "tiny", "--batch-size", "16", "--device", "cpu", "--no-head"]
TRAIN = ["--pairs", "pairs", "--out", "run", *SMALL]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_every_documented_command_exists():
    assert {"demo", "density", "doctor", "embed", "entropy", "rerank", "train"} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_the_shared_flags(run, command):
    code, out, _ = run(command, "--help")
    words = " ".join(re.sub("[│╭╮╰╯─]", " ", out).split())
    assert code == 0
    assert f"Example: geoflow {command} " in words
    assert "--config" in words
    assert "--debug" in words


def test_without_a_command_it_shows_help_and_by_flag_its_version(run):
    code, out, _ = run()
    assert code == 0
    assert all(command in out for command in COMMANDS)
    assert run("--version") == (0, f"geoflow_fast {gf.__version__}\n", "")


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_is_fast_and_does_not_import_torch(flag):
    code = f"""
import sys, time
from geoflow_fast.cli import main
sys.argv = ["geoflow", "{flag}"]
try:
    main()
except SystemExit as end:
    assert not end.code
heavy = {{"torch", "numpy", "scipy", "pyarrow", "matplotlib"}} & set(sys.modules)
print(time.process_time(), *sorted(heavy), file=sys.stderr)
"""
    report = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=HERE).stderr
    assert float(report) < 0.5  # seconds of processor time; the name of a heavy module is not a number


@pytest.mark.parametrize("command", [[], *([command] for command in COMMANDS)], ids=" ".join)
def test_help_fits_eighty_columns_and_cuts_no_name(run, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(*command, "--help")
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert "..." not in out.replace("[ARGS]...", "").replace(", ...", "")
    assert "<bool>" not in out  # flags take no value


def test_help_of_train_is_grouped_and_names_defaults(run):
    _, out, _ = run("train", "--help")
    headings = [line for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert [heading.split(";")[0].rstrip(":") for heading in headings] == [*map(str, typer_headings()), "Options"]
    words = " ".join(out.split())
    presets = ", ".join(f"{name} {getattr(gf.TrainConfig, name)().steps:,}" for name in ("tiny", "small", "paper"))
    few, slow, fast = (gf.TrainConfig.auto(n, cores=k).steps for n, k in ((2000, 1), (20_000, 1), (20_000, 64)))
    auto = f"auto {few}, or from 20,000 pairs on {slow:,} or {fast:,} by the machine"
    assert f"Default: the preset's; {auto}; {presets}." in words
    command = typer.main.get_command(app).commands["train"]
    grouped = {parameter.name for parameter in command.params if parameter.rich_help_panel is not None}
    assert grouped == {name for names in training.GROUPS.values() for name in names.split()}


def typer_headings() -> list[str]:
    """The headings of the help of `train`, in the order of their first flags."""
    parameters = typer.main.get_command(app).commands["train"].params
    seen = dict.fromkeys(parameter.rich_help_panel for parameter in parameters)
    return [heading.split(";")[0] for heading in seen if heading is not None]


def test_help_names_the_settings_of_fast(run):
    _, out, _ = run("entropy", "--help")
    words = " ".join(re.sub("[│╭╮╰╯─]", " ", out).split())
    assert f"--fast: {FAST_SAMPLING.n_samples}." in words
    assert f"--fast: {FAST_SAMPLING.n_steps}." in words


def test_doctor_shows_every_operation_with_its_reasons(run):
    code, out, err = run("doctor", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["backends"]["masked_interpolant"]["cpu"] == "available"
    assert {"torch", "triton", "CUDA", "threads", "CPU features in use"} <= set(report["machine"])
    supported = ", ".join(extension.supported_isas())
    assert report["machine"]["CPU features in use"] == f"{extension.isa()} (this processor can run {supported})"


def test_output_into_a_pipe_is_plain_text():
    process = start("doctor", TERM="xterm-256color")
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "masked_interpolant" in out
    assert "\x1b" not in out + err


def test_a_closed_pipe_is_not_an_error():
    command = f"{sys.executable} -m geoflow_fast --help | true; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, env=HERE)
    assert result.stdout.strip() == "141"
    assert result.stderr == ""


# Errors


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train --nonsense", "No such option: --nonsense"),
        ("nonsense", "No such command 'nonsense'"),
        ("train --pairs pairs", "Missing option '--out'"),
        ("train --out run --steps many", "'--steps'"),
        ("train --out run", "give --pairs, a folder of paired embeddings, or --images and --texts"),
        ("train --out run --pairs pairs --images images.npy", "leave out --images"),
        ("train --out run --pairs nowhere", "nowhere is missing"),
        ("train --out run --pairs images.npy", "images.npy is not a folder of embeddings"),
        ("train --out run --images nowhere.npy --texts texts.npy", "nowhere.npy is missing"),
        ("density --model nowhere --pairs pairs --out o.parquet", "nowhere"),
        (
            "train --out run --pairs pairs --head --preset tiny",
            "--preset is a setting of the flow; leave it out with --head",
        ),
        ("train --out run --pairs pairs --head --coupling exact", "--coupling is a setting of the flow"),
        (
            "train --out run --pairs pairs --head --conditional-coupling c2ot",
            "--conditional-coupling is a setting of the flow",
        ),
        ("train --out run --pairs pairs --head --centre", "--centre is a setting of the flow"),
        ("train --out run --pairs pairs --head --pca 3", "--pca is a setting of the flow"),
        ("train --out run --pairs pairs --head --config flow.toml", "--preset is a setting of the flow"),
        (
            "train --out run --pairs pairs --no-head --points 3",
            "--points is a setting of the head, which is not trained with --no-head",
        ),
        ("train --out run --pairs pairs --points few", "--points must be auto or a number, got 'few'"),
        ("train --out run --pairs pairs --head --points 0", "--points must"),
        ("train --out run --pairs pairs --points 65", "--points must"),
        ("train --out run --pairs pairs --head --points -1", "got '-1'"),
        ("train --out run --pairs pairs --head --device nowhere", "device 'nowhere' cannot be used here"),
    ],
)
def test_errors_are_one_line(run, desk, command, words):
    write(desk / "flow.toml", 'preset = "tiny"\n')
    code, out, err = run(*command.split())
    assert (code, out) == (2, "")
    assert err.startswith("geoflow: error: ")
    assert words in err
    assert err.count("\n") == 1
    assert not (desk / "run").exists()


FLAGS = {"normalize": "--normalize", "overwrite": "--overwrite", "steps": "--steps", "samples": "--samples"}
FLAGS |= {"batch_size": "--batch-size", "held_out": "--held-out", "pca": "--pca", "seed": "--seed"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("scale rows to unit norm, as normalize=True does", "scale rows to unit norm, as --normalize does"),
        ("leave out normalize=False", "leave out --no-normalize"),
        ("use a new folder or resume=False", "use a new folder or --overwrite"),
        ("40 are too few for batch_size=64; a batch_size of", "40 are too few for --batch-size 64; a --batch-size of"),
        ("steps must be at least 1, got 0", "--steps must be at least 1, got 0"),
        ("n_samples must be at least 1", "--samples must be at least 1"),
        ("pca_dim=7 exceeds the width", "--pca 7 exceeds the width"),
        ("the seed of 3 steps is used", "the seed of 3 steps is used"),
        ("data/batch_size.npy is missing", "data/batch_size.npy is missing"),
        ("held_out is missing", "held_out is missing"),  # the user has typed this path
        ("layer_scale=0 must be positive", "layer_scale=0 must be positive"),  # there is no such flag
    ],
)
def test_messages_name_flags(words, expected):
    assert in_flags(words, FLAGS, ["geoflow", "--held-out", "held_out"]) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pairs", "long", "--out", "new"], "not 1; scale rows to unit norm, as --normalize does"),
        ([*TRAIN, "--steps", "3"], "(steps 2 -> 3); use a new folder or --overwrite"),
        ([*TRAIN, "--batch-size", "100"], "are too few for --batch-size 100; choose a --batch-size of at most 63"),
        ([*TRAIN, "--patience", "0"], "--patience must be at least 1, got 0"),
    ],
)
def test_a_command_speaks_of_its_flags(run, desk, arguments, words):
    assert run("train", *TRAIN, "--steps", "2")[0] == 0
    gf.EmbeddingPairs.open(desk / "pairs").save(desk / "long")
    np.save(desk / "long/img_emb/img_emb_0.npy", 2 * np.load(desk / "pairs/img_emb/img_emb_0.npy"))
    code, _, err = run("train", *arguments)
    assert code == 2
    assert words in err


def test_overwrite_begins_anew(run, desk):
    assert run("train", *TRAIN, "--steps", 2)[0] == 0
    code, out, err = run("train", *TRAIN, "--steps", 3, "--overwrite")
    assert code == 0, err
    assert "finished at step 3" in out
    assert steps_of_run() == 3
    head = ["train", *HEAD, "--points", 1, "--out", "head"]
    assert run(*head)[0] == 0
    assert run(*head, "--seed", 1)[0] == 2
    assert run(*head, "--seed", 1, "--overwrite")[0] == 0
    assert gf.PosteriorHead.from_pretrained(desk / "head").config.seed == 1


@pytest.mark.parametrize(
    ("best_step", "words"),
    [
        (-1, "no weights yet"),
        (0, "best validation loss 2.5 at step 0: training made it no better, so the untrained weights are kept"),
        (7, "best validation loss 2.5 at step 7\n"),
    ],
)
def test_the_outcome_of_training_in_words(capsys, best_step, words):
    report = TrainReport(9, True, False, best_step, math.inf if best_step < 0 else 2.5, 1.0, Path("run"))
    training._print_outcome(Path("run"), report, None, Path("run/head"))
    out = capsys.readouterr().out
    assert words in out
    assert "inf" not in out


@pytest.mark.parametrize("arguments", [["--debug", "train"], ["train", "--debug"]])
@pytest.mark.usefixtures("desk")
def test_debug_shows_where_an_error_came_from(run, arguments):
    code, _, err = run(*arguments, "--out", "run", "--pairs", "nowhere")
    assert code == 2
    assert err.startswith("Traceback")
    assert err.splitlines()[-1] == "geoflow: error: nowhere is missing"


def test_errors_of_the_system_name_the_file_without_a_number(run, desk):
    (desk / "run").write_text("in the way")
    code, _, err = run("train", *TRAIN)
    assert (code, err) == (2, "geoflow: error: run: File exists\n")


# Two files, and reports for machines


def test_two_commands_turn_two_files_into_entropies(run, desk):
    files = ["--images", "images.npy", "--texts", "texts.npy"]
    code, out, err = run("train", *files, "--out", "runs/first", *SMALL, "--steps", 2)
    assert code == 0, err
    assert "finished at step 2" in out
    asked = ["--queries", "texts.npy", "--gallery", "images.npy", "--out", "scores.parquet"]
    code, out, err = run("entropy", "--model", "runs/first", *asked, "--fast", "--steps", 2)
    assert code == 0, err
    assert "64 queries over 64 items" in out
    assert (desk / "scores.parquet").is_file()


ASKED = ["--queries", "texts.npy", "--gallery", "images.npy"]
SCORED = {
    "entropy": (["entropy", *ASKED, "--fast", "--steps", 2], "entropy"),
    "density": (["density", "--pairs", "pairs", "--steps", 2], "joint"),
}


@pytest.mark.parametrize("command", SCORED)
def test_products_have_the_precision_that_is_asked_for(run, desk, monkeypatch, command):
    """A flow of small weights, so that bfloat16 shows and changes little; the jobs know each other apart."""
    arguments, column = SCORED[command]
    monkeypatch.setattr("geoflow_fast.flow.precision.bfloat16_pays", lambda _: True)
    flow = gf.GeoFlow(gf.GeoFlowConfig(6, 6, hidden=8, depth=1))
    with torch.no_grad():
        for weight in flow.parameters():
            weight.normal_(std=0.2, generator=torch.Generator().manual_seed(0))
    flow.save_pretrained(desk / "flow")
    values = {}
    for precision in ("float32", "bfloat16", "auto"):
        out = ["--out", f"{precision}.parquet", "--precision", precision]
        code, _, err = run(*arguments, "--model", "flow", *out)
        assert code == 0, err
        values[precision] = pyarrow.parquet.read_table(desk / f"{precision}.parquet")[column].to_numpy()
    assert np.array_equal(values["auto"], values["bfloat16"])
    assert 0 < np.abs(values["bfloat16"] - values["float32"]).max() < 0.3
    code, _, err = run(*arguments, "--model", "flow", "--out", "float32.parquet", "--precision", "bfloat16")
    assert code == 2
    assert "not the result of this job" in err


def test_commands_write_nothing_beside_what_they_read(run, desk):
    assert run("train", *HEAD, "--points", 1, "--out", "head")[0] == 0
    (desk / "data").mkdir()
    for name in ("images.npy", "texts.npy", "pairs"):
        (desk / name).rename(desk / "data" / name)
    asked = ["--queries", "data/texts.npy", "--gallery", "data/images.npy"]
    rerank = ["rerank", *asked, "--model", "flow", "--head", "head", "--steps", 2, "--held-out", "data/pairs"]
    commands = {
        "entropy": ["entropy", *asked, "--model", "head"],
        "sampled": ["entropy", *asked, "--model", "flow", "--fast", "--steps", 2],
        "density": ["density", "--pairs", "data/pairs", "--model", "flow", "--steps", 2],
        "rerank": [*rerank, "--calibration", "c.json"],
    }
    with read_only(desk / "data"):
        for name, command in commands.items():
            code, _, err = run(*command, "--out", f"{name}.parquet")
            assert code == 0, err


@pytest.mark.usefixtures("desk")
def test_a_calibration_holds_for_one_precision(run):
    command = ["rerank", *ASKED, "--model", "flow", "--steps", 2, "--calibration", "c.json"]
    assert run(*command, "--held-out", "pairs", "--out", "exact.parquet")[0] == 0
    code, _, err = run(*command, "--out", "half.parquet", "--precision", "bfloat16")
    assert code == 2
    assert "precision" in err
    assert run(*command, "--out", "again.parquet")[0] == 0


@pytest.mark.usefixtures("desk")
def test_heads_have_no_precision_of_a_flow(run):
    assert run("train", *HEAD, "--points", 1, "--out", "head")[0] == 0
    for command in ("entropy", "rerank"):
        code, _, err = run(command, *ASKED, "--model", "head", "--out", "o.parquet", "--precision", "bfloat16")
        assert code == 2
        assert "precision" in err
        assert "of flows" in err


def test_files_and_folder_of_the_same_pairs_train_alike(run, desk):
    files = ["--images", "pairs/img_emb/img_emb_0.npy", "--texts", "pairs/text_emb"]
    same = [*SMALL, "--steps", 2]
    assert run("train", *files, "--out", "by_files", *same)[0] == 0
    assert run("train", "--pairs", "pairs", "--out", "by_folder", *same)[0] == 0
    weights = [gf.GeoFlow.from_pretrained(desk / name).state_dict() for name in ("by_files", "by_folder")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.usefixtures("desk")
def test_train_reports_for_machines(run):
    code, out, err = run("train", *TRAIN, "--steps", "2", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert (report["steps"], report["finished"], report["out"]) == (2, True, "run")


# Flows and heads


TOO_FEW = "64 images are too few to hold some out for calibration; 180 are needed\n"
HEAD = ["--pairs", "pairs", "--out", "run", "--head", "--steps", "6", "--batch-size", "16", "--val-every", "3"]


def test_a_head_is_trained_alone(run, desk):
    code, out, err = run("train", *HEAD, "--points", 2, "--seed", 3, "--lr", 0.01)
    assert code == 0, err
    head = gf.PosteriorHead.from_pretrained(desk / "run")
    known = head.report
    assert (head.config.points, head.config.steps, head.config.seed, head.config.lr) == (2, 6, 3, 0.01)
    assert head.config.dropout == fitting.FEW.dropout  # the rest follows from the number of pairs
    likelihood = f"{-known['nll_t2i']:.4g} (t2i) and {-known['nll_i2t']:.4g} (i2t) nats"
    assert out == f"{TOO_FEW}head finished at step 6; 2 points; held-out log-likelihood {likelihood}\nWrote run\n"
    before = (desk / "run/model.safetensors").read_bytes()
    code, out, err = run("train", *HEAD, "--points", 2, "--seed", 3, "--lr", 0.01, "--json")
    assert code == 0, err
    assert json.loads(out) == {**known, "out": "run"}
    assert (desk / "run/model.safetensors").read_bytes() == before
    code, _, err = run("train", *HEAD, "--points", 3, "--seed", 3, "--lr", 0.01)
    assert code == 2
    assert "points 2 -> 3" in err


def test_the_number_of_points_is_chosen(run, desk):
    code, out, err = run("train", *HEAD, "--json")
    assert code == 0, err
    report = json.loads(out)
    tried = [(trial["points"], trial["dropout"]) for trial in report["trials"]]
    usual = fitting.FEW.dropout
    assert tried == [(1, usual), (4, usual), (8, usual), (4, fitting.LIGHTER)]
    assert report["nll"] == min(trial["nll"] for trial in report["trials"])
    assert gf.PosteriorHead.from_pretrained(desk / "run").config.points == report["points"]


def test_a_flow_is_followed_by_its_head(run, desk, monkeypatch):
    monkeypatch.setattr(fitting, "FEW", dataclasses.replace(fitting.FEW, steps=4))
    small = [*TRAIN[:-1], "--steps", 2]
    code, out, err = run("train", *small, "--points", 1)
    assert code == 0, err
    assert out.startswith(TOO_FEW)
    lines = out.splitlines()[1:]
    assert lines[0] == "64 pairs of widths 6 and 6; 1.42 million parameters, preset tiny, at most 2 steps of 16"
    assert lines[1].startswith("finished at step 2; best validation loss")
    assert lines[2] == "Wrote run"
    assert lines[3].startswith("head finished at step 4; 1 point; held-out log-likelihood")
    assert lines[4] == "Wrote run/head"
    assert gf.GeoFlow.from_pretrained(desk / "run").config.image_dim == 6
    head = gf.PosteriorHead.from_pretrained(desk / "run/head")
    assert head.config.batch_size == 58  # --batch-size is the flow's; the head has all pairs that are not held out
    code, out, err = run("train", *small, "--points", 1, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert (report["steps"], report["out"]) == (2, "run")
    assert report["head"] == {**head.report, "out": "run/head"}


@pytest.mark.usefixtures("desk")
def test_validation_pairs_are_those_of_the_head_too(run, monkeypatch):
    seen = []
    fit = fitting.fit_head
    monkeypatch.setattr("geoflow_fast.head.fitting.fit_head", lambda *a, **k: seen.append(a) or fit(*a, **k))
    code, _, err = run("train", *HEAD, "--points", 1, "--val", "pairs", "--normalize")
    assert code == 0, err
    ((pairs, _, val, points, *_),) = seen
    assert (len(pairs), len(val), val.folder, points) == (64, 64, Path("pairs"), 1)


@pytest.fixture
def interrupt_at(monkeypatch):
    """Sends a Ctrl-C during the step of the flow or the head that has this number, counted from 1."""
    steps_left: list[int] = []
    optimise = Run.optimise

    def optimise_or_interrupt(run: Run, batch: object) -> object:
        if steps_left and steps_left.pop() == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return optimise(run, batch)

    monkeypatch.setattr(Run, "optimise", optimise_or_interrupt)
    return lambda step: steps_left.extend(range(1, step + 1))


def test_flow_and_head_are_continued_by_the_same_command(run, desk, monkeypatch, interrupt_at):
    """The first Ctrl-C comes in the flow's second step, whose head is not begun; the next in the head's third."""
    monkeypatch.setattr(fitting, "FEW", dataclasses.replace(fitting.FEW, steps=8))
    flags = [*TRAIN[:-1], "--steps", 4, "--points", 1]
    assert run("train", *flags, "--out", "straight")[0] == 0
    interrupt_at(2)
    code, out, _ = run("train", *flags)
    assert code == 130
    assert "\nstopped; run the same command to continue at step 2; best validation loss" in out
    assert not (desk / "run/head").exists()
    interrupt_at(2 + 3)
    code, out, _ = run("train", *flags)
    assert code == 130
    assert "\nhead stopped; run the same command to continue at step 3; 1 point;" in out
    code, out, err = run("train", *flags)
    assert code == 0, err
    assert "\nhead finished at step 8; 1 point;" in out
    for name in ("model.safetensors", "head/model.safetensors", "head/last.safetensors"):
        assert (desk / "run" / name).read_bytes() == (desk / "straight" / name).read_bytes(), name


# Config files


def steps_of_run() -> int:
    return json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])["step"]


def test_a_config_file_gives_flags_that_the_command_line_does_not(run, desk):
    keys = (
        'pairs = "pairs"\npreset = "tiny"\nbatch-size = 16\nwarmup_steps = 1\nlr = 1e-3\ncentre = true\nhead = false\n'
    )
    keys += "steps = 2\n"
    write(desk / "train.toml", keys)
    code, _, err = run("train", "--config", "train.toml", "--out", "run")
    assert code == 0, err
    assert steps_of_run() == 2
    assert gf.GeoFlow.from_pretrained("run").config.centre
    code, out, err = run("train", "--out", "run2", "--config", "train.toml", "--steps", 3, "--no-centre", "--json")
    assert code == 0, err
    assert not gf.GeoFlow.from_pretrained("run2").config.centre
    assert json.loads(out)["steps"] == 3


def test_one_config_file_can_serve_several_commands(run, desk):
    write(desk / "all.toml", 'out = "run"\nsteps = 9\n[train]\nsteps = 2\n[density]\nprobes = 3\n')
    code, _, err = run("train", "--pairs", "pairs", *SMALL, "--config", "all.toml")
    assert code == 0, err
    assert steps_of_run() == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stepz = 3", "key 'stepz' is not a flag of geoflow train; did you mean 'steps'?"),
        ("config = 'x'", "key 'config' is not a flag of geoflow train"),
        ("[trane]\nsteps = 3", "table [trane] is not a command of geoflow"),
        ("[train]\nqueries = 'x'", "key 'queries' is not a flag of geoflow train"),
        ("steps = 2.5", "key 'steps'"),
        ("steps = true", "key 'steps' must be a number or a string, got True"),
        ("steps = [1, 2]", "key 'steps' must be a number or a string, got [1, 2]"),
        ("centre = 'yes'", "key 'centre' must be true or false, got 'yes'"),
        ("preset = 'huge'", "key 'preset'"),
        ("steps = 1979-05-27", "key 'steps' must be a number or a string"),
        ("steps = ", "is not a TOML file"),
        ("steps = 1\nsteps = 2", "is not a TOML file"),
    ],
)
def test_errors_in_a_config_file_are_named(run, desk, text, words):
    write(desk / "bad.toml", text)
    code, out, err = run("train", *TRAIN, "--config", "bad.toml")
    assert code == 2
    assert out == ""
    assert "bad.toml" in err
    assert words in err
    assert err.count("\n") == 1
    assert not (desk / "run").exists()


@pytest.mark.usefixtures("desk")
def test_a_missing_config_file_is_an_error(run):
    assert run("train", *TRAIN, "--config", "none.toml") == (
        2,
        "",
        "geoflow: error: none.toml is missing\n",
    )


# Signals


def wait_for(path: Path, process: subprocess.Popen[str], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.05)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_says_how_to_continue(desk, number, code):
    process = start("train", *TRAIN, "--steps", "100000", "--val-every", "100000")
    wait_for(desk / "run/metrics.jsonl", process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "stopped; run the same command to continue at step" in out
    assert err == ""
    assert (desk / "run/last.safetensors").is_file()


def test_termination_works_where_interrupts_are_ignored(run, monkeypatch):
    """A shell makes commands in the background ignore Ctrl-C; SIGTERM still ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)

    def terminated() -> dict[str, str]:
        os.kill(os.getpid(), signal.SIGTERM)
        return {}

    monkeypatch.setattr("geoflow_fast.cli.machine.machine_facts", terminated)
    try:
        assert run("doctor") == (143, "", "")
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_terminated_job_keeps_its_blocks_and_is_continued(run, desk):
    flags = ["--model", "flow", "--pairs", "pairs", "--out", "o.parquet", "--block", "4", "--steps", "20"]
    process = start("density", *flags)
    wait_for(desk / "o.parquet.blocks/000000000000.parquet", process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert err == "stopped; finished blocks are kept, run the same command to continue\n"
    kept = len(list((desk / "o.parquet.blocks").glob("*.parquet")))
    assert 0 < kept < 16
    code, out, err = run("density", *flags, "--json")
    assert code == 0, err
    assert json.loads(out)["pairs"] == 64
