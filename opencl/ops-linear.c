/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products: which kernels a linear becomes.
 *
 * x86 CPUs, up to 8 rows   linear_stages: prologue and up to four linears of one weight type, one launch
 * x86 CPUs, more rows      prepare_rows, then linear_stages with one stage, for each run of weights of one type
 * else                     prepare_rows, then linear_rows, likewise
 */

#include "opencl/ops-internal.h"

#include <assert.h>
#include <string.h>

/* Mirrors Shape in opencl/kernels/linear.cl. */
typedef struct Shape {
    uint64_t weight_offset[3], x_rows_offset, norm_offset;
    uint32_t weight_rows[3];
    uint32_t n_cols, y_cols, y_first, epilogue;
    float eps;
    uint32_t n_tiles, tiles_per_ticket, rows_per_ticket, terms;
} Shape;

static_assert(sizeof(Shape) == 88, "Shape is laid out alike on host and device");

/* More of linear.cl. */
#define EPILOGUE_GATE 3 /* y = silu(y) * W x */
#define EPILOGUE_NONE 4 /* only prepares activations */

/* A linear whose weights have one type: what one product of a kernel does. */
typedef struct Part {
    const OpsLinear *linear;
    const OpsWeight *weights;
    uint32_t n_weights;
    uint64_t tile_bytes;
    Shape shape;
} Part;

/* Tickets for each thread of a CPU: enough that the last one to finish is not waited for long.  Of few rows the sums take as long as
 * reading the weights, of one row half as long: there longer streams are worth more than even shares. */
#define TICKETS_PER_THREAD     8
#define TICKETS_PER_THREAD_FEW 24
/* A ticket is drawn by an atomic of 100 ns and should take microseconds, not tens of them. */
#define TICKET_BYTES 65536
/* Rows whose prepared activations stay in the second cache level beside a tile: 128 rows of 2048 columns are 400 KB. */
#define TICKET_ROWS 128

static const OpsLinear no_linear;
static const OpsWeight no_weight;
static const Part no_part = {.linear = &no_linear, .weights = &no_weight, .shape = {.terms = 1}};

static uint32_t tiles_of(const OpsWeight *weight)
{
    return (weight->n_rows + WEIGHT_TILE_ROWS - 1) / WEIGHT_TILE_ROWS;
}

/* Bytes between the tiles of a weight. */
static uint64_t tile_bytes(const OpsWeight *weight)
{
    const WeightTypeInfo *type = weight->type;

    return ((uint64_t)weight->n_cols + type->record_columns - 1) / type->record_columns * type->record_bytes;
}

/* ---- from linears to parts --------------------------------------------------------------------------------------- */

static Part make_part(const Ops *ops, const OpsLinear *linear, uint32_t first, uint32_t n, uint32_t epilogue)
{
    const OpsWeight *weights = &linear->weights[first];
    bool gated = linear->epilogue == OPS_EPILOGUE_SWIGLU;
    uint32_t terms = linear->fine && !ops->options.exact && weights->type->block_elements > 1 ? 2 : 1;
    Part part = {
        .linear = linear,
        .weights = weights,
        .n_weights = n,
        .tile_bytes = tile_bytes(weights),
        .shape = {.x_rows_offset = linear->x_rows_offset, .norm_offset = linear->norm_offset, .n_cols = weights[0].n_cols,
                  .epilogue = epilogue, .eps = linear->norm_eps, .terms = terms},
    };

    for (uint32_t i = 0; i < linear->n_weights; i++) {
        if (!gated || i == 0)
            part.shape.y_cols += linear->weights[i].n_rows;
        if (!gated && i < first)
            part.shape.y_first += linear->weights[i].n_rows;
    }
    if (linear->y_cols > 0) {
        part.shape.y_cols = linear->y_cols;
        part.shape.y_first += linear->y_first;
    }
    for (uint32_t i = 0; i < n; i++) {
        part.shape.weight_offset[i] = weights[i].offset;
        part.shape.weight_rows[i] = weights[i].n_rows;
        if (!gated || i == 0)
            part.shape.n_tiles += tiles_of(&weights[i]);
    }
    return part;
}

/* Splits a linear where the type changes; at most three parts. */
static uint32_t make_parts(const Ops *ops, const OpsLinear *linear, Part *ret)
{
    uint32_t n_parts = 0;

    for (uint32_t first = 0, end; first < linear->n_weights; first = end) {
        uint32_t epilogue = linear->epilogue;

        for (end = first + 1; end < linear->n_weights && linear->weights[end].type == linear->weights[first].type;)
            end++;
        if (linear->epilogue == OPS_EPILOGUE_SWIGLU && end - first == 1)
            epilogue = first == 0 ? OPS_EPILOGUE_STORE : EPILOGUE_GATE;
        ret[n_parts++] = make_part(ops, linear, first, end - first, epilogue);
    }
    return n_parts;
}

