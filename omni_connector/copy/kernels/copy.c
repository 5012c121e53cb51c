// SPDX-License-Identifier: Apache-2.0
/* Copies the rows of many slots past the caches, and makes the slots' checksums in the same pass;
 * or makes checksums of rows that are not copied.
 *
 * Row j of slot i goes from sources[i * rows + j] to targets[i * rows + j]. It has lengths[j]
 * bytes, a multiple of 64, and its target is aligned to 64 bytes.
 *
 * A checksum is xxh3-64 of more than 240 bytes
 * (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md): eight sums of 64 bits take a
 * stripe of 64 bytes at once, with a part of the secret that begins 8 bytes later for each stripe.
 * After 16 stripes, which are a block, the sums are scrambled and the secret begins anew. The last
 * stripe has a part of the secret of its own.
 *
 * scripts/compile_kernels.py makes copy.ll of this file, before any choice of instructions:
 * llvmlite makes those for the host's processor, so nothing here may be of one architecture.
 */
#include <stdint.h>

enum {
    STRIPE = 64,           // bytes
    BLOCK = 16,            // stripes
    AHEAD = 8192,          // bytes from what is copied to what is prefetched
    SCRAMBLE_SECRET = 128, // where these parts of the secret begin
    MERGE_SECRET = 11,
    LAST_SECRET = 121,
};

static const uint64_t PRIME32_1 = 0x9E3779B1, PRIME64_1 = 0x9E3779B185EBCA87;

static const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
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
    hash ^= hash >> 37;
    hash *= 0x165667919E3779F9;
    return hash ^ hash >> 32;
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
