// SPDX-License-Identifier: Apache-2.0
/* A hash table of rows of 36 bytes. Its entries are numbered, and their number is fixed.
 *
 * The entries of a bucket form a list. An entry that is not alive is not found, but stays in its
 * list until it gets another row. arena/row_table.py lays the table out, and checks all numbers.
 */
#include <stdint.h>

struct row {
    uint64_t words[4];
    uint32_t last_word; // its highest byte is 0 if the row stands for no key
} __attribute__((packed));

struct table {
    struct row *rows; // of each entry, as are the next three
    uint8_t *alive;
    int32_t *next;   // in its list; -1 at the end
    int32_t *bucket; // whose list it is in; -1 in none
    int32_t *first;  // of each bucket; -1 for none
    uint64_t num_buckets;
};

static const uint64_t ROW_PRIME = 0x9E3779B97F4A7C15;

static inline uint64_t mix(uint64_t hash, uint64_t word)
{
    return ((hash << 29 | hash >> 35) ^ word) * ROW_PRIME;
}

static inline uint64_t bucket_of(const struct table *table, const struct row *row)
{
    uint64_t hash = mix(0, row->last_word);
    for (int i = 3; i >= 0; i--)
        hash = mix(hash, row->words[i]);
    return (hash >> 32) * table->num_buckets >> 32;
}

static inline int same(const struct row *one, const struct row *other)
{
    uint64_t difference = one->last_word ^ other->last_word;
    for (int i = 0; i < 4; i++)
        difference |= one->words[i] ^ other->words[i];
    return difference == 0;
}

static inline int32_t entry_of(const struct table *table, const struct row *row, uint64_t bucket)
{
    int32_t entry = table->first[bucket];
    while (entry >= 0 && !(same(&table->rows[entry], row) && table->alive[entry]))
        entry = table->next[entry];
    return entry;
}

/* Gives a row to an entry, unless an entry has it already or it stands for no key. */
static inline void name_entry(struct table *table, const struct row *row, int32_t entry)
{
    uint64_t bucket = bucket_of(table, row);
    if (row->last_word >> 24 == 0 || entry_of(table, row, bucket) >= 0)
        return;
    if (table->bucket[entry] >= 0) {
        int32_t *link = &table->first[table->bucket[entry]];
        while (*link != entry)
            link = &table->next[*link];
        *link = table->next[entry];
    }
    table->rows[entry] = *row;
    table->alive[entry] = 1;
    table->bucket[entry] = (int32_t)bucket;
    table->next[entry] = table->first[bucket];
    table->first[bucket] = entry;
}
