"""fit_locally(): a regression written by hand, bit for bit, however the sites are spread; what it keeps and what it refuses."""

import copy
import json
import pickle
import random
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import segue
from segue.errors import ConfigError, DataError, HandoverError, MissingExtraError, TrainingError
from segue.losses import FeatureGuidance
from segue.phases import Phase
from segue.students import LinearAttention
from segue.training import fit_locally as module
from segue.training.recipe import Recipe
from tests.helpers.models import CASES
from tests.helpers.tiny import SITES, Net, batch, same_state, start

BATCHES = [batch(index, size=5)[0] for index in range(3)]
RECIPE = Recipe(epochs=2, lr=1e-2, weight_decay=0.0, clip=0.5, warmup=0.2)
PHASES = (Phase(name="local fit", length=0.5, local=True), Phase(name="students alone"))


def begin(dropout=0.0, guidance=None, **net) -> segue.Handover:
    return start(segue.Plan(sites=SITES, guidance=guidance or FeatureGuidance(), phases=PHASES), dropout=dropout, **net)


def fit(handover, batches=None, **settings):
    settings = {"recipe": RECIPE, "split": 2, "progress": None, **settings}
    return segue.fit_locally(handover, BATCHES if batches is None else batches, **settings)


def students(handover):
    return {name: parameter.detach().clone() for name, parameter in handover.named_parameters()}


@pytest.fixture(scope="module")
def undisturbed():
    handover = begin(dropout=0.1)
    fit(handover)
    return students(handover)


