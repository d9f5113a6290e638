"""Data in: sources that load a dataset from files, check it, and download nothing unless asked."""

from segue.data.augment import Crop, CropFlip, NoAugmentation, normalise
from segue.data.cifar10_png import Cifar10Png
from segue.data.digits import Digits
from segue.data.examples import Dataset, Examples, TextDataset
from segue.data.hub import HubDataset
from segue.data.idx import Idx
from segue.data.image_folder import ImageFolder
from segue.data.npz import Npz
from segue.data.parquet import Parquet
from segue.data.torchvision_folder import Torchvision
from segue.data.tsv import Tsv

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
