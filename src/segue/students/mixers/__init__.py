"""Mixers, one file each: how tokens exchange information, apart from how a model calls its attention."""

from segue.students.mixers.fourier import Fourier
from segue.students.mixers.linear import LinearAttention
from segue.students.mixers.linformer import Linformer
from segue.students.mixers.nystrom import Nystrom
from segue.students.mixers.performer import Performer
from segue.students.mixers.sliding_window import SlidingWindow
from segue.students.mixers.softmax import Softmax
from segue.students.mixers.windowed_linear import WindowedLinear
from segue.students.mixing import Mixer

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
