// SPDX-License-Identifier: Apache-2.0
/* The index of an arena, as its owner changes it. arena/block_index.py lays it out. */
#include <stdint.h>

static const uint64_t EACH_BYTE = 0x0101010101010101, PRIME = 0x9E3779B97F4A7C15;

#define READ(word) __atomic_load_n(&(word), __ATOMIC_RELAXED)
#define WRITE(word, value) __atomic_store_n(&(word), value, __ATOMIC_RELAXED)

struct own_index {
    uint64_t *fingerprints; // a bucket's, one in each byte; 0 for an empty cell
    uint32_t *cells;        // the slots, eight for each bucket
    uint64_t *checks;       // of each slot
    int64_t *generations;   // of each slot; negative while it is not to be read
    uint64_t num_slots;     // and of buckets
    int32_t *cell_of;       // the cell of each slot; -1 for none
};

static inline void hide(const struct own_index *index, int64_t slot)
{
    int32_t cell = index->cell_of[slot];
    if (cell < 0)
        return;
    WRITE(index->checks[slot], 0);
    WRITE(index->generations[slot], -1);
    WRITE(((uint8_t *)index->fingerprints)[cell], 0);
    index->cell_of[slot] = -1;
}

/* Lists a block in the first empty cell of its bucket, unless the bucket is full. */
static inline void show(
    const struct own_index *index, uint64_t tag, int64_t slot, int64_t generation)
{
    uint64_t bucket = (tag >> 32) * index->num_slots >> 32;
    uint64_t word = index->fingerprints[bucket];
    uint64_t empty = (word - EACH_BYTE) & ~word & 128 * EACH_BYTE;
    if (!empty)
        return;
    int32_t cell = (int32_t)(8 * bucket + __builtin_ctzll(empty) / 8);
    WRITE(index->generations[slot], generation);
    WRITE(index->checks[slot], (uint64_t)generation * PRIME ^ tag);
    WRITE(index->cells[cell], (uint32_t)slot);
    WRITE(((uint8_t *)index->fingerprints)[cell], (uint8_t)((tag & 127) | 128));
    index->cell_of[slot] = cell;
}
