"""Students decode recurrently: with a cache, in a batch, with beams, in chunks, and in the middle of a handover, the tokens are
those of a forward without a cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, StaticCache

import segue
from segue.errors import StudentError
from segue.students import MixedHeads, Softmax
from segue.students.attention.cache import StateLayer
from segue.students.attention.module import Operator
from tests.helpers import models
from tests.helpers.models import VOCABULARY, WIDTH
from tests.students.attention.mixers.found import ONE_OF_EACH, RECURRENT, SETTINGS

pytestmark = pytest.mark.filterwarnings("ignore:.* looks at all tokens:segue.errors.SegueWarning")

ELU = "elu"
OPERATORS: dict[str, Operator] = {name: SETTINGS[name] for name in RECURRENT}
ONE_OF_EACH = [name for name in ONE_OF_EACH if name in RECURRENT]
SIZES = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
SITES = {"gpt2": "transformer.h.*.attn", "bert": "bert.encoder.layer.*.attention.self"}
OWN: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8},  # with norms of queries and keys
    "mistral": {"sliding_window": 64},
    "gpt2": {"n_positions": 512, "n_embd": WIDTH, "n_layer": 3, "n_head": 4},
    "bert": {"is_decoder": True},
}
TURN = 21  # tokens of a prompt
NEW = 10  # tokens to generate

every_operator = pytest.mark.parametrize("name", OPERATORS)
one_of_each = pytest.mark.parametrize("name", ONE_OF_EACH)


def original(family: str = "llama", **settings: Any) -> nn.Module:
    """Make a model of three layers that never ends its text."""
    sizes = SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 512} if family != "gpt2" else {}
    ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(
        family, **{**sizes, **ends, **OWN.get(family, {}), **settings}, vocab_size=VOCABULARY
    )
    return models.build(lambda: transformers.AutoModelForCausalLM.from_config(config)).eval()


def handing_over(model: nn.Module, student: Any, layers: str = "*", **plan: Any) -> segue.Handover:
    sites = SITES.get(model.config.model_type, "model.layers.*.self_attn").replace("*", layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # Performer's directions
        handover = segue.replace_(model, segue.Plan(sites=sites, student=student, **plan), total_steps=4)
    model.eval()
    return handover


def converted(name: str | Operator = ELU, family: str = "llama", layers: str = "*", **settings: Any) -> nn.Module:
    model = original(family, **settings)
    handing_over(model, OPERATORS[name] if isinstance(name, str) else name, layers).finalize_(force=True)
    return model


def text(tokens: int = TURN, rows: int = 3, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def left_padding(*padding: int, tokens: int = TURN) -> Tensor:
    return (torch.arange(tokens) >= torch.tensor(padding)[:, None]).long()


MASK = left_padding(9, 15, 0)


def generated(model: nn.Module, ids: Tensor, mask: Tensor | None = None, **settings: Any) -> Any:
    mask = torch.ones_like(ids) if mask is None else mask
    settings = {"max_new_tokens": NEW, "do_sample": False, **settings}
    return model.generate(ids, attention_mask=mask, **settings)


def agree(model: nn.Module, **settings: Any) -> Tensor:
    """Generate from a padded batch without and with a cache, compare, and return the tokens."""
    whole, cached = (generated(model, text(), MASK, use_cache=use, **settings) for use in (False, True))
    assert torch.equal(cached, whole)
    assert len(cached[:, TURN:].unique()) > 1, "one token again and again proves nothing"
    return cached


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor, mask: Tensor, pieces: list[int], cache: Any) -> Tensor:
    """Call the model with some tokens at a time."""
    positions, found = (mask.cumsum(1) - 1).clamp_min(0), []
    for begin, end in zip([0, *pieces], [*pieces, ids.shape[1]], strict=True):
        call = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
        found.append(model(ids[:, begin:end], past_key_values=cache, use_cache=cache is not None, **call).logits)
    return torch.cat(found, dim=1)


def close(a: Tensor, b: Tensor, mask: Tensor | None = None) -> None:
    real = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(a[real], b[real], atol=1e-4, rtol=1e-4)


def held(cache: Any) -> int:
    """Count the bytes that the states of a cache keep alive."""
    layers = [layer for layer in cache.layers if isinstance(layer, StateLayer)]
    assert layers
    tensors = [x for layer in layers for x in (*layer.state.values(), *layer.pending.values()) if isinstance(x, Tensor)]
    return sum(storage.nbytes() for storage in {x.data_ptr(): x.untyped_storage() for x in tensors}.values())


# Tokens


FAMILIES = [("llama", name) for name in OPERATORS]
FAMILIES += [(family, name) for family in ("qwen3", "gpt2", "bert", "mistral") for name in ONE_OF_EACH]


@pytest.mark.parametrize(("family", "name"), FAMILIES)
def test_a_cache_changes_no_token_and_neighbours_and_padding_change_none(family, name):
    model = converted(name, family)
    together = agree(model)
    if family == "llama":  # a cache of fixed length has room for more than was seen
        assert torch.equal(generated(model, text(), MASK, cache_implementation="static"), together)
    for row, ids, mask in zip(together, text(), MASK, strict=True):
        alone = generated(model, ids[mask.bool()][None])
        assert torch.equal(alone[0], row[mask.argmax() :])


@every_operator
def test_a_search_takes_its_states_along(name):
    agree(converted(name), num_beams=3, num_return_sequences=2)


@one_of_each
def test_the_same_seed_draws_the_same_tokens(name):
    model, drawn = converted(name), []
    for use_cache in (False, True):
        torch.manual_seed(3)
        drawn.append(generated(model, text(), MASK, do_sample=True, num_return_sequences=2, use_cache=use_cache))
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0][0], drawn[0][1])


@pytest.mark.parametrize(("name", "layers"), [("performer", "0"), ("windowed", "2"), (ELU, "{0,2}")])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_some_layers_may_stay(family, name, layers):
    model = converted(name, family, layers)
    whole = generated(model, text(), MASK, use_cache=False)
    for implementation in ("dynamic", "static"):
        cached = generated(model, text(), MASK, cache_implementation=implementation, return_dict_in_generate=True)
        assert torch.equal(cached.sequences, whole)
        states = [isinstance(layer, StateLayer) for layer in cached.past_key_values.layers]
        assert states == [str(layer) in layers for layer in range(3)]


@every_operator
def test_a_second_turn_goes_on_from_the_first(name):
    model = converted(name, layers="{0,1}")
    first = generated(model, text(), MASK, return_dict_in_generate=True)
    ids = torch.cat([first.sequences, text(7, seed=1)], dim=1)
    mask = torch.cat([MASK, torch.ones(3, NEW + 7, dtype=torch.long)], dim=1)
    mask[1, TURN + NEW : TURN + NEW + 3] = 0  # a shorter second question
    second = generated(model, ids, mask, past_key_values=first.past_key_values)
    assert torch.equal(second, generated(model, ids, mask, use_cache=False))


# Logits


LONG = text(300, rows=2)
LONG_MASK = left_padding(0, 140, tokens=300)


@every_operator
def test_pieces_of_any_size_give_the_logits_of_the_whole(name):
    """Pieces beyond 128 tokens, of one token, and the first two of nothing but padding for a row."""
    model = converted(name)
    whole = logits(model, LONG, LONG_MASK, [], None)
    for cache, pieces in ((DynamicCache(config=model.config), [1, 132, 139, 299]), (DynamicCache(), [131, 132, 133])):
        close(logits(model, LONG, LONG_MASK, pieces, cache), whole, LONG_MASK)
    close(logits(model, LONG, LONG_MASK, [5, 140], StaticCache(model.config, max_cache_len=320)), whole, LONG_MASK)


@one_of_each
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_students_go_on_where_softmax_left_off(name, kind):
    """The prefix was put into the cache by the original; its padding still counts for nothing."""
    teacher, model, mask = original(), converted(name, layers="2"), left_padding(3, 12, 0)
    room = {"max_cache_len": 40} if kind is StaticCache else {}
    cache, positions = kind(config=model.config, **room), (mask.cumsum(1) - 1).clamp_min(0)
    logits(teacher, text()[:, :15], mask[:, :15], [], cache)  # before the last layer the two models are one
    with torch.no_grad():
        rest = model(text()[:, 15:], attention_mask=mask, position_ids=positions[:, 15:], past_key_values=cache).logits
    close(rest, logits(model, text(), mask, [], None)[:, 15:])
    assert isinstance(cache.layers[2], StateLayer)


@one_of_each
def test_half_precision_decodes_as_it_reads(name):
    model = converted(name).bfloat16()
    whole = logits(model, text(), MASK, [], None)
    cache = DynamicCache(config=model.config)
    pieces = logits(model, text(), MASK, [4, 20], cache)
    assert pieces.dtype == torch.bfloat16
    assert {x.dtype for x in cache.layers[0].state.values() if torch.is_tensor(x) and x.is_floating_point()} == {torch.float32}
    torch.testing.assert_close(pieces[MASK.bool()], whole[MASK.bool()], atol=0.1, rtol=0.05)
    assert generated(model, text(), MASK).shape == (3, TURN + NEW)


# One token without a mask goes straight to the mixer; nothing may slip through


@every_operator
def test_a_token_with_a_mask_that_hides_nothing_is_one_without(name):
    """As a static cache and eager attention bring it, and a token mask of the same."""
    model, found = converted(name), []
    for form in (None, torch.bool, torch.float32):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(text(), past_key_values=cache)
            for step in range(3):
                keys = TURN + step + 1
                mask = None if form is None else torch.full((3, 1, 1, keys), form == torch.bool, dtype=form)
                last = model(text(1, seed=step), attention_mask=mask, past_key_values=cache).logits
        found.append(last)
    torch.testing.assert_close(found[1:], found[:1] * 2, atol=1e-5, rtol=1e-5)


@one_of_each
def test_a_token_that_is_padding_is_left_out_after_tokens_without_a_mask(name):
    """A row waits for the others: its state stays as it is, whether the step before had a mask or not."""
    model = converted(name, num_hidden_layers=1)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(text(), past_key_values=cache)
        model(text(1, seed=1), past_key_values=cache)
        mask = torch.ones(3, TURN + 2, dtype=torch.long)
        mask[1, -1] = 0
        positions = mask.cumsum(1)[:, -1:] - 1
        model(text(1, seed=2), attention_mask=mask, position_ids=positions, past_key_values=cache)
        mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], dim=1)
        positions = mask.cumsum(1)[:, -1:] - 1
        last = model(text(1, seed=3), attention_mask=mask, position_ids=positions, past_key_values=cache).logits
    ids = torch.cat([text(), text(1, seed=1), text(1, seed=2), text(1, seed=3)], dim=1)
    close(last, logits(model, ids, mask, [], None)[:, -1:])


def test_a_mask_of_the_wrong_length_is_refused_after_tokens_without_one():
    model, cache = converted(), DynamicCache()
    with torch.no_grad():
        model(text(), past_key_values=cache)
        model(text(1), past_key_values=cache)
        with pytest.raises(StudentError, match="with a key/value cache the mask is that of all tokens so far"):
            model(text(1), attention_mask=torch.ones(3, 1, 1, 1, dtype=torch.bool), past_key_values=cache)


@one_of_each
@pytest.mark.parametrize(
    ("before", "after"), [(None, 2), (0, None), (0, 2)], ids=["hides what was read", "shows padding", "hides another"]
)
def test_a_mask_cannot_change_the_past(name, before, after):
    """The original would hide the token, or see it; a state cannot, and says so before it is wrong."""
    model = converted(name)
    cache = DynamicCache(config=model.config)

    def mask(tokens, hidden):
        found = torch.ones(3, tokens, dtype=torch.long)
        found[1, hidden] = 0
        return found

    with torch.no_grad():
        model(text(), attention_mask=None if before is None else mask(TURN, before), past_key_values=cache)
        with pytest.raises(StudentError, match="cannot hide a token, or show one, after it was read"):
            model(text(1), attention_mask=None if after is None else mask(TURN + 1, after), past_key_values=cache)


class Counted(TorchDispatchMode):
    """Count the operations that PyTorch dispatches."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


