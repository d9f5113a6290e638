"""The commands of `segue`; strings become objects here, at the edge, and nowhere else."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

import segue
from segue.errors import ConfigError, SegueError, nearest

app = typer.Typer(
    help="Replace modules inside a pretrained PyTorch model without breaking it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
console = Console()

Out = Annotated[Path, typer.Option(help="Where the results go.")]
Workers = Annotated[int, typer.Option(min=1, help="Runs at the same time on this machine.")]
Options = Annotated[list[str] | None, typer.Option("--option", "-o", help="An option of the experiment, as name=value.")]
Settings = Annotated[list[str] | None, typer.Option("--set", "-s", help="A setting by its path: recipe.lr=1e-3.")]


def show_error(error: SegueError) -> None:
    """Print an error for people: what was asked, what was found, what to do."""
    first, *rest = str(error).splitlines()
    output = Console(stderr=True)
    output.print(f"[bold red]{type(error).__name__}[/]: {escape(first)}", soft_wrap=True)
    for line in rest:
        output.print(escape(line), soft_wrap=True)


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
    seeds: Annotated[int, typer.Option(min=1, help="How often each method runs.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each run.")] = 320,
    teacher_steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of the teacher.")] = 500,
) -> None:
    """Compare the paper's seven methods on embedded data: a table, figures and a report in about three minutes."""
    from segue.cli.demo import show

    options = {"seeds": seeds, "steps": steps, "teacher_steps": teacher_steps}
    raise typer.Exit(show(out, console, options=options, workers=workers))


@app.command()
def sites(
    model: Annotated[str, typer.Argument(help="timm:NAME, hf:FOLDER_OR_ID, torchvision:NAME, or demo.")],
    pattern: Annotated[str | None, typer.Argument(help="Which modules, such as 'blocks.*.attn'.")] = None,
) -> None:
    """Show what would be replaced: names, shapes and parameter counts. Without a pattern, what there is."""
    from segue.lab.model_names import build, kinds

    built = build(model)
    if pattern is None:
        table = Table("pattern", "modules", "module", "parameters in all", title=f"{model}: what could be replaced")
        for kind in kinds(built):
            table.add_row(escape(kind.pattern), str(kind.count), kind.module, f"{kind.parameters:,}")
        console.print(table)
        console.print("Next: segue sites MODEL PATTERN shows one of these site by site.")
        return
    found = segue.select(built, pattern)
    table = Table("#", "site", "module", "parameters", "shapes", title=f"{len(found)} sites match {pattern!r}")
    total = 0
    for site in found:
        module = built.get_submodule(site.name)
        count = sum(parameter.numel() for parameter in module.parameters())
        total += count
        shapes = ", ".join(f"{name} {'x'.join(map(str, p.shape))}" for name, p in module.named_parameters() if p.dim() > 1)
        table.add_row(str(site.index), escape(", ".join(site.names)), type(module).__name__, f"{count:,}", escape(shapes))
    console.print(table)
    whole = sum(parameter.numel() for parameter in built.parameters())
    console.print(f"{total:,} of {whole:,} parameters ({total / max(1, whole):.1%}) would be replaced.")


@app.command()
def cost(
    model: Annotated[str, typer.Argument(help="timm:NAME, hf:FOLDER_OR_ID, torchvision:NAME, or demo.")],
    plan: Annotated[str, typer.Argument(help="A method (`segue methods`), 'paper' for its seven, or a plan saved as JSON.")],
    sites: Annotated[str | None, typer.Option(help="Which modules, such as 'blocks.*.attn'.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Examples in a step.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Of each example, for language models.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Of the run.")] = 1000,
    picture: Annotated[Path | None, typer.Option(help="A PNG of the operations step by step; for one plan.")] = None,
) -> None:
    """Show what a plan costs on a model, phase by phase, beside student-only and full-teacher training.

    `segue cost timm:vit_tiny_patch16_224 dcr --sites 'blocks.*.attn'`
    """
    from segue.cli.cost import show

    show(console, model, plan, sites, batch=batch, tokens=tokens, steps=steps, picture=picture)


