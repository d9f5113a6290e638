"""The commands of `segue`: each parses, calls and prints. Imports of torch are inside them, so that help answers at once."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.table import Column, Table
from rich.text import Text

import segue
from segue.cli.arguments import call_with, experiment_file, name_values, neighbours
from segue.cli.terminal import PlainConsole
from segue.convert.options import Conversion, EvalSettings, PlanSettings
from segue.convert.options import options as options_of
from segue.errors import ConfigError, SegueError, printable

app = typer.Typer(
    help="Replace modules inside a pretrained PyTorch model without breaking it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
console = PlainConsole()

Out = Annotated[Path, typer.Option(help="Folder of the results.")]
Workers = Annotated[int, typer.Option(min=1, help="Number of runs at the same time on this machine.")]
EngineOption = Annotated[Literal["local", "ray"], typer.Option(help="Place of the runs: this machine, or a Ray cluster.")]
ExperimentArgument = Annotated[str, typer.Argument(help="Folder with a runs.py, or such a file.")]
Opens = Annotated[bool, typer.Option("--open", help="Open the report in a browser; it follows runs that are under way.")]
Options = Annotated[list[str] | None, typer.Option("--option", "-o", help="Option of the experiment, as name=value.")]
Settings = Annotated[list[str] | None, typer.Option("--set", "-s", help="Setting by its path, such as recipe.lr=1e-3.")]


Model = Annotated[
    str, typer.Argument(help="Model as `segue convert` takes it (folder, GGUF file, id), or timm:NAME, torchvision:NAME, demo.")
]


def with_settings(kind: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function of settings into a command that has an option for every field of their dataclass."""
    described = options_of(kind)

    def parameter(name: str) -> inspect.Parameter:
        hint, option = described[name]
        info: Any = typer.Option(help=option.help, min=option.min, max=option.max, envvar=option.envvar)
        if option.argument:
            info = typer.Argument(help=option.help)
        typed = list[str] | None if option.repeated else (str | None) if option.parse else hint
        annotation: Any = Annotated[typed, info]
        default = getattr(kind, name, inspect.Parameter.empty)  # a dataclass keeps its defaults as attributes
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**given: Any) -> None:
            values = {name: given.pop(name) for name in described}
            parsed = {name: option.parse(values[name]) for name, (_, option) in described.items() if option.parse}
            parsed |= {name: tuple(values[name] or ()) for name, (_, option) in described.items() if option.repeated}
            function(kind(**values | parsed), **given)

        _, *own = inspect.signature(function, eval_str=True).parameters.values()
        keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
        command.__signature__ = inspect.Signature([*map(parameter, described), *keywords])  # type: ignore[attr-defined]
        return command

    return decorate


def show_error(error: SegueError) -> None:
    """Print an error in three lines: what is wrong, what was found, what to do."""
    first, *rest = str(error).splitlines()
    output = PlainConsole(stderr=True)
    output.print(Text.assemble((type(error).__name__, "bold red"), f": {first}"), soft_wrap=True)
    for line in rest:
        output.print(line, soft_wrap=True)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False) -> None:
    """Replace modules inside a pretrained PyTorch model without breaking it."""
    if show:
        print(segue.__version__)
        raise typer.Exit


@app.command()
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
    raise typer.Exit(show(out, console, options=options, workers=workers))


@app.command()
def sites(
    model: Model,
    pattern: Annotated[str | None, typer.Argument(help="Pattern of modules, such as 'blocks.*.attn'.")] = None,
) -> None:
    """Show the modules that a pattern matches: names, shapes and parameter counts. Without a pattern, show all patterns."""
    from segue.lab.models import build, kinds

    built = build(model)
    if pattern is None:
        table = Table("pattern", "modules", "module", "parameters", title=f"{model}: modules that can be replaced")
        for kind in kinds(built):
            table.add_row(kind.pattern, str(kind.count), kind.module, f"{kind.parameters:,}")
        console.print(table)
        console.print("Next: segue sites MODEL PATTERN shows the sites of one pattern.")
        return
    found = segue.select(built, pattern)
    table = Table("#", "site", "module", "parameters", "shapes", title=f"{len(found)} sites match {pattern!r}")
    total = 0
    for site in found:
        module = built.get_submodule(site.name)
        count = sum(parameter.numel() for parameter in module.parameters())
        total += count
        shapes = ", ".join(f"{name} {'x'.join(map(str, p.shape))}" for name, p in module.named_parameters() if p.dim() > 1)
        table.add_row(str(site.index), ", ".join(site.names), type(module).__name__, f"{count:,}", shapes)
    console.print(table)
    size = sum(parameter.numel() for parameter in built.parameters())
    console.print(f"{total:,} of {size:,} parameters ({total / max(1, size):.1%}) would be replaced.")