MORE = {
    "elu": -4,
    "relu": -5,
    "hedgehog": 3,
    "performer": 8,
    "gated linear": 14,
    "gated delta": 12,
    "window": -10,
    "windowed": 21,
}


@pytest.mark.parametrize(("name", "more"), MORE.items())
def test_a_decoding_step_takes_about_as_many_operations_as_the_original(name, more):
    """What decides at short contexts, where operations are small: per layer, compared with softmax and its usual cache."""
    counts = []
    for model in (original(), converted(name)):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(text(rows=1), past_key_values=cache)
            model(text(1, rows=1), past_key_values=cache)
            with Counted() as counted:
                model(text(1, rows=1), past_key_values=cache)
        counts.append(counted.count)
    layers = len(cache.layers)
    assert counts[1] - counts[0] <= more * layers


@one_of_each
def test_what_a_gradient_or_somebody_else_needs_is_not_written_over(name):
    """Steps write to the state of a cache, but not to one that a backward needs, of inference mode, or of another cache."""
    model = converted(name, layers="{0,1}").requires_grad_(False)
    model.model.layers[1].self_attn.query.requires_grad_(True)  # keys and values have no gradient, and are saved for one
    expected = None
    for between in (False, True):
        cache = DynamicCache(config=model.config)
        model(text(24), past_key_values=cache)
        loss = model(text(1, seed=1), past_key_values=cache).logits.square().sum()
        if between:
            with torch.no_grad():
                for seed in range(3):
                    model(text(1, seed=seed), past_key_values=cache)
        model.zero_grad()
        loss.backward()
        found = model.model.layers[1].self_attn.query.weight.grad.clone()
        expected = found if expected is None else expected
        assert torch.equal(found, expected)
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        for tokens in (24, 1, 1):
            model(text(tokens), past_key_values=cache)
        kept = copy.deepcopy(cache)
    steps = [text(1, seed=seed) for seed in range(3)]
    with torch.no_grad():
        first, again = ([model(step, past_key_values=past).logits for step in steps] for past in (cache, kept))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


