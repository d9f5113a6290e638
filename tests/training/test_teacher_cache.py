"""The offline teacher: KL from the most probable classes against the KL of all, and a training that never runs the original."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import segue
from segue.core import tensor_files
from segue.errors import CheckpointError, DataError, PlanError
from segue.losses import FeatureGuidance, LogitDistillation, OnTeacherStream
from segue.schedules import Constant
from segue.training import teacher_cache
from segue.training.batches import Batches, InOrder
from segue.training.teacher_cache import top_probabilities
from tests.helpers.tiny import same_bits

WORDS, WIDE, EXAMPLES = 11, 8, 13
LENGTHS = torch.tensor([5, 3, 6, 4, 6, 2, 5, 6, 3, 6, 4, 6, 5])
IDS = torch.randint(WORDS, (EXAMPLES, 6), generator=torch.Generator().manual_seed(0))


class Words(nn.Module):
    """A language model with a mixer of tokens at each of two sites."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(WORDS, WIDE)
            self.blocks = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(2))
            self.head = nn.Linear(WIDE, WORDS)
        self.calls = 0
        self.register_forward_pre_hook(lambda *_: setattr(self, "calls", self.calls + 1))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        counts = torch.ones(x.shape[:2]) if attention_mask is None else attention_mask
        for block in self.blocks:
            x = x + torch.tanh(block((x * counts[..., None]).cumsum(1)))
        return 3 * self.head(x)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(**batch)[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def padded(chosen: Tensor) -> dict[str, Tensor]:
    """Pad some texts to the longest of them, at their left."""
    longest = int(LENGTHS[chosen].max())
    ids, mask = torch.zeros(len(chosen), longest, dtype=torch.long), torch.zeros(len(chosen), longest, dtype=torch.long)
    for row, i in enumerate(chosen.tolist()):
        ids[row, longest - LENGTHS[i] :], mask[row, longest - LENGTHS[i] :] = IDS[i, : LENGTHS[i]], 1
    return {"input_ids": ids, "attention_mask": mask}


def equal(chosen: Tensor) -> dict[str, Tensor]:
    return {"input_ids": IDS[chosen]}


def all_examples(make: Any = equal, size: int = 4) -> InOrder:
    return InOrder(EXAMPLES, size, make)


def plan(temperature: float = 2.0, **given: Any) -> segue.Plan:
    distill = LogitDistillation(temperature=temperature, weight=0.5)
    return segue.Plan(sites="blocks.*", schedule=Constant(alpha=0.0), **{"distill": distill, **given})


def cached(folder: Path, model: Words | None = None, batches: Any = None, *, temperature: float = 2.0, k: int = 4) -> Any:
    distill = LogitDistillation(temperature=temperature)
    given = {"folder": folder, "k": k, "distill": distill, "progress": None}
    return segue.cache_teacher(model or Words(), batches or all_examples(), loss, **given)


def fit(model: Words, folder: Path | None = None, steps: int = 6, make: Any = equal, **given: Any) -> segue.training.fit.Fit:
    recipe = segue.Recipe(steps=steps, lr=1e-2, seed=3)
    batches = Batches(EXAMPLES, 4, lambda chosen, _: make(chosen), seed=1)
    chosen = given.pop("plan", None) or plan()
    loss_fn = given.pop("loss", loss)
    return segue.fit(model, chosen, batches, loss_fn, recipe=recipe, folder=folder, progress=None, **given)


def naive(teacher: Tensor, student: Tensor, k: int) -> float:
    """KL of one pair of distributions, of the teacher's k largest classes and one more for the rest."""
    p, q = teacher.double().softmax(-1), student.double().softmax(-1)
    top = p.argsort(descending=True)[:k].tolist()
    pairs = [(p[i].item(), q[i].item()) for i in top]
    rest = [i for i in range(len(p)) if i not in top]
    if rest:
        pairs.append((sum(p[i].item() for i in rest), sum(q[i].item() for i in rest)))
    return sum(a * math.log(a / b) for a, b in pairs)


def test_kl_of_the_top_classes_is_exact_on_them_and_never_above_that_of_all():
    teacher, student = torch.randn(2, 3, WORDS, generator=torch.Generator().manual_seed(1)) * 3
    loss_of = LogitDistillation(temperature=1.0)
    full = loss_of(teacher[None], student[None], None).item()
    before = 0.0
    for k in range(1, WORDS + 1):
        found = loss_of(top_probabilities(teacher[None], k), student[None], None).item()
        assert found == pytest.approx(sum(naive(t, s, k) for t, s in zip(teacher, student, strict=True)) / 3, abs=1e-5)
        assert before - 1e-6 <= found <= full + 1e-6  # finer partitions tell more
        before = found
    assert found == pytest.approx(full, abs=1e-6)
    assert loss_of(top_probabilities(teacher[None], 1), student[None], None).item() < 0.9 * full


@pytest.mark.parametrize("k", [1, 5, WORDS])
def test_the_gradient_is_that_of_the_coarse_kl(k):
    generator = torch.Generator().manual_seed(2)
    teacher, student = torch.randn(2, 1, 2, WORDS, generator=generator, dtype=torch.float64) * 2
    student.requires_grad_()
    top = top_probabilities(teacher / 3, k)
    (found,) = torch.autograd.grad(LogitDistillation(temperature=3.0)(top, student, None), student)
    p, q = (teacher / 3).softmax(-1), (student / 3).softmax(-1)
    inside = torch.zeros_like(p).scatter(-1, top.classes, 1.0)
    pairs = (p * inside, q * inside), ((p * (1 - inside)).sum(-1, keepdim=True), (q * (1 - inside)).sum(-1, keepdim=True))
    kl = sum((a * (a.clamp_min(1e-300).log() - b.clamp_min(1e-300).log())).sum(-1) for a, b in pairs).mean() * 9
    (wanted,) = torch.autograd.grad(kl, student)
    assert torch.allclose(found, wanted, atol=1e-6)


def test_a_rest_that_one_minus_the_sum_would_round_to_zero_is_kept():
    student = torch.tensor([[[30.0, 0.0, -1.0]]], requires_grad=True)
    top = top_probabilities(torch.tensor([[[1.0, 0.0, -1.0]]]), 1)
    value = LogitDistillation(temperature=1.0)(top, student, None)
    assert value.item() == pytest.approx(naive(torch.tensor([1.0, 0.0, -1.0]), torch.tensor([30.0, 0.0, -1.0]), 1), rel=1e-4)
    value.backward()
    assert student.grad.isfinite().all()


@pytest.mark.parametrize("make", [equal, padded])
def test_every_example_is_found_in_any_batch(make, tmp_path):
    model, cache = Words(), cached(tmp_path, batches=all_examples(make))
    for order in (torch.tensor([7, 0, 5]), torch.tensor([12]), torch.arange(EXAMPLES).flip(0)):
        batch = make(order)
        logits = model(**batch)
        found, wanted = cache((), batch, logits), top_probabilities(logits / 2.0, 4)
        real = batch.get("attention_mask", torch.ones(batch["input_ids"].shape)) > 0
        assert torch.equal(found.classes[real], wanted.classes[real])
        assert torch.allclose(found.logs[real], wanted.logs[real], atol=2e-3)  # of float16
        assert torch.allclose(found.logs[real].exp().sum(-1), torch.ones(int(real.sum())), atol=1e-6)
        assert (found.logs[~real].exp() == 0).all()  # padding has no loss, whatever the mask
    assert cache.tokens == (EXAMPLES * 6 if make is equal else int(LENGTHS.sum()))


def test_a_cached_training_is_that_with_the_original_and_never_runs_it(tmp_path):
    models = Words(), Words()
    with_original = fit(models[0])
    cache = cached(tmp_path, k=WORDS)
    with_cache = fit(models[1], teacher_cache=cache)
    assert (models[0].calls, models[1].calls) == (12, 6)
    for a, b in zip(with_original.handover.parameters(), with_cache.handover.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-4)
    assert with_cache.history[-1]["loss"] == pytest.approx(with_original.history[-1]["loss"], rel=1e-4)
    fewer = fit(Words(), teacher_cache=cached(tmp_path / "2", k=1))
    distances = [
        max(
            (a - b).abs().max().item()
            for a, b in zip(each.handover.parameters(), with_original.handover.parameters(), strict=True)
        )
        for each in (with_cache, fewer)
    ]
    assert 10 * distances[0] < distances[1]


def test_padding_has_no_part_in_a_cached_loss(tmp_path):
    model = Words()
    cache = cached(tmp_path, k=WORDS, batches=all_examples(padded))
    results = [fit(each, make=padded, teacher_cache=use) for each, use in ((Words(), None), (model, cache))]
    assert results[1].history[-1]["loss"] == pytest.approx(results[0].history[-1]["loss"], rel=1e-4)


def test_a_trained_backbone_needs_no_copy_of_the_original(tmp_path):
    trained = fit(Words(), plan=plan(train="all"), teacher_cache=cached(tmp_path))
    assert trained.handover.auxiliary.original is None


@pytest.mark.parametrize("offline", [False, True])
def test_teachers_that_nothing_needs_are_released(offline, tmp_path):
    trained = fit(Words(), plan=plan(release=True), teacher_cache=cached(tmp_path) if offline else None)
    assert {seam.teacher is None for seam in trained.handover.seams.values()} == {offline}


def test_a_cached_training_resumes_bit_for_bit(tmp_path):
    cache = cached(tmp_path / "cache")
    fit(straight := Words(), teacher_cache=cache)
    stopped = 0

    def power_cut(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        nonlocal stopped
        stopped += 1
        if stopped == 5:
            raise RuntimeError("the power failed")
        return loss(model, batch)

    with pytest.raises(RuntimeError, match="the power failed"):
        fit(Words(), tmp_path / "run", loss=power_cut, checkpoint_every=2, teacher_cache=cache)
    with pytest.raises(CheckpointError, match="teacher_cache"):
        fit(Words(), tmp_path / "run", resume=True)
    fit(resumed := Words(), tmp_path / "run", resume=True, teacher_cache=cached(tmp_path / "cache"))
    assert resumed.calls == 2
    assert all(same_bits(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_a_finished_cache_is_read_and_an_unfinished_one_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(teacher_cache, "TOKENS_IN_FILE", 1)  # a file for each batch
    whole = cached(tmp_path / "whole")
    again = Words()
    assert cached(tmp_path / "whole", again).places == whole.places
    assert again.calls == 8  # the calls are looked at, and stopped before the model computes

    class Stopped(Words):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            if self.calls > 6:  # four batches are looked at first
                raise KeyboardInterrupt
            return super().forward(*args, **kwargs)

    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path / "part", Stopped())
    assert 0 < len(list((tmp_path / "part").glob("*.safetensors"))) < len(list((tmp_path / "whole").glob("*.safetensors")))
    resumed = cached(tmp_path / "part", all_forwards := Forwards())
    assert all_forwards.computed == 2
    ids = equal(torch.arange(EXAMPLES))
    logits = Words()(**ids)
    assert all(map(torch.equal, resumed((), ids, logits), whole((), ids, logits)))


class Forwards(Words):
    """Count what is computed, not only asked for."""

    computed = 0

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.computed += 1
        return super().forward(*args, **kwargs)


def test_nothing_is_computed_for_a_finished_cache(tmp_path):
    cached(tmp_path, first := Forwards())
    cached(tmp_path, second := Forwards())
    assert (first.computed, second.computed) == (4, 0)


def test_a_token_takes_six_bytes_for_each_class(tmp_path, monkeypatch):
    monkeypatch.setattr(teacher_cache, "TOKENS_IN_FILE", 1 << 30)
    many = torch.randint(WORDS, (400, 50), generator=torch.Generator().manual_seed(3))
    batches = InOrder(400, 50, lambda chosen: {"input_ids": many[chosen]})
    cache = cached(tmp_path, batches=batches, k=8)
    assert cache.tokens == 20_000
    assert cache.bytes / cache.tokens == pytest.approx(6 * 8 + 2, rel=0.03)  # and 40 bytes for an example


def test_images_and_labels_are_cached_too(tmp_path):
    inputs, labels = torch.randn(6, 5, generator=torch.Generator().manual_seed(4)), torch.arange(6) % 3
    model, task = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), segue.Classification()
    cache = segue.cache_teacher(model, [(inputs, labels)], task, folder=tmp_path, k=2, distill=LogitDistillation())
    found, wanted = cache((inputs[2:4],), {}, model(inputs[2:4])), top_probabilities(model(inputs[2:4]) / 4.0, 2)
    assert torch.equal(found.classes, wanted.classes)
    assert torch.allclose(found.logs, wanted.logs, atol=2e-3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": Words(seed=1)}, "the original"),
        ({"batches": all_examples(lambda chosen: {"input_ids": IDS[chosen].flip(1)})}, "the data"),
        ({"k": 3}, "k \\(4 -> 3\\)"),
        ({"temperature": 1.0}, "the temperature \\(2.0 -> 1.0\\)"),
    ],
)
def test_a_cache_of_something_else_is_refused(change, said, tmp_path):
    cached(tmp_path)
    content = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(DataError, match=said) as caught:
        cached(tmp_path, **change)
    assert len(str(caught.value).splitlines()) == 3
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == content


@pytest.mark.parametrize(
    ("model", "given", "error", "said"),
    [
        (Words(seed=1), {}, DataError, "It is of another original"),
        (Words(), {"plan": plan(temperature=4.0)}, PlanError, "Its temperature is 2.0"),
        (Words(), {"plan": plan(distill=None)}, PlanError, "The plan's distillation is None"),
        (Words(), {"plan": plan(distill=FeatureGuidance())}, PlanError, "distillation is FeatureGuidance"),
        (Words(), {"plan": plan(guidance=OnTeacherStream())}, PlanError, "OnTeacherStream compares outputs inside"),
        (Words(), {"make": lambda chosen: {"input_ids": IDS[chosen].flip(1)}}, DataError, "The data is not that of the cache"),
    ],
)
def test_a_training_that_the_cache_does_not_fit_is_refused(model, given, error, said, tmp_path):
    cache, before = cached(tmp_path), {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(error, match=said) as caught:
        fit(model, teacher_cache=cache, **given)
    assert len(str(caught.value).splitlines()) == 3
    assert all(same_bits(x, before[name]) for name, x in model.state_dict().items())


def test_examples_that_change_are_refused_when_the_cache_is_made(tmp_path):
    generator = torch.Generator().manual_seed(0)
    augmented = InOrder(EXAMPLES, 4, lambda chosen: {"input_ids": torch.randint(WORDS, (len(chosen), 6), generator=generator)})
    with pytest.raises(DataError, match="changes from one reading to the next"):
        cached(tmp_path, batches=augmented)


def test_a_loss_that_calls_the_model_twice_is_refused(tmp_path):
    with pytest.raises(DataError, match="loss_fn calls the model 0 times"):
        segue.cache_teacher(Words(), all_examples(), lambda model, batch: batch["input_ids"].sum(), folder=tmp_path)


@pytest.mark.parametrize("name", ["teacher.json", "0-0.safetensors"])
def test_a_damaged_cache_is_refused(name, tmp_path):
    cached(tmp_path)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-7])
    with pytest.raises(DataError, match="the teacher cache cannot be read"):
        cached(tmp_path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("classes", lambda x: x + WORDS),
        ("classes", lambda x: x - WORDS),
        ("classes", lambda x: x[:, :2]),
        ("classes", lambda x: x[:-3]),
        ("logs", lambda x: x * float("nan")),
        ("logs", lambda x: x[:, :3]),
        ("lengths", lambda x: x[:-1]),
        ("lengths", lambda x: x + 1),
        ("lengths", lambda x: x.float()),
        ("lengths", lambda x: -x),
        ("keys", lambda x: x.flatten()),
        ("keys", lambda x: x.float()),
    ],
)
def test_a_cache_with_other_contents_is_refused(name, change, tmp_path):
    cached(tmp_path)
    path = tmp_path / "0-0.safetensors"
    tensors = {each: x.clone() for each, x in tensor_files.read(path).items()}
    tensor_files.write(path, tensors | {name: change(tensors[name]).contiguous()})
    with pytest.raises(DataError, match="the teacher cache cannot be read") as caught:
        fit(Words(), teacher_cache=cached(tmp_path), steps=2)
    assert len(str(caught.value).splitlines()) == 3
