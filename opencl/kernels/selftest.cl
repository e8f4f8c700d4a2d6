/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The first program of every device: known answers before anything is trusted to it, and what its compiler accepts.
 *
 *   selftest_answers(in, out)  in, out: (n) uint.  Work-item i writes three mixed sums of in[i], integer, float and local
 *                              memory, whose C twin is selftest_expected() in gpu-device.c.  Any local size up to 64.
 *   selftest_simd(out)         out: (1) uint.  Bits: 1 AVX2, 2 AVX-512BW, as this device's compiler defines them.
 *   selftest_spin(out, n)      out: (1) uint.  One work-item busy for n rounds; for tests of time-outs and overlap.
 */

__kernel void selftest_answers(__global const uint *in, __global uint *out)
{
    __local uint shared[64];
    const uint i = (uint)get_global_id(0), lane = (uint)get_local_id(0), n_lanes = (uint)get_local_size(0);
    const uint x = in[i];
    const float y = (float)(x & 0xffff) * 0.25f + 1.0f;

    shared[lane] = x * 2654435761u;
    barrier(CLK_LOCAL_MEM_FENCE);
    out[i] = (shared[n_lanes - 1 - lane] ^ (x >> 7)) + as_uint(y);
}

__kernel void selftest_simd(__global uint *out)
{
    uint bits = 0;

#if defined(__AVX2__)
    bits |= 1;
#endif
#if defined(__AVX2__) && defined(__AVX512BW__)
    bits |= 2;
#endif
    out[0] = bits;
}

__kernel void selftest_spin(__global uint *out, uint n)
{
    uint x = out[0];

    for (uint i = 0; i < n; i++)
        x = x * 1664525u + (x >> 16) + i;
    out[0] = x;
}
