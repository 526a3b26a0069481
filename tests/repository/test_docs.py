"""Every code block of the README and of docs/ runs, page by page from top to bottom, and what the pages name exists.

Commands run with flags that make them small. What cannot run here is only parsed: `make` and `pip` lines, and job
scripts of clusters.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from typer.testing import CliRunner

import geoflow_fast as gf
from benchmarks.methods import cli as methods
from geoflow_fast.cli import app
from geoflow_fast.jobs import calibration
from geoflow_fast.noise import sample_uniform
from geoflow_fast.runtime.parquet import read_columns

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN_ELSEWHERE = ("stores.md",)
"""Pages whose blocks need what is not installed here: tests/stores/test_page.py runs them."""
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
SHELL = ("", "sh", "bash", "console")
# What makes a documented command small; the last of two equal flags wins.
SMALLER = {
    "train": "--steps 2 --batch-size 32 --preset tiny --device cpu --no-head --no-calibrate",
    "train --pairs parts/train": "--steps 2 --batch-size 32",  # the page calibrates
    "train --head": "--steps 2 --batch-size 32 --points 1 --device cpu",
    "entropy": "--samples 4 --steps 2",
    "entropy --model runs/head": "",  # a head draws no samples
    "rerank --model runs/flow": "--steps 1 --shortlist 16",
    "density": "--steps 2",
    "evaluate": "--methods margin,max_softmax --resamples 9",
    "methods score": "--steps 2 --batch-size 32 --resamples 9",
    "methods train": "--steps 2 --batch-size 32 --preset tiny --device cpu",
    "methods recipe": "--methods margin,max_softmax --preset tiny --steps 2 --batch-size 32",
    "methods ablation": "--preset tiny --steps 2 --batch-size 32 --max-queries 20",
}


NEW_SESSIONS = ("abstention.md",)
"""Pages that a reader may follow over several days: every block of Python reads what it needs from files."""
# What makes documented Python small.
FEWER = {
    'fit(pairs, out="runs/head")': 'fit(pairs, gf.HeadConfig(steps=4, hidden=16), k="auto", out="runs/head")',
    "24_000": "2_400",
    "steps=2000": "steps=10",
    "steps=200": "steps=10",
    "max_queries=200": "max_queries=100",
    "search(text[:500])": "search(text[:40])",
    "answers.answer == torch.arange(500)": "answers.answer == torch.arange(40)",
}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the pages use: embeddings, held-out pairs, queries, a gallery, photos and a flow."""
    folder = tmp_path_factory.mktemp("desk")
    image, text = (sample_uniform(400, 16, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    text = gf.geometry.normalize(image + 0.1 * text)
    for name, rows in (
        ("embeddings", slice(0, 300)),
        ("held_out", slice(300, 400)),
        ("val", slice(300, 400)),
        ("test", slice(0, 60)),
        ("products/train", slice(0, 300)),
        ("products/val", slice(300, 400)),
        ("products/test", slice(300, 400)),
    ):
        gf.EmbeddingPairs.from_arrays(image[rows], text[rows]).save(folder / name)
    np.save(folder / "texts.npy", text[:64].numpy())
    np.save(folder / "images.npy", image[:64].numpy())
    np.save(folder / "new_texts.npy", text[300:364].numpy())
    np.save(folder / "new_images.npy", image[300:364].numpy())
    (folder / "queries.csv").write_text("id,text\n" + "".join(f"q{k},red {k}\n" for k in range(9)))
    (folder / "questions.csv").write_text("question,answer\n" + "".join(f"red {k},blue {k}\n" for k in range(9)))
    (folder / "judged.csv").write_text("query,item,grade\n" + "".join(f"{k},{k},1\n" for k in range(64)))
    (folder / "img_emb").mkdir()
    np.save(folder / "img_emb/img_emb_0.npy", image[:64].numpy())
    (folder / "photos").mkdir()
    for number in range(40):  # enough for a batch
        colour = ("red", "green", "blue", "yellow")[number % 4]
        Image.new("RGB", (40 + number, 30), colour).save(folder / f"photos/{number}.jpg")
        (folder / f"photos/{number}.txt").write_text(f"something {colour}, number {number}")
    torch.manual_seed(0)
    gf.GeoFlow(gf.GeoFlowConfig(16, 16, hidden=16, depth=1)).save_pretrained(folder / "runs/first")
    return folder


@pytest.fixture
def page_names(desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The variables that pages use without defining them; the working folder is a copy of `desk`."""
    shutil.copytree(desk, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    small = gf.TrainConfig.tiny()
    monkeypatch.setattr(gf.TrainConfig, "small", lambda: dataclasses.replace(small, steps=2, batch_size=32))
    for name, size in {"BANDWIDTH_QUERIES": (6, 6), "LADDER_QUERIES": (65, 65), "GUIDANCES": (0.0,)}.items():
        monkeypatch.setattr(calibration, name, size)
    # The weights are too large to download here, so another encoder does the work; the flags are still parsed.
    monkeypatch.setattr(gf.OpenClipEncoder, "load", lambda *_, **__: gf.ColourEncoder())
    return {
        "gf": gf,
        "flow": (flow := gf.GeoFlow.from_pretrained("runs/first")),
        "head": gf.PosteriorHead(
            gf.HeadConfig(points=2, hidden=8, bank=8), flow.config.image_dim, flow.config.text_dim
        ).eval(),
        "pairs": gf.EmbeddingPairs.open("embeddings"),
        "image": torch.from_numpy(np.load("img_emb/img_emb_0.npy")),
        "text": torch.from_numpy(np.load("texts.npy")).repeat(20, 1)[:64],
        "images": torch.from_numpy(np.load("img_emb/img_emb_0.npy")),
        "texts": torch.from_numpy(np.load("texts.npy")),
        "held_out_pairs": gf.EmbeddingPairs.open("held_out"),
    }


def blocks(page: Path) -> list[tuple[str, str]]:
    """The language and the code of each block of a page, in order."""
    return BLOCK.findall(page.read_text())


def commands(page: Path) -> list[str]:
    """The lines of unmarked and shell blocks, without comments."""
    shell = [code for language, code in blocks(page) if language in SHELL and not code.startswith("#!")]
    return [line for code in shell for line in lines_of(code)]


def lines_of(code: str) -> list[str]:
    """The commands of a block, with continued lines joined and comments removed."""
    return [line.split("  #")[0].strip() for line in code.replace("\\\n", " ").splitlines() if line.strip()]


def run_command(line: str, *, smaller: bool) -> None:
    """Runs a line of `geoflow` or of `benchmarks.methods`; what torchrun would start runs as one rank."""
    words, program = shlex.split(line), app
    if words[0] == "torchrun":
        words = ["geoflow", *words[words.index("geoflow_fast") + 1 :]]
    if words[:3] == ["python", "-m", "benchmarks.methods"]:
        words, program = ["methods", *methods.with_command(words[3:])], methods.app
        if words[1] == "study":  # it takes minutes to hours
            return
    elif words[0] != "geoflow":
        return
    named = words if program is methods.app else words[1:]
    extra = next((SMALLER[name] for k in (3, 2, 1) if (name := " ".join(named[:k])) in SMALLER), "")
    result = CliRunner().invoke(program, [*words[1:], *(shlex.split(extra) if smaller else [])])
    assert result.exit_code == 0, f"{line}\n{result.output}\n{result.exception!r}"


def run_page(page: Path, names: dict[str, Any], *, smaller: bool = True) -> None:
    """Runs every block of a page from top to bottom in the working folder, as a reader would. `names` receives what the
    blocks define."""
    for number, (language, code) in enumerate(blocks(page)):
        if language == "python":
            for many, few in FEWER.items() if smaller else ():
                code = code.replace(many, few)
            session = {} if page.name in NEW_SESSIONS else names
            exec(compile(code, f"{page.name}, block {number}", "exec"), session)
            names.update(session)
        elif language == "toml":
            first = code.splitlines()[0]  # the name under which a command further down reads the file
            assert re.fullmatch(r"# \w+\.toml", first), f"{page.name}: {first}"
            Path(first.removeprefix("# ")).write_text(code)
        elif language == "yaml":
            assert all(yaml.safe_load_all(code))
        elif language in SHELL and code.startswith("#!"):
            subprocess.run(["bash", "-n"], input=code, text=True, check=True)
        elif language in SHELL:
            for line in lines_of(code):
                run_command(line, smaller=smaller)
        else:
            assert language == "text", f"{page.name}, block {number}: what is {language}?"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in RUN_ELSEWHERE], ids=lambda page: page.stem)
def test_page_runs_from_top_to_bottom(page, page_names):
    run_page(page, page_names)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_python_runs_twice_to_the_same_numbers(page, capsys, page_names):
    """The data are related and seeded, and nothing is left behind that a second run would stumble over."""
    code = next(code for language, code in blocks(ROOT / page) if language == "python")
    for many, few in FEWER.items():
        code = code.replace(many, few)
    assert "manual_seed" in code
    assert "sample_uniform" not in code
    printed = []
    for _ in range(2):
        exec(compile(code, page, "exec"), dict(page_names))
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != ""


@pytest.mark.slow
def test_readme_keeps_its_promise(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image, text, _ = gf.worlds.ConceptWorld().sample(600, generator=torch.Generator().manual_seed(0))
    for part, rows in (("", slice(0, 400)), ("new_", slice(400, None))):
        np.save(f"{part}images.npy", image[rows].numpy())
        np.save(f"{part}texts.npy", text[rows].numpy())
    run_page(ROOT / "README.md", {}, smaller=False)
    assert float(capsys.readouterr().out.split()[-1]) > 0.92  # the page says about .94


@pytest.mark.slow
def test_start_page_keeps_its_promise_in_an_empty_folder(tmp_path, monkeypatch):
    """Rules hold on new queries, and the head answers more than cosines do."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    run_page(ROOT / "docs/abstention.md", names, smaller=False)
    shares = {}
    for name, hit in names["first"].items():
        rule, answered = gf.Rule.load(f"{name}.json"), read_columns(tmp_path / f"{name}.parquet", ["answer"])["answer"]
        shares[name] = answered.mean()
        # The true share is below the target with 95 % confidence; the new queries give a noisy estimate of it.
        noise = 3 * (rule.max_error * (1 - rule.max_error) / max(1, answered.sum())) ** 0.5
        assert (hit != names["new"])[answered].sum() <= (rule.max_error + noise) * answered.sum()
    assert shares["head"] > 1.5 * shares["cosine"] > 0.2


PUBLIC = (gf, gf.ops, gf.evaluation, gf.distributed, gf.stores)


def public(name: str) -> Any:
    """The value of a dotted name, as an attribute if there is one: an operation may have the name of its module."""
    parent, _, last = name.rpartition(".")
    owner = public(parent) if parent else None
    return getattr(owner, last) if hasattr(owner, last) else importlib.import_module(name)


def public_names() -> list[str]:
    """Full names of what the public modules export; modules among them are listed as such."""
    return [f"{module.__name__}.{name}" for module in PUBLIC for name in module.__all__ if name != "__version__"]


def listed_names() -> list[str]:
    """The names that docs/api.md lists, in order."""
    return re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)


def test_api_page_lists_every_public_name():
    listed = listed_names()
    assert len(listed) == len(set(listed)), "a name is listed twice"
    modules = {name for name in public_names() if inspect.ismodule(public(name))}
    assert sorted(set(public_names()) - modules - set(listed)) == []
    missing = [name for name in modules if not any(f"{entry}.".startswith(f"{name}.") for entry in listed)]
    assert missing == [], "the page lists nothing of a public module"
    assert [name for name in listed if public(name) is None] == []  # raises an error if a name does not exist


def test_type_checkers_see_the_public_names():
    """The stub imports each name from the module from which the package imports it on first use."""
    stub = ast.parse((ROOT / "geoflow_fast/__init__.pyi").read_text())
    seen = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted([*seen, "__version__"]) == dir(gf) == sorted(gf.__all__)
    for name, home in seen.items():
        assert getattr(gf, name) is public(home), name


def test_every_public_name_has_a_docstring():
    values = {name: public(name) for name in public_names()}
    described = {name: value for name, value in values.items() if inspect.isclass(value) or inspect.isroutine(value)}
    assert len(described) > 50
    # Python gives a dataclass without a docstring its signature as one.
    undocumented = [
        name for name, value in described.items() if not value.__doc__ or value.__doc__.startswith(f"{value.__name__}(")
    ]
    assert undocumented == []


def test_citation_has_this_version_and_names_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == gf.__version__
    assert f'version = "{gf.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert {"title", "authors", "year", "journal"} <= citation["preferred-citation"].keys()


def test_files_that_pages_name_exist():
    text = "\n".join(page.read_text() for page in PAGES)
    folders = "geoflow_fast|kernels|csrc|tests|tools|examples|benchmarks"
    named = set(re.findall(rf"(?<![\w/])((?:{folders})/[\w/.-]+\.[a-z]+)", text))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    for name in set(re.findall(r"python -m benchmarks\.methods\s+study ([a-z0-9_]+)", text)):
        assert (ROOT / f"benchmarks/methods/studies/{name}.py").is_file(), name


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = {word for page in PAGES for word in re.findall(r"`?make ([a-z][a-z-]+)", "\n".join(commands(page)))}
    assert {"demo", "test"} <= named
    assert [target for target in sorted(named) if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def test_first_screen_of_the_readme_shows_the_two_commands():
    first_screen = PAGES[0].read_text().splitlines()[:40]
    assert any(line.startswith("make demo") for line in first_screen)
    assert any(line.startswith("make test") for line in first_screen)
