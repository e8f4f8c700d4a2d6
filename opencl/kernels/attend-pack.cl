/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Packs pages: must equal kv_pack_page() of quant/kv-codec.c bit for bit, given the same cosines.  Every step there has its
 * counterpart here in the same order; a lane is a token.
 *
 * Tables (attend-plan.c): page_angles f32 (n_pages, 2, ROT_PAD): cos and sin of pair f at the page's centre, position 32 p + 15.5;
 * places f32 (ROT_PAD, 2, 32): cos and sin of pair f at places -15.5 .. 15.5 from it; then what attend-tile-x86.cl interpolates by.
 */

#define PAGE_VECTORS (PAGE_TOKENS / W)
#define K_NIBBLES    (K_BITS != 8)
#define K_PLANES     ((HEAD_DIM + 31) / 32)

typedef struct { const __global uchar *base; size_t index; } Source;

/* Where one side of a token of the page lies: among the pass's new rows, or in the tail ring. */
static inline Source pack_source(const __global Pack *pack, int token, int kv_head, bool is_key, const __global uchar *kept, int n_rows,
                                 const __global uchar *tail)
{
    const int position = pack->page * PAGE_TOKENS + token;

    if (position >= pack->new_start)
        return (Source){kept, new_index((is_key ? 0 : n_rows) + pack->new_row0 + position - pack->new_start, kv_head)};
    return (Source){tail, (is_key ? 0 : TAIL_SIDE) + tail_index(position % TAIL_TOKENS, kv_head)};
}

/* One side of tokens W v .. W v + W - 1, transposed: x[d] holds W tokens. */
static inline void pack_read(const __global Pack *pack, int v, int kv_head, bool is_key, const __global uchar *kept, int n_rows,
                             const __global uchar *tail, vfloat x[HEAD_DIM])
{
    float transposed[HEAD_DIM * W];

    for (int lane = 0; lane < W; lane++) {
        const Source from = pack_source(pack, v * W + lane, kv_head, is_key, kept, n_rows, tail);
        float row[HEAD_DIM];

        for (int d = 0; d < HEAD_DIM; d += W)
            VSTORE(tail_load(from.base, from.index + d), row + d);
        for (int d = 0; d < HEAD_DIM; d++)
            transposed[d * W + lane] = row[d];
    }
    for (int d = 0; d < HEAD_DIM; d++)
        x[d] = VLOAD(transposed + d * W);
}

#if LEAT

static inline vfloat reciprocal(vfloat x)
{
    vfloat y = AS_VFLOAT((vuint)(0x7ef311c7u) - AS_VUINT(x));

    for (int i = 0; i < 4; i++)
        y = fma(y, fma(-x, y, (vfloat)(1.0f)), y);
    return y;
}

static inline vfloat step_inverse(vfloat step)
{
    return reciprocal(step > 0.0f ? step : (vfloat)(1.0f));
}

static inline vuint step_bits(vfloat step)
{
    vuint bits, rounded;

    step = step > 0.0f ? step : (vfloat)(0.0f);
    step = step < 65024.0f ? step : (vfloat)(65024.0f);
    bits = AS_VUINT(step);
    rounded = bits + 0xfffu + ((bits >> 13) & 1u);
    bits = bits < 0x38800000u ? AS_VUINT(step + 0.5f) - 0x3f000000u : (rounded - 0x38000000u) >> 13;
    return (bits + 8u) & ~15u;
}

static inline vfloat step_round(vfloat step)
{
    vuint bits = step_bits(step);

    return bits < 0x400u ? TO_VFLOAT(AS_VINT(bits)) * 0x1p-24f : AS_VFLOAT((bits << 13) + 0x38000000u);
}

static inline vfloat offset_clamp(vfloat quarters)
{
    quarters = quarters > -8.0f ? quarters : (vfloat)(-8.0f);
    return quarters < 7.0f ? quarters : (vfloat)(7.0f);
}

static inline vint level_codes(vfloat x, vfloat inverse, vfloat quarters, int bits)
{
    const float top = (float)((1 << bits) - 1);
    vfloat t = fma(x, inverse, (float)(1 << (bits - 1)) - 0.25f * quarters);

    t = t > 0.0f ? t : (vfloat)(0.0f);
    t = t < top ? t : (vfloat)(top);
    return TO_VINT(t);
}