# The cache itself


@one_of_each
def test_rows_of_a_cache_are_repeated_selected_and_reordered(name):
    """Also while tokens wait to be folded into a state, as they do in training."""
    model, ids, order = converted(name, layers="{1,2}"), text(), torch.tensor([2, 0, 0])
    whole = logits(model, ids, MASK, [], None)
    for grad in (False, True):
        for move in (
            lambda cache: cache.reorder_cache(order),
            lambda cache: cache.batch_select_indices(order),
            lambda cache: (cache.batch_repeat_interleave(2), cache.batch_select_indices(2 * order + 1)),
        ):
            cache = DynamicCache(config=model.config)
            with torch.set_grad_enabled(grad):
                positions = (MASK.cumsum(1) - 1).clamp_min(0)
                model(ids[:, :16], attention_mask=MASK[:, :16], position_ids=positions[:, :16], past_key_values=cache)
                assert bool(cache.layers[1].pending) == grad
                move(cache)
                call = {"attention_mask": MASK[order], "position_ids": positions[order][:, 16:]}
                rest = model(ids[order][:, 16:], past_key_values=cache, **call).logits
            close(rest.detach(), whole[order][:, 16:])


@one_of_each
def test_a_cache_that_was_reset_is_a_fresh_one(name):
    model, everything = converted(name), torch.ones(1, TURN, dtype=torch.long)
    cache = DynamicCache(config=model.config)
    first = logits(model, text(rows=1), everything, [], cache)
    cache.reset()
    assert cache.get_seq_length() == held(cache) == 0
    assert torch.equal(logits(model, text(rows=1), everything, [], cache), first)


