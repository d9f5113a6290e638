"""Data sampled from the original: the right distribution, the same every time, resumed, and kept apart by its settings."""

from __future__ import annotations

import shutil

import pytest
import torch

from segue.convert import data, sampling
from segue.convert.pretrained import open_base
from segue.convert.sampling import Samples, drawn, generate, nucleus
from segue.core import tensor_files
from segue.errors import ConfigError, DataError
from tests.convert.small_models import POSITIONS, epoch, settings

SILENT = [].append


def of_self(**given):
    return settings("self", **{"steps": 10, "tokens": 8, **given})


@pytest.fixture
def llama(base):
    return open_base(str(base("llama")))


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch):
    monkeypatch.setattr(sampling, "AT_ONCE", 6)


def by_hand(row: torch.Tensor, chance: float) -> torch.Tensor:
    """Go through the tokens until their mass exceeds the chance."""
    left = chance * row.double().sum().item()
    for token, mass in enumerate(row.double().tolist()):
        if left < mass:
            return torch.tensor([token])
        left -= mass
    raise AssertionError("the masses are used up")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_sequences_are_those_of_a_naive_loop_without_a_cache(kind, base):
    model = open_base(str(base(kind))).model
    first = torch.full((5, 1), 1)
    found = generate(model, first, 9, torch.Generator().manual_seed(3), 0.7, 0.9)
    ids, generator = first, torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _ in range(8):
            probabilities = (model(input_ids=ids, use_cache=False).logits[:, -1] / 0.7).softmax(-1)
            for row in probabilities:
                order = row.argsort(descending=True)
                total = 0.0
                for token in order:
                    before, total = total, total + row[token].item()
                    if before >= 0.9:
                        row[token] = 0.0
            chances = torch.rand(len(ids), 1, dtype=torch.float64, generator=generator)
            ids = torch.cat(
                [ids, torch.stack([by_hand(row, u.item()) for row, u in zip(probabilities, chances, strict=True)])], 1
            )
    assert torch.equal(found, ids)


def test_tokens_come_as_often_as_the_model_says(llama):
    first = torch.full((4000, 1), 1)
    second = generate(llama.model, first, 2, torch.Generator().manual_seed(0), 1.0, 1.0)[:, 1]
    with torch.no_grad():
        wanted = llama.model(input_ids=first[:1]).logits[0, -1].softmax(-1)
    counts = torch.bincount(second, minlength=len(wanted)).float() / len(second)
    assert (counts - wanted).abs().max() < 4 * (wanted.max() / len(second)).sqrt()


def test_a_token_without_mass_is_never_drawn():
    given = torch.tensor([[0.0, 0.0, 0.5, 0.0, 0.25, 0.0]]).expand(20_000, -1)
    found = torch.bincount(drawn(given, torch.Generator().manual_seed(1)).flatten(), minlength=6) / 20_000
    assert found.tolist() == pytest.approx([0, 0, 2 / 3, 0, 1 / 3, 0], abs=0.015)
    assert set(drawn(given, torch.Generator().manual_seed(1)).flatten().tolist()) == {2, 4}


def test_the_nucleus_is_the_fewest_tokens_that_reach_the_mass():
    given = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.97, 0.01, 0.01, 0.01]])
    assert nucleus(given, 0.65).tolist() == [pytest.approx([0, 0.4, 0.3, 0]), pytest.approx([0.97, 0, 0, 0])]
    assert nucleus(given, 1.0) is given


def test_training_and_held_out_sequences_are_apart_and_the_same_every_time(llama, tmp_path):
    found = data.load(llama, of_self(validation=0.2), tmp_path)
    said: list[str] = []
    found.prepare(said.append)
    held_out = [tuple(row) for batch in found.held_out for row in batch["input_ids"].tolist()]
    trained = [tuple(row) for number in range(3) for batch in epoch(found, number) for row in batch["input_ids"].tolist()]
    assert (len(held_out), len(set(trained))) == (10, 40)  # 10 steps of 4; a fifth of all is held out
    assert not set(held_out) & set(trained)
    assert {row[0] for row in (*held_out, *trained)} == {1}
    assert found.train_size.endswith("sequences of 8, sampled from the original after its EOS token (it has no BOS token)")
    assert len(said) == 1
    assert said[0].startswith("sampling 54 sequences of 8 tokens from the original after its EOS token")
    for folder in (tmp_path, None):
        again = data.load(llama, of_self(validation=0.2), folder)
        again.prepare(SILENT)
        assert [tuple(row) for batch in again.held_out for row in batch["input_ids"].tolist()] == held_out


