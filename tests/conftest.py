"""Shared by all tests: quiet threads and no network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import segue  # noqa: F401  before timm and transformers: makes torchvision import beside a CPU torch
