"""Data in: sources that load a dataset from files, check it, and download nothing unless asked."""

from segue.lab.sources.augment import Crop, CropFlip, NoAugmentation, normalise
from segue.lab.sources.digits import Digits
from segue.lab.sources.examples import Dataset, Examples, TextDataset
from segue.lab.sources.idx import Idx
from segue.lab.sources.tsv import Tsv

__all__ = [
    "Crop",
    "CropFlip",
    "Dataset",
    "Digits",
    "Examples",
    "Idx",
    "NoAugmentation",
    "TextDataset",
    "Tsv",
    "normalise",
]