def test_what_was_seen_cannot_be_unseen():
    model = converted()
    cache = DynamicCache(config=model.config)
    logits(model, text(), MASK, [], cache)
    cache.crop(0)
    with pytest.raises(StudentError, match=r"(?s)the last 2 tokens cannot be removed .*a state there.*copy.deepcopy"):
        cache.crop(-2)
    with pytest.raises(StudentError, match="generate without an assistant model"):
        generated(model, text(rows=1), prompt_lookup_num_tokens=3, max_new_tokens=40)
    before = copy.deepcopy(cache)
    mask = torch.cat([MASK, torch.ones_like(MASK[:, :4])], dim=1)
    again = [model(text(4), attention_mask=mask, past_key_values=past, use_cache=True).logits for past in (cache, before)]
    assert torch.equal(*again)


def test_an_assistant_is_refused():
    with pytest.raises(StudentError, match="generate without an assistant model"):
        generated(converted(), text(rows=1), assistant_model=original())


@pytest.mark.parametrize("settings", [{}, {"cache_implementation": "static"}], ids=str)
def test_generation_past_the_window_of_the_teacher_equals_that_without_a_cache(settings):
    model = converted(family="mistral", sliding_window=TURN + 4)
    expected = generated(model, text(), MASK, max_new_tokens=12, use_cache=False)
    assert torch.equal(generated(model, text(), MASK, max_new_tokens=12, **settings), expected)