def test_every_site_is_a_regression_written_by_hand():
    handover = begin()
    by_hand = {name: copy.deepcopy(seam.student).train() for name, seam in handover.seams.items()}
    found = fit(handover)
    original = Net().eval()
    for name, student in by_hand.items():
        optimizer = torch.optim.AdamW(student.parameters(), weight_decay=0.0)
        errors = []
        for step in range(6):
            if step % 3 == 0:
                order = torch.randperm(3, generator=torch.Generator().manual_seed(hash((0, step // 3)) & 0x7FFFFFFF)).tolist()
            for group in optimizer.param_groups:
                group["lr"] = RECIPE.lr * (RECIPE.rate(step, 6) / RECIPE.lr)
            features = []
            hook = original.get_submodule(name).register_forward_hook(
                lambda _m, args, out, to=features: to.extend((args[0], out))
            )
            with torch.no_grad():
                original(BATCHES[order[step % 3]])
            hook.remove()
            for part in range(2):
                x, y = (each[part::2] for each in features)
                error = ((student(x) - y).square().sum(-1).mean(1) / y.square().sum(-1).mean(1)).mean()
                error.backward()
                nn.utils.clip_grad_norm_(student.parameters(), RECIPE.clip)
                optimizer.step()
                optimizer.zero_grad()
                errors.append(error.item())
        assert same_state(student.state_dict(), handover.seams[name].student.state_dict())
        means = [sum(pair) / 2 for pair in zip(errors[::2], errors[1::2], strict=True)]
        running = means[0] ** 0.5
        for mean in means[1:]:
            running = 0.9 * running + 0.1 * mean**0.5
        assert (found[name].before, found[name].after) == pytest.approx((means[0] ** 0.5, running))


def test_the_order_of_the_sites_does_not_matter(undisturbed, monkeypatch):
    monkeypatch.setattr(module, "_in_processes", lambda jobs, workers: map(module.fit_site, reversed(jobs)))
    handover = begin(dropout=0.1)
    random.seed(7)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    fit(handover)
    assert same_state(students(handover), undisturbed)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes_give_the_students_of_one(undisturbed):
    handover = begin(dropout=0.1)
    fit(handover, workers=2)
    assert same_state(students(handover), undisturbed)


def test_ray_workers_get_jobs_that_depend_on_nothing_else(undisturbed, monkeypatch):
    """A stand-in for Ray that sends jobs as Ray does, and works at the last one first; the real one takes half a minute."""

    class Remote:
        def __init__(self, function):
            self.function = function

        def remote(self, *args):
            return pickle.dumps((self.function, args))

    def get(sent):
        function, args = pickle.loads(sent)
        return function(*args)

    began = []
    fake = SimpleNamespace(
        is_initialized=lambda: False,
        init=lambda **_: began.append("init"),
        shutdown=lambda: began.append("shutdown"),
        cluster_resources=lambda: {"CPU": 2.0},
        remote=lambda **_: Remote,
        wait=lambda pending, num_returns: (pending[-1:], pending[:-1]),
        get=get,
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    handover = begin(dropout=0.1)
    fit(handover, workers=2, engine="ray")
    assert began == ["init", "shutdown"]
    assert same_state(students(handover), undisturbed)


def test_without_ray_its_engine_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match="the engine ray is not available"):
        fit(begin(), engine="ray")


def forwards(handover) -> list[int]:
    counted: list[int] = []
    handover.model.register_forward_hook(lambda *_: counted.append(1))
    return counted


def test_with_a_cache_the_model_does_not_run_again(undisturbed, tmp_path):
    first = begin(dropout=0.1)
    assert fit(first, cache=tmp_path) == (found := fit(again := begin(dropout=0.1), cache=tmp_path))
    assert list(found) == list(first.seams)
    assert same_state(students(again), undisturbed)
    other = begin(dropout=0.1)
    counted = forwards(other)
    fit(other, cache=tmp_path, recipe=Recipe(epochs=1, lr=1e-2))  # other settings: fitted again, from the same features
    assert not counted
    assert not same_state(students(other), undisturbed)


def test_an_interrupted_fit_keeps_the_sites_that_are_finished(undisturbed, tmp_path, monkeypatch):
    done = []

    def interrupted(job):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(job.site.name)
        return real(job)

    real = module.fit_site
    monkeypatch.setattr(module, "fit_site", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(stopped := begin(dropout=0.1), cache=tmp_path)
    assert same_state(students(stopped), students(begin(dropout=0.1)))  # as it was
    monkeypatch.setattr(module, "fit_site", lambda job: (done.append(job.site.name), real(job))[1])
    resumed = begin(dropout=0.1)
    counted = forwards(resumed)
    fit(resumed, cache=tmp_path)
    assert done == list(resumed.seams)
    assert not counted
    assert same_state(students(resumed), undisturbed)


def test_features_of_another_model_or_of_other_batches_are_refused(tmp_path):
    fit(begin(), cache=tmp_path)
    for handover, batches, said in (
        (begin(seed=1), BATCHES, "model"),
        (begin(), BATCHES[:2], "batches"),
        (begin(), BATCHES[::-1], "batches"),
        (begin(depth=2), BATCHES, "sites"),
    ):
        with pytest.raises(DataError, match="holds other features") as caught:
            fit(handover, batches, cache=tmp_path)
        assert said in str(caught.value)


def test_features_with_another_mask_or_of_a_backbone_that_has_trained_are_refused(tmp_path):
    fit(begin(), cache=tmp_path / "mask", mask=lambda x: None)
    with pytest.raises(DataError, match="They differ in: batches"):
        fit(begin(), cache=tmp_path / "mask", mask=lambda x: torch.ones(x.shape[:2]))
    handover = start(segue.Plan(sites=SITES, guidance=FeatureGuidance(), train="all"))
    fit(handover, cache=tmp_path / "model")
    fit(handover, cache=tmp_path / "model")  # other students, the same features
    backbone = handover.backbone_that_changes()
    next(iter(backbone.values())).data.add_(1.0)
    with pytest.raises(DataError, match="They differ in: model"):
        fit(handover, cache=tmp_path / "model")


class Centred(nn.Linear):
    """Mixes the samples of a batch."""

    def forward(self, x):
        return super().forward(x - x.mean(0, keepdim=True))


def test_a_cut_is_tried_for_features_that_were_recorded_without_it(tmp_path):
    def centred():
        torch.manual_seed(0)
        return segue.replace_(nn.Sequential(Centred(6, 6), nn.Linear(6, 2)), segue.Plan(sites="0", guidance=FeatureGuidance()))

    batches = [torch.randn(8, 6) for _ in range(2)]
    fit(centred(), batches, cache=tmp_path, split=1)
    with pytest.raises(HandoverError, match="a batch cannot be cut at site '0'"):
        fit(centred(), batches, cache=tmp_path, split=2)
    fit(centred(), batches, cache=tmp_path, split=1)


@pytest.mark.parametrize("how", ["flipped", "cut", "missing", "a folder", "the index"])
def test_damaged_features_are_refused(tmp_path, how):
    fit(begin(), cache=tmp_path)
    path = tmp_path / ("features.json" if how == "the index" else "1/2.safetensors")
    content = path.read_bytes()
    path.unlink()
    if how == "flipped":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif how == "a folder":
        path.mkdir()
    elif how != "missing":
        path.write_bytes(content[:-3])
    with pytest.raises(DataError, match="cannot be read"):
        fit(begin(), cache=tmp_path, split=1)


def test_a_site_that_is_near_enough_stops(tmp_path):
    fit(begin(), cache=tmp_path, tolerance=100.0)
    steps = [json.loads(path.read_text())["segue"]["step"] for path in tmp_path.glob("students/*/*/state.json")]
    assert steps == [2] * 3  # one batch, in two updates


@pytest.mark.parametrize("name", ["timm resnet18", "HF Llama", "HF BERT layers", "shared layers"])
def test_models_of_all_kinds_are_fitted(name):
    case = next(case for case in CASES if case.name == name)
    plan = segue.Plan(sites=case.sites, guidance=FeatureGuidance(), phases=PHASES)
    handover = segue.replace_(case.build().train(), plan, total_steps=4)
    given = case.batch()
    example = given.kwargs or given.args
    found = fit(handover, [example], split=1, recipe=Recipe(steps=8, lr=3e-3))
    assert all(fitted.after < fitted.before for fitted in found.values())


def test_an_operator_that_reads_its_teachers_calls_is_fitted():
    case = next(case for case in CASES if case.name == "timm vit_tiny")
    plan = segue.Plan(sites=case.sites, student=LinearAttention(), guidance=FeatureGuidance(), phases=PHASES)
    found = fit(
        segue.replace_(case.build().train(), plan, total_steps=4), [case.batch().args[0]], recipe=Recipe(steps=30, lr=1e-3)
    )
    assert all(fitted.after < fitted.before for fitted in found.values())


def test_an_update_that_is_not_finite_stops_or_is_left_out():
    bad = [BATCHES[0], BATCHES[1].clone().index_fill_(0, torch.tensor([1]), torch.nan)]
    with pytest.raises(TrainingError, match="has no finite update in step"):
        fit(begin(), bad)
    handover = begin()
    fit(handover, bad, recipe=Recipe(epochs=2, on_nan="skip"))
    assert all(torch.isfinite(value).all() for value in students(handover).values())


UNFIT = [{"accumulate": 2}, {"precision": "bf16"}, {"compile": True}, {"shard": True}]
UNFIT += [{"guard": segue.Guard()}, {"ema": segue.Ema()}, {"early_stopping": segue.EarlyStopping()}]


@pytest.mark.parametrize("setting", UNFIT, ids=lambda setting: "".join(setting))
def test_settings_without_a_meaning_here_are_refused(setting):
    (name,) = setting
    with pytest.raises(ConfigError, match=rf"does not take Recipe\({name}="):
        fit(begin(), recipe=Recipe(steps=2, **setting))


def test_what_cannot_be_sent_to_another_process_is_refused():
    with pytest.raises(ConfigError, match="cannot be sent to another process"):
        fit(begin(guidance=lambda teacher, student, mask: (teacher - student).square().mean()), workers=2)


def test_no_batches_no_guidance_and_several_processes_are_refused(monkeypatch):
    with pytest.raises(DataError, match="there are no batches"):
        fit(begin(), [])
    with pytest.raises(HandoverError, match="needs guidance"):
        fit(start(segue.Plan(sites=SITES)))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(HandoverError, match="is for one process"):
        fit(begin())
