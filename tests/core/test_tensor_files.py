import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from segue.core import tensor_files
from tests.helpers.tiny import same_bits


def sample(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = torch.tensor(shape).prod().item() if shape else 1
    raw = torch.randint(0, 255, (int(count) * dtype.itemsize,), dtype=torch.uint8)
    return (raw % 2 == 0).reshape(shape) if dtype is torch.bool else raw.view(dtype).reshape(shape)


def test_files_are_those_of_the_safetensors_package(tmp_path):
    torch.manual_seed(0)
    tensors = {f"{dtype}/{i}": sample(dtype, 2 + i, 3) for dtype in tensor_files.DTYPES for i in range(2)}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3), "odd": sample(torch.int8, 3)}
    tensor_files.write(tmp_path / "ours", tensors)
    back = tensor_files.read(tmp_path / "ours")
    assert set(back) == set(tensors)
    for name, tensor in tensors.items():
        assert same_bits(back[name], tensor), name
    with safe_open(tmp_path / "ours", framework="pt") as file:
        assert set(file.keys()) == set(tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_the_bytes_equal_the_packages_own(dtype, tmp_path):
    tensors = {"a": sample(dtype, 3, 4), "b": sample(dtype, 5)}
    tensor_files.write(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("tensors", [{}, {"empty": torch.zeros(0, 3)}, {"a": torch.zeros(3), "b": torch.ones(2, 2)}])
def test_the_header_announces_the_size_of_the_file(tensors, tmp_path):
    path = tmp_path / "file"
    tensor_files.write(path, tensors)
    assert tensor_files.announced_size(path) == path.stat().st_size


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "damaged"),
        ((2).to_bytes(8, "little") + b"[]", "damaged"),
        ((9).to_bytes(8, "little") + b'{"a": {}}', "damaged"),
        ((100_000_000).to_bytes(8, "little") + b"{", "damaged"),
        ((100_000_001).to_bytes(8, "little") + b"{", "its header has 100,000,001 bytes"),  # the package's own limit
    ],
)
def test_a_damaged_header_announces_nothing(content, says, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(OSError, match=says):
        tensor_files.announced_size(tmp_path / "file")


def test_bits_are_compared_whatever_a_tensor_looks_like():
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert tensor_files.same_bits(z.conj(), z.conj().resolve_conj())
    assert not tensor_files.same_bits(z.conj(), z)
    assert tensor_files.same_bits(z.conj().imag, -z.imag)  # which has a bit for its sign
    assert tensor_files.same_bits(torch.arange(6).reshape(2, 3).T, torch.tensor([[0, 3], [1, 4], [2, 5]]))
    nan = torch.tensor([float("nan"), 0.0])
    assert tensor_files.same_bits(nan, nan.clone())
    assert not tensor_files.same_bits(nan, nan * torch.tensor([1.0, -1.0]))
    assert not tensor_files.same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not tensor_files.same_bits(torch.zeros(2), torch.zeros(1, 2))


def test_shown_bytes_outlive_the_tensor_they_are_shown_of():
    shown = [tensor_files.memory(torch.full((1 << 16,), float(i))) for i in range(20)]  # nobody else holds these tensors
    for i, content in enumerate(shown):
        assert bytes(content) == bytes(torch.full((1 << 16,), float(i)).numpy().tobytes())


def test_bits_of_every_second_number_are_compared():
    x = torch.arange(6.0)
    assert tensor_files.same_bits(x[::2], x[::2].clone())
    assert not tensor_files.same_bits(x[::2], x[1::2])


@pytest.mark.parametrize("thread", [False, True])
def test_an_interrupt_waits_until_a_file_is_read(thread, tmp_path, monkeypatch):
    """Inside of torch it would become an error about the file."""
    save_file({"a": torch.ones(3)}, tmp_path / "file")
    load, read = safetensors.torch.load_file, []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a script in the background ignores

    def interrupted(path):
        if not thread:
            signal.raise_signal(signal.SIGINT)
        read.append(load(path))
        return read[-1]

    monkeypatch.setattr(safetensors.torch, "load_file", interrupted)
    try:
        if thread:  # which gets no signals
            with ThreadPoolExecutor(1) as pool:
                pool.submit(tensor_files.read, tmp_path / "file").result()
        else:
            with pytest.raises(KeyboardInterrupt):
                tensor_files.read(tmp_path / "file")
        assert torch.equal(read[0]["a"], torch.ones(3))
    finally:
        assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
