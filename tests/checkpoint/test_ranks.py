"""One process works, all know how it ended; here the group has one process."""

import pytest
import torch

from segue.checkpoint.ranks import on_rank_0


@pytest.fixture(params=["no group", "a group of one"])
def group(request, tmp_path):
    if request.param == "no group":
        yield
        return
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("result", [None, "folder", 0])
def test_the_result_of_the_work_is_returned(result):
    assert on_rank_0(lambda: result, "the work failed.") == result


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
def test_its_own_error_is_raised_where_it_failed(error):
    def work():
        raise error

    with pytest.raises(type(error)) as found:
        on_rank_0(work, "the work failed.")
    assert found.value is error
