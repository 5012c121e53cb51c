// SPDX-License-Identifier: Apache-2.0
/* Keeps the books of an arena's slots, for all blocks of a copy in one call: when the copy begins,
 * when it has ended well, and when nobody holds its slots any more.
 *
 * arena/slot_pool.py says what each state means, and does the same with numpy.
 *
 * scripts/compile_kernels.py makes slots.ll of this file.
 */
#include "index.h"
#include "rows.h"

enum {
    DEPTHS = 17,           // as in arena/eviction.py
    NUM_PROMPTS = 1 << 13, // numbers of prompts are below this
    HASHED_BYTES = 8,      // of a key, by which evicted contents are remembered
    KINDS = 4,             // of slots in the eviction order
};

struct slots {
    int64_t *generation; // of each slot, as are all arrays up to `depth`
    int32_t *users;
    uint8_t *busy, *ready, *keyed;
    int64_t *tenant;
    uint8_t *privileged;
    double *pinned_until;
    uint8_t *again, *favoured, *pinned;
    int64_t *hash; // of its content
    uint8_t *depth;
    int64_t *past; // two entries for each slot: see `EvictionOrder._past`
    uint8_t *past_depth;
    double *new, *used_again; // numbers of contents, of each depth
    uint8_t *marks;           // of each number of a prompt; all 0 between two calls
    uint64_t num_slots;
    double most_new;     // contents after which `new` and `used_again` are halved
    double sample, worth; // `LEAST` and `WORTH` of arena/eviction.py
};

/* Consecutive blocks of one prompt. */
struct run {
    int64_t count, prompt, tenant;
};

/* What a hint asks for consecutive blocks. */
struct grant {
    int64_t first, count; // of the blocks
    int64_t favours;
    double pin_until; // negative where nothing is pinned
};

/* New blocks of one group, for which there is room. */
struct batch {
    uint64_t *tags; // of each block, as are the next two
    int64_t *prompts, *tenants;
    int32_t *places; // 2^bits, all 0 between two calls; at least twice as many as blocks
    int64_t bits;
};

static const uint64_t LOWER_HALF = 0xFFFFFFFF;

/* Whether no row is there twice. */
static int all_differ(const struct batch *batch, const struct row *rows, int64_t count)
{
    int differ = 1;
    uint64_t last = (1ull << batch->bits) - 1;
    for (int64_t i = 0; differ && i < count; i++) {
        uint64_t place = (rows[i].words[0] * ROW_PRIME) >> (64 - batch->bits);
        while (batch->places[place] && !same(&rows[batch->places[place] - 1], &rows[i]))
            place = (place + 1) & last;
        differ = batch->places[place] == 0;
        batch->places[place] = (int32_t)(i + 1);
    }
    for (uint64_t place = 0; place <= last; place++)
        batch->places[place] = 0;
    return differ;
}

/* Whether blocks are all new and admitted: keys have one length and are different, neither an index
 * nor the table has one, and new blocks of each prompt's depth are kept. Fills `batch`, and changes
 * nothing else.
 *
 * seed: of their tags. picks: whether new blocks of some depths are passed over. */
int64_t examine(
    const struct slots *slots, const struct table *table, const struct index *indexes,
    int64_t num_indexes, const struct row *rows, const struct run *runs, int64_t num_runs,
    uint64_t seed, int64_t picks, const struct batch *batch)
{
    int64_t count = 0;
    for (const struct run *run = runs; run < runs + num_runs; run++) {
        int64_t depth = run->prompt % DEPTHS;
        if (picks && slots->new[depth] >= slots->sample &&
            slots->used_again[depth] * slots->worth < slots->new[depth])
            return 0;
        for (int64_t end = count + run->count; count < end; count++) {
            batch->prompts[count] = run->prompt;
            batch->tenants[count] = run->tenant;
        }
    }
    uint32_t length = rows->last_word >> 24;
    if (length < HASHED_BYTES || !all_differ(batch, rows, count))
        return 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t slot, generation;
        batch->tags[i] = tag_of(&rows[i], seed);
        if (rows[i].last_word >> 24 != length ||
            entry_of(table, &rows[i], bucket_of(table, &rows[i])) >= 0)
            return 0;
        for (int64_t owner = 0; owner < num_indexes; owner++)
            if (find(&indexes[owner], batch->tags[i], &slot, &generation))
                return 0;
    }
    return 1;
}

/* Contents begin to be copied into slots, and are remembered if they were evicted before. */
static void remember(
    const struct slots *slots, const struct row *rows, const int64_t *ids, int64_t count,
    const int64_t *prompts, int64_t evicted)
{
    int64_t size = 2 * (int64_t)slots->num_slots;
    uint8_t *remembered = slots->marks; // whether a later block of the prompt is
    for (int64_t i = count - 1; i >= 0; i--) {
        int64_t slot = ids[i], prompt = prompts ? prompts[i] : 0;
        int64_t hash = (int64_t)(rows[i].words[0] ^ (rows[i].last_word & 0xFFFFFF));
        uint8_t depth = prompt % DEPTHS;
        slots->hash[slot] = hash;
        slots->depth[slot] = depth;
        if (evicted >= 0) {
            int64_t place = hash % size + (hash % size < 0 ? size : 0);
            uint64_t past = (uint64_t)slots->past[place];
            uint64_t since = ((uint64_t)evicted - past) & LOWER_HALF;
            if ((past ^ (uint64_t)hash) >> 32 == 0 && since <= slots->num_slots) {
                remembered[prompt] = 1;
                slots->depth[slot] = slots->past_depth[place];
                slots->used_again[slots->past_depth[place]] += 1;
            }
        }
        if (remembered[prompt])
            slots->again[slot] = 1;
        else
            slots->new[depth] += 1;
    }
    for (int64_t i = 0; i < count; i++)
        remembered[prompts ? prompts[i] : 0] = 0;
    double sum = 0;
    for (int depth = 0; depth < DEPTHS; depth++)
        sum += slots->new[depth];
    for (int depth = 0; sum > slots->most_new && depth < DEPTHS; depth++) {
        slots->new[depth] /= 2;
        slots->used_again[depth] /= 2;
    }
}

