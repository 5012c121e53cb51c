// SPDX-License-Identifier: Apache-2.0
/* Moves rows that a device has one after the other to rows of pinned memory of the host, wherever
 * they lie, and back: one launch, where the host would have to ask for a transfer of each row.
 *
 * `rows` has the address of each row of the host. Rows are `words` words of 16 bytes long, and lie
 * at multiples of these.
 *
 * scripts/compile_kernels.py makes move_rows.ptx of this file, which a CUDA device runs, and
 * move_rows.ll, which does the same on one thread of a host, so that tests need no device.
 */
#include "threads.h"

typedef uint64_t Word __attribute__((vector_size(16)));

KERNEL void rows_to_host(const Word *packed, const uint64_t *rows, uint32_t count, uint32_t words)
{
    for (uint32_t i = first_index(); i < count * words; i += index_step())
        ((Word *)rows[i / words])[i % words] = packed[i];
}

static Word of_host(const uint64_t *rows, uint32_t words, uint32_t i)
{
    return ((const Word *)rows[i / words])[i % words];
}

/* Four words are asked for before the first one is there: the host's memory answers late. */
KERNEL void rows_from_host(Word *packed, const uint64_t *rows, uint32_t count, uint32_t words)
{
    uint32_t i = first_index(), step = index_step(), end = count * words;
    for (; i + 3 * step < end; i += 4 * step) {
        Word one = of_host(rows, words, i), two = of_host(rows, words, i + step);
        Word three = of_host(rows, words, i + 2 * step), four = of_host(rows, words, i + 3 * step);
        packed[i] = one;
        packed[i + step] = two;
        packed[i + 2 * step] = three;
        packed[i + 3 * step] = four;
    }
    for (; i < end; i += step)
        packed[i] = of_host(rows, words, i);
}
