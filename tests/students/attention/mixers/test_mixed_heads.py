"""Mixed heads: their settings, their formula, which heads are kept where, and what they cost while generating."""

from dataclasses import replace

import pytest
import torch
import transformers

import segue
from segue.errors import StudentError
from segue.plan import decode, encode
from segue.students import AttentionSpec, LinearAttention, MixedHeads, SlidingWindow, Softmax, WindowedLinear
from tests.students.attention.mixers import test_linear, test_sliding_window, test_softmax, test_windowed_linear
from tests.students.attention.mixers.checks import assert_naive, attention_spec, inputs, mixer_of, padding, run

SETTINGS = {
    "mixed": MixedHeads(operator=WindowedLinear(window=5, sinks=2), keep=(0,)),
    "mixed, linear": MixedHeads(operator=LinearAttention(), keep=(0,)),
    "mixed, window": MixedHeads(operator=SlidingWindow(window=5), keep=(0,)),
}
IN_MODELS = {"MixedHeads": MixedHeads(operator=WindowedLinear(window=3), keep=(0,))}
OTHERS = {"of_queries.weight": (5, 7, 7), "of_keys.weight": (5, 7, 7), "log_far": (5,), "far_of_queries": (5, 7, 1)}
STATE_DICT = {"mixed": {f"others.{name}": shape for name, shape in OTHERS.items()}}
# of six query heads, three for each key head: all of a key head, as many of each, and more of one than of the other
GROUPS = [(3, 4, 5), (0, 4), (1, 2, 4), (0, 1, 2, 3, 4)]
OF = {
    WindowedLinear: test_windowed_linear.naive,
    LinearAttention: test_linear.naive,
    SlidingWindow: test_sliding_window.naive,
}


def naive(operator, spec, mixer, q, k, v, token_mask, causal):
    """Compute every head by itself."""
    y, group = test_softmax.naive(Softmax(), spec, None, q, k, v, token_mask, causal), spec.heads // spec.key_heads
    others = [head for head in range(spec.heads) if head not in operator.keep]
    one_each = [head // group for head in others]
    if not others or not operator.keep:
        return y if operator.keep else OF[type(operator.operator)](operator.operator, spec, mixer, q, k, v, token_mask, causal)
    alone = attention_spec(heads=len(others), key_heads=len(others), size=spec.head_size, scale=spec.scale)
    mixed = OF[type(operator.operator)](
        operator.operator, alone, mixer.others, q[:, others], k[:, one_each], v[:, one_each], token_mask, causal
    )
    return y.index_copy(1, torch.tensor(others), mixed)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keep", GROUPS, ids=str)
def test_heads_that_share_keys_can_be_parted(keep, causal):
    spec = attention_spec()
    q, k, v, g = inputs(4, spec, 63)
    for inner in (WindowedLinear(window=5, sinks=2), LinearAttention(feature_map="hedgehog")):
        operator = MixedHeads(operator=inner, keep=keep)
        assert_naive(naive, operator, spec, q, k, v, padding(63), causal, g, [torch.float64])


@pytest.mark.parametrize("causal", [False, True])
def test_all_heads_are_softmax_and_no_heads_the_operator(causal):
    spec, token_mask, inner = attention_spec(), padding(100), WindowedLinear(window=5)
    q, k, v, g = inputs(4, spec, 100)
    for keep, plain in ((tuple(range(6)), Softmax()), ((), inner)):
        mixed, alone = mixer_of(MixedHeads(operator=inner, keep=keep), spec), mixer_of(plain, spec)
        found = run(mixed, mixed, q, k, v, token_mask, causal, g)
        right = run(alone, alone, q, k, v, token_mask, causal, g)
        assert all(torch.equal(found[part], value) for part, value in right.items())


def llama(student) -> transformers.LlamaForCausalLM:
    """Make a Llama of two layers with four heads, with students in place of its attention."""
    transformers.set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes))
    segue.replace_(model, segue.Plan(sites="**.self_attn", student=student), total_steps=2).finalize_(force=True)
    return model.eval()


