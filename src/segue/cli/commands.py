"""The commands of `segue`: each parses, calls and prints. Imports of torch are inside them, so that help answers at once."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import segue
from segue.cli.arguments import (
    Config,
    EngineOption,
    ExperimentArgument,
    Json,
    Model,
    Opens,
    Options,
    Out,
    PresetName,
    Settings,
    Workers,
    experiment_file,
    name_values,
    with_settings,
)
from segue.cli.help import HelpfulCommand, HelpfulGroup
from segue.cli.names import completion, students, variants
from segue.cli.terminal import command_line, console, resumed_by, say
from segue.convert.options import Conversion, EvalSettings, PlanSettings

app = typer.Typer(
    cls=HelpfulGroup,
    help="Replace modules inside a pretrained PyTorch model without breaking it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
command = functools.partial(app.command, cls=HelpfulCommand)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    """Replace modules inside a pretrained PyTorch model without breaking it."""
    if show:
        print(segue.__version__)
        raise typer.Exit


@command()
def demo(
    out: Out = Path("runs/demo"),
    workers: Workers = 2,
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs of each method.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Number of optimizer steps of each run.")] = 320,
    teacher_steps: Annotated[int, typer.Option(min=1, help="Number of optimizer steps of the teacher.")] = 500,
) -> None:
    """Compare the paper's methods and a local fit on embedded data: a table, figures and a report in about three minutes."""
    from segue.cli.demo import show

    options = {"seeds": seeds, "steps": steps, "teacher_steps": teacher_steps}
    with resumed_by(*sys.argv[1:]):
        code = show(out, console, options=options, workers=workers)
    raise typer.Exit(code)


@command()
def sites(
    model: Model,
    pattern: Annotated[str | None, typer.Argument(help="Pattern of modules, such as 'blocks.*.attn'.")] = None,
    json: Json = False,
) -> None:
    """Show the modules that a pattern matches: names, shapes and parameter counts. Without a pattern, show all patterns."""
    from segue.cli.sites import show

    show(model, pattern, as_json=json)


