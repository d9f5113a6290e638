"""Shared by all tests: quiet threads, torchvision beside a CPU torch, and no network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from segue.torchvision_cpu import declare_missing_operators

declare_missing_operators()

collect_ignore_glob = ["*conftest.py"]  # no doctests in them, and three files of one name cannot all be imported as modules
