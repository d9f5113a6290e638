"""Data in: sources that load a dataset from files, check it, and download nothing unless asked."""

from segue.lab.sources.augment import Crop, CropFlip, NoAugmentation, normalise
from segue.lab.sources.cifar10_png import Cifar10Png
from segue.lab.sources.digits import Digits
from segue.lab.sources.examples import Dataset, Examples, TextDataset
from segue.lab.sources.hub import HubDataset
from segue.lab.sources.idx import Idx
from segue.lab.sources.image_folder import ImageFolder
from segue.lab.sources.npz import Npz
from segue.lab.sources.parquet import Parquet
from segue.lab.sources.torchvision_folder import Torchvision
from segue.lab.sources.tsv import Tsv

__all__ = [
    "Cifar10Png",
    "Crop",
    "CropFlip",
    "Dataset",
    "Digits",
    "Examples",
    "HubDataset",
    "Idx",
    "ImageFolder",
    "NoAugmentation",
    "Npz",
    "Parquet",
    "TextDataset",
    "Torchvision",
    "Tsv",
    "normalise",
]
