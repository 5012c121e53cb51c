// SPDX-License-Identifier: Apache-2.0
/* Copies the rows of many slots past the caches, and makes the slots' checksums in the same pass;
 * or makes checksums of rows that are not copied.
 *
 * Row j of slot i goes from sources[i * rows + j] to targets[i * rows + j]. It has lengths[j]
 * bytes, a multiple of 64, and its target is aligned to 64 bytes.
 *
 * scripts/compile_kernels.py makes copy.ll of this file, before any choice of instructions:
 * llvmlite makes those for the host's processor, so nothing here may be of one architecture.
 */
#include "xxh3.h"

enum {
    AHEAD = 8192, // bytes from what is copied to what is prefetched
};

typedef uint64_t stripe_t __attribute__((vector_size(STRIPE)));
typedef stripe_t unaligned_t __attribute__((aligned(1), may_alias));

/* A slot's checksum, which may be made in several calls. Without stripes left, it is in `total`. */
struct state {
    uint64_t sums[8];
    uint64_t left;  // stripes still to come
    uint64_t total; // stripes in all
};

static stripe_t load(const void *from)
{
    return *(const unaligned_t *)from;
}

/* Nobody reads the target soon, and past the caches its lines are not read before the write. The
 * source is asked for early, as the processor itself looks no further than a page. */
static inline __attribute__((always_inline)) stripe_t take(
    const uint8_t *source, uint8_t *target, const uint8_t *soon, int stored)
{
    __builtin_prefetch(soon, 0, 2);
    stripe_t stripe = load(source);
    if (stored)
        __builtin_nontemporal_store(stripe, (stripe_t *)target);
    return stripe;
}

static stripe_t add(stripe_t sums, stripe_t stripe, const uint8_t *secret)
{
    stripe_t keyed = stripe ^ load(secret);
    stripe_t swapped = __builtin_shufflevector(stripe, stripe, 1, 0, 3, 2, 5, 4, 7, 6);
    return sums + swapped + (keyed & 0xFFFFFFFF) * (keyed >> 32);
}

static stripe_t scramble(stripe_t sums)
{
    return (sums ^ (sums >> 47) ^ load(SECRET + SCRAMBLE_SECRET)) * PRIME32_1;
}

static uint64_t merge(stripe_t sums, uint64_t bytes)
{
    stripe_t keyed = sums ^ load(SECRET + MERGE_SECRET);
    uint64_t hash = bytes * PRIME64_1;
    for (int i = 0; i < 8; i += 2) {
        unsigned __int128 product = (unsigned __int128)keyed[i] * keyed[i + 1];
        hash += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    return avalanche(hash);
}

/* Inlined three times, so that `stored` and `hashed` are constants. */
static inline __attribute__((always_inline)) void run(
    uint8_t *const *targets, const uint8_t *const *sources, const uint64_t *lengths, uint64_t slots,
    uint64_t rows, struct state *states, int stored, int hashed)
{
    for (uint64_t row = 0, slot = 0; slot < slots; slot++) {
        struct state *state = &states[slot];
        stripe_t sums = load(state->sums);
        uint64_t left = state->left, total = state->total;
        for (uint64_t j = 0; j < rows; j++, row++) {
            const uint8_t *source = sources[row];
            const uint8_t *next_source = sources[row + 1 < slots * rows ? row + 1 : row];
            uint8_t *target = stored ? targets[row] : 0;
            uint64_t stripes = lengths[j] / STRIPE;
            uint64_t ahead = stripes < AHEAD / STRIPE ? stripes : AHEAD / STRIPE;
            for (uint64_t i = 0; i < stripes;) {
                const uint8_t *from = source + i * STRIPE;
                uint8_t *to = target + i * STRIPE;
                const uint8_t *soon = i + ahead < stripes
                                          ? from + ahead * STRIPE
                                          : next_source + (i + ahead - stripes) * STRIPE;
                uint64_t phase = (total - left) % BLOCK;
                if (stripes - i >= BLOCK && (!hashed || (phase == 0 && left > BLOCK))) {
#pragma clang loop unroll(full)
                    for (int k = 0; k < BLOCK; k++) {
                        int at = k * STRIPE;
                        stripe_t stripe = take(from + at, to + at, soon + at, stored);
                        if (hashed)
                            sums = add(sums, stripe, SECRET + 8 * k);
                    }
                    if (hashed)
                        sums = scramble(sums);
                    i += BLOCK;
                    left -= BLOCK;
                } else {
                    stripe_t stripe = take(from, to, soon, stored);
                    sums = add(sums, stripe, SECRET + (left == 1 ? LAST_SECRET : 8 * phase));
                    if (phase == BLOCK - 1 && left > 1)
                        sums = scramble(sums);
                    i++;
                    left--;
                }
            }
        }
        if (hashed && state->left > 0) {
            *(unaligned_t *)state->sums = sums;
            state->left = left;
            if (left == 0)
                state->total = merge(sums, total * STRIPE);
        }
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST); // no store that bypasses the caches is late
}

/* Leaves the states alone. */
void copy(
    uint8_t *const *targets, const uint8_t *const *sources, const uint64_t *lengths, uint64_t slots,
    uint64_t rows, struct state *states)
{
    run(targets, sources, lengths, slots, rows, states, 1, 0);
}

void copy_hashed(
    uint8_t *const *targets, const uint8_t *const *sources, const uint64_t *lengths, uint64_t slots,
    uint64_t rows, struct state *states)
{
    run(targets, sources, lengths, slots, rows, states, 1, 1);
}

/* As `copy_hashed`, but copies nothing. */
void hash(
    const uint8_t *const *sources, const uint64_t *lengths, uint64_t slots, uint64_t rows,
    struct state *states)
{
    run(0, sources, lengths, slots, rows, states, 0, 1);
}