@app.command()
def convert(
    model: Annotated[str, typer.Argument(help="A Hugging Face id, a folder with safetensors, or a GGUF file.")],
    sites: Annotated[str, typer.Option(help="Which modules, such as 'model.layers.*.self_attn'.")],
    student: Annotated[str, typer.Option(help="What replaces them, such as 'WindowedLinear(window=64)'.")],
    data: Annotated[str, typer.Option(help="Text files, a folder of images by class, or an id of `datasets`.")],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")],
    out: Annotated[Path, typer.Option(help="The folder of the converted model.")],
    method: Annotated[str, typer.Option(help="How the originals hand over (`segue methods`).")] = "dcr_dfg",
    keep: Annotated[str | None, typer.Option(help="Which of the sites stay, such as 'model.layers.{0,29}.*'.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Examples in a step.")] = 8,
    tokens: Annotated[int, typer.Option(min=2, help="Of each piece of text.")] = 256,
    lr: Annotated[float, typer.Option(help="The largest learning rate.")] = 5e-4,
    warmup: Annotated[float, typer.Option(min=0, max=1, help="The share of steps in which the rate rises.")] = 0.05,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches in a step.")] = 1,
    train: Annotated[Literal["students", "all"], typer.Option(help="What learns.")] = "students",
    precision: Annotated[Literal["float32", "bf16", "fp16"], typer.Option(help="Of the computation.")] = "float32",
    dtype: Annotated[str | None, typer.Option(help="Of the saved weights; the original's if not given.")] = None,
    shard: Annotated[
        bool, typer.Option(envvar="ACCELERATE_USE_FSDP", help="FSDP2 instead of DDP, in several processes.")
    ] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the model.")] = False,
    validation: Annotated[float, typer.Option(help="The share of texts that is held out.")] = 0.05,
    looks: Annotated[int, typer.Option(min=1, help="How often the held-out part is looked at.")] = 10,
    seed: int = 0,
    text: Annotated[str | None, typer.Option(help="The column of texts.")] = None,
    label: Annotated[str | None, typer.Option(help="The column of labels.")] = None,
    download: Annotated[bool, typer.Option(help="Allow the download of a dataset.")] = False,
) -> None:
    """Convert a pretrained model: a folder with the new one, its card and its curve. Goes on if it was interrupted.

    `segue convert MODEL --sites 'model.layers.*.self_attn' --student 'WindowedLinear(window=64)' --data text.txt --steps 1000
    --out DIR`
    """
    from segue.convert.convert import Conversion

    model, data = (str(Path(each).resolve()) if Path(each).exists() else each for each in (model, data))
    settings = {name: value for name, value in locals().items() if name in Conversion.__dataclass_fields__}
    _convert(Conversion(**settings, compile=compiled), out)


@app.command(name="eval")
def eval_(
    folder: Annotated[Path, typer.Argument(help="That `segue convert` wrote.")],
    base: Annotated[str | None, typer.Option(help="Where the original lies now; by default where it lay.")] = None,
    data: Annotated[str | None, typer.Option(help="To judge by; by default what the conversion held out of its own.")] = None,
    validation: Annotated[float | None, typer.Option(help="The share of the data that is judged by, its end.")] = None,
    contexts: Annotated[str | None, typer.Option(help="Tokens, such as 256,1024,4096: where speed is measured.")] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Of each text; may be more than it was trained on.")] = None,
    texts: Annotated[int | None, typer.Option(min=1, help="At most so many pieces of text, or examples.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the page goes; by default eval in the folder.")] = None,
) -> None:
    """Compare a converted model with its original: quality, agreement, speed and memory; a table and one page.

    `segue eval DIR --tokens 1024`
    """
    from segue.convert import evaluate as judge
    from segue.convert import evaluation_text as judge_words

    settings = judge.Judging(
        folder=folder, base=base, data=data, validation=validation, contexts=judge.sizes(contexts), tokens=tokens, texts=texts
    )
    place = out or folder / "eval"
    results = judge.judge(settings, place, lambda text: console.print(escape(text), soft_wrap=True, highlight=False))
    table = Table(Column("", no_wrap=True), "original", "converted", "compared", box=box.SIMPLE_HEAD)
    for row in judge_words.rows(results):
        table.add_row(*map(escape, row))
    console.print(table)
    for sentence in judge_words.sentences(results):
        console.print(f"- {escape(sentence)}", soft_wrap=True, highlight=False)
    console.print(str(place / "index.html"), soft_wrap=True)


