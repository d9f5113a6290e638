"""Tensors as bytes: in files of the safetensors format, and as fingerprints.

The safetensors package writes through numpy, which the core does not need otherwise. The format is plain, so it is written
here: eight bytes with the length of a JSON header, the header, then the tensors' bytes in order. Reading is the package's.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from segue.core import files

LARGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors package

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write contiguous tensors on the CPU; wide types come first, so that all are aligned."""
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, end = {}, 0
    for name in ordered:
        start, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        header[name] = {"dtype": DTYPES[tensors[name].dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in ordered:
            file.write(memory(tensors[name]))


def read(path: Path) -> dict[str, Tensor]:
    """Read every tensor of a file."""
    from safetensors.torch import load_file  # imported late: `import segue` stays quick

    with _interrupts_wait():
        return load_file(path)


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Let Ctrl-C wait for the end of a `with` block: inside of torch it becomes an error about the file."""
    if threading.current_thread() is not threading.main_thread() or not callable(handler := signal.getsignal(signal.SIGINT)):
        yield
        return
    received: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(*received[0])


def announced_size(path: Path) -> int:
    """Return the number of bytes that a file has according to its header; OSError where it has none."""
    with files.opened(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > LARGEST_HEADER:
            raise OSError(f"its header has {length:,} bytes, at most {LARGEST_HEADER:,} are read")
        try:
            header = json.loads(file.read(length))
            end: int = max([0, *(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")])
        except (ValueError, LookupError, TypeError, AttributeError):
            raise OSError("its header is damaged") from None
    return 8 + length + end


def memory(tensor: Tensor) -> bytes | ctypes.Array[ctypes.c_char]:
    """Show the bytes of a contiguous tensor on the CPU without a copy."""
    if not tensor.nbytes:
        return b""
    shown = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    shown.tensor = tensor  # type: ignore[attr-defined]  # stays as long as its bytes are shown
    return shown


def fingerprint(tensors: dict[str, Tensor]) -> str:
    """Hash names, types, shapes and bytes; on the meta device there are no bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = full(tensors[name]).detach()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if not tensor.is_meta:
            digest.update(memory(tensor.cpu().contiguous()))
    return digest.hexdigest()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit, also in NaN and in the sign of zero; sparse ones never are."""
    if (a.shape, a.dtype) != (b.shape, b.dtype) or a.layout != torch.strided:
        return False
    plain = (local(x).resolve_conj().resolve_neg().reshape(-1).contiguous() for x in (a, b))
    return torch.equal(*(x.view(torch.uint8) for x in plain))


def full(tensor: Tensor) -> Tensor:
    """Return the full tensor where it may be sharded over ranks."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor that may be sharded over ranks."""
    held: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held.detach()


def sharded_like(value: Tensor, target: Tensor) -> Tensor:
    """Shard a full tensor over ranks as its target is sharded."""
    if not hasattr(target, "full_tensor"):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(target, DTensor)
    return distribute_tensor(value.to(target.device), target.device_mesh, target.placements)
