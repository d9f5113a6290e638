"""One thread, and no import of the script that wrote the files: it runs with the code of its own version only."""

import pytest
import torch

collect_ignore = ["write_v0_1_0.py", "conftest.py"]


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