def test_a_state_is_not_read_as_keys_and_values():
    teacher, model = original(), converted()
    cache = DynamicCache(config=model.config)
    logits(model, text(), MASK, [], cache)
    with pytest.raises(StudentError, match="start with a new cache when teachers and students change places"):
        teacher(text(1), past_key_values=cache)


@pytest.mark.parametrize("name", [name for name in RECURRENT if not isinstance(OPERATORS[name], MixedHeads)])
def test_a_state_does_not_grow(name):
    """What is kept alive counts, not what is seen of it: a slice keeps its complete tensor."""
    model, sizes = converted(name), []
    cache = DynamicCache(config=model.config)
    for tokens in (60, 40, 1, 899, 1):
        with torch.no_grad():
            model(text(tokens, rows=1), position_ids=torch.arange(tokens)[None], past_key_values=cache)
        sizes.append(held(cache))
    assert cache.get_seq_length() == 1001
    assert sizes[1] == sizes[3]
    assert sizes[2] == sizes[4] <= 1.25 * sizes[1]  # a window is cut when the next token comes
    ring, operator = cache.layers[0].state.get("k"), OPERATORS[name]
    assert ring is None or ring.shape[2] == operator.sinks + operator.window


@pytest.mark.parametrize("compiled_first", [True, False])
def test_compiled_and_plain_calls_continue_the_same_padded_cache(compiled_first):
    model, cache, positions = converted(), DynamicCache(), (MASK.cumsum(1) - 1).clamp_min(0)
    torch._dynamo.reset()
    compiled, found = torch.compile(model, backend="eager"), []
    for turn, (begin, end) in enumerate(((0, 18), (18, 19), (19, 21))):  # PyTorch gives up compiling after a few lengths
        call = {"attention_mask": MASK[:, :end], "position_ids": positions[:, begin:end], "past_key_values": cache}
        with torch.no_grad():
            found.append((compiled if (turn == 0) == compiled_first else model)(text()[:, begin:end], **call).logits)
    close(torch.cat(found, dim=1), logits(model, text(), MASK, [], None), MASK)
    if compiled_first:  # what compiled code noted is checked
        changed = torch.cat([1 - MASK[:, :1], MASK[:, 1:], torch.ones_like(MASK[:, :1])], dim=1)
        with pytest.raises(StudentError, match="cannot hide a token"):
            model(text(1), attention_mask=changed, past_key_values=cache)


@pytest.mark.slow
def test_a_decoding_step_compiles_to_one_graph():
    """Two graphs over ten steps: the first step, and one for all lengths."""
    torch._dynamo.reset()
    model, counted = converted(num_hidden_layers=1), torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, backend=counted, fullgraph=True)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(text(), past_key_values=cache)
        for step in range(10):
            steps = [
                call(text(1, seed=step), past_key_values=past).logits
                for call, past in zip((compiled, model), caches, strict=True)
            ]
            torch.testing.assert_close(*steps)
    assert counted.frame_count <= 2
    torch._dynamo.reset()


# Training


@one_of_each
def test_gradients_pass_a_cache(name):
    model, labels, gradients = converted(name), text(seed=2), []
    for pieces in ([], [5, 6]):
        cache = DynamicCache(config=model.config) if pieces else None
        parts = zip([0, *pieces], [*pieces, TURN], strict=True)
        found = [model(text()[:, a:b], past_key_values=cache, use_cache=cache is not None).logits for a, b in parts]
        F.cross_entropy(torch.cat(found, dim=1).flatten(0, 1), labels.flatten()).backward()
        gradients.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    assert len(gradients[0]) > 20
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-3)