static int check_linear(const Ops *ops, const OpsLinear *linear, uint32_t n_rows)
{
    bool gated = linear->epilogue == OPS_EPILOGUE_SWIGLU;
    uint64_t y_end = linear->y_first;

    if (n_rows == 0 || n_rows > ops->options.max_rows || linear->n_weights == 0 || linear->n_weights > 3 ||
        (gated && (linear->n_weights != 2 || linear->weights[0].n_rows != linear->weights[1].n_rows)))
        return error_origin(-EINVAL);
    for (uint32_t i = 0; i < linear->n_weights; i++) {
        const OpsWeight *weight = &linear->weights[i];

        if (weight->n_cols != linear->weights[0].n_cols || weight->n_cols > ops->options.max_columns ||
            weight->n_cols % weight->type->block_elements != 0 || weight->n_rows == 0)
            return error_origin(-EINVAL);
        y_end += gated && i > 0 ? 0 : weight->n_rows;
    }
    return linear->y_cols > 0 && y_end > linear->y_cols ? error_origin(-EINVAL) : 0;
}

/* Every launch of a chain. */
static int launch(Ops *ops, GpuKernel *kernel, GpuRange range)
{
    GpuWait wait = ops->wait;
    GpuEvent *event = NULL;
    int r;

    ops->wait = GPU_WAIT_NONE; /* what follows comes after it on the same queue */
    r = gpu_launch(kernel, range, wait, ops->ret_event ? &event : NULL);
    if (!r && ops->ret_event) {
        (void)gpu_event_unref(*ops->ret_event);
        *ops->ret_event = event;
    }
    return r;
}

/* ---- stages on x86 CPUs ------------------------------------------------------------------------------------------ */

enum { STAGES_N, STAGES_N_ROWS, STAGES_ACTS, STAGES_ACT_WORDS, STAGES_SYNC, STAGES_FIRST, STAGE_ARGUMENTS = 8 };

static int set_stage(GpuKernel *kernel, uint32_t stage, const Part *part)
{
    unsigned argument = STAGES_FIRST + stage * STAGE_ARGUMENTS;
    const OpsLinear *linear = part->linear;
    int r;

    r = gpu_kernel_set_bytes(kernel, argument, &part->shape, sizeof(part->shape));
    if (!r)
        r = gpu_kernel_set_buffer(kernel, argument + 1, linear->x);
    if (!r)
        r = gpu_kernel_set_buffer(kernel, argument + 2, linear->x_rows);
    if (!r)
        r = gpu_kernel_set_buffer(kernel, argument + 3, linear->norm_weight);
    for (uint32_t i = 0; i < 3 && !r; i++)
        r = gpu_kernel_set_buffer(kernel, argument + 4 + i, i < part->n_weights ? part->weights[i].buffer : NULL);
    if (!r)
        r = gpu_kernel_set_buffer(kernel, argument + 7, linear->y);
    return r;
}

static void share_out(const Ops *ops, Part *part, uint32_t n_rows)
{
    bool few = n_rows > 2 && n_rows <= OPS_GROUP_ROWS;
    uint64_t shares = (uint64_t)ops->n_groups * (few ? TICKETS_PER_THREAD_FEW : TICKETS_PER_THREAD);
    uint64_t n_row_steps = (n_rows + TICKET_ROWS - 1) / TICKET_ROWS, tiles = part->shape.n_tiles * n_row_steps / shares;
    uint64_t most = TICKET_BYTES / (part->tile_bytes + 1);

    if (n_rows <= OPS_GROUP_ROWS)
        tiles = MIN(tiles, most);
    part->shape.tiles_per_ticket = (uint32_t)MAX(tiles, 1u);
    part->shape.rows_per_ticket = part->shape.epilogue == EPILOGUE_NONE ? OPS_GROUP_ROWS : TICKET_ROWS;
}