@app.command()
def cost(
    model: Model,
    plan: Annotated[str, typer.Argument(help="Method (`segue methods`), 'paper' for its seven, or a plan saved as JSON.")],
    sites: Annotated[str | None, typer.Option(help="Pattern of modules, such as 'blocks.*.attn'.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Number of examples in a step.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens in an example, for language models.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Number of optimizer steps.")] = 1000,
    picture: Annotated[Path | None, typer.Option(help="PNG file for the operations of every step; for one plan.")] = None,
) -> None:
    """Show the cost of a plan on a model, phase by phase, compared with student-only and full-teacher training.

    `segue cost timm:vit_tiny_patch16_224 dcr --sites 'blocks.*.attn'`
    """
    from segue.cli.cost import show

    show(console, model, plan, sites, batch=batch, tokens=tokens, steps=steps, picture=picture)


@app.command()
@with_settings(Conversion)
def convert(
    settings: Conversion,
    out: Annotated[Path, typer.Option(help="Folder of the converted model.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Time a few steps, print time, memory, disk and operations, and stop.")
    ] = False,
    opens: Opens = False,
) -> None:
    """Convert a pretrained model: a folder with the new one, its card and its curve. An interrupted conversion resumes.

    `segue convert MODEL --sites 'model.layers.*.self_attn' --student 'WindowedLinear(window=64)' --data text.txt --out DIR`
    """
    from segue.cli.report import watching

    given = {name: getattr(settings, name) for name in ("model", "data", "plan", "validation")}
    places: dict[str, Any] = {name: _place(value) for name, value in given.items()}
    places["evaluate_on"] = tuple(map(_place, settings.evaluate_on))
    with watching(out, opens=opens and not dry_run):
        _convert(dataclasses.replace(settings, **places), out, dry_run=dry_run)


@app.command(name="eval")
@with_settings(EvalSettings)
def eval_(
    settings: EvalSettings,
    out: Annotated[Path | None, typer.Option(help="Folder of the page; by default eval in the converted folder.")] = None,
) -> None:
    """Compare a converted model with its original: quality, agreement, speed and memory; a table and one page.

    `segue eval DIR --tokens 1024`
    """
    from segue.convert import findings
    from segue.convert.evaluate import evaluate

    place = out or settings.folder / "eval"
    results = evaluate(settings, place, _say)
    table = Table(Column("", no_wrap=True), "original", "converted", "compared", box=box.SIMPLE_HEAD)
    for part, rows in groupby(findings.rows(results), lambda row: row.part):
        table.add_section()
        table.add_row(part, style="dim")
        for row in rows:
            table.add_row(*row[:4], style="bold" if row.worse else None)
    console.print(table)
    if branches := findings.branch_rows(results):
        table = Table(Column("", no_wrap=True), *findings.BRANCH_HEADINGS[1:], box=box.SIMPLE_HEAD)
        for cells in branches:
            table.add_row(*cells)
        console.print(table)
    for sentence in (findings.worse(results), *findings.sentences(results)):
        _say(f"- {sentence}")
    console.print(str(place / "index.html"), soft_wrap=True)


@app.command()
@with_settings(PlanSettings)
def plan(
    settings: PlanSettings,
    out: Annotated[Path, typer.Option(help="Folder of the plan; an interrupted one resumes there.")],
    json: Annotated[bool, typer.Option("--json", help="Print the plan and its numbers as JSON.")] = False,
) -> None:
    """Choose which modules to replace, by what and in what order: what each choice saves and damages, before any training.

    `segue plan MODEL --sites 'model.layers.*.self_attn' --candidates 'LinearAttention; SlidingWindow(window=64)' --data FILE
    --save cache_bytes=0.5 --out DIR`, then `segue convert MODEL --plan DIR/plan.json --data FILE --out DIR2`
    """
    from segue.cli.plan import show

    show(settings, out, console, as_json=json)


@app.command()
def methods() -> None:
    """List the methods."""
    from segue.lab import variants

    table = Table(title="Methods")
    for heading in ("name", "in figures", "gate", "schedule", "guidance", "distillation"):
        table.add_column(heading, no_wrap=heading == "name")
    for variant in variants.ALL.values():
        plan = variant.plan(sites="*")
        parts = (plan.gate, plan.schedule, plan.guidance, plan.distill)
        table.add_row(variant.name, variant.label, *("-" if part is None else type(part).__name__ for part in parts))
    console.print(table)
    console.print("'paper' stands for the first seven, 'all' for every one.")