/* Copies of new blocks begin, into slots that nobody holds and that have left the eviction order.
 *
 * index, listed: of peers, and the tag of each slot; both null where no peer looks anything up.
 * tags, tenants: of each block. prompts: null where all are of one prompt of depth 0.
 * evicted: number of evictions, negative where nothing is remembered.
 *
 * Returns 1 if all have one tenant, else 0; -1, and changes nothing, if a key is too short or the
 * number of a prompt too large. */
int64_t begin(
    const struct slots *slots, struct table *table, const struct own_index *index, uint64_t *listed,
    const struct row *rows, const int64_t *ids, int64_t count, const uint64_t *tags,
    const int64_t *tenants, const int64_t *prompts, int64_t evicted)
{
    int64_t same = 1;
    for (int64_t i = 0; i < count; i++) {
        if (rows[i].last_word >> 24 < HASHED_BYTES || (prompts && (uint64_t)prompts[i] >= NUM_PROMPTS))
            return -1;
        same &= tenants[i] == tenants[0];
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t slot = ids[i];
        if (index) {
            hide(index, slot);
            listed[slot] = tags[i];
        }
        slots->generation[slot] += 1;
        slots->ready[slot] = slots->keyed[slot] = 0;
        slots->users[slot] = slots->busy[slot] = 1;
        slots->tenant[slot] = tenants[i];
    }
    for (int64_t i = 0; i < count; i++)
        name_entry(table, &rows[i], (int32_t)ids[i]);
    remember(slots, rows, ids, count, prompts, evicted);
    return same;
}

/* Copies into slots have ended well: peers find those that have a key. Returns how many slots
 * nobody holds. */
int64_t filled(
    const struct slots *slots, const struct own_index *index, const uint64_t *listed,
    const int64_t *ids, int64_t count)
{
    int64_t unheld = 0;
    for (int64_t i = 0; i < count; i++) {
        slots->busy[ids[i]] = 0;
        slots->ready[ids[i]] = 1;
        unheld += slots->users[ids[i]] == 0;
        if (index && slots->keyed[ids[i]])
            hide(index, ids[i]);
    }
    for (int64_t i = 0; index && i < count; i++)
        if (slots->keyed[ids[i]])
            show(index, listed[ids[i]], ids[i], slots->generation[ids[i]]);
    return unheld;
}

static inline int kind_of(const struct slots *slots, int64_t slot)
{
    if (slots->pinned[slot])
        return 3;
    return slots->favoured[slot] ? 2 : slots->again[slot];
}

/* Follows hints for slots that were given to new blocks since: none is in the eviction order, or
 * pinned. Returns how many they are. */
int64_t privilege(
    const struct slots *slots, const int64_t *ids, const struct grant *grants, int64_t num_grants)
{
    int64_t privileged = 0;
    for (const struct grant *grant = grants; grant < grants + num_grants; grant++) {
        for (const int64_t *id = ids + grant->first; id < ids + grant->first + grant->count; id++) {
            slots->privileged[*id] = 1;
            slots->favoured[*id] = grant->favours != 0;
            slots->pinned[*id] = grant->pin_until >= 0;
            if (slots->pinned[*id])
                slots->pinned_until[*id] = grant->pin_until;
        }
        privileged += grant->count;
    }
    return privileged;
}

/* One user less holds each of the slots, which are different ones. Returns 0 if not all are cached
 * now; else 1 if all are of the first kind, used once; else 2.
 *
 * by_kind: written in that case: the slots by their kinds, those of a kind in the order given.
 * counts: of each kind; written in any case. */
int64_t let_go(
    const struct slots *slots, const int64_t *ids, int64_t count, int64_t *by_kind, int64_t *counts)
{
    int64_t cached = 1;
    for (int kind = 0; kind < KINDS; kind++)
        counts[kind] = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t slot = ids[i];
        slots->users[slot] -= 1;
        cached &= slots->users[slot] == 0 && slots->ready[slot] && slots->keyed[slot] &&
                  !slots->busy[slot];
        counts[kind_of(slots, slot)] += 1;
    }
    if (!cached || counts[0] == count)
        return cached;
    int64_t ends[KINDS], end = 0;
    for (int kind = 0; kind < KINDS; end += counts[kind++])
        ends[kind] = end;
    for (int64_t i = 0; i < count; i++)
        by_kind[ends[kind_of(slots, ids[i])]++] = ids[i];
    return 2;
}