/* Up to OPS_STAGES parts of one type.  @shared: there is one part, which prepares activations for all groups or uses those. */
static int launch_stages(Ops *ops, OpsKernels *kernels, Part *parts, uint32_t n_parts, uint32_t n_rows, bool shared)
{
    GpuKernel *kernel = kernels->product;
    int r = 0;

    for (uint32_t i = 0; i < n_parts && !r; i++) {
        share_out(ops, &parts[i], n_rows);
        r = set_stage(kernel, i, &parts[i]);
    }
    /* A buffer that an earlier launch had may be gone by now, and a driver looks at all arguments. */
    for (uint32_t i = n_parts; i < kernels->n_stages_set && !r; i++)
        r = set_stage(kernel, i, &no_part);
    kernels->n_stages_set = n_parts;
    if (!r)
        r = gpu_kernel_set_u32(kernel, STAGES_N, n_parts);
    if (!r)
        r = gpu_kernel_set_u32(kernel, STAGES_N_ROWS, n_rows);
    if (!r)
        r = gpu_kernel_set_buffer(kernel, STAGES_ACTS, ops->act);
    if (!r)
        r = gpu_kernel_set_u32(kernel, STAGES_ACT_WORDS,
                               shared ? 0 : (uint32_t)ops_act_group_words(ops->options.max_columns));
    if (!r)
        r = gpu_kernel_set_buffer(kernel, STAGES_SYNC, ops->sync);
    if (!r)
        r = launch(ops, kernel, GPU_RANGE_1D(ops->n_groups, 1));
    return r;
}

/* ---- prepared rows ----------------------------------------------------------------------------------------------- */

/* Devices other than x86 CPUs: a work-group for each row. */
static int launch_prepare_rows(Ops *ops, OpsKernels *kernels, const Part *part, uint32_t n_rows)
{
    const OpsLinear *linear = part->linear;
    GpuKernel *kernel = kernels->prepare;
    int r;

    r = gpu_kernel_set_buffer(kernel, 0, linear->x);
    if (!r)
        r = gpu_kernel_set_buffer(kernel, 1, linear->x_rows);
    if (!r)
        r = gpu_kernel_set_bytes(kernel, 2, &linear->x_rows_offset, sizeof(linear->x_rows_offset));
    if (!r)
        r = gpu_kernel_set_buffer(kernel, 3, linear->norm_weight);
    if (!r)
        r = gpu_kernel_set_bytes(kernel, 4, &linear->norm_offset, sizeof(linear->norm_offset));
    if (!r)
        r = gpu_kernel_set_f32(kernel, 5, linear->norm_eps);
    if (!r)
        r = gpu_kernel_set_u32(kernel, 6, part->shape.n_cols);
    if (!r)
        r = gpu_kernel_set_u32(kernel, 7, part->shape.terms);
    if (!r)
        r = gpu_kernel_set_buffer(kernel, 8, ops->act);
    if (!r)
        r = launch(ops, kernel, GPU_RANGE_2D(OPS_LOCAL_ITEMS, n_rows, OPS_LOCAL_ITEMS, 1));
    return r;
}

/* Devices other than x86 CPUs: a work-item for each row of the weights and group of rows. */
static int launch_linear_rows(Ops *ops, OpsKernels *kernels, const Part *part, uint32_t n_rows)
{
    size_t items = ((size_t)part->shape.n_tiles * WEIGHT_TILE_ROWS + OPS_LOCAL_ITEMS - 1) / OPS_LOCAL_ITEMS * OPS_LOCAL_ITEMS;
    uint32_t n_groups = (n_rows + OPS_GROUP_ROWS - 1) / OPS_GROUP_ROWS;
    GpuKernel *kernel = kernels->product;
    int r;

    r = gpu_kernel_set_bytes(kernel, 0, &part->shape, sizeof(part->shape));
    for (uint32_t i = 0; i < 3 && !r; i++)
        r = gpu_kernel_set_buffer(kernel, 1 + i, i < part->n_weights ? part->weights[i].buffer : NULL);
    if (!r)
        r = gpu_kernel_set_buffer(kernel, 4, ops->act);
    if (!r)
        r = gpu_kernel_set_u32(kernel, 5, n_rows);
    if (!r)
        r = gpu_kernel_set_buffer(kernel, 6, part->linear->y);
    if (!r)
        r = launch(ops, kernel, GPU_RANGE_2D(items, n_groups, OPS_LOCAL_ITEMS, 1));
    return r;
}

/* Activations of a part for all rows, to be used by launch_product() of parts with the same input. */
static int launch_prepare(Ops *ops, OpsKernels *kernels, const Part *part, uint32_t n_rows)
{
    Part prepare = *part;

    if (!ops->vectors)
        return launch_prepare_rows(ops, kernels, part, n_rows);
    prepare.n_weights = 0;
    prepare.shape.epilogue = EPILOGUE_NONE;
    prepare.shape.n_tiles = 1;
    return launch_stages(ops, kernels, &prepare, 1, n_rows, true);
}