@command()
def cost(
    model: Model,
    plan: Annotated[
        str,
        typer.Argument(
            help="Method (`segue methods`), such as 'lolcats(hold=0.3)', 'paper' for its seven, or a plan saved as JSON.",
            autocompletion=completion(variants),
        ),
    ],
    sites: Annotated[str | None, typer.Option(help="Pattern of modules, such as 'blocks.*.attn'.")] = None,
    student: Annotated[
        str | None,
        typer.Option(
            help="Replacement of each module, such as 'WindowedLinear(window=64)'; by default the same with new weights.",
            autocompletion=completion(students),
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Number of examples in a step.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens in an example, for language models.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Number of optimizer steps.")] = 1000,
    picture: Annotated[Path | None, typer.Option(help="PNG file for the operations of every step; for one plan.")] = None,
    json: Json = False,
) -> None:
    """Show the cost of a plan on a model, phase by phase, compared with student-only and full-teacher training.

    `segue cost timm:vit_tiny_patch16_224 dcr --sites 'blocks.*.attn'`
    """
    from segue.cli.cost import show

    show(console, model, plan, sites, student, batch=batch, tokens=tokens, steps=steps, picture=picture, as_json=json)


@command()
@with_settings(Conversion)
def convert(
    settings: Conversion,
    out: Annotated[Path, typer.Option(help="Folder of the converted model.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Time a few steps, print time, memory, disk and operations, and stop.")
    ] = False,
    config: Config = None,
    opens: Opens = False,
) -> None:
    """Convert a pretrained model: a folder with the new one, its card and its curve. An interrupted conversion resumes.

    `segue convert MODEL --sites 'model.layers.*.self_attn' --student 'WindowedLinear(window=64)' --data text.txt --out DIR`

    `segue convert --config mine.toml`
    """
    from segue.cli.report import watching

    given = {name: getattr(settings, name) for name in ("model", "data", "plan", "validation")}
    places: dict[str, Any] = {name: _place(value) for name, value in given.items()}
    places["evaluate_on"] = tuple(map(_place, settings.evaluate_on))
    with watching(out, opens=opens and not dry_run):
        _convert(dataclasses.replace(settings, **places), out, dry_run=dry_run)


@command(name="eval")
@with_settings(EvalSettings)
def eval_(
    settings: EvalSettings,
    out: Annotated[Path | None, typer.Option(help="Folder of the page; by default eval in the converted folder.")] = None,
    json: Json = False,
) -> None:
    """Compare a converted model with its original: quality, agreement, speed and memory; a table and one page.

    `segue eval DIR --tokens 1024`
    """
    from segue.cli.evaluation import show

    show(settings, out or settings.folder / "eval", as_json=json)


@command()
@with_settings(PlanSettings)
def plan(
    settings: PlanSettings,
    out: Annotated[Path, typer.Option(help="Folder of the plan; an interrupted one resumes there.")],
    json: Json = False,
) -> None:
    """Choose which modules to replace, by what and in what order: what each choice saves and damages, before any training.

    `segue plan MODEL --sites 'model.layers.*.self_attn' --candidates 'LinearAttention; SlidingWindow(window=64)' --data FILE
    --save cache_bytes=0.5 --out DIR`

    `segue convert MODEL --plan DIR/plan.json --data FILE --out DIR2`
    """
    from segue.cli.plan import show

    with resumed_by(*sys.argv[1:]):
        show(settings, out, console, as_json=json)


@command()
def methods(
    everything: Annotated[bool, typer.Option("--all", help="List the lab's variants of the methods too.")] = False,
    json: Json = False,
) -> None:
    """List the methods and what each is made of."""
    from segue.cli.methods import show

    show(everything=everything, as_json=json)


@command()
def run(
    method: Annotated[
        str | None,
        typer.Option(
            help="Replacement method; `segue methods` lists them. By default local_fit.",
            autocompletion=completion(variants),
        ),
    ] = None,
    preset: Annotated[PresetName | None, typer.Option(help="Preset of model and data; by default demo.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run; by default 0.")] = None,
    data_fraction: Annotated[float | None, typer.Option(help="Fraction of the training data to use.")] = None,
    out: Out = Path("runs/single"),
    options: Options = None,
    settings: Settings = None,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML or YAML file with settings of the run; what it leaves out is as in the preset and method."),
    ] = None,
    save_config: Annotated[
        Path | None, typer.Option(help="TOML or YAML file for all settings of the run; nothing is trained.")
    ] = None,
    tracker: Annotated[list[str] | None, typer.Option(help="Tracker of Accelerate, such as tensorboard or wandb.")] = None,
    opens: Opens = False,
) -> None:
    """Train one run, in every process of torchrun or accelerate. An interrupted run resumes.

    Everything is written to --out: the run, and the teacher that it needs, in the folder `teachers`. Runs of several folders
    share their teachers in the folder that the environment variable SEGUE_TEACHERS names.

    `segue run --method dcr --preset demo --set recipe.shard=true --set recipe.steps=100`

    `segue run --method dcr --save-config mine.toml`

    `segue run --config mine.toml`
    """
    from segue.cli.run import configured, show
    from segue.lab import config_files

    given = {"method": method, "preset": preset, "seed": seed, "data_fraction": data_fraction, "options": options}
    found = configured(config, given, name_values(settings))
    if save_config is not None:
        config_files.save(found, save_config)
        say(f"{save_config}\nNext: {command_line('run', '--config', save_config)}")
        return
    show(found, out, trackers=tuple(tracker or ()), opens=opens)


@command()
def tune(
    experiment: ExperimentArgument,
    out: Annotated[Path | None, typer.Option(help="Folder of the trials; by default runs/<experiment>_tune.")] = None,
    trials: Annotated[int, typer.Option(min=3, help="Number of trials of each method.")] = 8,
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs of each trial.")] = 1,
    steps_share: Annotated[float, typer.Option(help="Fraction of the experiment's steps in a trial.")] = 1.0,
    hold_out: Annotated[float, typer.Option(help="Fraction of the training data to score the trials on.")] = 0.2,
    workers: Workers = 1,
    engine: EngineOption = "local",
    options: Options = None,
) -> None:
    """Choose learning rates and loss weights: as many trials for every method, on held-out training data.

    Finished trials are kept; an interrupted search resumes to the same choice.

    `segue tune experiments/recipes --trials 8 --workers 2`

    `segue grid experiments/recipes --tuned runs/recipes_tune/tuned.json`
    """
    from segue.cli.tune import show
    from segue.lab.experiment import Experiment
    from segue.lab.tune import Tuning

    place = experiment_file(experiment)
    tuning = Tuning(trials=trials, seeds=seeds, steps_share=steps_share, hold_out=hold_out)
    found = Experiment(str(place.resolve()), name_values(options))
    raise typer.Exit(show(found, out or Path("runs") / f"{place.parent.name}_tune", console, tuning, workers, engine))


@command()
def grid(
    experiment: ExperimentArgument,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; by default runs/<experiment>.")] = None,
    workers: Workers = 1,
    engine: EngineOption = "local",
    tuned: Annotated[
        Path | None, typer.Option(help="File tuned.json with the settings of each method, by `segue tune`.")
    ] = None,
    options: Options = None,
    config: Config = None,
    opens: Opens = False,
) -> None:
    """Train the runs of an experiment: finished ones are skipped, interrupted ones resume.

    Everything is written to --out, the teachers too, unless the environment variable SEGUE_TEACHERS names a folder for them.
    """
    from segue.cli.grid import train_grid
    from segue.lab.experiment import Experiment
    from segue.lab.tune import tuned as with_settings_of

    place = experiment_file(experiment)
    folder = out or Path("runs") / place.parent.name
    found = Experiment(str(place.resolve()), name_values(options))
    chosen = found if tuned is None else with_settings_of(found, tuned)
    raise typer.Exit(train_grid(chosen, folder, workers, engine, opens=opens))


@command()
def resume(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, a grid, a search of settings or a conversion.")],
    workers: Annotated[int | None, typer.Option(min=1, help="Number of runs at the same time; by default as before.")] = None,
    run_file: Annotated[bool, typer.Option(help="Run the Python file that grid.json names, without a question.")] = False,
    download: Annotated[bool, typer.Option(help="Allow the download of models and data that the folder names.")] = False,
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint to resume from; by default the latest.")] = None,
    allow_changes: Annotated[
        list[str] | None, typer.Option(help="Setting that may differ from the checkpoint's, such as batches.first.")
    ] = None,
) -> None:
    """Resume an interrupted run, grid, search of settings or conversion.

    An experiment is code: its file is run if you ran it in this folder before, if you agree, or with --run-file.
    """
    from segue.cli.resume import resume

    given: dict[str, Any] = {"checkpoint": checkpoint, "allow_changes": tuple(allow_changes or ())}
    raise typer.Exit(resume(folder, convert=_convert, workers=workers, run_file=run_file, download=download, **given))


@command()
def pack(
    folder: Annotated[Path, typer.Argument(help="Folder with finished runs.")],
    out: Annotated[Path, typer.Option(help="Folder of the packed file, such as experiments/NAME/results.")],
) -> None:
    """Pack finished runs into one small text file for a repository; `segue report` reads it like the runs themselves."""
    from segue.reporting import records

    found = records.read_all(folder)
    packed = records.pack(found, out)
    size = packed.stat().st_size
    say(
        f"{len(found)} runs in {size:,} bytes, {size // len(found):,} for a run.\n{packed}\nNext: {command_line('report', out)}"
    )


@command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder with finished runs, or with packed ones.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the page; by default that of the runs.")] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="Method to compare the others with; by default the experiment's, or the best other method of each group."
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Take the runs of all folders below, also of other experiments and settings.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the page here while runs are under way; write nothing.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of --watch; 0 is any that is free.")] = 0,
    opens: Opens = False,
    json: Json = False,
) -> None:
    """Make figures, tables and one HTML page from the runs of a grid, or serve the page while they are under way."""
    from segue.cli import report as reports

    named: dict[str, Any] = {"title": title, "reference": reference, "opens": opens}
    if watch:
        reports.watch(folder, port=port, **named)
    else:
        reports.show(folder, out=out, everything=everything, as_json=json, **named)


@command()
def doctor(json: Json = False) -> None:
    """Show versions, devices and extras, and what is missing: for a bug report. It names no path and no secret."""
    from segue.cli.doctor import show

    show(as_json=json)


def _place(name: Any) -> Any:
    """Return the complete path of what is on this machine, so that it is found from wherever one resumes or evaluates."""
    return str(Path(name).resolve()) if isinstance(name, str) and name != "self" and Path(name).exists() else name


def _convert(settings: Any, out: Path, **resuming: Any) -> None:
    from segue.convert.convert import convert

    convert(settings, out, say, **resuming)
    if int(os.environ.get("RANK", 0)) == 0 and not resuming.get("dry_run"):
        say(f"In Python: segue.from_pretrained({str(out)!r})\nNext: {command_line('eval', out)}")
