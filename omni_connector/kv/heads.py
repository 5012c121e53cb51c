# SPDX-License-Identifier: Apache-2.0
"""Which KV heads of a peer's tensor-parallel ranks make up the heads of one of ours."""

from dataclasses import dataclass

from omni_connector.errors import LayoutError


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """Consecutive heads of one layer, taken from one source rank.

    Args:
        source: the first of them in the source's page.
        target: the first of them in our page.
        count: how many.

    Raises:
        ValueError: a negative number.
    """

    source: int
    target: int
    count: int

    def __post_init__(self) -> None:
        if min(self.source, self.target, self.count) < 0:
            raise ValueError(f"not a slice of heads: {self}")


def head_sources(
    *,
    total: int | None,
    source_heads: int,
    source_ranks: int,
    target_heads: int,
    target_rank: int,
    target_ranks: int,
) -> tuple[tuple[int, HeadSlice], ...]:
    """Find the source ranks, and their heads, of every head of one target rank.

    vLLM gives rank r of n the heads [r*K/n, (r+1)*K/n) of K, or with fewer heads than ranks
    the one head r // (n/K). Of the ranks that hold the same head, target ranks take turns;
    where both sides have as many ranks, each takes its heads from its own number.

    Args:
        total: KV heads of the layer in the whole model; 1 for MLA, whose cache every rank
            holds. None where it is not known, or a value that both sides' heads contradict:
            then the heads of all ranks are taken to be distinct.
        source_heads: heads of one source rank.
        source_ranks: tensor-parallel ranks of the source.
        target_heads: heads of one target rank.
        target_rank: which of the target's ranks.
        target_ranks: tensor-parallel ranks of the target.

    Returns:
        (source rank, slice), in the order of our heads, each head once.

    Raises:
        LayoutError: the numbers do not fit together.
        ValueError: the rank is not one of the ranks, or a count is below one.
    """
    if not 0 <= target_rank < target_ranks:
        raise ValueError(f"rank {target_rank} of {target_ranks}")
    if min(source_heads, source_ranks, target_heads) < 1 or (total is not None and total < 1):
        raise ValueError(
            f"{source_heads} heads on each of {source_ranks} ranks, {target_heads} on each of "
            f"{target_ranks}, {total} in all"
        )
    where = (
        f"{source_heads} KV heads on each of {source_ranks} ranks and {target_heads} on each of "
        f"{target_ranks}"
    )
    if (
        total is not None
        and source_heads == max(1, total // source_ranks)
        and target_heads == max(1, total // target_ranks)
    ):
        heads = total
    elif source_heads * source_ranks == target_heads * target_ranks:
        heads = source_heads * source_ranks
    else:
        raise LayoutError(f"{where} are not the same heads (the model has {total})")
    for ranks in (source_ranks, target_ranks):
        if heads % ranks and ranks % heads:
            raise LayoutError(f"{where}: {heads} heads cannot be shared out over {ranks} ranks")

    target_copies = max(1, target_ranks // heads)
    source_copies = max(1, source_ranks // heads)
    first = target_rank // target_copies * target_heads
    turn = target_rank % source_copies
    sources = []
    head = first
    while head < first + target_heads:
        holder, within = divmod(head, source_heads)
        count = min(source_heads - within, first + target_heads - head)
        sources.append(
            (holder * source_copies + turn, HeadSlice(within, head - first, count)),
        )
        head += count
    return tuple(sources)
