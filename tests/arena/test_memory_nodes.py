# SPDX-License-Identifier: Apache-2.0
"""The node of a rank, and of the pages of its arena: with nodes that the test makes up, and with
those of this machine."""

import errno
import mmap
import os
from collections import Counter
from pathlib import Path

import pytest

from omni_connector.arena import memory_nodes
from omni_connector.arena.arena import Arena
from omni_connector.arena.memory_nodes import MemoryNodes
from omni_connector.arena.nodes import cores_of_nodes

GPU = "0000:3b:00.0"
ONE, TWO = frozenset(range(4)), frozenset(range(4, 8))


class Kernel:
    """Stands in for the system calls of a host with two nodes.

    Attributes:
        policy: of the calling thread.
        refuses: an error number for all calls, or None.
        bound: what was asked for: (address, bytes, policy, nodes).
        pages: by address, the node of a page that is there.
    """

    def __init__(self):
        self.policy = 0
        self.refuses = None
        self.bound = []
        self.pages = {}

    def __call__(self, number, *arguments):
        if self.refuses is not None:
            raise OSError(self.refuses, os.strerror(self.refuses))
        calls = memory_nodes._CALLS["x86_64"]
        if number == calls.get_mempolicy:
            arguments[0]._obj.value = self.policy
        elif number == calls.mbind:
            start, length, policy, mask, bits, flags = arguments
            assert bits.value >= 64
            assert flags.value == 0
            nodes = {
                64 * i + bit for i, word in enumerate(mask) for bit in range(64) if word >> bit & 1
            }
            self.bound.append((start.value, length.value, policy.value, nodes))
        else:
            assert number == calls.move_pages
            _, count, addresses, nodes, found, _ = arguments
            assert nodes is None  # it looks, and moves nothing
            for i in range(count.value):
                found[i] = self.pages.get(addresses[i], -errno.ENOENT)
        return 0


@pytest.fixture
def kernel():
    return Kernel()


def host(root: Path, *cores: str, gpu: int | None = None, memoryless: int | None = None) -> Path:
    for number, listed in enumerate(cores):
        folder = root / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{listed}\n")
        kib = 0 if number == memoryless else 1000
        (folder / "meminfo").write_text(f"Node {number} MemTotal:  {kib} kB\n")
    if gpu is not None:
        folder = root / "sys/bus/pci/devices" / GPU
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{gpu}\n")
    return root


def of_rank(root, kernel, pinned=ONE | TWO, pci=None, machine="x86_64"):
    return MemoryNodes(root, kernel, machine).of_rank(frozenset(pinned), pci)


def test_the_node_of_a_gpu_is_that_of_its_rank(tmp_path, kernel):
    host(tmp_path, "0-3", "4-7", gpu=1)
    assert of_rank(tmp_path, kernel, ONE, GPU.upper()) == 1
    assert of_rank(tmp_path, kernel, ONE, "0000:99:00.0") == 0


@pytest.mark.parametrize("gpu", [-1, 2, 7])
def test_a_gpu_of_no_node_or_of_one_without_cores_leaves_it_to_the_pinned_cores(
    tmp_path, kernel, gpu
):
    """The memory of some GPUs is a node of its own, without cores: no place for an arena."""
    host(tmp_path, "0-3", "4-7", "", gpu=gpu)
    assert of_rank(tmp_path, kernel, TWO, GPU) == 1
    assert of_rank(tmp_path, kernel, ONE | TWO, GPU) is None


def test_cores_on_one_node_say_which_and_cores_on_several_nothing(tmp_path, kernel):
    host(tmp_path, "0-3", "4-7")
    assert of_rank(tmp_path, kernel, {5}) == 1
    assert of_rank(tmp_path, kernel, {3, 4}) is None
    assert of_rank(tmp_path, kernel, {99}) is None


@pytest.mark.parametrize(
    "host_of",
    [
        lambda root: root / "absent",
        lambda root: host(root, "0-7", gpu=0),
        lambda root: host(root, "0-7", "", gpu=0),
        lambda root: host(root, "0-3", "4-7", gpu=1, memoryless=1),
        lambda root: host(root, "0-3", "nonsense", gpu=1),
    ],
)
def test_nothing_is_placed_on_a_host_of_one_node_or_one_that_hides_them(tmp_path, kernel, host_of):
    assert of_rank(host_of(tmp_path), kernel, ONE, GPU) is None