def layers(keep) -> list[int]:
    """Return how many heads keep their softmax in each layer."""
    model = llama(MixedHeads(operator=WindowedLinear(window=3), keep=keep))
    kinds = [layer.self_attn.mixer for layer in model.model.layers]
    return [len(mixer.kept_heads.queries) if hasattr(mixer, "kept_heads") else 0 for mixer in kinds]


def test_each_layer_can_keep_heads_of_its_own():
    assert layers((1, 2)) == [2, 2]
    assert layers({0: (1, 2, 3), 1: ()}) == [3, 0]
    assert layers({"1": (1,), "**": (0, 2)}) == [2, 1]
    assert layers({"*.layers.0.*": (1,), 1: ()}) == [1, 0]


def test_a_mapping_is_saved():
    student = MixedHeads(keep={0: (1, 2), "model.layers.1.*": ()})
    assert decode(encode(student), "student") == student
    assert student == MixedHeads(keep={"0": (1, 2), "model.layers.1.*": ()})


@pytest.mark.parametrize(
    ("keep", "says"),
    [
        ((0, 9), "there is no head 9 to keep.\n  The attention has 4 heads, from 0 to 3.\n  Hint: give MixedHeads"),
        ({0: (1,)}, "says nothing of site 'model.layers.1.self_attn'.\n  Its layer is 1, and the keys are 0.\n  Hint: add"),
    ],
)
def test_heads_and_layers_that_are_not_there_are_refused(keep, says):
    with pytest.raises(StudentError) as error:
        layers(keep)
    assert says in str(error.value)


def test_what_belongs_to_all_heads_is_given_to_the_mixture():
    with pytest.raises(StudentError, match="must not have init or ignore"):
        MixedHeads(operator=LinearAttention(ignore=("bias",)))


def test_a_window_of_the_teacher_is_kept():
    spec = attention_spec(window=4)
    q, k, v, _ = inputs(2, spec, 50)
    mixed = mixer_of(MixedHeads(operator=SlidingWindow(window=9, sinks=0), keep=(0, 4)), spec)
    torch.testing.assert_close(
        mixed(q, k, v, None, True), mixer_of(SlidingWindow(window=4, sinks=0), spec)(q, k, v, None, True)
    )


def test_generation_with_a_cache_gives_the_tokens_without_one():
    model = llama(MixedHeads(operator=WindowedLinear(window=3), keep={0: (0, 3), 1: (1,)}))
    prompt = torch.randint(50, (3, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    cached, plain = (model.generate(prompt, use_cache=use, **settings) for use in (True, False))
    assert torch.equal(cached, plain)


def test_only_kept_heads_remember_all_tokens():
    spec = attention_spec(causal=True)
    mixer, (_, k, v, _) = mixer_of(MixedHeads(operator=WindowedLinear(window=5), keep=(3, 4, 5)), spec), inputs(1, spec, 200)
    few, many = (mixer.update_state(k[:, :, :n], v[:, :, :n], None, None) for n in (100, 200))
    grown = {name for name in many if many[name].shape != few[name].shape}
    assert grown == {"kept.k", "kept.v"}
    assert many["kept.k"].shape == (1, 1, 200, 7)


def test_the_spec_of_some_heads_has_their_projections():
    weight = torch.arange(24.0).view(12, 2)
    projections = {part: segue.students.Projection(weight, weight[:, 0]) for part in ("query", "key", "value")}
    spec = AttentionSpec(heads=4, head_size=3, **projections)
    mixer = MixedHeads(operator=LinearAttention(), keep=(0, 2)).mixer(replace(spec))
    others = mixer.other_heads.spec(spec)
    assert (others.heads, others.key_heads) == (2, 2)
    assert others.value.bias.tolist() == [6.0, 8.0, 10.0, 18.0, 20.0, 22.0]


def test_a_model_without_values_gets_mixed_heads_too():
    """Costs are counted on the meta device."""
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    segue.replace_(model, segue.Plan(sites="model.layers.*.self_attn", student=MixedHeads(keep=(0, 2))), total_steps=2)
    assert model(torch.zeros(2, 7, dtype=torch.long, device="meta")).logits.shape == (2, 7, 50)
