"""Load forged folders beside a stand-in for `kernels`, and print what they reached: run by the tests as a process."""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

WATCHED = ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.exec", "pickle.find_class")
KERNEL = "someone/attention-kernels"
STAND_IN = '''
"""As transformers imports it; what would fetch and run code is recorded."""
CALLS = []

def unchanged(*args, **kwargs):
    return lambda cls: cls

use_kernel_forward_from_hub = use_kernelized_func = unchanged

def recorded(name):
    def call(*args, **kwargs):
        CALLS.append(f"{name} {args} {kwargs}")
        raise RuntimeError("recorded")
    return call

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return recorded(name)
'''


def write_stand_in(place: Path) -> None:
    """Write a package that records calls in the place of `kernels`, of a version that transformers accepts."""
    asked = [line for line in metadata.requires("transformers") or () if line.startswith("kernels")]
    versions = [found for line in asked for found in re.findall(r">=([\d.]+)", line)]
    version = versions[0] if versions else "0.17.2"
    (place / "kernels").mkdir(parents=True, exist_ok=True)
    (place / "kernels" / "__init__.py").write_text(STAND_IN)
    about = place / f"kernels-{version}.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")


def forgeries(kernel: str = KERNEL) -> dict[str, dict]:
    """Return what may be added to the configuration of a Llama to choose code, by what it tries."""
    renamed = {"attribute_map": {"harmless": "_attn_implementation"}, "harmless": kernel}
    declared = {"attribute_map": {"pretraining_tp": "_attn_implementation"}, "pretraining_tp": kernel}
    names = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation")
    nested = {"model_type": "llama", **renamed}
    return {
        "renamed": renamed,
        "declared": declared,
        **{name: {name: kernel} for name in names},
        "community": {"attn_implementation": "kernels-community/flash-attn2"},
        "dict": {"attn_implementation": {"": kernel}},
        "layers": {"per_layer_config": {"0": {"_attn_implementation": kernel}}},
        "text_config": {"text_config": nested, "sub_configs": {"text_config": "LlamaConfig"}},
        "defaults": {"sub_configs_defaults": {"text_config": nested}, "text_config": nested},
        "auto_map": {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}},
        "elsewhere": {"auto_map": {"AutoModelForCausalLM": f"{kernel}--evil.Model"}},
        "architectures": {"architectures": ["evil.Model", f"{kernel}--Model", "models.llama", "LlamaForCausalLM"]},
        "commit": {"_commit_hash": "0" * 40, "_name_or_path": kernel, "name_or_path": kernel},
        "quantized": {"quantization_config": {"quant_method": "mxfp4"}},
        "kernels": {"use_kernels": True, "kernel_config": {"kernel_mapping": {"RMSNorm": f"{kernel}:Norm"}}},
        "weights": {"transformers_weights": "evil.bin", "trust_remote_code": True, "_auto_class": "AutoModel"},
        "rope": {"rope_parameters": {"rope_type": kernel, "rope_theta": 10000.0}},
        "act": {"hidden_act": kernel},
        "type": {"model_type": "bert"},
        "timm": {"model_type": "timm_wrapper", "architectures": ["TimmWrapperModel"], "architecture": f"hf-hub:{kernel}"},
        "timm file": {
            "model_type": "timm_wrapper",
            "architectures": ["TimmWrapperModel"],
            "architecture": "vit_tiny_patch16_224",
            "model_args": {"checkpoint_path": "evil.pth"},
        },
    }


def main(folder: str) -> None:
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = False
    import kernels
    import transformers

    import segue
    from segue.errors import SegueError

    found = {}
    reached: list[str] = []
    sys.addaudithook(lambda event, args: reached.append(f"{event} {args!r:.200}") if event in WATCHED else None)
    path = Path(folder)
    record = json.loads((path / "segue.json").read_text())
    (path / "generation_config.json").write_text(
        json.dumps({"custom_generate": KERNEL, "trust_remote_code": True, "max_new_tokens": 2, "eos_token_id": 1})
    )
    for index, name in enumerate(forgeries()):
        forged = forgeries(f"{KERNEL}-{index}")[name]  # another each time: transformers asks once
        kernels.CALLS.clear()
        reached.clear()
        changed = {**record, "base": {**record["base"], "config": {**record["base"]["config"], **forged}}}
        (path / "segue.json").write_text(json.dumps(changed))
        how = "loaded"
        try:
            model = segue.from_pretrained(path, verify=False)
            model.generate(transformers.AutoTokenizer.from_pretrained(path)("one", return_tensors="pt")["input_ids"])
            assert model.config._attn_implementation in ("sdpa", "eager"), model.config._attn_implementation
            assert not hasattr(model.generation_config, "custom_generate")
        except SegueError as error:
            how = f"{error}"
        found[name] = {"how": how, "kernels": list(kernels.CALLS), "reached": list(reached)}
    # without Segue the trick works, so that the stand-in is one
    trick = forgeries()["renamed"]
    small = transformers.LlamaConfig(hidden_size=32, intermediate_size=8, num_hidden_layers=1, vocab_size=9, **trick)
    with suppress(ValueError):
        transformers.LlamaForCausalLM(small)
    print(json.dumps({"without segue": list(kernels.CALLS), **found}))


if __name__ == "__main__":
    main(sys.argv[1])
