"""The settings of `segue convert` and `segue eval`: each default, limit and help text stands here, once, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from segue.border import checked
from segue.errors import ConfigError

GROUPS: dict[str, tuple[str, ...]] = {  # of the options in a help text
    "Model": (
        *("model", "sites", "student", "candidates", "method", "plan", "guidance", "distill", "control", "exclude"),
        *("folder", "base", "digest"),
    ),
    "Data": (
        *("data", "text", "label", "download", "tokens", "texts", "contexts", "harness", "validation", "evaluate_on"),
        *("samples", "sampling_temperature", "sampling_top_p"),
    ),
    "Training": (
        *("steps", "batch", "batches", "lr", "lr_new", "lr_backbone", "warmup", "accumulate", "train", "lora", "seed"),
        *("evaluations", "eval_batches", "teacher_cache", "fit_steps", "subsets", "recall", "augmented"),
    ),
    "Budget": ("save", "kl", "differing", "saves", "cost_batch", "cost_tokens"),
    "Devices": ("precision", "dtype", "shard", "compile"),
}
RENAMED = {"looks": "evaluations", "keep": "exclude"}  # settings of version 0.1.0, in files that it wrote


@dataclass(frozen=True, kw_only=True)
class Option:
    """What the command line needs to know about a setting besides its type and default."""

    help: str
    min: float | None = None
    max: float | None = None
    argument: bool = False  # given by its position
    envvar: str | None = None
    parse: Callable[[str | None], Any] | None = None  # makes the value of what is typed
    repeated: bool = False  # given once for each of several values


def options(kind: type) -> dict[str, tuple[Any, Option]]:
    """Return the type and the description of every setting of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Annotated}


def sizes(text: str | None) -> tuple[int, ...] | None:
    """Parse numbers that are separated by commas.

    >>> sizes("256,1024")
    (256, 1024)
    """
    if text is None:
        return None
    found = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in found):
        fault = f"contexts must be numbers of tokens, got {text!r}."
        raise ConfigError(fault, "They are separated by commas.", "give for example 256,1024,4096.")
    return tuple(sorted({int(part) for part in found}))


def share_or_place(text: str | float | None) -> float | str | None:
    """Parse a fraction, or the name of a file or dataset.

    >>> share_or_place("0.1"), share_or_place("held_out.txt")
    (0.1, 'held_out.txt')
    """
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