def test_an_interrupted_sampling_resumes(llama, tmp_path, monkeypatch):
    wanted = Samples(llama, of_self(), tmp_path / "a")
    wanted.sample(20, SILENT)
    calls = 0

    def stops(*args):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return generate(*args)

    monkeypatch.setattr(sampling, "generate", stops)
    with pytest.raises(KeyboardInterrupt):
        Samples(llama, of_self(), tmp_path / "b").sample(20, SILENT)
    resumed = Samples(llama, of_self(), tmp_path / "b")
    resumed.sample(20, SILENT)
    assert calls == 5  # two of four are there
    assert torch.equal(resumed[torch.arange(20)], wanted[torch.arange(20)])
    said: list[str] = []
    Samples(llama, of_self(), tmp_path / "b").sample(20, said.append)
    assert (calls, said) == (5, [])


@pytest.mark.parametrize("change", [{"seed": 1}, {"sampling_temperature": 0.5}, {"sampling_top_p": 0.5}, {"tokens": 9}])
def test_other_settings_are_other_samples(change, llama, tmp_path):
    a, b = Samples(llama, of_self(), tmp_path), Samples(llama, of_self(**change), tmp_path)
    assert a.folder != b.folder
    if "tokens" not in change:  # longer sequences begin in the same way
        assert not torch.equal(a[torch.arange(6)], b[torch.arange(6)])


def test_a_number_of_sequences_is_reused_over_epochs(llama):
    found = data.load(llama, of_self(samples=8, steps=1000))
    assert len(epoch(found)) == 2
    assert {tuple(row) for batch in epoch(found, 1) for row in batch["input_ids"].tolist()} == {
        tuple(row) for batch in epoch(found, 2) for row in batch["input_ids"].tolist()
    }
    assert Samples(llama, of_self(steps=10**6), None).count == sampling.MOST


def test_another_model_has_other_samples(base, llama, tmp_path):
    other = open_base(str(base("qwen")))
    assert Samples(llama, of_self(), tmp_path).folder != Samples(other, of_self(), tmp_path).folder


def test_the_first_token_is_bos_then_eos_then_any(llama):
    llama.processor.add_special_tokens({"bos_token": "<start>"})
    assert Samples(llama, of_self(), None).start_text == "after its BOS token"
    assert set(Samples(llama, of_self(), None)[torch.arange(6)][:, 0].tolist()) == {2}
    llama.processor.bos_token = llama.processor.eos_token = None
    llama.model.config.bos_token_id = llama.model.config.eos_token_id = None
    samples = Samples(llama, of_self(), None)
    assert samples.start_text == "after random tokens (it has neither a BOS nor an EOS token)"
    assert len(set(samples[torch.arange(6)][:, 0].tolist())) > 1


def test_a_damaged_file_is_refused(llama, tmp_path):
    samples = Samples(llama, of_self(), tmp_path)
    samples.sample(6, SILENT)
    (path,) = samples.folder.iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match="delete that file, so that they are sampled again"):
        Samples(llama, of_self(), tmp_path)[torch.arange(2)]
    for token in (-1, llama.model.config.vocab_size):
        tensor_files.write(path, {"ids": torch.full((6, 8), token, dtype=torch.int32)})
        with pytest.raises(DataError, match=f"its tokens go from {token} to {token}"):
            Samples(llama, of_self(), tmp_path)[torch.arange(2)]
    shutil.rmtree(samples.folder)
    assert torch.equal(Samples(llama, of_self(), tmp_path)[torch.arange(6)], samples[torch.arange(6)])


@pytest.mark.parametrize("kind", ["masked", "labels", "encoder"])
def test_models_that_do_not_generate_are_refused(kind, base):
    with pytest.raises(ConfigError, match="--data self needs a causal language model") as caught:
        data.load(open_base(str(base(kind))), of_self())
    assert len(str(caught.value).splitlines()) == 3


def test_sequences_longer_than_the_model_are_refused(llama):
    with pytest.raises(ConfigError, match=f"tokens must be at most {POSITIONS}"):
        data.load(llama, of_self(tokens=POSITIONS + 1))