@one_of_each
def test_a_cache_that_a_training_step_never_reads_costs_nothing(name):
    model, counts = converted(name).train(), []
    for use_cache in (False, True):
        with FlopCounterMode(display=False) as counter:
            model(text(), use_cache=use_cache).logits.sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


# In the middle of a handover


def constant(alpha: float) -> Any:
    return segue.schedules.Constant(alpha=alpha)


def step_once(handover: segue.Handover) -> None:
    """Let the gates draw: from here on a side without weight may be left out."""
    handover.model.train()
    (handover.model(text(), labels=text()).loss + handover.aux_loss()).backward()
    handover.step()
    handover.model.eval()


BLENDS: dict[str, dict[str, Any]] = {
    "half": {"schedule": constant(0.5)},
    "a soft coin": {"schedule": constant(0.8), "gate": segue.gates.GumbelSoftmax()},
    "a coin": {"schedule": constant(0.5), "gate": segue.gates.Bernoulli()},
    "teachers": {"schedule": constant(1.0)},
    "students, teachers in memory": {"schedule": constant(0.0), "release": False},
    "another share at each site": {
        "schedule": segue.schedules.PerSite(
            schedules={"**.0.*": constant(0.0), "**.1.*": constant(0.5)}, otherwise=constant(1.0)
        )
    },
    "held": {"schedule": segue.schedules.Hold(fraction=0.9), "guidance": segue.losses.FeatureGuidance()},
}


@pytest.mark.parametrize("blend", BLENDS)
def test_a_half_converted_model_generates_with_a_cache(blend):
    """Teacher and student remember their own pasts, padded and through a search, before and after a first step."""
    name = ONE_OF_EACH[list(BLENDS).index(blend) % len(ONE_OF_EACH)]
    model = original()
    handover = handing_over(model, OPERATORS[name], **BLENDS[blend])
    generated(model, text(), MASK)  # the very first forward, which computes both sides, is one with a cache
    agree(model)
    step_once(handover)
    agree(model, num_beams=3)
    handover.finalize_(force=True)
    agree(model)


@one_of_each
def test_a_blend_keeps_two_pasts(name):
    """In a half-converted model in pieces: the teachers' cache holds keys, the students' own holds states."""
    model = original()
    handover = handing_over(model, OPERATORS[name], "{0,2}", schedule=constant(0.5))
    cache = DynamicCache(config=model.config)
    whole = logits(model, LONG, LONG_MASK, [], None)
    close(logits(model, LONG, LONG_MASK, [1, 132, 139, 299], cache), whole, LONG_MASK)
    assert [isinstance(layer, StateLayer) for layer in cache.layers] == [True, False, True]
    teachers = cache._segue_teachers
    assert [teachers.layers[layer].keys.shape[2] for layer in (0, 2)] == [300, 300]
    with handover.as_student():
        agree(model)


@one_of_each
def test_second_turns_and_single_sequences_of_a_half_converted_model(name):
    model = original()
    handing_over(model, OPERATORS[name], schedule=constant(0.4))
    together = generated(model, text(), MASK, return_dict_in_generate=True)
    for row, ids, mask in zip(together.sequences, text(), MASK, strict=True):
        assert torch.equal(generated(model, ids[mask.bool()][None])[0], row[mask.argmax() :])
    ids = torch.cat([together.sequences, text(7, seed=1)], dim=1)
    mask = torch.cat([MASK, torch.ones(3, NEW + 7, dtype=torch.long)], dim=1)
    second = generated(model, ids, mask, past_key_values=together.past_key_values)
    assert torch.equal(second, generated(model, ids, mask, use_cache=False))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_operators_without_a_state_keep_keys_and_values(family):
    model = converted(Softmax(), family)
    cache = agree(model) is not None and generated(model, text(), return_dict_in_generate=True).past_key_values
    assert not any(isinstance(layer, StateLayer) for layer in cache.layers)