static int launch_product(Ops *ops, OpsKernels *kernels, Part *part, uint32_t n_rows)
{
    return ops->vectors ? launch_stages(ops, kernels, part, 1, n_rows, true)
                        : launch_linear_rows(ops, kernels, part, n_rows);
}

int ops_linear_warm(Ops *ops, OpsKernels *kernels)
{
    Part nothing = no_part;
    int r;

    kernels->n_stages_set = OPS_STAGES;
    r = launch_prepare(ops, kernels, &nothing, 1);
    nothing.shape.n_tiles = 1; /* a tile without valid rows or columns */
    if (!r)
        r = launch_product(ops, kernels, &nothing, 1);
    return r;
}

/* ---- linears ----------------------------------------------------------------------------------------------------- */

static bool activations_are_alike(const Ops *ops, const OpsWeight *a, const OpsWeight *b)
{
    return ops->options.exact || (a->type->block_elements == 1) == (b->type->block_elements == 1);
}

static int linear_prepared(Ops *ops, const OpsLinear *linear, uint32_t n_rows)
{
    Part parts[3];
    uint32_t n_parts = make_parts(ops, linear, parts);
    int r;

    for (uint32_t i = 0; i < n_parts; i++) {
        const WeightTypeInfo *type = parts[i].weights[0].type;
        OpsKernels *kernels = &ops->kernels[type->type];

        r = ops_require_type(ops, type);
        if (r)
            return r;
        if (i == 0 || !activations_are_alike(ops, parts[i].weights, parts[i - 1].weights))
            r = launch_prepare(ops, kernels, &parts[i], n_rows);
        if (!r)
            r = launch_product(ops, kernels, &parts[i], n_rows);
        if (r)
            return r;
    }
    return 0;
}

/* Collects stages of one type and launches them when the type changes or no more fit. */
static int chain_stages(Ops *ops, const OpsLinear *linears, uint32_t n, uint32_t n_rows)
{
    OpsKernels *kernels = NULL;
    Part stages[OPS_STAGES], parts[3];
    uint32_t n_stages = 0;
    int r;

    for (uint32_t i = 0; i < n; i++) {
        uint32_t n_parts = make_parts(ops, &linears[i], parts);

        for (uint32_t j = 0; j < n_parts; j++) {
            const WeightTypeInfo *type = parts[j].weights[0].type;

            if (n_stages == OPS_STAGES || (n_stages > 0 && stages[0].weights[0].type != type)) {
                r = launch_stages(ops, kernels, stages, n_stages, n_rows, false);
                if (r)
                    return r;
                n_stages = 0;
            }
            if (n_stages == 0) {
                r = ops_require_type(ops, type);
                kernels = &ops->kernels[type->type];
                if (r)
                    return r;
            }
            stages[n_stages++] = parts[j];
        }
    }
    return n_stages > 0 ? launch_stages(ops, kernels, stages, n_stages, n_rows, false) : 0;
}

static int run_chain(Ops *ops, const OpsLinear *linears, uint32_t n, uint32_t n_rows)
{
    int r = 0;

    for (uint32_t i = 0; i < n && !r; i++)
        r = check_linear(ops, &linears[i], n_rows);
    if (!r && ops->vectors && n_rows <= OPS_GROUP_ROWS)
        return chain_stages(ops, linears, n, n_rows);
    for (uint32_t i = 0; i < n && !r; i++)
        r = linear_prepared(ops, &linears[i], n_rows);
    return r;
}

int ops_chain_after(Ops *ops, const OpsLinear *linears, uint32_t n, uint32_t n_rows, GpuWait wait, GpuEvent **ret_event)
{
    GpuEvent *event = NULL;
    int r;

    ops->wait = wait;
    ops->ret_event = &event;
    r = run_chain(ops, linears, n, n_rows);
    ops->wait = GPU_WAIT_NONE;
    ops->ret_event = NULL;
    if (r) {
        (void)gpu_event_unref(event);
        return r;
    }
    *ret_event = event;
    return 0;
}

int ops_chain(Ops *ops, const OpsLinear *linears, uint32_t n, uint32_t n_rows)
{
    return run_chain(ops, linears, n, n_rows);
}

int ops_linear(Ops *ops, const OpsLinear *linear, uint32_t n_rows)
{
    return ops_chain(ops, linear, 1, n_rows);
}