@pytest.mark.parametrize(("policy", "node"), [(0, 1), (4, 1), (1, None), (2, None), (3, None)])
def test_a_policy_that_somebody_has_set_stays(tmp_path, kernel, policy, node):
    """Of vLLM's NUMA binding, or of numactl: default and local are nobody's choice."""
    kernel.policy = policy
    assert of_rank(host(tmp_path, "0-3", "4-7"), kernel, TWO) == node


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_a_kernel_that_refuses_to_tell_the_policy_has_none(tmp_path, kernel, code):
    kernel.refuses = code
    assert of_rank(host(tmp_path, "0-3", "4-7"), kernel, TWO) == 1


def test_the_whole_mapping_is_preferred_on_the_node(tmp_path, kernel):
    nodes = MemoryNodes(tmp_path, kernel, "x86_64")
    with mmap.mmap(-1, 8 * mmap.PAGESIZE) as memory:
        assert nodes.prefer(memory, 70)
        ((_, length, policy, asked),) = kernel.bound
        assert (length, policy, asked) == (8 * mmap.PAGESIZE, 1, {70})
        kernel.refuses = errno.EINVAL  # the cgroup forbids the node
        assert not nodes.prefer(memory, 1)
        assert not MemoryNodes(tmp_path, kernel, "vax").prefer(memory, 1)


def test_pages_are_counted_by_their_nodes_and_missing_ones_not(tmp_path, kernel):
    nodes = MemoryNodes(tmp_path, kernel, "x86_64")
    with Arena.create(4, mmap.PAGESIZE) as arena:
        start = arena.slots.ctypes.data
        kernel.pages = {start: 0, start + mmap.PAGESIZE: 1, start + 3 * mmap.PAGESIZE: 1}
        assert nodes.of_pages(arena.slots) == Counter({0: 1, 1: 2})
        assert nodes.of_pages(arena.slots, most=2) == Counter({0: 1})
        kernel.refuses = errno.EPERM
        assert not nodes.of_pages(arena.slots)


def test_an_arena_asks_for_its_node_before_any_page_is_there(monkeypatch, kernel):
    asked = []

    class Nodes(MemoryNodes):
        def prefer(self, memory, node):
            there = MemoryNodes().of_pages(memoryview_of(memory))
            asked.append((node, len(memory), sum(there.values())))
            return False  # a refusal changes nothing

    monkeypatch.setattr("omni_connector.arena.arena.MemoryNodes", Nodes)
    with Arena.create(2, 4096, node=1) as arena:
        arena.begin_write(0, 1)
        arena.publish(0, 1, b"", 0, 0)
    with Arena.create(2, 4096):
        pass
    assert [each[0] for each in asked] == [1]
    assert [each[2] for each in asked] == [0]


def memoryview_of(memory):
    import numpy as np

    return np.frombuffer(memory, np.uint8)


def test_what_proc_says_of_the_arenas_of_processes(tmp_path, kernel):
    for pid, permissions in (("7", "rw-s"), ("8", "r--s")):
        folder = tmp_path / "proc" / pid
        folder.mkdir(parents=True)
        (folder / "maps").write_text(
            "00400000-00500000 rw-p 00000000 00:00 0 [heap]\n"
            f"7f00a000-7f10a000 {permissions} 0 00:01 9 /memfd:omni-connector-arena (deleted)\n"
        )
        (folder / "numa_maps").write_text(
            "00400000 default heap anon=3 dirty=3 N0=3 kernelpagesize_kB=4\n"
            "7f00a000 prefer:1 file=/memfd:omni-connector-arena\\040(deleted) dirty=12 N0=2 N1=10 "
            "kernelpagesize_kB=4\n"
        )
    (tmp_path / "proc/9").mkdir()  # it has ended
    nodes = MemoryNodes(tmp_path, kernel)
    assert list(nodes.of_arenas()) == [(7, Counter({0: 8, 1: 40}))]


def test_the_pages_of_an_arena_lie_on_the_only_node_of_this_machine():
    """Whatever nodes this machine has, and also where it lets nobody ask."""
    nodes = MemoryNodes()
    found = cores_of_nodes()
    node = min(found, default=0)
    with Arena.create(64, 4096, node=node) as arena:
        assert not nodes.of_pages(arena.slots)
        arena.slots[:16] = 1
        there = nodes.of_pages(arena.slots)
    if len(found) == 1 and there:
        assert there == Counter({node: 16})