@checked
@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Everything that one conversion depends on."""

    model: Annotated[str, Option(help="Hugging Face id, folder with safetensors, or GGUF file.", argument=True)]
    sites: Annotated[str | None, Option(help="Pattern of the modules to replace, such as 'model.layers.*.self_attn'.")] = None
    student: Annotated[str | None, Option(help="Replacement of each module, such as 'WindowedLinear(window=64)'.")] = None
    data: Annotated[
        str,
        Option(
            help="File of texts or chats, folder of them, folder of images by class, id of `datasets`, or 'self': sampled from "
            "the original."
        ),
    ]
    steps: Annotated[
        int | None, Option(help="Number of optimizer steps; the default is announced with the time it takes.", min=1)
    ] = None
    method: Annotated[
        str | None,
        Option(
            help="Replacement method, such as 'lolcats(hold=0.3)'; `segue methods` lists them, the model decides the default."
        ),
    ] = None
    plan: Annotated[
        str | None, Option(help="Plan saved as JSON, instead of sites, student, method and losses: Plan.to_dict() in a file.")
    ] = None
    guidance: Annotated[
        str | None, Option(help="Loss at the sites, such as 'CosineGuidance(weight=2)', its weight, or 'none'.")
    ] = None
    distill: Annotated[
        str | None, Option(help="Loss between the models, such as 'LogitDistillation(temperature=1)', its weight, or 'none'.")
    ] = None
    control: Annotated[
        bool, Option(help="Replace attention by exact softmax attention and train it in the same way: nothing is converted.")
    ] = False
    exclude: Annotated[
        str | None, Option(help="Pattern of matched modules to leave unchanged, such as 'model.layers.{0,29}.*'.")
    ] = None
    batch: Annotated[int, Option(help="Number of examples in a batch.", min=1)] = 8
    tokens: Annotated[int, Option(help="Number of tokens in a piece of text.", min=2)] = 256
    lr: Annotated[
        float | None,
        Option(help="Peak learning rate: of all parameters, or beside --lr-new of those copied from the original."),
    ] = None
    lr_new: Annotated[
        float | None, Option(help="Peak learning rate of parameters that the original does not have, such as feature maps.")
    ] = None
    lr_backbone: Annotated[
        float | None, Option(help="Peak learning rate of what trains around the sites; by default a tenth of --lr.")
    ] = None
    warmup: Annotated[
        float | None,
        Option(
            help="Fraction of the steps in which the learning rate rises, of each phase that has rates of its own; "
            "by default as the method says, else 0.05.",
            min=0,
            max=1,
        ),
    ] = None
    accumulate: Annotated[int, Option(help="Number of batches in an optimizer step.", min=1)] = 1
    train: Annotated[Literal["students", "all"], Option(help="Parameters to train.")] = "students"
    lora: Annotated[
        int | None,
        Option(help="Rank of LoRA adapters that train around the sites and are merged in the end; needs PEFT.", min=1),
    ] = None
    precision: Annotated[Literal["float32", "bf16", "fp16"], Option(help="Precision of the computation.")] = "float32"
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, Option(help="Type of the saved weights; by default the original's.")
    ] = None
    shard: Annotated[
        bool, Option(help="Shard the model by FSDP2 instead of DDP, with several processes.", envvar="ACCELERATE_USE_FSDP")
    ] = False
    compile: Annotated[bool, Option(help="Compile the model with torch.compile.")] = False
    validation: Annotated[
        float | str,
        Option(
            help="Fraction of the data that is held out, between 0 and 1, or a file or dataset of its own.",
            parse=share_or_place,
        ),
    ] = 0.05
    evaluate_on: Annotated[
        tuple[str, ...], Option(help="Further file or dataset to evaluate on; may be repeated.", repeated=True)
    ] = ()
    evaluations: Annotated[
        int | None,
        Option(help="Number of evaluations on the held-out data; by default as many as cost 10 % of the run.", min=1),
    ] = None
    eval_batches: Annotated[
        int | None, Option(help="Number of held-out batches in each of them; all if evaluations are given.", min=1)
    ] = None
    seed: Annotated[int, Option(help="Seed of the order of the data and of new weights.")] = 0
    text: Annotated[str | None, Option(help="Name of the text column.")] = None
    label: Annotated[str | None, Option(help="Name of the label column.")] = None
    download: Annotated[bool, Option(help="Allow the download of a dataset.")] = False
    samples: Annotated[
        int | None,
        Option(help="Number of sequences to train on with --data self; by default those of all steps, at most 2,048.", min=1),
    ] = None
    sampling_temperature: Annotated[float, Option(help="Temperature of --data self.", min=0.01)] = 1.0
    sampling_top_p: Annotated[float, Option(help="Probability mass that --data self samples from.", min=0.01, max=1)] = 1.0
    teacher_cache: Annotated[
        int | None,
        Option(
            help="Number of the original's most probable tokens kept on disk for distillation, instead of running it in every "
            "step.",
            min=1,
        ),
    ] = None

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    @checked
    def from_dict(cls, saved: Mapping[str, Any]) -> Conversion:
        """Rebuild the settings from a file, also one that version 0.1.0 wrote."""
        given: dict[str, Any] = {RENAMED.get(name, name): tuple(x) if isinstance(x, list) else x for name, x in saved.items()}
        if given.get("train") == "all" and "lr" in given:
            given.setdefault("lr_backbone", given["lr"])  # 0.1.0 had one rate for all
        known = options(cls)
        wrong = sorted(set(given) - set(known)) or [name for name in known if name not in given and not hasattr(cls, name)]
        if wrong:
            how = "unknown" if wrong[0] in given else "missing"
            fault = f"the saved settings of a conversion are damaged: {wrong[0]!r} is {how}."
            raise ConfigError(fault, f"They have {', '.join(given) or 'no names'}.", "give the settings again: segue convert.")
        return cls(**given)


@checked
@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """Everything that a comparison depends on; None means as in the conversion."""

    folder: Annotated[Path, Option(help="Folder that `segue convert` wrote.", argument=True)]
    base: Annotated[str | None, Option(help="Id or folder of the original; by default as recorded.")] = None
    data: Annotated[str | None, Option(help="Data to evaluate on; by default what the conversion held out.")] = None
    validation: Annotated[float | None, Option(help="Fraction of the data to evaluate on, taken from its end.")] = None
    contexts: Annotated[
        tuple[int, ...] | None,
        Option(help="Context lengths at which speed is measured, such as 256,1024,4096.", parse=sizes),
    ] = None
    tokens: Annotated[int | None, Option(help="Number of tokens in a text; may be more than in training.", min=2)] = None
    texts: Annotated[int | None, Option(help="Largest number of texts or images to evaluate on.", min=1)] = None
    harness: Annotated[
        str | None, Option(help="Multiple-choice task of lm-evaluation-harness, by its name or YAML file, to ask both models.")
    ] = None
    digest: Annotated[str | None, Option(help="Digest that the folder must have; its model card shows it.")] = None
    download: Annotated[bool, Option(help="Allow the download of the original and of a dataset.")] = False

    def __post_init__(self) -> None:
        _check(self)


def _check(settings: Any) -> None:
    """Refuse a value outside its limits, however the settings were made."""
    for name, (_, option) in options(type(settings)).items():
        value = getattr(settings, name)
        if value is None:
            continue
        if not (option.min is None or value >= option.min) or not (option.max is None or value <= option.max):
            limits = f"at least {option.min}" if option.max is None else f"from {option.min} to {option.max}"
            raise _refused(settings, name, limits, option)
        if name == "validation" and not isinstance(value, str) and not 0 < value < 1:
            raise _refused(settings, name, "between 0 and 1", option)


def _refused(settings: Any, name: str, wanted: str, option: Option) -> ConfigError:
    default = getattr(type(settings), name, None)
    hint = "choose another value." if default is None else f"the default is {default!r}."
    return ConfigError(f"{name} must be {wanted}, got {getattr(settings, name)!r}.", f"{name}: {option.help}", hint)


def parts(text: str | None) -> tuple[str, ...] | None:
    """Parse texts that are separated by semicolons.

    >>> parts("LinearAttention; WindowedLinear(window=64)")
    ('LinearAttention', 'WindowedLinear(window=64)')
    """
    return None if text is None else tuple(part.strip() for part in text.split(";") if part.strip())


@checked
@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Everything that `segue plan` depends on."""

    model: Annotated[str, Option(help="Hugging Face id or folder, GGUF file, or timm:NAME.", argument=True)]
    sites: Annotated[
        tuple[str, ...], Option(help="Patterns of the modules that may be replaced, separated by semicolons.", parse=parts)
    ]
    candidates: Annotated[
        tuple[str, ...],
        Option(help="Students that may replace them, such as 'LinearAttention; WindowedLinear(window=64)'.", parse=parts),
    ]
    data: Annotated[str, Option(help="Text file, folder of text files, folder of images by class, or id of `datasets`.")]
    save: Annotated[str | None, Option(help="Least savings of the complete model, such as 'flops=0.2, cache_bytes=0.5'.")] = (
        None
    )
    kl: Annotated[float | None, Option(help="Largest KL divergence from the original, before training.", min=0)] = None
    differing: Annotated[
        float | None, Option(help="Largest fraction of first choices that differ from the original's.", min=0, max=1)
    ] = None
    saves: Annotated[
        Literal["flops", "parameters", "cache_bytes", "prefill", "decode", "train"] | None,
        Option(help="Metric to save, where no least savings are given; by default FLOPs, else the cache, else weights."),
    ] = None
    batches: Annotated[
        int | None,
        Option(help="Largest number of batches; by default 256 predictions to measure on, and one for each step.", min=1),
    ] = None
    batch: Annotated[int, Option(help="Number of examples in a batch.", min=1)] = 8
    tokens: Annotated[int, Option(help="Number of tokens in a piece of text.", min=2)] = 128
    cost_batch: Annotated[int, Option(help="Number of examples in a batch whose costs are measured.", min=1)] = 1
    cost_tokens: Annotated[
        int | None, Option(help="Number of tokens whose costs are measured; by default --tokens.", min=2)
    ] = None
    fit_steps: Annotated[int, Option(help="Number of steps of the local fit of every candidate.", min=1)] = 32
    subsets: Annotated[int, Option(help="Number of random subsets whose damage is measured.", min=8)] = 48
    recall: Annotated[float, Option(help="Weight of retrieval beside the text, for causal models.", min=0)] = 0.0
    augmented: Annotated[float, Option(help="Weight of augmented images beside the plain ones.", min=0)] = 0.0
    seed: Annotated[int, Option(help="Seed of new weights and of the subsets.")] = 0
    text: Annotated[str | None, Option(help="Name of the text column.")] = None
    label: Annotated[str | None, Option(help="Name of the label column.")] = None
    download: Annotated[bool, Option(help="Allow the download of the model and of a dataset.")] = False

    def __post_init__(self) -> None:
        _check(self)
