// SPDX-License-Identifier: Apache-2.0
/* The index of an arena, as peers read it and its owner changes it. arena/block_index.py lays it
 * out. Owners write to their indexes meanwhile, and may be hostile: each word is read once and then
 * used, and no slot is followed that does not exist.
 */
#include <stdint.h>

static const uint64_t EACH_BYTE = 0x0101010101010101, PRIME = 0x9E3779B97F4A7C15;
static const uint64_t MIX = 0xD6E8FEB86659FD93;

#define READ(word) __atomic_load_n(&(word), __ATOMIC_RELAXED)
#define WRITE(word, value) __atomic_store_n(&(word), value, __ATOMIC_RELAXED)

struct index {
    const uint64_t *fingerprints; // a bucket's, one in each byte; 0 for an empty cell
    const uint32_t *cells;        // the slots, eight for each bucket
    const uint64_t *checks;       // of each slot
    const int64_t *generations;   // of each slot; negative while it is not to be read
    uint64_t num_slots;           // and of buckets
};

struct own_index {
    uint64_t *fingerprints; // as in `struct index`, as are the next four
    uint32_t *cells;
    uint64_t *checks;
    int64_t *generations;
    uint64_t num_slots;
    int32_t *cell_of; // the cell of each slot; -1 for none
};

/* Whether the index has the block; if so, its slot and generation are written. */
static inline int find(const struct index *index, uint64_t tag, int64_t *slot, int64_t *generation)
{
    uint64_t bucket = (tag >> 32) * index->num_slots >> 32;
    uint64_t fingerprint = (tag & 127) | 128;
    uint64_t differences = READ(index->fingerprints[bucket]) ^ fingerprint * EACH_BYTE;
    /* The high bit of each byte that is 0; also of some others, which the check tells apart. */
    uint64_t matches = (differences - EACH_BYTE) & ~differences & 128 * EACH_BYTE;
    for (; matches; matches &= matches - 1) {
        uint64_t found = READ(index->cells[8 * bucket + __builtin_ctzll(matches) / 8]);
        if (found >= index->num_slots)
            continue;
        int64_t its_generation = READ(index->generations[found]);
        uint64_t check = READ(index->checks[found]);
        if (its_generation >= 0 && ((uint64_t)its_generation * PRIME ^ tag) == check) {
            *slot = (int64_t)found;
            *generation = its_generation;
            return 1;
        }
    }
    return 0;
}

/* The tag of a block, from the first 8 bytes of its hash. */
static inline uint64_t tag_of(const void *hash, uint64_t seed)
{
    uint64_t word;
    __builtin_memcpy(&word, hash, 8);
    word = (word ^ seed) * MIX;
    word ^= word >> 32;
    word *= MIX;
    return word ? word : 1;
}

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
