/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Packs pages: must equal kv_pack_page() of quant/kv-codec.c bit for bit, given the same cosines.  Every step there has its
 * counterpart here in the same order; a lane is a token.
 *
 * Tables (attend-plan.c): page_angles f32 (n_pages, 2, ROT_PAD): cos and sin of pair f at the page's centre, position 32 p + 15.5;
 * places f32 (ROT_PAD, 2, 32): cos and sin of pair f at places -15.5 .. 15.5 from it; then what attend-tile-x86.cl interpolates by.
 */

#define PAGE_VECTORS (PAGE_TOKENS / W)
#define K_REST_VECTORS ((K_DIM / 4 * K_REST + 7) / 8)
#define PACK_DIM     (K_DIM > V_DIM ? K_DIM : V_DIM) /* room for one side */
#define MOST_GROUPS  (FP8 ? 1 : K_GROUPS > V_GROUPS ? K_GROUPS : V_GROUPS)

typedef struct { const __global uchar *base; size_t index; } Source;

/* Where one side of a token of the page lies: among the pass's new rows, or in the tail ring. */
static inline Source pack_source(const __global Pack *pack, int token, int kv_head, bool is_key, const __global uchar *kept, int n_rows,
                                 const __global uchar *tail)
{
    const int position = pack->page * PAGE_TOKENS + token, row = pack->new_row0 + position - pack->new_start;

    if (position >= pack->new_start)
        return (Source){kept, is_key ? new_key(row, kv_head) : new_value(n_rows, row, kv_head)};
    return (Source){tail, is_key ? tail_key(position % TAIL_TOKENS, kv_head) : tail_value(position % TAIL_TOKENS, kv_head)};
}

/* One side (@dim dims) of tokens W v .. W v + W - 1, transposed: x[d] holds W tokens. */
static inline void pack_read(const __global Pack *pack, int v, int kv_head, bool is_key, int dim, const __global uchar *kept, int n_rows,
                             const __global uchar *tail, vfloat x[PACK_DIM])
{
    float transposed[PACK_DIM * W];

    for (int lane = 0; lane < W; lane++) {
        const Source from = pack_source(pack, v * W + lane, kv_head, is_key, kept, n_rows, tail);
        float row[PACK_DIM];

        for (int d = 0; d < dim; d += W)
            VSTORE(tail_load(from.base, from.index + d), row + d);
        for (int d = 0; d < dim; d++)
            transposed[d * W + lane] = row[d];
    }
    for (int d = 0; d < dim; d++)
        x[d] = VLOAD(transposed + d * W);
}

#if CODED

