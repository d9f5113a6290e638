"""One valid call of every public callable: the only part of the wrong calls that is written by hand.

A function of a folder returns the arguments by name (`self` too, for a method). `USES` says how a thing that was made is
used for the first time: what is nonsense in it must be refused by then.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import segue
from segue import gates, losses, methods, phases, planning, schedules, students
from segue.data import Digits
from segue.lab import presets, variants
from segue.lab.experiment import Experiment
from segue.lab.models import SentenceClassifier, SmallViT
from segue.lab.small_vit import VisionTransformer
from segue.lab.tasks import ImageTask
from segue.lab.tune import Tuning
from segue.training.recipe import Recipe
from segue.training.tasks import Classification
from tests.helpers import tiny_runs
from tests.helpers.tiny import SITES, Attention, Net, batch, optimizer_for
from tests.students.attention import tiny_attention

Arguments = dict[str, Any]
TASK = Classification()
INPUTS, LABELS = batch()


def plan(**settings: Any) -> segue.Plan:
    return segue.Plan(**{"sites": SITES, **settings})


def handover(total_steps: int = 4, **settings: Any) -> segue.Handover:
    return segue.replace_(Net().train(), plan(**settings), total_steps=total_steps)


def features() -> Any:
    running = handover(guidance=losses.FeatureGuidance())
    with running.features() as found:
        running.model(INPUTS)
    return found


def finished(_: Path) -> nn.Module:
    return handover(schedule=schedules.Constant()).finalize_()


def saved(folder: Path) -> Path:
    segue.save(handover(), folder / "saved")
    return folder / "saved"


def loss_fn(model: nn.Module, examples: Any) -> torch.Tensor:
    return F.cross_entropy(model(examples[0]), examples[1])


def measured(**settings: Any) -> Callable[[Path], Arguments]:
    return lambda _: {"handover": handover(gate=gates.Bernoulli()), "batches": [batch(0)], "loss_fn": loss_fn, **settings}


def of(**arguments: Any) -> Callable[[Path], Arguments]:
    """Return arguments that a call does not change."""
    return lambda _: dict(arguments)


def pair(_: Path) -> Arguments:
    return {"teacher": torch.randn(2, 3, 4), "student": torch.randn(2, 3, 4), "mask": torch.ones(2, 3)}


def written_run(folder: Path) -> Path:
    place = folder / "runs.py"
    place.write_text("from tests.helpers.tiny_runs import config\n\ndef runs():\n    return [config()]\n", encoding="utf-8")
    return place


CONVERSION: Arguments = {
    "model": "model",
    "sites": "model.layers.*.self_attn",
    "student": "Softmax",
    "data": "text.txt",
    "steps": 3,
}
SPEC = tiny_attention.TinyAttention(Attention(8)).parse(Attention(8))
PIXELS = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)

VALID: dict[str, Callable[[Path], Arguments]] = {
    "segue.Plan": of(
        sites=SITES,
        student=students.Reinit(),
        gate=gates.Blend(),
        schedule=schedules.Linear(),
        guidance=losses.FeatureGuidance(),
    ),
    "segue.Plan.from_dict": lambda _: {"data": plan().to_dict()},
    "segue.Site": of(name="blocks.0.attn"),
    "segue.Span": of(layers="blocks", every=3),
    "segue.select": lambda _: {"model": Net(), "sites": SITES},
    "segue.replace_": lambda _: {"model": Net(), "plan": plan(), "total_steps": 4, "example": INPUTS},
    "segue.Handover.aux_loss": lambda _: {"self": handover()},
    "segue.Handover.losses": lambda _: {"self": handover()},
    "segue.Handover.calibrate": lambda _: {
        "self": handover(student=students.Softmax()),
        "batches": [INPUTS],
        "method": students.LeastSquares(),
    },
    "segue.Handover.features": lambda _: {"self": handover(guidance=losses.FeatureGuidance())},
    "segue.core.local_fit.Features.losses": lambda _: {"self": features(), "split": 2, "reuse": 2},
    "segue.fit_locally": lambda folder: {
        "handover": handover(guidance=losses.FeatureGuidance()),
        "batches": [INPUTS],
        "recipe": Recipe(steps=1),
        "cache": folder / "cache",
        "progress": None,
    },
    "segue.cache_teacher": lambda folder: {
        "model": Net(),
        "batches": [(INPUTS, LABELS)],
        "loss_fn": TASK,
        "folder": folder / "teacher",
        "k": 3,
        "progress": None,
    },
    "segue.Handover.comparing": lambda _: {"self": handover()},
    "segue.Handover.similarity": lambda _: {"self": handover(), "args": (INPUTS,)},
    "segue.Handover.parameter_groups": lambda _: {"self": handover()},
    "segue.Handover.schedule_rates": lambda _: {"self": handover(), "optimizer": torch.optim.SGD(Net().parameters())},
    "segue.Handover.weighted": lambda _: {"self": handover(), "task_loss": torch.ones(())},
    "segue.Handover.finalize_": lambda _: {"self": handover(), "force": True},
    "segue.Handover.raise_alpha": lambda _: {"self": handover(), "alphas": {"blocks.1.attn": 0.5}, "over": 2},
    "segue.Handover.reschedule": lambda _: {"self": handover(), "schedule": schedules.Linear()},
    "segue.Handover.verify": lambda _: {"self": handover(), "args": (INPUTS,)},
    "segue.fit": lambda folder: {
        "model": Net(),
        "plan": plan(guidance=losses.FeatureGuidance()),
        "batches": [batch(0, 2), batch(1, 2)],
        "loss_fn": TASK,
        "recipe": Recipe(steps=2),
        "validation": [batch(2, 2)],
        "folder": folder / "fit",
        "evaluations": 1,
        "progress": None,
    },
    "segue.Guard": of(),
    "segue.Guard.watch": lambda _: {
        "self": segue.Guard(),
        "handover": (running := handover()),
        "optimizer": torch.optim.SGD(running.parameters()),
    },
    "segue.Ema": of(),
    "segue.Ema.watch": lambda _: {"self": segue.Ema(), "handover": handover()},
    "segue.EarlyStopping": of(score="accuracy"),
    "segue.Recipe": of(steps=2),
    "segue.Recipe.optimizer": lambda _: {"self": Recipe(steps=2), "named": [*Net().named_parameters()]},
    "segue.Recipe.rate": of(self=Recipe(steps=2), step=0, total=2),
    "segue.Recipe.set_rate": lambda _: {
        "self": Recipe(steps=2),
        "optimizer": torch.optim.SGD(Net().parameters()),
        "step": 0,
        "total": 2,
    },
    "segue.Recipe.total_steps": of(self=Recipe(epochs=2), batches_per_epoch=3),
    "segue.Classification": of(label_smoothing=0.1),
    "segue.save": lambda folder: {"target": handover(), "folder": folder / "new"},
    "segue.load_": lambda folder: {"target": Net().train(), "folder": saved(folder)},
    "segue.diagnostics.Recorder": of(batches=[batch(0)], loss_fn=loss_fn),
    "segue.diagnostics.cost": lambda _: {"model": Net(), "plan": plan(), "batch": INPUTS, "total_steps": 3},
    "segue.diagnostics.curvature_bias": measured(points=1, iterations=1),
    "segue.diagnostics.distribution_of": of(gate=gates.Bernoulli(), alpha=0.5),
    "segue.diagnostics.gate_gradient_variance": measured(draws=4, alone=False, most_outcomes=4),
    "segue.diagnostics.loss_path": measured(points=2),
    "segue.gates.GumbelSoftmax": of(temperature=1.0),
    "segue.losses.CkaGuidance": of(weight=1.0),
    "segue.losses.CosineGuidance": of(weight=1.0),
    "segue.losses.FeatureAxis": of(axis=-1),
    "segue.losses.FeatureGuidance": of(weight=1.0),
    "segue.losses.GramGuidance": of(weight=1.0),
    "segue.losses.LogitDistillation": of(weight=1.0),
    "segue.losses.PredictionDistillation": of(weight=1.0),
    "segue.losses.OnTeacherStream": of(then=losses.FeatureGuidance()),
    "segue.methods.method": of(label="A method"),
    **{f"segue.methods.{name}": of(sites=SITES) for name in methods.ALL},
    "segue.phases.Phase": of(name="local fit", length=0.5, local=True, lr=1e-3),
    "segue.phases.Rates": of(new=1e-3),
    "segue.phases.Rates.of": of(self=phases.Rates(new=1e-3), kind="new"),
    "segue.schedules.Adaptive": of(until=0.5),
    "segue.schedules.Constant": of(alpha=0.5),
    "segue.schedules.Cosine": of(start=1.0),
    "segue.schedules.Linear": of(start=1.0),
    "segue.schedules.Hold": of(fraction=0.5),
    "segue.schedules.PerSite": of(schedules={"blocks.0.attn": schedules.Linear()}),
    "segue.schedules.Piecewise": of(points=((0.0, 1.0), (1.0, 0.0))),
    "segue.schedules.Staggered": of(order="front"),
    "segue.schedules.aggr20": of(start=1.0),
    "segue.schedules.mean_of": of(history=[{"step": 0, "alpha": 1.0}, {"step": 4, "alpha": 0.0}]),
    "segue.similarity.measure": pair,
    "segue.similarity.cosine": pair,
    "segue.similarity.squared_error": pair,
    "segue.planning.Frontier": of(saves="flops", choose=0.5),
    "segue.planning.Quality": of(kl=0.1),
    "segue.planning.Saving": of(flops=0.3),
    "segue.planning.choose_heads": lambda _: {
        "model": VisionTransformer(pixels=4, channels=1, patch=2, width=8, depth=2, heads=2, classes=3),
        "sites": "blocks.*.attn",
        "mixture": students.MixedHeads(operator=students.SlidingWindow(window=1)),
        "batches": [torch.randn(2, 1, 4, 4)],
        "keep": 1,
        "recall": 0.0,
        "seed": 0,
        "progress": None,
    },
    "segue.planning.plan_replacement": lambda folder: {
        "model": Net(),
        "batches": [INPUTS],
        "candidates": [students.Drop(returns="zeros")],
        "budget": planning.Saving(parameters=1e-3),
        "sites": "blocks.*.mlp",
        "fit_steps": 1,
        "lr": 1e-3,
        "closed_form": False,
        "subsets": 8,
        "measure_on": 1,
        "recall": 0.0,
        "augmented": 0.0,
        "cost_batch": INPUTS,
        "folder": folder / "planned",
        "settings": {"release": True},
        "seed": 0,
        "progress": None,
    },
    "segue.planning.replan": lambda _: {"handover": handover(), "batches": [INPUTS], "window": 0.5},
    "segue.similarity.relative_error": pair,
    "segue.similarity.divergence": lambda folder: {name: x for name, x in pair(folder).items() if name != "mask"},
    "segue.similarity.gram_error": pair,
    "segue.similarity.linear_cka": pair,
    "segue.students.ActivationSwap": of(to="relu"),
    "segue.students.Adapter": of(inside=4),
    "segue.students.AttentionSpec": of(heads=1, head_size=8, query=SPEC.query, key=SPEC.key, value=SPEC.value),
    "segue.students.FlaLayer": of(name="GatedDeltaNet"),
    "segue.students.Drop": of(returns="zeros"),
    "segue.students.Fourier": of(),
    "segue.students.GatedDeltaNet": of(decay=False),
    "segue.students.GatedLinear": of(feature_map="elu"),
    "segue.students.GatedMlp": of(ratio=0.5),
    "segue.students.LeastSquares": of(ridge=1e-4),
    "segue.students.LinearAttention": of(feature_map="elu"),
    "segue.students.Linformer": of(rank=2, tokens=5),
    "segue.students.LowRankMlp": of(rank=2),
    "segue.students.MixedHeads": of(operator=students.SlidingWindow(window=2), keep=(0,)),
    "segue.students.NarrowMlp": of(ratio=0.5),
    "segue.students.Net2Net": of(noise=0.01),
    "segue.students.Nystrom": of(landmarks=2),
    "segue.students.OneLayer": of(which=0),
    "segue.students.PerSite": of(students={"**": students.Reinit()}),
    "segue.students.Performer": of(features=8),
    "segue.students.Projection": of(weight=torch.ones(2, 2), bias=None),
    "segue.students.RmsNorm": of(),
    "segue.students.SlidingWindow": of(window=2),
    "segue.students.Softmax": of(),
    "segue.students.WideMlp": of(ratio=2),
    "segue.students.WindowedLinear": of(window=2),
    "segue.students.projection": lambda _: {"module": nn.Linear(2, 2)},
    "segue.students.register_attention": of(kind=Attention, interface=tiny_attention.TinyAttention),
    "segue.students.split_qkv": of(fused=students.Projection(torch.ones(6, 2), None)),
    "segue.students.LeastSquares.observer": lambda _: {
        "self": students.LeastSquares(),
        "teacher": nn.Linear(2, 2),
        "student": nn.Linear(2, 2),
        "site": segue.Site("a"),
    },
    "segue.students.LeastSquares.projection": lambda _: {
        "self": students.LeastSquares(output="0"),
        "student": nn.Sequential(nn.Linear(2, 2)),
        "site": segue.Site("a"),
    },
    "segue.from_pretrained": lambda folder: {"folder": folder},
    "segue.convert.convert.convert": of(settings=None, out=Path("out")),
    "segue.convert.evaluate.evaluate": of(settings=None, out=Path("out")),
    "segue.convert.options.Conversion": of(**CONVERSION),
    "segue.convert.options.Conversion.from_dict": of(saved=CONVERSION),
    "segue.convert.options.EvalSettings": of(folder=Path("folder")),
    "segue.integrations.driver.Driver": lambda _: {"plan": plan()},
    "segue.integrations.lightning.HandoverCallback": lambda _: {"plan": plan()},
    "segue.integrations.transformers.HandoverCallback": lambda _: {"plan": plan()},
    "segue.lab.config.Run": lambda _: dict(vars(tiny_runs.config())),
    "segue.lab.config.Stage": of(recipe=Recipe(steps=1)),
    "segue.lab.config.Teacher": of(task=tiny_runs.TASK, stages=(tiny_runs.HEAD,)),
    "segue.lab.config.Choice": of(settings={}, trials=3, seeds=1, hold_out=10, score=0.5),
    "segue.lab.experiment.Experiment": of(place="runs.py"),
    "segue.lab.experiment.Experiment.from_dict": of(saved={"place": "runs.py", "options": {}}),
    "segue.lab.grid.run_grid": lambda folder: {"experiment": Experiment(str(written_run(folder))), "out": folder},
    "segue.lab.models.SentenceClassifier": of(name="model"),
    "segue.lab.models.SmallViT": of(depth=2),
    "segue.lab.models.Timm": of(name="vit_tiny_patch16_224"),
    "segue.lab.presets.Preset": lambda _: dict(vars(presets.demo())),
    "segue.lab.presets.Preset.run": of(self=presets.demo(), variant=variants.ALL["dcr"]),
    "segue.lab.presets.demo": of(steps=10),
    "segue.lab.presets.minilm": of(model="m", train="a.tsv", test="b.tsv"),
    "segue.lab.presets.paper": of(folder="data"),
    "segue.lab.presets.small": of(folder="data"),
    "segue.lab.report.page.build": lambda folder: {"folder": folder},
    "segue.lab.run.run": lambda folder: {"config": tiny_runs.config(), "folder": folder / "run"},
    "segue.lab.small_vit.VisionTransformer": of(depth=1),
    "segue.lab.tasks.ImageTask": of(source=Digits(), model=SmallViT(depth=1)),
    "segue.lab.tasks.ImageTask.load": of(self=ImageTask(source=Digits(), model=SmallViT(depth=1))),
    "segue.lab.tasks.SentenceTask": of(source=Digits(), model=SentenceClassifier(name="m")),
    "segue.lab.tune.Tuning": of(trials=3),
    "segue.lab.tune.Tuning.from_dict": of(saved={"trials": 3}),
    "segue.lab.tune.tune": lambda folder: {
        "experiment": Experiment(str(written_run(folder))),
        "out": folder,
        "tuning": Tuning(),
    },
    "segue.lab.tune.tuned": lambda folder: {"experiment": Experiment(str(written_run(folder))), "path": folder / "tuned.json"},
    "segue.lab.variants.Variant": of(name="a", label="A", plan=methods.dcr),
    "segue.lab.variants.find": of(names=["dcr"]),
    "segue.lab.variants.with_lambda": of(variant=variants.ALL["dcr_dfg"], weight=0.5),
    "segue.reporting.records.read_all": lambda folder: {"folder": folder},
    "segue.data.Crop": of(pad=1),
    "segue.data.CropFlip": of(pad=1),
    "segue.data.HubDataset": of(id="a/b"),
    "segue.data.Idx": of(folder="a"),
    "segue.data.ImageFolder": of(folder="a"),
    "segue.data.Parquet": of(train="a", test="b"),
    "segue.data.Torchvision": of(name="CIFAR10", folder="a"),
    "segue.data.Tsv": of(train="a", test="b"),
    "segue.data.normalise": of(images_uint8=PIXELS, mean=(0.5,), std=(0.5,)),
}

# Calls that need files or minutes: only arguments of a wrong type are tried, which are refused before anything is done.
AT_THE_BORDER_ONLY = {
    "segue.from_pretrained",
    "segue.convert.convert.convert",
    "segue.convert.evaluate.evaluate",
    "segue.lab.grid.run_grid",
    "segue.lab.run.run",
    "segue.lab.tune.tune",
    "segue.lab.tune.tuned",
    "segue.lab.report.page.build",
    "segue.reporting.records.read_all",
}

# Values that are right and take a minute on a busy machine, which would count as hung.
VALID_AND_LONG = {"segue.Recipe(compile=True)"}

RESULT = "made by Segue as the answer to a call"
CONTRACT = "called by Segue at every step or forward, with its own values"
FRAMEWORK = "called by a training framework, with its own objects"
NOT_CALLED_BY_USERS = {
    r"segue\.convert\.hub\.push_to_hub": "needs the hub: tests/convert/test_hub.py",
    r"segue\.diagnostics\.(Cost|CurvatureBias|GateDistribution|GateGradientVariance|LossPath)(\..*)?": RESULT,
    r"segue\.(training\.fit\.Fit|core\.verify\.\w+|core\.calibrate\.Fitted)(\..*)?": RESULT,
    r"segue\.(lab\.grid\.Outcome|similarity\.Similarity)": RESULT,
    r"segue\.core\.local_fit\.Features(\.(loss|observe|sizes))?": "made by handover.features(), and used by segue.fit",
    r"segue\.planning\.(Choice|ChosenHeads|Planned|Replanned)(\..*)?": RESULT,
    r"segue\.students\.PerSite\.of": CONTRACT,
    r"segue\.reporting\.records\.(Result|RunInfo|TrainInfo|Point)": RESULT,
    r"segue\.data\.(Examples|Dataset|TextDataset)": RESULT,
    r"segue\.Handover": "made by replace_",
    r"segue\.Handover\.(end|follow|recording|require_running|require_teachers|resume_at)": "called by Segue itself",
    r"segue\.gates\.(Noise.*|\w+\.(outcomes|nodes))": CONTRACT,
    r"segue\.schedules\.(is_hold|\w+\.is_hold|alpha_at)|segue\.losses\.weight_at": CONTRACT,
    r"segue\.students\.(\w+\.mixer|AttentionCall|(AttentionInterface|ByName)(\..*)?|read_mask)": CONTRACT,
    r"segue\.Classification\.scores|segue\.lab\.small_vit\.VisionTransformer\.forward": CONTRACT,
    r"segue\.integrations\.\w+\.\w+\.(on_\w+|setup|aux_loss|set_step|start_|optimizer|update|refuse_unfit)": FRAMEWORK,
    r"segue\.integrations\.\w+\.\w+\.(watch|note|record_features)": FRAMEWORK,
    r"segue\.lab\.tasks\.SentenceTask\.load": "needs files of a pretrained model; ImageTask.load is the same code",
    r"segue\.similarity\.(samples|move_features|feature_axis|as_real)": CONTRACT,
    r"segue\.errors\..*": "makes the errors themselves",
}

# Foreign errors that are right, by the call: what raises is the user's own, and its exception arrives as it is.
BATCHES_OF_THE_USER = "the user's own model or loss_fn is called with the user's own batches, and raises"
FUNCTION_OF_THE_USER = "the user's own function takes the number of arguments, is called with them, and raises"
EXPECTED_FOREIGN = {
    r"segue\.fit\((batches|validation)=.*": BATCHES_OF_THE_USER,
    r"segue\.diagnostics\.(curvature_bias|gate_gradient_variance|loss_path)\(batches=.*": BATCHES_OF_THE_USER,
    r".*\((measure|on_eval|mask|feature_map|loss_fn|to|init|student)=module\)": FUNCTION_OF_THE_USER,
}


def _in_a_plan(field: str, **settings: Any) -> Callable[[Any, Path], None]:
    """Use a part of a plan: put it into a model, take a training step."""

    def use(part: Any, _: Path) -> None:
        running = segue.replace_(Net().train(), plan(**{field: part, **settings}), total_steps=3)
        optimizer = optimizer_for(running)
        (F.cross_entropy(running.model(INPUTS), LABELS) + running.aux_loss()).backward()
        optimizer.step()
        running.step()

    return use


def _fit(recipe: Any, _: Path) -> None:
    segue.fit(Net(), plan(), [batch(0, 2), batch(1, 2)], TASK, recipe=recipe, progress=None)


def _train(made: Any, _: Path) -> None:
    running = segue.replace_(Net().train(), made, total_steps=3)
    (F.cross_entropy(running.model(INPUTS), LABELS) + running.aux_loss()).backward()
    running.step()


def _mlp(student: Any, _: Path) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)))
    segue.replace_(model, segue.Plan(sites="0", student=student), total_steps=3)
    model(INPUTS)


USES: dict[str, Callable[[Any, Path], None]] = {
    "segue.Plan": _train,
    "segue.Span": lambda span, _: segue.select(Net(), span) and None,
    "segue.Recipe": _fit,
    "segue.Classification": lambda task, _: task(Net(), batch()) and None,
    "segue.gates.GumbelSoftmax": _in_a_plan("gate"),
    **{
        f"segue.losses.{name}": _in_a_plan("guidance")
        for name in ("CkaGuidance", "CosineGuidance", "FeatureAxis", "FeatureGuidance", "GramGuidance", "OnTeacherStream")
    },
    **{f"segue.losses.{name}": _in_a_plan("distill") for name in ("LogitDistillation", "PredictionDistillation")},
    **{f"segue.methods.{name}": _train for name in methods.ALL},
    **{
        f"segue.schedules.{name}": _in_a_plan("schedule")
        for name in ("Constant", "Cosine", "Linear", "Hold", "PerSite", "Piecewise", "Staggered", "aggr20", "mean_of")
    },
    "segue.schedules.Adaptive": _in_a_plan("schedule", guidance=losses.FeatureGuidance()),
    **{
        f"segue.students.{name}": _in_a_plan("student")
        for name in (
            *("GatedDeltaNet", "GatedLinear", "Linformer", "LinearAttention", "Nystrom", "Performer", "SlidingWindow"),
            *("MixedHeads", "WindowedLinear", "Softmax"),
        )
    },
    **{f"segue.students.{name}": _mlp for name in ("GatedMlp", "LowRankMlp", "NarrowMlp", "WideMlp")},
    "segue.students.ActivationSwap": _in_a_plan("student", sites="blocks.*.mlp.1", train="all"),
    "segue.students.RmsNorm": _in_a_plan("student", sites="blocks.*.norm"),
    "segue.students.Drop": _in_a_plan("student", train="all"),
    "segue.students.PerSite": _in_a_plan("student"),
    "segue.students.OneLayer": _in_a_plan("student", sites=segue.Span("blocks", every=3)),
    "segue.students.Adapter": _in_a_plan("adapter", sites="head", student=lambda teacher, site: nn.Linear(4, 4)),
    "segue.students.LeastSquares": lambda made, _: handover(student=students.Softmax()).calibrate([INPUTS], made) and None,
}