@app.command()
def run(
    method: Annotated[str, typer.Option(help="Replacement method; `segue methods` lists them.")] = "dcr_dfg",
    preset: Annotated[Literal["demo", "small", "paper", "minilm"], typer.Option(help="Preset of model and data.")] = "demo",
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 0,
    data_fraction: Annotated[float | None, typer.Option(help="Fraction of the training data to use.")] = None,
    out: Out = Path("runs/single"),
    options: Options = None,
    settings: Settings = None,
    tracker: Annotated[list[str] | None, typer.Option(help="Tracker of Accelerate, such as tensorboard or wandb.")] = None,
    opens: Opens = False,
) -> None:
    """Train one run, in every process of torchrun or accelerate. An interrupted run resumes.

    `segue run --method dcr --preset demo --set recipe.shard=true --set recipe.steps=100`
    """
    from segue.cli.report import watching
    from segue.lab import presets, variants
    from segue.lab.config import changed
    from segue.lab.run import run as train

    found = variants.find([method])
    if len(found) > 1:
        raise ConfigError(
            f"{method!r} stands for {len(found)} methods.", "A run has one method.", "`segue grid` trains many runs."
        )
    chosen = call_with(getattr(presets, preset), f"the preset {preset}", name_values(options))
    config = chosen.run(found[0], seed=seed, data_fraction=data_fraction)
    for path, value in name_values(settings).items():
        config = changed(config, path, value)
    with watching(out / config.name, opens=opens):
        result = train(config, out / config.name, keep_model=True, trackers=tuple(tracker or ()))
    if int(os.environ.get("RANK", 0)) == 0:
        score = result.train_info.score
        console.print(f"students alone: {score} {result.final:.4f} (teacher {result.train_info.teacher[score]:.4f})")
        console.print(str(out / config.name), soft_wrap=True)


