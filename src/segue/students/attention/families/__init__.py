"""The families of attention modules that Segue reads, one file each; the first that is proved right is taken."""

from segue.students.attention.families.alibi import Alibi
from segue.students.attention.families.by_name import ByName
from segue.students.attention.families.diffusers import Diffusers
from segue.students.attention.families.latent import Latent
from segue.students.attention.families.luke import Luke
from segue.students.attention.families.multihead import TorchMultiheadAttention
from segue.students.attention.families.positions import MaskedInside, RotatedInside, Tempered
from segue.students.attention.families.roformer import RoFormer
from segue.students.attention.families.t5 import T5, UMT5
from segue.students.attention.families.vision import Vision
from segue.students.attention.spec import AttentionInterface

__all__ = ["BUILT_IN", "ByName"]

BUILT_IN: tuple[type[AttentionInterface], ...] = (
    TorchMultiheadAttention,
    Diffusers,
    T5,
    UMT5,
    RoFormer,
    Luke,
    Latent,
    Alibi,
    RotatedInside,
    Tempered,
    MaskedInside,
    ByName,
    Vision,
)