/* kv_hadamard() over the dims of W tokens. */
static inline void hadamard_tokens(vfloat *x, int dim)
{
    int first = 0;

    for (int block = HADAMARD_MOST; block >= 16; block /= 2) {
        if (!(dim & block))
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

/* What turns (before RoPE), and what does not. */
static inline void subtract_key_mean(vfloat *x, int v, const __global float *mean, const __global float *page_angle,
                                     const __global float *places)
{
    for (int f = 0; f < MEAN_HALF; f++) {
        vfloat place_c = VLOAD(places + f * 2 * PAGE_TOKENS + v * W), place_s = VLOAD(places + (f * 2 + 1) * PAGE_TOKENS + v * W);
        float page_c = page_angle[f], page_s = page_angle[ROT_PAD + f], a = mean[f], b = mean[f + ROT_HALF];
        vfloat c = fma(place_c, (vfloat)(page_c), -(place_s * page_s)), s = fma(place_c, (vfloat)(page_s), place_s * page_c);

        x[f] -= fma((vfloat)(a), c, -(b * s));
        x[f + ROT_HALF] -= fma((vfloat)(b), c, a * s);
    }
    for (int d = 2 * MEAN_HALF; d < K_DIM; d++)
        x[d] -= mean[d];
}

typedef struct { Coder group[MOST_GROUPS]; } Coders;

static inline void ushorts_store(vuint x, __global ushort *to)
{
#if W == 16
    vstore16(convert_ushort16(x), 0, to);
#else
    *to = (ushort)x;
#endif
}

/* Scales and zeros of all groups of W tokens, stored. */
static inline void pack_scales(const vfloat *x, int dim, int v, int n_groups, int bits, float8 factors, __global ushort *scales,
                               Coders *ret)
{
#if GROUPED
    for (int group = 0; group < n_groups; group++) {
        vuint scale, zero;

        ret->group[group] = coder_make(x + group * GROUP_DIMS, min(GROUP_DIMS, dim - group * GROUP_DIMS), bits, factors, &scale, &zero);
        ushorts_store(scale, scales + group * PAGE_TOKENS + v * W);
        if (FORM != 2)
            ushorts_store(zero, scales + (n_groups + group) * PAGE_TOKENS + v * W);
    }
#endif
}

static inline vint code_of(const vfloat *x, const Coders *coders, int d, int bits)
{
    return coder_code(x[d], coders->group[d / GROUP_DIMS], bits);
}

/* Four codes of dims d .. d + 3, a byte each. */
static inline vuint four_codes(const vfloat *x, const Coders *coders, int d, int bits)
{
    vuint word = 0;

    for (int e = 0; e < 4; e++)
        word |= AS_VUINT(code_of(x, coders, d + e, bits)) << (uint)(8 * e);
    return word;
}

#if FP8
static inline void pack_keys(const vfloat *x, const Coders *coders, int v, __global uchar *record)
{
    for (int g = 0; g < K_DIM / 4; g++) {
        vuint codes = four_codes(x, coders, 4 * g, 8);
        __global ushort *words = (__global ushort *)record + (g * 2 + v * W / 16) * 32 + v * W % 16;

        ushorts_store(codes & 0xffffu, words);
        ushorts_store(codes >> 16, words + 16);
    }
}

/* From codes (V_DIM, 32 tokens) of the whole page: two neighbouring tokens make a word. */
static inline void pack_values(const SHARED uchar *codes, __global uchar *record)
{
    const SHARED uint *fours = (const SHARED uint *)codes;

    FOR_LANES(i, V_DIM * 16)
        ((__global ushort *)(record + V_OFFSET))[i] = (ushort)(fours[(i / 256 * 16 + i % 16) * 8 + i / 32 % 8] >> (i / 16 % 2 * 16));
}
#else
static inline void pack_keys(const vfloat *x, const Coders *coders, int v, __global uchar *record)
{
    __global uint *words = (__global uint *)record;
    const int token = v * W, place = token / 16 * 16 + token % 16;

    vuint rest[K_REST_VECTORS + 1];

    for (int p = 0; p < K_REST_VECTORS; p++)
        rest[p] = 0;
    for (int g = 0; g < K_VECTORS; g++) {
        vuint base = 0;

        for (int i = 0; i < K_PER; i++) {
            const int four = g * K_PER + i;
            vuint codes = four_codes(x, coders, 4 * four, K_BITS);

            base |= (codes & FIELD_MASK(K_BASE)) << (uint)(i * K_BASE);
#if K_REST
            rest[four / K_REST_PER] |= ((codes >> (uint)K_BASE) & FIELD_MASK(K_REST)) << (uint)(four % K_REST_PER * K_REST);
#endif
        }
        VSTORE(base, words + g * 32 + place);
    }
    for (int p = 0; p < K_REST_VECTORS; p++)
        VSTORE(rest[p], words + K_HIGH / 4 + p * 32 + place);
}

/* From codes (V_DIM, 32 tokens) of the whole page: four neighbouring tokens make a word. */
static inline void pack_values(const SHARED uchar *codes, __global uchar *record)
{
    const SHARED uint *fours = (const SHARED uint *)codes;

    FOR_LANES(i, V_DIM * V_BASE) {
        const SHARED uint *four = fours + (i / (16 * V_BASE) * 16 + i % 16) * 8 + i / 16 % V_BASE * V_PER;
        uint word = 0;

        for (int j = 0; j < V_PER; j++)
            word |= (four[j] & FIELD_MASK(V_BASE)) << (j * V_BASE);
        ((__global uint *)(record + V_OFFSET))[i] = word;
    }
#if V_REST
    FOR_LANES(i, V_DIM * V_REST) {
        const SHARED uint *four = fours + (i / (16 * V_REST) * 16 + i % 16) * 8 + i / 16 % V_REST * V_REST_PER;
        uint word = 0;

        for (int j = 0; j < V_REST_PER; j++)
            word |= ((four[j] >> V_BASE) & FIELD_MASK(V_REST)) << (j * V_REST);
        ((__global uint *)(record + V_HIGH))[i] = word;
    }
#endif
}
#endif

static inline void pack_value_codes(const vfloat *x, const Coders *coders, int v, SHARED uchar *codes)
{
    for (int d = 0; d < V_DIM; d++) {
        vint code = code_of(x, coders, d, V_BITS);
#if W == 16
        vstore16(convert_uchar16(code), 0, codes + d * PAGE_TOKENS + v * W);
#else
        codes[d * PAGE_TOKENS + v] = (uchar)code;
#endif
    }
}

/* The form's transform of one side. */
static inline void pack_transform(vfloat *x, int dim, int v, int kv_head, bool is_key, const __global float *constants,
                                  const __global float *page_angle, const __global float *places)
{
#if CENTRE
    if (is_key)
        subtract_key_mean(x, v, constants + CONST_K_MEAN + kv_head * K_DIM, page_angle, places);
    else
        for (int d = 0; d < V_DIM; d++)
            x[d] -= constants[CONST_V_MEAN + kv_head * V_DIM + d];
#endif
#if PAIR_SCALE
    for (int d = 0; d < K_DIM && is_key; d++)
        x[d] *= constants[CONST_K_FACTOR + kv_head * K_DIM + d];
#endif
#if ROTATE
    hadamard_tokens(x, dim);
#endif
}

/* One side of W tokens of a page; the codes of values wait in @codes until the whole page is there. */
static inline void pack_vector(const __global Pack *pack, int v, int kv_head, bool is_key, const __global uchar *kept, int n_rows,
                               const __global uchar *tail, const __global float *constants, const __global float *page_angles,
                               const __global float *places, float8 k_factors, float8 v_factors, SHARED uchar *codes,
                               __global uchar *record)
{
    const int dim = is_key ? K_DIM : V_DIM;
    vfloat x[PACK_DIM];
    Coders coders;

    pack_read(pack, v, kv_head, is_key, dim, kept, n_rows, tail, x);
    pack_transform(x, dim, v, kv_head, is_key, constants, page_angles + (size_t)pack->page * 2 * ROT_PAD, places);
    coders.group[0].a = constants[CONST_FP8 + !is_key];
    pack_scales(x, dim, v, is_key ? K_GROUPS : V_GROUPS, is_key ? K_BITS : V_BITS, is_key ? k_factors : v_factors,
                (__global ushort *)(record + (is_key ? K_SCALE : V_SCALE)), &coders);
    if (is_key)
        pack_keys(x, &coders, v, record);
    else
        pack_value_codes(x, &coders, v, codes);
}

#else

/* Unpacked forms: K (dim, token), V (token, dim). */
static inline void pack_vector(const __global Pack *pack, int v, int kv_head, bool is_key, const __global uchar *kept, int n_rows,
                               const __global uchar *tail, const __global float *constants, const __global float *page_angles,
                               const __global float *places, float8 k_factors, float8 v_factors, SHARED uchar *codes,
                               __global uchar *record)
{
    vfloat x[PACK_DIM];

    if (is_key) {
        pack_read(pack, v, kv_head, true, K_DIM, kept, n_rows, tail, x);
        for (int d = 0; d < K_DIM; d++)
            tail_store(x[d], record, d * PAGE_TOKENS + v * W);
        return;
    }
    for (int token = v * W; token < (v + 1) * W; token++) {
        const Source from = pack_source(pack, token, kv_head, false, kept, n_rows, tail);

        for (int d = 0; d < V_DIM; d += W)
            tail_store(tail_load(from.base, from.index + d), record + V_OFFSET, token * V_DIM + d);
    }
}
#endif

/* A unit is one side of a (pack, KV head); group size LANES. */
__kernel void attend_pack(int n_packs, const __global uchar *pack_buffer, ulong packs_offset, int n_rows, const __global uchar *kept,
                          const __global uchar *tails, ulong tail_offset, ulong tail_stride, const __global uchar *calibration,
                          ulong calibration_offset, const __global float *page_angles, const __global float *places, float8 k_factors,
                          float8 v_factors, __global uchar *fresh)
{
    SHARED uchar codes[PAGE_TOKENS * V_DIM] __attribute__((aligned(64)));
    const int n = n_packs * N_KV * 2;

    for (int unit = unit_begin(n); unit < unit_end(n); unit++) {
        const __global Pack *pack = AT(Pack, pack_buffer, packs_offset) + unit / (2 * N_KV);
        const int kv_head = unit / 2 % N_KV;
        const bool is_key = unit % 2 == 0;
        __global uchar *record = fresh + (size_t)pack->to * PAGE_BYTES + kv_head * RECORD_BYTES;

        FOR_LANES(v, PAGE_VECTORS)
            pack_vector(pack, v, kv_head, is_key, kept, n_rows, tails + tail_offset + pack->tail_slot * tail_stride,
                        AT(float, calibration, calibration_offset), page_angles, places, k_factors, v_factors, codes, record);
#if CODED
        SHARED_SYNC();
        if (!is_key)
            pack_values(codes, record);
        SHARED_SYNC();
#endif
    }
}
