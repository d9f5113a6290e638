"""Write the files of version 0.1.0 that later versions must read.

Command:  OMP_NUM_THREADS=1 python -m tests.compatibility.write_v0_1_0
Runs with the code of commit bf6578f only, and is kept as the record of what it wrote; a quarter of a minute on one core.
It writes the same bytes again: clocks count calls, so times and speeds in the files mean nothing; memory and dates are
replaced by fixed ones, paths by names in braces.
"""
# ruff: noqa: I001  the rooms that these imports name are gone

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import itertools
import json
import random
import shutil
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import torch
from safetensors.torch import save_file

import segue
from segue import commands, gates, losses, methods, plan, schedules, students, training
from segue.lab import scales, sources, variants
from segue.lab.config import Run, Stage, Teacher, config_hash, to_dict
from segue.lab.grid import Experiment
from segue.lab.models import SmallViT
from segue.lab.sources import CropFlip, Digits
from segue.lab.tasks import ImageTask
from segue.recipe import Recipe
from segue.sites import Span
from segue.torchvision_cpu import declare_missing_operators

from . import V0_1_0, cases

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Write everything anew."""
    shutil.rmtree(V0_1_0, ignore_errors=True)
    V0_1_0.mkdir()
    torch.set_num_threads(1)
    declare_missing_operators()
    ticks = itertools.count()
    time.perf_counter = lambda: next(ticks) * 1e-3
    for part in (write_public_names, write_plans, write_run_configs, write_checkpoints, write_fits, write_lab):
        seed_everything()
        part()
    seed_everything()
    write_conversions()
    seed_everything()
    write_trainer()
    seed_everything()
    write_lightning()
    for path in sorted(V0_1_0.rglob("*")):
        if path.name in ("lock", "log.txt"):
            path.unlink()


def seed_everything() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def write_json(data: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.detach().clone().contiguous() for name, value in tensors.items()}, path)


def write_public_names() -> None:
    modules = ("gates", "schedules", "losses", "methods", "students", "errors", "diagnostics", "similarity")
    names = {"segue": sorted(segue.__all__)}
    for name in modules:
        module = import_module(f"segue.{name}")
        names[name] = sorted(getattr(module, "__all__", None) or defined_in(module))
    write_json(names, V0_1_0 / "public_names.json")


def defined_in(module: Any) -> set[str]:
    """Return the public names that a file without __all__ defines."""
    found: set[str] = set()
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in found if not name.startswith("_")}


def write_plans() -> None:
    plans = {f"method {name}": method(sites="blocks.*.attn", seed=7) for name, method in methods.ALL.items()}

    def one(name: str, **settings: Any) -> None:
        plans[name] = segue.Plan(**{"sites": "blocks.*.attn", **settings})

    one("every setting", sites=("blocks.{0..3}.attn", "re:head.*"), train="all", backbone="train", teacher_gradient=False,
        release=True, unreached="ignore", seed=11, adapter=students.Adapter(inside=4, outside=8))  # fmt: skip
    one("sites.Span", sites=Span("blocks", every=2, first=2, last=5), student=students.OneLayer(which=1), teacher_gradient=True)
    one("sites mixed with a span", sites=("head", Span("blocks", every=3)))
    for gate in (gates.Blend(), gates.Bernoulli(), gates.GumbelSoftmax(temperature=0.25)):
        one(f"gates.{type(gate).__name__}", gate=gate)
    for schedule in (
        schedules.Constant(alpha=0.25),
        schedules.Linear(start=0.9, end=0.1, until=0.5),
        schedules.Cosine(start=0.8, end=0.2, until=0.75),
        schedules.Piecewise(points=((0.0, 1.0), (0.1, 0.5), (0.1, 0.4), (1.0, 0.0))),
        schedules.Hold(fraction=0.3, then=schedules.Cosine()),
        schedules.Staggered(then=schedules.Linear(until=0.5), order=(2, 0, 1), overlap=0.25, until=0.9),
        schedules.PerSite(
            schedules={"blocks.0.*": schedules.Constant(alpha=0.0), "blocks.*.attn": schedules.Staggered(order="back")},
            otherwise=schedules.Linear(),
        ),
    ):
        one(f"schedules.{type(schedule).__name__}", schedule=schedule)
    for guidance in (
        losses.FeatureGuidance(weight=0.3, scale="paper", schedule=schedules.Linear()),
        losses.CosineGuidance(weight=2.0),
        losses.GramGuidance(schedule=schedules.Constant(alpha=1.0)),
        losses.CkaGuidance(weight=0.5),
        losses.OnTeacherStream(then=losses.CosineGuidance(weight=4.0)),
    ):
        one(f"losses.{type(guidance).__name__}", guidance=guidance)
    one("losses.LogitDistillation", distill=losses.LogitDistillation(weight=0.5, temperature=2.0, schedule=schedules.Cosine()))
    one("distilled features", distill=losses.FeatureGuidance(weight=3.0))
    one("distilled directions", distill=losses.CosineGuidance())
    for student in (
        students.Reinit(),
        students.OneLayer(which=1),
        students.ActivationSwap(to="silu"),
        students.Adapter(inside=8, outside=16),
        students.CopyMatching(),
        students.Kaiming(),
        students.Net2Net(noise=0.01),
        students.TruncatedSvd(),
        students.LeastSquares(ridge=1e-3, output="proj"),
        students.Library("fla:GatedDeltaNet", settings={"expand_v": 1.0, "layers": [1, 2], "mode": "chunk"}),
        students.LowRankMlp(rank=8, init=students.Kaiming()),
        students.NarrowMlp(ratio=0.5, init=students.TruncatedSvd()),
        students.WideMlp(ratio=2.0, init=students.Net2Net(noise=0.1)),
        students.GatedMlp(ratio=0.5),
        students.RmsNorm(init=students.Kaiming()),
        students.Fourier(),
        students.LinearAttention(feature_map="hedgehog", init=students.Kaiming()),
        students.Linformer(rank=4, tokens=16),
        students.Nystrom(landmarks=4, iterations=3),
        students.Performer(features=32),
        students.SlidingWindow(window=4, global_tokens=2),
        students.Softmax(init=students.Kaiming()),
        students.WindowedLinear(window=8, feature_map="elu"),
    ):
        kind = f"students.{type(student).__name__}"
        if callable(student) and len(inspect.signature(type(student).__call__).parameters) == 3:
            one(kind, student=student)
        else:
            one(kind, student=students.RmsNorm(init=student))
    one("the user's own", student=cases.own_student, schedule=cases.OwnSchedule(), guidance=len,
        distill=losses.LogitDistillation(logits=len))  # fmt: skip
    encoded = {name: made.to_dict() for name, made in plans.items()}
    write_json(encoded, V0_1_0 / "plans.json")
    missing = savable_kinds() - kinds_in(encoded)
    assert not missing, missing


def savable_kinds() -> set[str]:
    """Return the kinds of settings that a plan can hold."""
    never = {"gates.Noise", "sites.Site", "students.Call", "students.Geometry", "students.Interface", "students.Projection"}
    found = set()
    for module in plan.ROOMS.values():
        for name, kind in vars(module).items():
            if dataclasses.is_dataclass(kind) and not name.startswith("_"):
                found.add(f"{kind.__module__.split('.')[1]}.{name}")
    assert all(kind.split(".")[0] in plan.ROOMS for kind in found)
    return found - never


def kinds_in(data: Any) -> set[str]:
    if isinstance(data, dict):
        own = {data["kind"]} if isinstance(data.get("kind"), str) else set()
        return own.union(*map(kinds_in, data.values()))
    return set().union(*map(kinds_in, data)) if isinstance(data, list) else set()


def write_run_configs() -> None:
    (dcr,) = variants.find(["dcr_dfg"])
    runs = {
        "scale demo": scales.demo().run(dcr, seed=2),
        "scale small": scales.small("data/fashion").run(dcr, share=0.5, group="half"),
        "scale paper, hub": scales.paper().run(dcr),
        "scale paper, torchvision": scales.paper(folder="data/cifar", precision="float32").run(dcr),
        "scale minilm": scales.minilm("model", "train.tsv", "test.tsv", hold_out=10).run(dcr),
    }
    given: dict[str, list[dict[str, Any]]] = {
        "minilm": [{"model": "model"}],
        "minilm_search": [{"model": "model"}],
        "operators": [
            {},
            {"folder": "data/fashion"},
            {"part": "minilm", "model": "model"},
            {"part": "layers", "model": "model"},
        ],
        "theory": [{}, {"folder": "data/fashion"}],
    }
    for path in sorted((ROOT / "experiments").glob("*/runs.py")):
        for options in given.get(path.parent.name, [{}]):
            words = ", ".join([path.parent.name, *(f"{name} {value}" for name, value in options.items())])
            runs[f"experiment {words}"] = Experiment(str(path), options).runs()[-1]
    for variant in variants.ALL.values():
        runs[f"variant {variant.name}"] = scales.demo().run(variant)
    for source in (
        sources.Cifar10Png(folder="data/cifar10"),
        sources.HubDataset(id="some/data", image="img", label="fine", train="a", test="b", download=True),
        sources.ImageFolder(folder="data/images", size=16),
        sources.Npz(path="data/images.npz"),
        sources.Parquet(train="train.parquet", test="test.parquet", image="img", label="fine"),
        sources.Torchvision(name="SVHN", folder="data", download=True),
    ):
        task = ImageTask(source=source, model=SmallViT(patch=4), augment=sources.Crop(pad=2), size=32)
        runs[f"source {type(source).__name__}"] = replace(scales.demo().run(dcr), task=task)
    task = ImageTask(source=Digits(), model=SmallViT(), augment=CropFlip(pad=1, flip=False), mean=(0.5,), std=(0.25,))
    recipe = Recipe(epochs=1.5, final_lr=1e-5, decay="constant", betas=(0.8, 0.9), eps=1e-6, clip=None, accumulate=2,
                    precision="fp16", compile=True, shard=True, on_nan="skip", seed=9)  # fmt: skip
    runs["every setting"] = replace(scales.demo().run(dcr), task=task, recipe=recipe, looks=7, diagnostics=())
    own = replace(task, augment=cases.batch)
    runs["the user's own"] = replace(scales.demo().run(dcr), task=own, plan=segue.Plan(sites="*", student=cases.own_student))
    found = {name: {"config_hash": config_hash(run), "config": to_dict(run)} for name, run in runs.items()}
    write_json(found, V0_1_0 / "run_configs.json")


def write_checkpoints() -> None:
    for name, made in (("running", cases.GUIDED), ("everything", cases.EVERYTHING), ("own", cases.own_plan())):
        seed_everything()
        if name == "own":
            made.schedule.observe(0.0, {})
        handover = segue.replace_(cases.Net().train(), made, total_steps=cases.TOTAL)
        optimizer = cases.optimizer_for(handover)
        cases.train(handover, optimizer, cases.STOP)
        segue.save(handover, V0_1_0 / "checkpoints" / name, optimizer=optimizer)
        cases.train(handover, optimizer, cases.TOTAL - cases.STOP)
        write_tensors(handover.finalize_().state_dict(), V0_1_0 / "checkpoints" / f"{name}.safetensors")
    seed_everything()
    handover = segue.replace_(cases.Net().train(), cases.GUIDED, total_steps=cases.TOTAL)
    cases.train(handover, cases.optimizer_for(handover), cases.TOTAL)
    model = segue.replace_(handover.finalize_(), cases.SPAN, total_steps=1).finalize_()  # the second replacement
    segue.save(model, V0_1_0 / "checkpoints" / "finalized")
    with torch.no_grad():
        write_tensors({"output": model.eval()(cases.batch(99)[0])}, V0_1_0 / "checkpoints" / "finalized.safetensors")


class StopError(Exception):
    """What ends a training right after a checkpoint."""


def stopped_at(step: int) -> Any:
    """Let trainings stop after the checkpoint of a step."""
    plain = training._Training._save

    class Patched:
        def __enter__(self) -> None:
            def save(self: Any) -> None:
                plain(self)
                if self.done == step:
                    raise StopError

            training._Training._save = save

        def __exit__(self, kind: Any, *_: Any) -> bool:
            training._Training._save = plain
            assert kind is StopError, kind
            return True

    return Patched()


def only_latest(folder: Path) -> None:
    """Forget all checkpoints but the last one."""
    latest = (folder / "latest").read_text()
    for path in folder.iterdir():
        if path.is_dir() and path.name != latest:
            shutil.rmtree(path)


def write_fits() -> None:
    for name in cases.FITS:
        folder = V0_1_0 / "fits" / name
        with stopped_at(cases.STOP):
            cases.fit(name, folder)
        only_latest(folder / "checkpoints")
        with TemporaryDirectory() as elsewhere:
            fitted = cases.fit(name, Path(elsewhere))
        model = fitted.model if fitted.handover is None else fitted.handover.finalize_()
        write_tensors(model.state_dict(), V0_1_0 / "fits" / f"{name}.safetensors")


def write_lab() -> None:
    task = ImageTask(source=Digits(), model=SmallViT(patch=4, depth=2, width=8, heads=2), look=60)
    teacher = Teacher(task=task, stages=(Stage(recipe=Recipe(steps=30, lr=1e-2, warmup=0.1)),), batch=32)

    def tiny(name: str, seed: int) -> Run:
        (variant,) = variants.find([name])
        made = scales.demo(steps=10).run(variant, seed=seed, share=0.1)
        return replace(made, experiment="tiny", task=task, teacher=teacher, batch=16, looks=3, seed=seed)

    from segue.lab.run import run_alone

    lab = V0_1_0 / "lab"
    for name, seed in (("dcr_dfg", 0), ("dcr_dfg", 1), ("theseus", 0), ("theseus", 1)):
        config = tiny(name, seed)
        run_alone(config, lab / "grid" / config.name)
    config = tiny("distillation", 0)
    run_alone(config, lab / "undisturbed" / config.name)
    with stopped_at(5):
        run_alone(config, lab / "grid" / config.name)
    only_latest(lab / "grid" / config.name / "checkpoints")
    for stage in lab.glob("teachers/*/stage0"):
        shutil.rmtree(stage)
    for path in lab.rglob("result.json"):
        result = json.loads(path.read_text())
        result["train_info"]["peak_memory"] = 1 << 30
        result["meta_info"] |= {
            "commit": "bf6578f",
            "begun": "2025-01-01T00:00:00+00:00",
            "finished": "2025-01-01T00:01:00+00:00",
        }
        result["meta_info"]["hardware"] |= {"cores": 2, "threads": 1}
        write_json(result, path)
    write_json({"place": "{experiment}", "options": {"seeds": 2}, "workers": 1, "engine": "local"}, lab / "grid" / "grid.json")


def write_conversions() -> None:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = V0_1_0 / "conversions"
    words = ["<pad>", "<end>", "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<pad>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks).save_pretrained(folder / "base")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 12}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = transformers.LlamaConfig(**sizes, **ids, num_key_value_heads=1, max_position_embeddings=64)
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.2)
    model.save_pretrained(folder / "base")
    chance = random.Random(0)
    lines = []
    for _ in range(400):
        begin = chance.randrange(10)
        lines.append(" ".join(words[2 + (begin + i) % 10] for i in range(chance.randrange(3, 6))))
    (folder / "text.txt").write_text("\n".join(lines) + "\n")
    convert = ["convert", folder / "base", "--sites", cases.LLAMA_SITES, "--student", "WindowedLinear(window=4)"]
    convert += ["--data", folder / "text.txt", "--steps", 6, "--batch", 4, "--tokens", 16, "--looks", 2]
    segue_command(*convert, "--out", folder / "converted")
    with stopped_at(1):
        segue_command(*convert, "--out", folder / "interrupted")
    only_latest(folder / "interrupted" / "training" / "checkpoints")
    shutil.rmtree(folder / "converted" / "training" / "checkpoints")
    for name in ("curve.png", "README.md"):
        (folder / "converted" / name).unlink()
    for path in folder.rglob("*.json"):
        text = path.read_text()
        for name, place in (("base", folder / "base"), ("data", folder / "text.txt"), ("converted", folder / "converted")):
            text = text.replace(json.dumps(str(place)), f'"{{{name}}}"')
        path.write_text(text)
    read = torch.arange(2, 12).repeat(2)[None]
    with torch.no_grad():
        logits = segue.from_pretrained(folder / "converted")(input_ids=read).logits
    write_tensors({"input_ids": read, "logits": logits}, folder / "logits.safetensors")


def segue_command(*arguments: Any) -> None:
    commands.app([str(argument) for argument in arguments], standalone_mode=False)


def write_trainer() -> None:
    from segue.integrations.transformers import HandoverCallback

    with TemporaryDirectory() as elsewhere:
        callback = HandoverCallback(cases.TRAINER_PLAN)
        stock = cases.trainer(Path(elsewhere), callback, save_strategy="steps", save_steps=cases.TRAINER_STOP)
        stock.train()
        out = V0_1_0 / "trainer"
        shutil.copytree(Path(elsewhere) / f"checkpoint-{cases.TRAINER_STOP}", out / "checkpoint-4")
        (out / "checkpoint-4" / "training_args.bin").unlink()  # a pickle that is not read
        stock.save_model(str(out / "finished"))
        (out / "finished" / "training_args.bin").unlink()
        row = cases.Rows()[0]["input_ids"][None]
        with torch.no_grad():
            write_tensors({"logits": stock.model.eval()(input_ids=row).logits}, out / "logits.safetensors")


def write_lightning() -> None:
    from segue.integrations.lightning import HandoverCallback

    from .lightning_case import Module, loader, trainer

    callback = HandoverCallback(cases.GUIDED)
    out = V0_1_0 / "lightning"
    seed_everything()
    module = Module()
    trainer(callback, save_at=(1, out / "epoch1.ckpt")).fit(module, loader())
    write_tensors(module.model.state_dict(), out / "finished.safetensors")


if __name__ == "__main__":
    assert importlib.util.find_spec("segue.lab.scales"), "this runs with the code of version 0.1.0 only"
    sys.exit(main())
