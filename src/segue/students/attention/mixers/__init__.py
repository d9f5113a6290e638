"""Mixers, one file each: how tokens exchange information, apart from how a model calls its attention."""

from segue.students.attention.mixer import Mixer
from segue.students.attention.mixers.fourier import Fourier
from segue.students.attention.mixers.linear import LinearAttention
from segue.students.attention.mixers.linformer import Linformer
from segue.students.attention.mixers.nystrom import Nystrom
from segue.students.attention.mixers.performer import Performer
from segue.students.attention.mixers.sliding_window import SlidingWindow
from segue.students.attention.mixers.softmax import Softmax
from segue.students.attention.mixers.windowed_linear import WindowedLinear

__all__ = [
    "Fourier",
    "LinearAttention",
    "Linformer",
    "Mixer",
    "Nystrom",
    "Performer",
    "SlidingWindow",
    "Softmax",
    "WindowedLinear",
]
