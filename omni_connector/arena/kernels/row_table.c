// SPDX-License-Identifier: Apache-2.0
/* Looks up rows in a table of `rows.h`, and gives rows to its entries.
 *
 * scripts/compile_kernels.py makes row_table.ll of this file.
 */
#include "rows.h"

/* Which entry has each row, -1 for none. */
void find(const struct table *table, const struct row *rows, int64_t count, int64_t *entries)
{
    for (int64_t i = 0; i < count; i++)
        entries[i] = entry_of(table, &rows[i], bucket_of(table, &rows[i]));
}

/* Gives rows to entries, except those that an entry has and those that stand for no key. */
void name(struct table *table, const struct row *rows, int64_t count, const int64_t *entries)
{
    for (int64_t i = 0; i < count; i++)
        name_entry(table, &rows[i], (int32_t)entries[i]);
}
