# SPDX-License-Identifier: MIT
"""The processes of tests on several of them, ranks.py: failures are seen, none hangs."""

import os
import time

import pytest
import ranks
import torch
import torch.distributed as dist
from ranks import on_ranks


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("more", [0, 5])
def test_every_rank_runs_the_body(rank, world, more):
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
    assert torch.get_num_threads() == 1
    total = torch.tensor(rank + more)
    dist.all_reduce(total)
    assert total == world * (world - 1) // 2 + world * more


def pid(rank, world):
    return rank, world, os.getpid(), torch.rand(2)


def test_processes_are_kept():
    two, four = ranks.run(pid, 2), ranks.run(pid, 4)
    assert [each[:2] for each in four] == [(rank, 4) for rank in range(4)]
    assert [each[2] for each in two] == [each[2] for each in four[:2]]
    # And every case has the same random numbers on every rank.
    assert all(torch.equal(each[3], two[0][3]) for each in two + four)


def ends_in_many_ways(rank):
    if rank == 0:
        raise ValueError(f"wrong on {rank}")
    if rank == 1:
        print("sleeps")
        time.sleep(600)
    if rank == 2:
        time.sleep(1)  # until the others have connected with it
        os._exit(3)


def test_a_failure_of_any_rank_fails():
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception) as failure:
        ranks.run(ends_in_many_ways, 4, dies={3})
    assert time.monotonic() - start < 30
    text = str(failure.value)
    assert "rank 0 of 4: Traceback" in text and "ValueError: wrong on 0" in text
    assert "rank 1 of 4: did not end, 3.0 s after others" in text
    assert "rank 2 of 4: its process died" in text
    assert "rank 3 of 4: should have died, but ended" in text
    assert "rank 1, stdout:\nsleeps" in text
    assert "in ends_in_many_ways" in text.partition("rank 1, stderr:")[2]
    assert [each[0] for each in ranks.run(pid, 4)] == [0, 1, 2, 3]


def sleeps():
    time.sleep(600)


def test_a_hang_fails():
    words = "rank 0 of 1: did not end, after 2.0 s.*\n.* in sleeps"
    with pytest.raises(pytest.fail.Exception, match=f"(?s){words}"):
        ranks.run(sleeps, 1, timeout=2.0)


@on_ranks(2, dies={1})
def test_a_death_is_an_error_of_the_others(rank):
    if rank == 1:
        os._exit(3)
    with pytest.raises(RuntimeError):
        dist.barrier()
