# SPDX-License-Identifier: Apache-2.0
import multiprocessing
import os
import threading

from omni_connector.arena.nodes import near_cores, process_cores, threads_on

ALL = frozenset(range(8))


def nodes(folder, *lists):
    for number, text in enumerate(lists):
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(text)
    return folder


def test_cores_of_the_node_that_the_pinned_ones_lie_on_are_near(tmp_path):
    folder = nodes(tmp_path, "0-3\n", "4,5-7\n", "\n")
    assert near_cores(ALL, frozenset({5}), folder) == {4, 5, 6, 7}
    assert near_cores(frozenset({1, 2, 6}), frozenset({0}), folder) == {1, 2}
    assert near_cores(ALL, frozenset({3, 4}), folder) == ALL


def test_all_cores_are_near_where_the_host_tells_nothing_or_none_is(tmp_path):
    assert near_cores(ALL, frozenset({5}), tmp_path / "absent") == ALL
    folder = nodes(tmp_path, "0-3\n", "4-7\n")
    assert near_cores(frozenset({1}), frozenset({5}), folder) == {1}
    (folder / "node1" / "cpulist").write_text("nonsense")
    assert near_cores(ALL, frozenset({5}), folder) == ALL


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
