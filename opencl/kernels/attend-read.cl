/* SPDX-License-Identifier: Apache-2.0 */
/* Reads bytes and does nothing else with them: the floor that tests/bench/bench-attend.c compares with.  Two work-items or more. */

__kernel void attend_read(const __global uchar *base, ulong offset, int n_lines, __global int *out)
{
    const __global int16 *lines = (const __global int16 *)(base + offset);
    const int me = get_global_id(0), all = get_global_size(0);
    int16 sum0 = 0, sum1 = 0, sum2 = 0, sum3 = 0;
    long i = (long)n_lines * me / all, end = (long)n_lines * (me + 1) / all;

    for (; i + 3 < end; i += 4) {
        sum0 ^= lines[i];
        sum1 ^= lines[i + 1];
        sum2 ^= lines[i + 2];
        sum3 ^= lines[i + 3];
    }
    vstore16(sum0 ^ sum1 ^ sum2 ^ sum3, me, out);
}
