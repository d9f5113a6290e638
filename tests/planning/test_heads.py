"""choose_heads(): the heads that a model misses, found by forwards alone."""

import copy

import pytest
import torch
import transformers

import segue
from segue.convert import parse_student
from segue.errors import PlanError
from segue.planning import choose_heads
from segue.students import MixedHeads, SlidingWindow
from tests.helpers.tiny import same_state
from tests.planning import cases

SITES = "model.layers.*.self_attn"
MIXTURE = MixedHeads(operator=SlidingWindow(window=1, sinks=0))


def kl(model, batch, student) -> float:
    """Measure a mixture as a user would."""
    handover = segue.replace_(copy.deepcopy(model), segue.Plan(sites=SITES, student=student), total_steps=1)
    with torch.no_grad(), handover.as_student() as swapped:
        before, after = (each.eval()(**batch).logits.log_softmax(-1) for each in (model, swapped))
    counted = batch["attention_mask"].bool()
    return (before.exp() * (before - after)).sum(-1)[counted].mean().item()


def test_the_heads_that_help_most_alone_are_kept_and_the_model_is_as_before():
    model, (batch,), _ = cases.llama()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    chosen = choose_heads(model, SITES, MIXTURE, [batch], keep=3, progress=None)
    assert same_state(model.state_dict(), state)
    assert not any(type(module).__name__ == "Seam" for module in model.modules())
    assert chosen.kl_without == pytest.approx(kl(model, batch, MIXTURE), rel=1e-4)
    gains = {}
    for site, found in chosen.gains.items():
        for head, gain in enumerate(found):
            alone = segue.students.MixedHeads(operator=MIXTURE.operator, keep={site: (head,), "**": ()})
            assert gain == pytest.approx(chosen.kl_without - kl(model, batch, alone), rel=1e-3, abs=1e-6)
            gains[site, head] = gain
    best = sorted(gains, key=lambda place: -gains[place])[:3]
    assert chosen.student.keep == {site: tuple(sorted(head for of, head in best if of == site)) for site in chosen.gains}
    assert chosen.kl == pytest.approx(kl(model, batch, chosen.student), rel=1e-4)
    assert chosen.kl < chosen.kl_without


def test_all_heads_are_the_original_and_the_choice_saves_as_data():
    model, (batch,), _ = cases.llama()
    count = model.config.num_hidden_layers * model.config.num_attention_heads
    chosen = choose_heads(model, SITES, MIXTURE, [batch], keep=count, recall=0.0, progress=None)
    assert chosen.kl == pytest.approx(0.0, abs=1e-6)
    plan = segue.Plan(sites=SITES, student=chosen.student)
    assert segue.Plan.from_dict(plan.to_dict()) == plan
    assert parse_student.student(repr(chosen.student)) == chosen.student  # as `segue convert --student` takes it


def test_what_is_recalled_counts_by_its_weight():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=70, **sizes)).eval()
    batch = {"input_ids": torch.randint(70, (2, 8))}
    without = [
        choose_heads(model, SITES, MIXTURE, [batch], keep=1, recall=weight, progress=None).kl_without for weight in (0, 1, 3)
    ]
    assert without[1] > without[0]
    assert without[2] - without[0] == pytest.approx(3 * (without[1] - without[0]), rel=1e-4)


@pytest.mark.parametrize(
    ("sites", "keep", "first"),
    [
        (SITES, 99, "keep must be at most "),
        ("model.layers.*.mlp", 1, "the candidate 'no heads kept' fits none of the 2 sites."),
    ],
)
def test_heads_that_are_not_there_are_refused(sites, keep, first):
    model, (batch,), _ = cases.llama()
    with pytest.raises(segue.SegueError) as caught:
        choose_heads(model, sites, MIXTURE, [batch], keep=keep, progress=None)
    assert str(caught.value).startswith(first)
    assert isinstance(caught.value, PlanError) == (keep == 99)
    assert len(str(caught.value).splitlines()) == 3