/* Here offset is in quarter steps. */
typedef struct {
    const vfloat *x;
    int n, bits;
    vfloat step, quarters, error; /* the best */
} Search;

static inline void search_try(Search *search, vfloat step, vfloat quarters)
{
    const float half_top = 0.5f * (float)((1 << search->bits) - 1);
    vfloat inverse = step_inverse(step), middle = half_top - 0.25f * quarters, error = 0.0f;

    for (int i = 0; i < search->n; i++) {
        vfloat level = TO_VFLOAT(level_codes(search->x[i], inverse, quarters, search->bits)) - middle;
        vfloat difference = fma(-level, step, search->x[i]);

        error = fma(difference, difference, error);
    }
    search->step = error < search->error ? step : search->step;
    search->quarters = error < search->error ? quarters : search->quarters;
    search->error = error < search->error ? error : search->error;
}

static inline void search_refine(Search *search, float relative_step)
{
    const float moves[4] = {-2.0f, -1.0f, 1.0f, 2.0f};

    for (int round = 0; round < 2; round++) {
        vfloat step = search->step, quarters = search->quarters;

        for (int i = 0; i < 4; i++)
            search_try(search, step, offset_clamp(quarters + moves[i]));
        step = search->step;
        quarters = search->quarters;
        for (int i = 0; i < 4; i++)
            search_try(search, step_round(step * fma(moves[i], relative_step, 1.0f)), quarters);
    }
}

static inline Search search_scale(const vfloat *x, int n, int bits, float8 factors)
{
    const float top = (float)((1 << bits) - 1);
    vfloat low = FLT_MAX, high = -FLT_MAX, largest = 0.0f, cover, covered;
    Search search = {x, n, bits};
    float factor[8];

    vstore8(factors, 0, factor);
    for (int i = 0; i < n; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
        largest = fabs(x[i]) > largest ? fabs(x[i]) : largest;
    }
    cover = (high - low) * (1.0f / top);
    covered = largest * (1.0f / (0.5f * top + 1.75f));
    cover = cover > covered ? cover : covered;
    search.step = step_round(cover);
    search.quarters = 0.0f;
    search.error = INFINITY;
    for (int i = 0; i < 6; i++) {
        vfloat step = step_round(cover * factor[i]);
        vfloat quarters = offset_clamp((high + low) * step_inverse(step) * 2.0f);

        search_try(&search, step, (quarters + 12582912.0f) - 12582912.0f);
    }
    search_refine(&search, factor[6]);
    return search;
}

/* kv_hadamard() over the dims of W tokens. */
static inline void hadamard_tokens(vfloat x[HEAD_DIM])
{
    int first = 0;

    for (int block = 256; block >= 16; block /= 2) {
        if (!(HEAD_DIM & block))
            continue;
        for (int step = 1; step < block; step *= 2)
            for (int base = first; base < first + block; base += 2 * step)
                for (int i = base; i < base + step; i++) {
                    vfloat a = x[i], b = x[i + step];

                    x[i] = a + b;
                    x[i + step] = a - b;
                }
        for (int i = first; i < first + block; i++)
            x[i] *= hadamard_scale(block);
        first += block;
    }
}

static inline void subtract_turned_mean(vfloat x[HEAD_DIM], int v, const __global float *mean, const __global float *page_angle,
                                        const __global float *places)
{
    for (int f = 0; f < ROT_HALF; f++) {
        vfloat place_c = VLOAD(places + f * 2 * PAGE_TOKENS + v * W), place_s = VLOAD(places + (f * 2 + 1) * PAGE_TOKENS + v * W);
        float page_c = page_angle[f], page_s = page_angle[ROT_PAD + f], a = mean[f], b = mean[f + ROT_HALF];
        vfloat c = fma(place_c, (vfloat)(page_c), -(place_s * page_s)), s = fma(place_c, (vfloat)(page_s), place_s * page_c);

        x[f] -= fma((vfloat)(a), c, -(b * s));
        x[f + ROT_HALF] -= fma((vfloat)(b), c, a * s);
    }
    for (int d = 2 * ROT_HALF; d < HEAD_DIM; d++)
        x[d] -= mean[d];
}

