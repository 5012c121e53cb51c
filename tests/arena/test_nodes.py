# SPDX-License-Identifier: Apache-2.0
import multiprocessing
import os
import threading

import pytest

from omni_connector.arena.nodes import near_cores, process_cores, threads_on

ALL = frozenset(range(8))
GPU = "0000:3b:00.0"


def host(root, *lists, gpu=None):
    """The root of a host with these nodes, and a GPU on one of them."""
    for number, text in enumerate(lists):
        folder = root / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text)
    if gpu is not None:
        folder = root / "sys/bus/pci/devices" / GPU
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{gpu}\n")
    return root


def near(root, pinned, *, cores=ALL, pci=None):
    return near_cores(frozenset(cores), frozenset(pinned), pci, root)


def test_cores_of_the_node_that_the_pinned_ones_lie_on_are_near(tmp_path):
    root = host(tmp_path, "0-3\n", "4,5-7\n", "\n")
    assert near(root, {5}) == {4, 5, 6, 7}
    assert near(root, {0}, cores={1, 2, 6}) == {1, 2}
    assert near(root, {3, 4}) == ALL


def test_cores_of_the_node_of_a_gpu_are_near_whatever_is_pinned(tmp_path):
    root = host(tmp_path, "0-3", "4-7", gpu=1)
    assert near(root, {0}, pci=GPU.upper()) == {4, 5, 6, 7}
    assert near(root, {0}, pci="0000:99:00.0") == {0, 1, 2, 3}
    assert near(root, {0}, cores={0, 1}, pci=GPU) == {0, 1}  # a container without cores there


@pytest.mark.parametrize("gpu", [-1, 2, 7, "nonsense"])
def test_a_gpu_of_no_node_or_of_one_without_cores_leaves_it_to_the_pinned_cores(tmp_path, gpu):
    """The memory of some GPUs is a node of its own, without cores."""
    root = host(tmp_path, "0-3", "4-7", "", gpu=gpu)
    assert near(root, {5}, pci=GPU) == {4, 5, 6, 7}
    assert near(root, {3, 5}, pci=GPU) == ALL


def test_all_cores_are_near_where_the_host_tells_nothing_or_none_is(tmp_path):
    assert near(tmp_path / "absent", {5}, pci=GPU) == ALL
    root = host(tmp_path, "0-3\n", "4-7\n")
    assert near(root, {5}, cores={1}) == {1}
    (root / "sys/devices/system/node/node1/cpulist").write_text("nonsense")
    assert near(root, {5}) == ALL


def _told(queue):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    queue.put(process_cores())


def test_a_pinned_worker_may_use_the_cores_of_the_process_that_started_it():
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    worker = context.Process(target=_told, args=(queue,))
    worker.start()
    assert queue.get() == os.sched_getaffinity(0)
    worker.join()


def test_a_process_that_nobody_started_has_its_own_cores():
    assert process_cores() == os.sched_getaffinity(0)


def test_threads_start_on_the_cores_that_were_named_and_the_caller_stays_on_its_own():
    before = os.sched_getaffinity(0)
    one, found = {min(before)}, []
    with threads_on(frozenset(one)):
        thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
    assert found == [one]
    assert os.sched_getaffinity(0) == before


def test_cores_that_are_not_there_are_not_asked_for():
    before = os.sched_getaffinity(0)
    with threads_on(frozenset({max(before) + 4096})):
        assert os.sched_getaffinity(0) == before