@app.command()
def methods() -> None:
    """List the methods that can be compared."""
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
    method: Annotated[str, typer.Option(help="`segue methods` lists them.")] = "dcr_dfg",
    scale: Annotated[Literal["demo", "small", "paper", "minilm"], typer.Option(help="How big.")] = "demo",
    seed: int = 0,
    share: Annotated[float | None, typer.Option(help="Of the training data, for the replacement.")] = None,
    out: Out = Path("runs/single"),
    options: Options = None,
    settings: Settings = None,
    tracker: Annotated[list[str] | None, typer.Option(help="tensorboard, wandb, ...: any of Accelerate's.")] = None,
) -> None:
    """Carry out one run; launched by torchrun or accelerate, it uses every process. Goes on if it was interrupted.

    `segue run --method dcr --scale demo --set recipe.shard=true --set recipe.steps=100`
    """
    from segue.lab import presets as scales
    from segue.lab import variants
    from segue.lab.config import changed
    from segue.lab.run import run as carry_out

    found = variants.find([method])
    if len(found) > 1:
        raise ConfigError(
            f"the methods {method!r} were asked for.", "A run has one method.", "`segue grid` carries out many runs."
        )
    variant = found[0]
    made = getattr(scales, scale)
    config = _call(made, f"the scale {scale}", _options(options)).run(variant, seed=seed, share=share)
    for path, value in _options(settings).items():
        config = changed(config, path, value)
    result = carry_out(config, out / config.name, keep_model=True, trackers=tuple(tracker or ()))
    if int(os.environ.get("RANK", 0)) == 0:
        score = result.train_info.score
        console.print(f"students alone: {score} {result.final:.4f} (teacher {result.train_info.teacher[score]:.4f})")
        console.print(str(out / config.name), soft_wrap=True)


@app.command()
def grid(
    experiment: Annotated[str, typer.Argument(help="A folder with runs.py, or such a file.")],
    out: Annotated[Path | None, typer.Option(help="Where the results go; by default runs/<experiment>.")] = None,
    workers: Workers = 1,
    engine: Annotated[Literal["local", "ray"], typer.Option(help="This machine, or a Ray cluster.")] = "local",
    options: Options = None,
) -> None:
    """Carry out the runs of an experiment: what is finished is skipped, what was interrupted goes on."""
    from segue.lab.grid import Experiment

    place = _experiment(experiment)
    folder = out or Path("runs") / place.parent.name
    raise typer.Exit(_grid(Experiment(str(place.resolve()), _options(options)), folder, workers, engine))


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="Of one run, of a grid, or of a conversion.")],
    workers: Annotated[int | None, typer.Option(min=1, help="As before, if not given.")] = None,
) -> None:
    """Go on with an interrupted run, grid or conversion."""
    from segue.lab.config import from_dict
    from segue.lab.grid import Experiment
    from segue.lab.run import run as carry_out

    if (settings := folder / "training" / "settings.json").exists():
        from segue.convert.convert import Conversion

        _convert(Conversion(**json.loads(settings.read_text(encoding="utf-8"))), folder)
        return
    if (folder / "grid.json").exists():
        known = json.loads((folder / "grid.json").read_text(encoding="utf-8"))
        experiment = Experiment(known["place"], known["options"])
        raise typer.Exit(_grid(experiment, folder, workers or known["workers"], known["engine"]))
    if (folder / "config.json").exists():
        config = from_dict(json.loads((folder / "config.json").read_text(encoding="utf-8"))["config"])
        result = carry_out(config, folder)
        console.print(f"students alone: {result.train_info.score} {result.final:.4f}")
        return
    raise ConfigError(
        f"the run or grid in {folder} was to go on.",
        f"No config.json or grid.json lies there. {_neighbours(folder)}",
        "give the folder that `segue run`, `segue grid` or `segue convert` wrote to.",
    )


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="With finished runs in it.")],
    title: Annotated[str | None, typer.Option(help="Of the page.")] = None,
) -> None:
    """Make figures, tables and one HTML page from saved runs."""
    from segue.cli import results as terminal
    from segue.lab.report.page import build
    from segue.lab.report.summary import summarize
    from segue.reporting import records as results

    if not folder.is_dir():
        raise ConfigError(f"a report on {folder} was asked for.", _neighbours(folder), "give the folder of a grid.")
    page = build(folder, title=title)
    terminal.show(summarize(results.read_all(folder)), console)
    console.print(f"\n{page}", soft_wrap=True)