/* What codes are made with: 1 / step, and the offset in quarter steps. */
typedef struct { vfloat inverse[N_GROUPS], quarters[N_GROUPS]; } Coder;

/* Scales of all groups of W tokens, stored. */
static inline Coder pack_scales(const vfloat x[HEAD_DIM], int v, int bits, float8 factors, __global ushort *scales)
{
    Coder coder;

    for (int group = 0; group < N_GROUPS; group++) {
        Search best = search_scale(x + group * GROUP_DIMS, min(GROUP_DIMS, HEAD_DIM - group * GROUP_DIMS), bits, factors);
        vuint half_bits = step_bits(best.step) | AS_VUINT(TO_VINT(best.quarters + 8.0f));

        coder.inverse[group] = step_inverse(best.step);
        coder.quarters[group] = best.quarters;
#if W == 16
        vstore16(convert_ushort16(half_bits), 0, scales + group * PAGE_TOKENS + v * W);
#else
        scales[group * PAGE_TOKENS + v] = (ushort)half_bits;
#endif
    }
    return coder;
}

static inline vint code_of(const vfloat x[HEAD_DIM], const Coder *coder, int d, int bits)
{
    return level_codes(x[d], coder->inverse[d / GROUP_DIMS], coder->quarters[d / GROUP_DIMS], bits);
}

/* Four codes of dims d .. d + 3, a byte each. */
static inline vuint four_codes(const vfloat x[HEAD_DIM], const Coder *coder, int d, int bits)
{
    vuint word = 0;

    for (int e = 0; e < 4; e++)
        word |= AS_VUINT(code_of(x, coder, d + e, bits)) << (8 * e);
    return word;
}

static inline void pack_keys(const vfloat x[HEAD_DIM], const Coder *coder, int v, __global uchar *record)
{
    __global uint *words = (__global uint *)record;
    const int token = v * W, place = token / 16 * 16 + token % 16;

#if K_BITS == 8
    for (int g = 0; g < HEAD_DIM / 4; g++)
        VSTORE(four_codes(x, coder, 4 * g, 8), words + g * 32 + place);
#else
    vuint planes[K_PLANES];

    for (int p = 0; p < K_PLANES; p++)
        planes[p] = 0;
    for (int g = 0; g < HEAD_DIM / 8; g++) {
        vuint low = four_codes(x, coder, 4 * g, K_BITS), high = four_codes(x, coder, HEAD_DIM / 2 + 4 * g, K_BITS);
        const int low_plane = g, high_plane = HEAD_DIM / 8 + g;

        VSTORE((low & 0x0f0f0f0fu) | (high & 0x0f0f0f0fu) << 4, words + g * 32 + place);
        planes[low_plane / 8] |= ((low >> 4) & 0x01010101u) << (low_plane % 8);
        planes[high_plane / 8] |= ((high >> 4) & 0x01010101u) << (high_plane % 8);
    }
#if K_BITS == 5
    for (int p = 0; p < K_PLANES; p++)
        VSTORE(planes[p], words + K_HIGH / 4 + p * 32 + place);
#endif
#endif
}

/* From codes (HEAD_DIM, 32 tokens) of the whole page: four neighbouring tokens make a word. */
static inline void pack_values(const SHARED uchar *codes, __global uchar *record)
{
    __global uint *words = (__global uint *)(record + V_OFFSET);
    const SHARED uint *fours = (const SHARED uint *)codes;

#if V_BITS == 8
    FOR_LANES(i, HEAD_DIM * 8)
        words[i] = fours[(i / 128 * 16 + i % 16) * 8 + i / 16 % 8];
#else
    FOR_LANES(i, HEAD_DIM * 4) {
        const SHARED uint *four = fours + (i / 64 * 16 + i % 16) * 8 + i / 16 % 4;

        words[i] = (four[0] & 0x0f0f0f0fu) | (four[4] & 0x0f0f0f0fu) << 4;
    }
#endif
#if V_BITS == 5
    FOR_LANES(i, HEAD_DIM) {
        uint plane = 0;

        for (int bit = 0; bit < 8; bit++)
            plane |= ((fours[i * 8 + bit] >> 4) & 0x01010101u) << bit;
        ((__global uint *)(record + V_HIGH))[i] = plane;
    }
#endif
}

