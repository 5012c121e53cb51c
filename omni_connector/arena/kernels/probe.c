// SPDX-License-Identifier: Apache-2.0
/* Looks up the leading blocks of a prompt in the indexes of many engines, changes the own index, and
 * computes the tags of blocks.
 *
 * arena/block_index.py lays the indexes out. Their owners write to them meanwhile, and may be
 * hostile: each word is read once and then used, and no slot is followed that does not exist.
 *
 * scripts/compile_kernels.py makes probe.ll of this file.
 */
#include "index.h"

/* How many blocks are found before the first that no index has. Each block is looked up first in
 * the index that had the one before. */
int64_t probe(
    const struct index *indexes, int64_t num_indexes, const uint64_t *tags, int64_t num_tags,
    int64_t *owners, int64_t *slots, int64_t *generations)
{
    int64_t owner = 0;
    for (int64_t i = 0; i < num_tags; i++) {
        int64_t asked = 0;
        while (asked < num_indexes && !find(&indexes[owner], tags[i], &slots[i], &generations[i])) {
            asked++;
            owner = owner + 1 < num_indexes ? owner + 1 : 0;
        }
        if (asked == num_indexes)
            return i;
        owners[i] = owner;
    }
    return num_tags;
}

/* Which index has each block: the first of those that have it; -1 in all three where none has. */
void probe_each(
    const struct index *indexes, int64_t num_indexes, const uint64_t *tags, int64_t num_tags,
    int64_t *owners, int64_t *slots, int64_t *generations)
{
    for (int64_t i = 0; i < num_tags; i++) {
        int64_t owner = 0;
        slots[i] = generations[i] = -1;
        while (owner < num_indexes && !find(&indexes[owner], tags[i], &slots[i], &generations[i]))
            owner++;
        owners[i] = owner < num_indexes ? owner : -1;
    }
}

/* Removes slots from the index, and lists them with these blocks, if there are any. Returns 0, and
 * changes nothing, if there is no such slot. */
int64_t change(
    const struct own_index *index, const uint64_t *tags, const int64_t *slots,
    const int64_t *generations, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        if ((uint64_t)slots[i] >= index->num_slots)
            return 0;
    for (int64_t i = 0; i < count; i++)
        hide(index, slots[i]);
    for (int64_t i = 0; tags && i < count; i++)
        show(index, tags[i], slots[i], generations[i]);
    return 1;
}

/* The tags of blocks, from the first 8 bytes of each of their hashes. */
void tag(const uint8_t *hashes, int64_t hash_bytes, int64_t count, uint64_t seed, uint64_t *tags)
{
    for (int64_t i = 0; i < count; i++)
        tags[i] = tag_of(hashes + i * hash_bytes, seed);
}
