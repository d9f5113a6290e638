"""Give a trained ViT of Hugging Face new attention inside its own Trainer: one callback.

Run: python examples/hf_trainer.py --steps 300
Stopped in the middle? The same command with --resume continues from Trainer's last checkpoint, bit for bit.
"""

import argparse
from pathlib import Path

import torch
import transformers
from small_vit import digits

import segue
from segue.integrations.transformers import HandoverCallback

SIZES = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 96, "initializer_range": 0.1}


def rows(images, labels):
    return [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]


def accuracy(prediction):
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean().item()}


def trainer(model, folder: Path, steps: int, *callbacks):
    """Make a stock Trainer; nothing here knows Segue."""
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=64, learning_rate=3e-3, weight_decay=0.01,
        save_steps=max(1, steps // 10), logging_steps=max(1, steps // 10), report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    training, test = (rows(*part) for part in digits())
    data = {"train_dataset": training, "eval_dataset": test, "compute_metrics": accuracy}
    return transformers.Trainer(model, arguments, **data, callbacks=list(callbacks))


def main(steps: int, folder: Path, resume: bool) -> None:
    if not (folder / "teacher").exists():  # your pretrained model
        torch.manual_seed(0)
        config = transformers.ViTConfig(**SIZES, image_size=8, patch_size=2, num_channels=1, num_labels=10)
        teacher = trainer(transformers.ViTForImageClassification(config), folder / "pretraining", steps)
        teacher.train()
        teacher.save_model(folder / "teacher")
    model = transformers.ViTForImageClassification.from_pretrained(folder / "teacher")

    plan = segue.methods.dcr_dfg(sites="**.attention")
    handover = trainer(model, folder / "handover", steps, HandoverCallback(plan))
    print(f"accuracy before {handover.evaluate()['eval_accuracy']:.3f}")
    handover.train(resume_from_checkpoint=resume)
    print(f"accuracy with new attention {handover.evaluate()['eval_accuracy']:.3f}")
    handover.save_model(folder / "student")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", type=Path, default=Path("runs/hf_trainer"))
    parser.add_argument("--resume", action="store_true")
    main(**vars(parser.parse_args()))