static inline void pack_value_codes(const vfloat x[HEAD_DIM], const Coder *coder, int v, SHARED uchar *codes)
{
    for (int d = 0; d < HEAD_DIM; d++) {
        vint code = code_of(x, coder, d, V_BITS);
#if W == 16
        vstore16(convert_uchar16(code), 0, codes + d * PAGE_TOKENS + v * W);
#else
        codes[d * PAGE_TOKENS + v] = (uchar)code;
#endif
    }
}

/* One side of W tokens of a page; the codes of values wait in @codes until the whole page is there. */
static inline void pack_vector(const __global Pack *pack, int v, int kv_head, bool is_key, const __global uchar *kept, int n_rows,
                               const __global uchar *tail, const __global float *means, const __global float *page_angles,
                               const __global float *places, float8 k_factors, float8 v_factors, SHARED uchar *codes,
                               __global uchar *record)
{
    vfloat x[HEAD_DIM];
    Coder coder;

    pack_read(pack, v, kv_head, is_key, kept, n_rows, tail, x);
    if (is_key) {
        subtract_turned_mean(x, v, means + kv_head * HEAD_DIM, page_angles + (size_t)pack->page * 2 * ROT_PAD, places);
    } else {
        for (int d = 0; d < HEAD_DIM; d++)
            x[d] -= means[(N_KV + kv_head) * HEAD_DIM + d];
    }
    hadamard_tokens(x);
    coder = pack_scales(x, v, is_key ? K_BITS : V_BITS, is_key ? k_factors : v_factors,
                        (__global ushort *)(record + (is_key ? K_SCALE : V_SCALE)));
    if (is_key)
        pack_keys(x, &coder, v, record);
    else
        pack_value_codes(x, &coder, v, codes);
}

#else

/* Unpacked forms: K (dim, token), V (token, dim). */
static inline void pack_vector(const __global Pack *pack, int v, int kv_head, bool is_key, const __global uchar *kept, int n_rows,
                               const __global uchar *tail, const __global float *means, const __global float *page_angles,
                               const __global float *places, float8 k_factors, float8 v_factors, SHARED uchar *codes,
                               __global uchar *record)
{
    vfloat x[HEAD_DIM];

    if (is_key) {
        pack_read(pack, v, kv_head, true, kept, n_rows, tail, x);
        for (int d = 0; d < HEAD_DIM; d++)
            tail_store(x[d], record, d * PAGE_TOKENS + v * W);
        return;
    }
    for (int token = v * W; token < (v + 1) * W; token++) {
        const Source from = pack_source(pack, token, kv_head, false, kept, n_rows, tail);

        for (int d = 0; d < HEAD_DIM; d += W)
            tail_store(tail_load(from.base, from.index + d), record + V_OFFSET, token * HEAD_DIM + d);
    }
}
#endif

/* A unit is one side of a (pack, KV head); group size LANES. */
__kernel void attend_pack(int n_packs, const __global uchar *pack_buffer, ulong packs_offset, int n_rows, const __global uchar *kept,
                          const __global uchar *tails, ulong tail_offset, ulong tail_stride, const __global uchar *calibration,
                          ulong calibration_offset, const __global float *page_angles, const __global float *places, float8 k_factors,
                          float8 v_factors, __global uchar *fresh)
{
    SHARED uchar codes[PAGE_TOKENS * HEAD_DIM] __attribute__((aligned(64)));
    const int n = n_packs * N_KV * 2;

    for (int unit = unit_begin(n); unit < unit_end(n); unit++) {
        const __global Pack *pack = AT(Pack, pack_buffer, packs_offset) + unit / (2 * N_KV);
        const int kv_head = unit / 2 % N_KV;
        const bool is_key = unit % 2 == 0;
        __global uchar *record = fresh + (size_t)pack->to * PAGE_BYTES + kv_head * RECORD_BYTES;

        FOR_LANES(v, PAGE_VECTORS)
            pack_vector(pack, v, kv_head, is_key, kept, n_rows, tails + tail_offset + pack->tail_slot * tail_stride,
                        AT(float, calibration, calibration_offset), page_angles, places, k_factors, v_factors, codes, record);
#if LEAT
        SHARED_SYNC();
        if (!is_key)
            pack_values(codes, record);
        SHARED_SYNC();
#endif
    }
}
