"""Speed and memory: a cache grows, a state does not, and the counted bytes are exact."""

import segue
from segue.convert import speed
from tests.convert.small_models import model


def test_a_cache_grows_with_the_context_and_a_state_does_not():
    models = {"grown": model("llama"), "flat": model("llama")}
    plan = segue.methods.dcr(sites="**.self_attn", student=segue.students.LinearAttention())
    segue.replace_(models["flat"], plan, total_steps=1).finalize_(force=True)
    rows = speed.decoding(models, (8, 32), steps=2)
    sizes = {(row["model"], row["context"]): row["cache_bytes"] for row in rows}
    token = 2 * 2 * 16 * 4  # keys and values of two layers, one head of 16 numbers in float32
    assert sizes["grown", 32] == (32 + 3) * token  # three more were generated
    assert sizes["flat", 32] == sizes["flat", 8]
    for row in rows:
        assert row["quartiles"][0] <= row["tokens_per_second"] <= row["quartiles"][1]
        assert speed.peak_bytes(models[row["model"]], row["context"]) > row["cache_bytes"] / 2
