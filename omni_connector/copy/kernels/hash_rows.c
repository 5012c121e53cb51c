// SPDX-License-Identifier: Apache-2.0
/* Makes checksums of rows that lie one after the other, each of `bytes` bytes, a multiple of 64: as
 * xxh3.h says, by many threads at once.
 *
 * They may be parts of longer rows. Then `before` stripes of a part's first block were the end of the
 * part before, and `more` says that another part follows.
 *
 * Of all that the sums take, only the scrambling of a block waits for the block before. So
 * `block_sums` adds up each block by itself, one thread for each of its eight sums; `row_sums` goes
 * from block to block, one thread for each sum of a row; and `merge_sums` makes a row's checksum.
 *
 * scripts/compile_kernels.py makes hash_rows.ptx of this file, which a CUDA device runs, and
 * hash_rows.ll, which does the same on one thread of a host, so that tests need no device.
 */
#include "threads.h"
#include "xxh3.h"

enum {
    SUMS = 8,
    WORDS = STRIPE / 8, // of a stripe
    AHEAD = 16,         // blocks that memory takes to answer
};

static const uint64_t FIRST_SUMS[SUMS] = {
    0xC2B2AE3D,         0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x85EBCA77,         0x27D4EB2F165667C5, 0x9E3779B1,
};

/* The part of the secret that begins at a byte. */
static uint64_t secret(uint32_t at)
{
    const uint64_t *words = (const uint64_t *)SECRET;
    uint32_t shift = at % 8 * 8;
    uint64_t low = words[at / 8];
    return shift ? low >> shift | words[at / 8 + 1] << (64 - shift) : low;
}

/* What a stripe adds to one of the sums. */
static uint64_t added(const uint64_t *stripe, uint32_t sum, uint32_t at)
{
    uint64_t keyed = stripe[sum] ^ secret(at + 8 * sum);
    return stripe[sum ^ 1] + (keyed & 0xFFFFFFFF) * (keyed >> 32);
}

static uint64_t scrambled(uint64_t sum, uint64_t key)
{
    return (sum ^ sum >> 47 ^ key) * PRIME32_1;
}

/* Blocks after which the sums are scrambled: a row's last one's never are. */
static uint32_t whole_blocks(uint64_t bytes, uint32_t before, uint32_t more)
{
    return (before + bytes / STRIPE - !more) / BLOCK;
}

KERNEL void block_sums(
    const uint64_t *rows, uint32_t count, uint64_t bytes, uint32_t before, uint32_t more,
    uint64_t *sums)
{
    uint32_t blocks = whole_blocks(bytes, before, more);
    for (uint32_t i = first_index(); i < count * blocks * SUMS; i += index_step()) {
        uint32_t block = i / SUMS % blocks, row = i / SUMS / blocks;
        int64_t stripe = (int64_t)block * BLOCK - before;
        const uint64_t *words = rows + row * (bytes / 8) + stripe * WORDS;
        uint64_t sum = 0;
        if (block || !before) { // no load waits for another
#pragma clang loop unroll(full)
            for (uint32_t k = 0; k < BLOCK; k++)
                sum += added(words + k * WORDS, i % SUMS, 8 * k);
        } else {
            for (uint32_t k = before; k < BLOCK; k++)
                sum += added(words + k * WORDS, i % SUMS, 8 * k);
        }
        sums[i] = sum;
    }
}

/* `begun` are the sums of the parts before; none if there are none. They may be the totals, too. */
KERNEL void row_sums(
    const uint64_t *rows, uint32_t count, uint64_t bytes, uint32_t before, uint32_t more,
    const uint64_t *sums, const uint64_t *begun, uint64_t *totals)
{
    uint32_t blocks = whole_blocks(bytes, before, more);
    for (uint32_t i = first_index(); i < count * SUMS; i += index_step()) {
        uint32_t at = i % SUMS, row = i / SUMS;
        const uint64_t *of_row = sums + (uint64_t)row * blocks * SUMS + at;
        uint64_t total = begun ? begun[i] : FIRST_SUMS[at];
        uint64_t key = secret(SCRAMBLE_SECRET + 8 * at);
        uint32_t block = 0;
        if (blocks >= AHEAD) {
            uint64_t ahead[AHEAD];
#pragma clang loop unroll(full)
            for (uint32_t k = 0; k < AHEAD; k++)
                ahead[k] = of_row[k * SUMS];
            for (; block + 2 * AHEAD <= blocks; block += AHEAD) {
#pragma clang loop unroll(full)
                for (uint32_t k = 0; k < AHEAD; k++) {
                    total = scrambled(total + ahead[k], key);
                    ahead[k] = of_row[(block + AHEAD + k) * SUMS];
                }
            }
#pragma clang loop unroll(full)
            for (uint32_t k = 0; k < AHEAD; k++)
                total = scrambled(total + ahead[k], key);
            block += AHEAD;
        }
        for (; block < blocks; block++)
            total = scrambled(total + of_row[block * SUMS], key);
        const uint64_t *words = rows + row * (bytes / 8) - before * (int64_t)WORDS;
        uint64_t stripe = blocks ? blocks * BLOCK : before, end = before + bytes / STRIPE;
        for (; stripe < end - !more; stripe++)
            total += added(words + stripe * WORDS, at, 8 * (stripe % BLOCK));
        if (!more)
            total += added(words + stripe * WORDS, at, LAST_SECRET);
        totals[i] = total;
    }
}

/* `bytes` are those of a whole row. */
KERNEL void merge_sums(const uint64_t *totals, uint32_t count, uint64_t bytes, uint64_t *hashes)
{
    for (uint32_t i = first_index(); i < count; i += index_step()) {
        uint64_t hash = bytes * PRIME64_1;
        for (uint32_t at = 0; at < SUMS; at += 2) {
            const uint64_t *pair = totals + i * SUMS + at;
            uint64_t one = pair[0] ^ secret(MERGE_SECRET + 8 * at);
            uint64_t other = pair[1] ^ secret(MERGE_SECRET + 8 * at + 8);
            unsigned __int128 product = (unsigned __int128)one * other;
            hash += (uint64_t)product ^ (uint64_t)(product >> 64);
        }
        hashes[i] = avalanche(hash);
    }
}
