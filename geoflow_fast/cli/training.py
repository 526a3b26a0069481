"""`geoflow train`: a flow or a baseline on paired embeddings."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from geoflow_fast.cli.base import (
    INTERRUPTED,
    Commands,
    DeviceFlag,
    JsonFlag,
    NormalizeFlag,
    PresetFlag,
    SeedFlag,
    given,
    print_json,
)

if TYPE_CHECKING:
    pass

if TYPE_CHECKING:
    from geoflow_fast.training.loop import TrainReport

app = Commands()


@app.command(epilog="Example: geoflow train --pairs embeddings/ --out runs/first --preset small --steps 20000")
def train(
    out: Annotated[Path, typer.Option(help="Folder of the run; the same command continues a stopped run.")],
    pairs: Annotated[Path | None, typer.Option(help="Folder of paired embeddings (img_emb/, text_emb/).")] = None,
    images: Annotated[
        Path | None, typer.Option(help="Instead of --pairs: .npy file or folder of shards with one row per image.")
    ] = None,
    texts: Annotated[Path | None, typer.Option(help="With --images: the same for texts.")] = None,
    image_index: Annotated[
        Path | None,
        typer.Option(help="With --images: .npy file with the image row of each text. Default: row k for text k."),
    ] = None,
    preset: PresetFlag = "small",
    val: Annotated[Path | None, typer.Option(help="Folder of validation pairs. Default: 2 % of the images.")] = None,
    method: Annotated[
        str, typer.Option(help="geoflow, or a baseline: probvlm, asymvlm_vmf, asymvlm_ps, grove, repvlm, bayesvlm, ...")
    ] = "geoflow",
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Pairs per step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Steps until the learning rate reaches its peak.")] = None,
    seed: SeedFlag = 0,
    coupling: Annotated[
        str | None, typer.Option(help="Coupling of joint rows: paper, sample, exact or independent.")
    ] = None,
    conditional_coupling: Annotated[
        str | None, typer.Option(help="Coupling of conditional rows: independent, paper or c2ot.")
    ] = None,
    noise: Annotated[str | None, typer.Option(help="Kind of noise: iid or structured.")] = None,
    ot_scope: Annotated[
        str | None,
        typer.Option(help="With several ranks: one transport plan for all (global) or one per rank (local)."),
    ] = None,
    accumulate: Annotated[int | None, typer.Option(help="Divide each batch into this many pieces.")] = None,
    ema_decay: Annotated[float | None, typer.Option(help="Average the weights with this decay.")] = None,
    val_every: Annotated[int | None, typer.Option(help="Steps between validations.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    centre: Annotated[bool, typer.Option("--centre/--no-centre", help="Subtract the mean of each modality.")] = False,
    pca: Annotated[int | None, typer.Option(help="Keep this many principal components of each modality.")] = None,
    normalize: NormalizeFlag = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard/--no-tensorboard", help="Also write TensorBoard events.")
    ] = False,
    compile_network: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the network with torch.compile.")
    ] = False,
    device: DeviceFlag = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Trains a flow or a baseline on paired embeddings. Ctrl-C saves and stops; the same command continues."""
    from geoflow_fast import baselines
    from geoflow_fast.data.pairs import EmbeddingPairs, open_pairs
    from geoflow_fast.distributed import joined
    from geoflow_fast.training.flow_matching import train_from_preset

    chosen = given(
        steps=steps,
        batch_size=batch_size,
        lr=lr,
        warmup_steps=warmup_steps,
        coupling=coupling,
        conditional_coupling=conditional_coupling,
        noise=noise,
        ot_scope=ot_scope,
        accumulate=accumulate,
        ema_decay=ema_decay,
        val_every=val_every,
        checkpoint_every=checkpoint_every,
        seed=seed,
        tensorboard=tensorboard,
        compile=compile_network,
    )
    report: TrainReport | None
    with joined() as world:
        data = open_pairs(pairs, images, texts, image_index, normalize=normalize, world=world)
        held_out = None if val is None else EmbeddingPairs.open(val, normalize=normalize, world=world)
        run = (data, out, preset, held_out, chosen)
        if method == "geoflow":
            report = train_from_preset(*run, centre=centre, pca_dim=pca, device=device, world=world)
        elif centre or pca is not None:
            raise ValueError(f"--centre and --pca are the flow's; {method} takes the embeddings as they are")
        elif world.size > 1:
            raise ValueError(f"{method} is trained by one process; start it without torchrun")
        else:
            report = baselines.train_preset(method, *run, folder=pairs, device=device)
    if world.is_main:
        if as_json:
            print_json({"out": out} if report is None else dataclasses.asdict(report))
        else:
            if report is not None:
                state = "finished" if report.finished else "stopped; run the same command to continue"
                best = f"best validation loss {report.best_val_loss:.6g} at step {report.best_step}"
                typer.echo(f"{state} at step {report.steps}; {best}")
            typer.echo(f"Wrote {out if report is None else report.out}")
    if report is not None and not report.finished:
        raise typer.Exit(INTERRUPTED)