@app.command()
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

    `segue tune experiments/recipes --trials 8 --workers 2`, then `segue grid experiments/recipes --tuned
    runs/recipes_tune/tuned.json`. Finished trials are kept; an interrupted search resumes to the same choice.
    """
    from segue.cli.tune import show
    from segue.lab.experiment import Experiment
    from segue.lab.tune import Tuning

    place = experiment_file(experiment)
    tuning = Tuning(trials=trials, seeds=seeds, steps_share=steps_share, hold_out=hold_out)
    found = Experiment(str(place.resolve()), name_values(options))
    raise typer.Exit(show(found, out or Path("runs") / f"{place.parent.name}_tune", console, tuning, workers, engine))


@app.command()
def grid(
    experiment: ExperimentArgument,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; by default runs/<experiment>.")] = None,
    workers: Workers = 1,
    engine: EngineOption = "local",
    tuned: Annotated[
        Path | None, typer.Option(help="File tuned.json with the settings of each method, by `segue tune`.")
    ] = None,
    options: Options = None,
    opens: Opens = False,
) -> None:
    """Train the runs of an experiment: finished ones are skipped, interrupted ones resume."""
    from segue.cli.report import watching
    from segue.lab.experiment import Experiment
    from segue.lab.tune import tuned as with_settings_of

    place = experiment_file(experiment)
    folder = out or Path("runs") / place.parent.name
    found = Experiment(str(place.resolve()), name_values(options))
    chosen = found if tuned is None else with_settings_of(found, tuned)
    with watching(folder, opens=opens):
        raise typer.Exit(_grid(chosen, folder, workers, engine))


@app.command()
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
    from segue.cli.tune import show
    from segue.data.files import without_network
    from segue.lab.config import Run, from_dict
    from segue.lab.experiment import Experiment
    from segue.lab.run import run as train
    from segue.lab.tune import Tuning
    from segue.reporting.records import read_json

    network = nullcontext() if download else without_network()
    given: dict[str, Any] = {"resume": checkpoint, "allow_changes": tuple(allow_changes or ())}
    if (settings := folder / "training" / "settings.json").exists():
        if (folder / "segue.json").exists():
            console.print(f"{folder} is finished: there is nothing to resume.\nNext: segue eval {folder}", soft_wrap=True)
            return
        with network:
            _convert(Conversion.from_dict(read_json(settings)), folder, **given)
        return
    if place := next((folder / name for name in ("grid.json", "tune.json") if (folder / name).exists()), None):
        if checkpoint or allow_changes:
            raise ConfigError(
                "a grid resumes each of its runs from its own latest checkpoint.",
                "--checkpoint and --allow-changes are of one run.",
                f"give the folder of that run: segue resume {folder}/RUN.",
            )
        known = read_json(place, "place", "options", "workers", "engine")
        experiment = Experiment.from_dict(known)
        _require_consent(experiment, place, run_file)
        if place.name == "grid.json":
            raise typer.Exit(_grid(experiment, folder, workers or known["workers"], known["engine"]))
        tuning = Tuning.from_dict(read_json(place, "tuning")["tuning"])
        raise typer.Exit(show(experiment, folder, console, tuning, workers or known["workers"], known["engine"]))
    if (folder / "config.json").exists():
        config = from_dict(read_json(folder / "config.json", "config")["config"])
        if not isinstance(config, Run):
            raise ConfigError(
                f"{folder} is not a run.", f"Its config.json holds a {type(config).__name__}.", "give a run's folder."
            )
        with network:
            result = train(config, folder, **given)
        console.print(f"students alone: {result.train_info.score} {result.final:.4f}")
        return
    raise ConfigError(
        f"{folder} is not a run, a grid, a search of settings or a conversion.",
        f"It has no config.json, grid.json, tune.json or training/settings.json. {neighbours(folder)}",
        "give the folder that `segue run`, `segue grid`, `segue tune` or `segue convert` wrote to.",
    )


@app.command()
def pack(
    folder: Annotated[Path, typer.Argument(help="Folder with finished runs.")],
    out: Annotated[Path, typer.Option(help="Folder of the packed file, such as experiments/NAME/results.")],
) -> None:
    """Pack finished runs into one small text file for a repository; `segue report` reads it like the runs themselves."""
    from segue.reporting import records

    found = records.read_all(folder)
    packed = records.pack(found, out)
    size = packed.stat().st_size
    console.print(f"{len(found)} runs in {size:,} bytes, {size // len(found):,} for a run.\n{packed}", soft_wrap=True)


@app.command()
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
) -> None:
    """Make figures, tables and one HTML page from the runs of a grid, or serve the page while they are under way."""
    from segue.cli import report as reports

    named: dict[str, Any] = {"title": title, "reference": reference, "opens": opens}
    if watch:
        reports.watch(folder, console, port=port, **named)
    else:
        reports.show(folder, console, out=out, everything=everything, **named)


def _place(name: Any) -> Any:
    """Return the complete path of what is on this machine, so that it is found from wherever one resumes or evaluates."""
    return str(Path(name).resolve()) if isinstance(name, str) and name != "self" and Path(name).exists() else name


def _convert(settings: Any, out: Path, **resuming: Any) -> None:
    from segue.convert.convert import convert

    convert(settings, out, _say, **resuming)
    if int(os.environ.get("RANK", 0)) == 0 and not resuming.get("dry_run"):
        console.print(f"In Python: segue.from_pretrained({str(out)!r})\nNext: segue eval {out}", soft_wrap=True)


def _say(text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False)


def _grid(experiment: Any, folder: Path, workers: int, engine: Any) -> int:
    """Train a grid, print what failed, and return the exit code."""
    from segue.lab import consent
    from segue.lab.grid import describe_grid, run_grid
    from segue.reporting.records import write_json

    experiment.runs()  # raises its errors before anything is written
    known = describe_grid(experiment, workers=workers, engine=engine)  # so does this
    consent.remember(experiment, folder)
    write_json(known, folder / "grid.json")
    failed = [outcome for outcome in run_grid(experiment, folder, workers=workers, engine=engine) if not outcome.ok]
    for outcome in failed:
        console.print(Text.assemble(("failed", "bold red"), f": {outcome.name}\n{outcome.why}"), soft_wrap=True)
    if failed:
        console.print(f"{len(failed)} runs failed; their logs are in {folder}/<run>/log.txt.", soft_wrap=True)
        return 1
    console.print(f"All runs are finished. Next: segue report {folder}", soft_wrap=True)
    return 0


def _require_consent(experiment: Any, named_in: Path, run_file: bool) -> None:
    """Run a file that only the folder names if the user says so, or has said so before."""
    from segue.lab import consent

    folder = named_in.parent
    if run_file or consent.is_shipped(experiment) or consent.is_known(experiment, folder):
        return
    place = experiment.place
    if sys.stdin.isatty() and sys.stderr.isatty():
        question = f"{named_in} names the experiment {place}, which is code. Run it?"
        if typer.confirm(printable(question), default=False, err=True):
            return
    raise ConfigError(
        f"the experiment {place} is not run.",
        "It is code, the folder names it, and you have not run it, as it is now, in this folder.",
        f"read it, then: segue resume {folder} --run-file",
    )
