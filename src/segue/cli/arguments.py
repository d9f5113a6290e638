"""Arguments: what a user types, as files, options and calls; and the options that several commands have."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from segue.cli.names import COMPLETIONS, completion
from segue.convert.options import GROUPS
from segue.convert.options import options as options_of
from segue.errors import ConfigError, nearest

Out = Annotated[Path, typer.Option(help="Folder of the results.")]
Workers = Annotated[int, typer.Option(min=1, help="Number of runs at the same time on this machine.")]
EngineOption = Annotated[Literal["local", "ray"], typer.Option(help="Place of the runs: this machine, or a Ray cluster.")]
ExperimentArgument = Annotated[str, typer.Argument(help="Folder with a runs.py, or such a file.")]
Options = Annotated[list[str] | None, typer.Option("--option", "-o", help="Option of the experiment, as name=value.")]
Settings = Annotated[list[str] | None, typer.Option("--set", "-s", help="Setting by its path, such as recipe.lr=1e-3.")]
Opens = Annotated[bool, typer.Option("--open", help="Open the report in a browser; it follows runs that are under way.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]
PresetName = Literal["demo", "small", "paper", "minilm"]
Model = Annotated[
    str, typer.Argument(help="Model as `segue convert` takes it (folder, GGUF file, id), or timm:NAME, torchvision:NAME, demo.")
]


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take the values of a file for the options that are not typed; a name that is no option is refused."""
    if path is None or context.resilient_parsing:  # a shell completes
        return path
    from segue.lab.config_files import read

    data = read(path)
    known = [str(parameter.name) for parameter in context.command.params if parameter.name not in ("help", "config")]
    for name in data:
        if name not in known:
            raise ConfigError(
                f"{path} has an unknown setting {name!r}.", nearest(name, known), f"it may have {', '.join(known)}."
            )
    pairs = data.get("options")
    if isinstance(pairs, dict):  # a table, as in grid.json
        data["options"] = [f"{name}={json.dumps(value)}" for name, value in pairs.items()]
    context.default_map = data
    return path


Config = Annotated[
    Path | None,
    typer.Option(
        help="TOML or YAML file with these options by name; those that are typed win.", is_eager=True, callback=_read_config
    ),
]


def with_settings(kind: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function of settings into a command that has an option for every field of their dataclass."""
    described = options_of(kind)

    def parameter(name: str) -> inspect.Parameter:
        hint, option = described[name]
        panel = next((group for group, names in GROUPS.items() if name in names), None)
        more: dict[str, Any] = {"autocompletion": completion(COMPLETIONS[name])} if name in COMPLETIONS else {}
        info: Any = typer.Option(
            help=option.help, min=option.min, max=option.max, envvar=option.envvar, rich_help_panel=panel, **more
        )
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


def experiment_file(name: str) -> Path:
    """Find the file of an experiment: a file, a folder with runs.py, or a name below experiments/."""
    for path in (Path(name), Path(name) / "runs.py", Path("experiments") / name / "runs.py"):
        if path.is_file() and path.suffix == ".py":
            return path
    known = [str(path.parent) for path in sorted(Path("experiments").glob("*/runs.py"))]
    raise ConfigError(
        f"there is no experiment {name!r}.", nearest(name, known), "an experiment is a folder with a runs.py in it."
    )


def name_values(pairs: list[str] | None) -> dict[str, Any]:
    """Parse name=value pairs; a value is JSON where it can be, and text otherwise."""
    options: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"{pair!r} is not an option.", "It is not of the form name=value.", "give for example seeds=5.")
        try:
            options[name] = json.loads(text)
        except ValueError:
            options[name] = text
    return options


def call_with(function: Any, what: str, options: dict[str, Any]) -> Any:
    """Call a function with options; an unknown or missing option is an error that names those it has."""
    parameters = inspect.signature(function).parameters
    for name in options:
        if name not in parameters:
            raise ConfigError(
                f"{what} has no option {name!r}.", nearest(name, list(parameters)), f"it has {', '.join(parameters)}."
            )
    missing = [name for name, p in parameters.items() if p.default is p.empty and name not in options]
    if missing:
        raise ConfigError(f"{what} is incomplete.", f"It needs the option {missing[0]!r}.", f"give --option {missing[0]}=PATH.")
    return function(**options)


def neighbours(folder: Path) -> str:
    """Name the folders that are near one that is not there."""
    others = [str(path) for path in sorted(folder.parent.glob("*")) if path.is_dir()] if folder.parent.is_dir() else []
    return nearest(str(folder), others) if others else "There is no such folder."