def _convert(settings: Any, out: Path) -> None:
    from segue.convert.convert import convert

    def say(text: str) -> None:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)  # the progress line comes again below
        console.print(escape(text), soft_wrap=True, highlight=False)

    convert(settings, out, say)
    if int(os.environ.get("RANK", 0)) == 0:
        console.print(f"In Python: segue.from_pretrained({str(out)!r})\nNext: segue eval {out}", soft_wrap=True)


def _grid(experiment: Any, folder: Path, workers: int, engine: str) -> int:
    """Carry out a grid, say what failed, and return the exit code."""
    from segue.lab.grid import run_grid
    from segue.reporting.records import write_json

    experiment.runs()  # every mistake in it shows before anything is written
    known = {"place": experiment.place, "options": experiment.options, "workers": workers, "engine": engine}
    write_json(known, folder / "grid.json")
    failed = [outcome for outcome in run_grid(experiment, folder, workers=workers, engine=engine) if not outcome.ok]
    for outcome in failed:
        console.print(f"[bold red]failed[/]: {escape(outcome.name)}\n{escape(outcome.why)}", soft_wrap=True)
    if failed:
        console.print(f"{len(failed)} runs failed; their logs are in {folder}/<run>/log.txt.", soft_wrap=True)
        return 1
    console.print(f"All runs are finished. Next: segue report {folder}", soft_wrap=True)
    return 0


def _experiment(name: str) -> Path:
    """Find the file of an experiment: a file, a folder with runs.py, or a name below experiments/."""
    for path in (Path(name), Path(name) / "runs.py", Path("experiments") / name / "runs.py"):
        if path.is_file() and path.suffix == ".py":
            return path
    known = [str(path.parent) for path in sorted(Path("experiments").glob("*/runs.py"))]
    raise ConfigError(
        f"the experiment {name!r} was asked for.", nearest(name, known), "an experiment is a folder with a runs.py in it."
    )


def _options(pairs: list[str] | None) -> dict[str, Any]:
    """Read name=value pairs; a value is JSON where it can be, and text otherwise."""
    options: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"the option {pair!r} was given.", "It is not of the form name=value.", "for example seeds=5.")
        try:
            options[name] = json.loads(text)
        except ValueError:
            options[name] = text
    return options


def _call(function: Any, what: str, options: dict[str, Any]) -> Any:
    """Call a function with options, and say which it has if one is wrong or missing."""
    import inspect

    parameters = inspect.signature(function).parameters
    for name in options:
        if name not in parameters:
            raise ConfigError(f"the option {name!r} was given to {what}.", nearest(name, list(parameters)), "see its help.")
    missing = [name for name, p in parameters.items() if p.default is p.empty and name not in options]
    if missing:
        raise ConfigError(f"{what} was asked for.", f"It needs the option {missing[0]!r}.", f"give --option {missing[0]}=PATH.")
    return function(**options)


def _neighbours(folder: Path) -> str:
    beside = [str(path) for path in sorted(folder.parent.glob("*")) if path.is_dir()] if folder.parent.is_dir() else []
    return nearest(str(folder), beside) if beside else "There is no such folder."
