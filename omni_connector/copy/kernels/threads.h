// SPDX-License-Identifier: Apache-2.0
/* How a kernel's work is spread over the threads of a device. On the host one thread does all, so
 * that tests need no device. */
#include <stdint.h>

#ifdef __NVPTX__
#define KERNEL __attribute__((nvptx_kernel))
static uint32_t first_index(void)
{
    return __nvvm_read_ptx_sreg_ctaid_x() * __nvvm_read_ptx_sreg_ntid_x() +
           __nvvm_read_ptx_sreg_tid_x();
}
static uint32_t index_step(void)
{
    return __nvvm_read_ptx_sreg_nctaid_x() * __nvvm_read_ptx_sreg_ntid_x();
}
#else
#define KERNEL
static uint32_t first_index(void)
{
    return 0;
}
static uint32_t index_step(void)
{
    return 1;
}
#endif
