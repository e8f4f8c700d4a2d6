/* SPDX-License-Identifier: Apache-2.0 */
/* Random programs of cache operations. */

#include "tests/lib/random-program.h"

#include <string.h>
#include <time.h>

uint32_t random_below(Random *random, uint32_t n)
{
    uint64_t x = random->state += 0x9e3779b97f4a7c15u;

    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (uint32_t)(((x ^ (x >> 31)) >> 32) * n >> 32);
}

static const KvShape shapes[] = {
    {.n_heads = 4, .n_kv_heads = 2, .k_head_dim = 32, .v_head_dim = 32, .rotary_dim = 32},
    {.n_heads = 2, .n_kv_heads = 1, .k_head_dim = 64, .v_head_dim = 32, .rotary_dim = 48},
    {.n_heads = 3, .n_kv_heads = 3, .k_head_dim = 80, .v_head_dim = 80, .rotary_dim = 40},
    {.n_heads = 2, .n_kv_heads = 1, .k_head_dim = 144, .v_head_dim = 128, .rotary_dim = 16},
};

/* Those that a short run uses come first. */
typedef enum Form {
    FORM_LEAT,
    FORM_F16,
    FORM_F32,
    FORM_LEAT_8_8,
    FORM_LEAT_4_5,
    FORM_LEAT_6_3,
    FORM_LEAT_2_2,
    FORM_LEAT_AFTER_ROPE,
    FORM_LEAT_BARE,
    FORM_LEAT_LONG_TAIL,
    FORM_QUANTO,
    FORM_HQQ,
    FORM_FP8,
    FORM_X_MAX,
} Form;
#define SHORT_SHAPES 2
#define SHORT_FORMS  FORM_LEAT_8_8

KvForm random_form(uint32_t index)
{
    KvForm form = kv_form_default(KV_FORM_LEAT);

    switch ((Form)(index % FORM_X_MAX)) {
    case FORM_LEAT:
        return form;
    case FORM_F16:
        return kv_form_default(KV_FORM_F16);
    case FORM_F32:
        return kv_form_default(KV_FORM_F32);
    case FORM_LEAT_8_8:
        return kv_form_leat(8, 8);
    case FORM_LEAT_4_5:
        return kv_form_leat(4, 5);
    case FORM_LEAT_6_3:
        form = kv_form_leat(6, 3);
        form.group_dims = 32;
        return form;
    case FORM_LEAT_2_2:
        form = kv_form_leat(2, 2);
        form.levels = KV_LEVELS_PLAIN;
        return form;
    case FORM_LEAT_AFTER_ROPE:
        form.centre = KV_CENTRE_AFTER_ROPE;
        form.sink_tokens = 0;
        return form;
    case FORM_LEAT_BARE:
        form.centre = KV_CENTRE_NONE;
        form.rotation = KV_ROTATION_NONE;
        form.pair_scale = true;
        return form;
    case FORM_LEAT_LONG_TAIL:
        form.tail_tokens = 96;
        form.sink_tokens = 32;
        return form;
    case FORM_QUANTO:
        return kv_form_default(KV_FORM_QUANTO);
    case FORM_HQQ:
        return kv_form_default(KV_FORM_HQQ);
    case FORM_FP8:
        return kv_form_default(KV_FORM_FP8);
    case FORM_X_MAX:
        break;
    }
    return form;
}

uint32_t random_source(const RandomConfig *config, uint32_t layer)
{
    return config->layers[layer].kind == RANDOM_SHARED ? config->layers[layer].source : layer;
}

KvShape random_shape(const RandomConfig *config, uint32_t layer)
{
    const RandomLayer *l = &config->layers[random_source(config, layer)];
    KvShape shape = shapes[l->shape % N_ELEMENTS(shapes)];

    if (l->kind == RANDOM_CROSS)
        shape.rotary_dim = 0;
    return shape;
}

uint32_t random_form_of(const RandomConfig *config, uint32_t layer)
{
    const RandomLayer *l = &config->layers[random_source(config, layer)];
    bool windowed = l->kind == RANDOM_SLIDING || l->kind == RANDOM_CHUNKED;

    if (l->form > 0)
        return (l->form - 1) % FORM_X_MAX;
    if (windowed && config->only_non_sliding && config->home == KV_HOME_HOST)
        return config->exact ? FORM_F32 : FORM_F16;
    return config->form % FORM_X_MAX;
}

bool random_has_cross(const RandomConfig *config)
{
    for (uint32_t l = 0; l < config->n_layers; l++)
        if (config->layers[l].kind == RANDOM_CROSS)
            return true;
    return false;
}

uint32_t random_max_row_values(void)
{
    uint32_t most = 0;

    for (size_t i = 0; i < N_ELEMENTS(shapes); i++)
        most = MAX(most, (uint32_t)kv_row_values(&shapes[i]));
    return most;
}

/* ---- making -------------------------------------------------------------------------------------------------------------------- */

/* What a layer may be beside full: some programs are of full layers alone, others mix full with what @mix chooses. */
static void make_layer(RandomConfig *config, uint32_t i, uint32_t mix, uint32_t window, Random *random, bool wide)
{
    RandomLayer *layer = &config->layers[i];
    bool other = random_below(random, 2);

    *layer = (RandomLayer){.shape = config->layers[0].shape};
    if (mix == 1 && other)
        *layer = (RandomLayer){.kind = RANDOM_SLIDING, .window = window, .shape = layer->shape};
    if (mix == 2 && other)
        *layer = (RandomLayer){.kind = RANDOM_CHUNKED, .window = window, .shape = layer->shape};
    if ((mix == 3 || mix == 6) && other)
        *layer = (RandomLayer){.kind = random_below(random, 2) ? RANDOM_NONE : RANDOM_FULL, .state = true, .shape = layer->shape};
    if (mix == 4 && other)
        *layer = (RandomLayer){.kind = RANDOM_CROSS, .shape = layer->shape};
    if (mix == 5)
        *layer = (RandomLayer){.kind = (RandomKind)random_below(random, RANDOM_SHARED), .state = random_below(random, 4) == 0,
                               .shape = layer->shape};
    if (layer->kind == RANDOM_SLIDING || layer->kind == RANDOM_CHUNKED)
        layer->window = window;
    if (wide && i > 0 && random_below(random, 3) == 0)
        layer->shape = random_below(random, N_ELEMENTS(shapes));
    if (random_below(random, wide ? 4 : 10) == 0)
        layer->form = 1 + random_below(random, wide ? FORM_X_MAX : SHORT_FORMS);
    if (i > 0 && random_below(random, 6) == 0 && config->layers[0].kind != RANDOM_NONE)
        *layer = (RandomLayer){.kind = RANDOM_SHARED, .source = 0};
}

static void make_layers(RandomConfig *config, Random *random, bool wide)
{
    static const uint32_t windows[] = {64, 33, 1, 20, 100, 300};
    /* One window a program: each is a set of kernels. */
    uint32_t window = windows[random_below(random, wide ? N_ELEMENTS(windows) : 2)], mix = random_below(random, 8);
    bool any = false;

    config->n_layers = 1 + random_below(random, wide ? RANDOM_MAX_LAYERS : 3);
    config->layers[0].shape = random_below(random, wide ? N_ELEMENTS(shapes) : SHORT_SHAPES);
    for (uint32_t i = 0; i < config->n_layers; i++) {
        make_layer(config, i, mix, window, random, wide);
        any = any || (config->layers[i].kind != RANDOM_NONE && config->layers[i].kind != RANDOM_CROSS);
    }
    if (!any) /* some layer must have tokens of its own */
        config->layers[0] = (RandomLayer){.shape = config->layers[0].shape};
}

static void make_policy(RandomConfig *config, Random *random, bool unified_memory)
{
    static const uint32_t budgets_kib[] = {0, 0, 0, 300, 1200}, device_kib[] = {0, 0, 0, 1, 200, 900};

    config->growth = random_below(random, 3) ? KV_GROWTH_DYNAMIC : KV_GROWTH_STATIC;
    config->home = random_below(random, 3) ? KV_HOME_HOST : KV_HOME_DEVICE;
    config->transfer = (KvTransfer)random_below(random, unified_memory ? 3 : 2);
    config->n_slots = 1 + random_below(random, 4);
    config->tile_blocks = random_below(random, 4);
    config->host_budget_kib = budgets_kib[random_below(random, N_ELEMENTS(budgets_kib))];
    config->device_more_kib = device_kib[random_below(random, N_ELEMENTS(device_kib))];
}

static void make_config(RandomConfig *config, Random *random, bool unified_memory, bool wide)
{
    static const uint32_t lengths[] = {1024, 1024, 700, 321, 64};

    memset(config, 0, sizeof(*config));
    config->form = random_below(random, wide ? FORM_X_MAX : SHORT_FORMS);
    config->exact = !wide || random_below(random, 3) > 0;
    config->calibrated = random_below(random, 2);
    config->max_tokens = lengths[random_below(random, N_ELEMENTS(lengths))];
    config->only_non_sliding = random_below(random, 3) == 0;
    config->max_sequences = 2 + random_below(random, 4);
    make_layers(config, random, wide);
    make_policy(config, random, unified_memory);
}

static uint32_t some_tokens(Random *random)
{
    static const uint32_t limits[] = {1, 1, 1, 4, 34, 70, 200};

    return 1 + random_below(random, limits[random_below(random, N_ELEMENTS(limits))]);
}

/* Low numbers more often, so that operations meet. */
static uint32_t some_sequence(Random *random)
{
    return random_below(random, 1 + random_below(random, RANDOM_MAX_SEQUENCES));
}

/* Different sequences with a number each, so that the rows of all are one pass. */
static void make_items(RandomOp *op, Random *random, uint32_t max_sequences)
{
    uint32_t wanted = 1 + random_below(random, random_below(random, 3) ? 1 : max_sequences), rows = 0;
    uint32_t first = some_sequence(random);

    for (uint32_t i = 0; i < wanted; i++) {
        uint32_t n = some_tokens(random);

        if (rows + n > RANDOM_MAX_ROWS)
            break;
        rows += n;
        op->args[op->n_args++] = (RandomArg){(first + i) % RANDOM_MAX_SEQUENCES, n};
    }
}

static void make_rows(RandomOp *op, Random *random)
{
    uint32_t n = 2 + random_below(random, 3), first = some_sequence(random);

    for (uint32_t i = 0; i < n; i++)
        op->args[op->n_args++] =
            (RandomArg){(first + i) % RANDOM_MAX_SEQUENCES, (first + random_below(random, n)) % RANDOM_MAX_SEQUENCES};
}

static void make_op(const RandomProgram *program, RandomOp *op, Random *random)
{
    static const RandomOpKind kinds[] = {
        RANDOM_PASS, RANDOM_PASS, RANDOM_PASS,       RANDOM_PASS, RANDOM_PASS, RANDOM_PASS, RANDOM_PASS,    RANDOM_ABORT, RANDOM_CROP,
        RANDOM_CROP, RANDOM_CROP, RANDOM_CHECKPOINT, RANDOM_FORK, RANDOM_FORK, RANDOM_FREE, RANDOM_REORDER, RANDOM_CLEAR,
        RANDOM_RECORD, RANDOM_RECORD, RANDOM_UNDO, RANDOM_UNDO, RANDOM_UNDO, RANDOM_SELECT,
        RANDOM_MIGRATE, RANDOM_SAVE, RANDOM_RESTORE,
    };

    *op = (RandomOp){.kind = kinds[random_below(random, N_ELEMENTS(kinds))], .seed = random_below(random, 1 << 20)};
    switch (op->kind) {
    case RANDOM_ABORT:
        op->n = random_below(random, program->config.n_layers + 1);
        make_items(op, random, program->config.max_sequences);
        break;
    case RANDOM_PASS:
        make_items(op, random, program->config.max_sequences);
        break;
    case RANDOM_REORDER:
        op->n = random_below(random, 2);
        make_rows(op, random);
        break;
    case RANDOM_SELECT:
        op->n = 1 + random_below(random, RANDOM_MAX_ARGS);
        make_rows(op, random);
        break;
    case RANDOM_UNDO:
        op->n = random_below(random, random_below(random, 3) ? 6 : 60);
        make_rows(op, random);
        op->n_args = random_below(random, 3) ? 1 : 1 + random_below(random, op->n_args);
        break;
    case RANDOM_CROP:
        op->n_args = 1;
        op->args[0] = (RandomArg){some_sequence(random), random_below(random, random_below(random, 2) ? 12 : 150)};
        break;
    case RANDOM_SAVE:
    case RANDOM_RESTORE:
        op->n_args = 1;
        op->args[0] = (RandomArg){some_sequence(random), random_below(random, RANDOM_MAX_IMAGES)};
        break;
    case RANDOM_FORK:
        op->n_args = 1;
        op->args[0] = (RandomArg){some_sequence(random), random_below(random, RANDOM_MAX_SEQUENCES)};
        break;
    case RANDOM_MIGRATE:
    case RANDOM_CHECKPOINT:
    case RANDOM_RECORD:
    case RANDOM_FREE:
    case RANDOM_CLEAR:
    case RANDOM_OP_X_MAX:
        op->n_args = 1;
        op->args[0].sequence = some_sequence(random);
        break;
    }
}

void random_program_make(RandomProgram *program, uint64_t seed, bool unified_memory, bool wide)
{
    Random random = {seed * 0x2545f4914f6cdd1du};

    memset(program, 0, sizeof(*program));
    make_config(&program->config, &random, unified_memory, wide);
    program->n_ops = 10 + random_below(&random, 50);
    for (uint32_t i = 0; i < program->n_ops; i++)
        make_op(program, &program->ops[i], &random);
}

void random_policy_vary(RandomConfig *config, uint64_t seed, bool unified_memory)
{
    Random random = {~seed};

    make_policy(config, &random, unified_memory);
}

/* ---- text ---------------------------------------------------------------------------------------------------------------------------- */

static const char *const op_names[] = {
    [RANDOM_PASS] = "pass", [RANDOM_ABORT] = "abort", [RANDOM_CROP] = "crop",   [RANDOM_CHECKPOINT] = "checkpoint",
    [RANDOM_FORK] = "fork", [RANDOM_FREE] = "free",   [RANDOM_CLEAR] = "clear", [RANDOM_REORDER] = "reorder",
    [RANDOM_SELECT] = "select", [RANDOM_RECORD] = "record", [RANDOM_UNDO] = "undo",
    [RANDOM_MIGRATE] = "migrate", [RANDOM_SAVE] = "save", [RANDOM_RESTORE] = "restore",
};

void random_program_print(const RandomProgram *program, FILE *to)
{
    const RandomConfig *c = &program->config;

    fprintf(to, "config form %u exact %d calibrated %d growth %d home %d stay %d transfer %d slots %u tile %u tokens %u "
                "sequences %u host-kib %u device-kib %u\n",
            c->form, c->exact, c->calibrated, (int)c->growth, (int)c->home,
            c->only_non_sliding, (int)c->transfer, c->n_slots, c->tile_blocks, c->max_tokens, c->max_sequences, c->host_budget_kib, c->device_more_kib);
    for (uint32_t i = 0; i < c->n_layers; i++)
        fprintf(to, "layer %d window %u source %u shape %u form %u state %d\n", (int)c->layers[i].kind, c->layers[i].window,
                c->layers[i].source, c->layers[i].shape, c->layers[i].form, c->layers[i].state);
    for (uint32_t i = 0; i < program->n_ops; i++) {
        const RandomOp *op = &program->ops[i];

        fprintf(to, "%s %u %u", op_names[op->kind], op->n, op->seed);
        for (uint32_t a = 0; a < op->n_args; a++)
            fprintf(to, " %u:%u", op->args[a].sequence, op->args[a].value);
        fprintf(to, "\n");
    }
}

static bool read_config(RandomConfig *c, const char *line)
{
    unsigned flags[3], axes[3];
    int n = sscanf(line,
                   "config form %u exact %u calibrated %u growth %u home %u stay %u transfer %u slots %u tile %u tokens %u "
                   "sequences %u host-kib %u device-kib %u",
                   &c->form, &flags[0], &flags[1], &axes[0], &axes[1], &flags[2], &axes[2], &c->n_slots,
                   &c->tile_blocks, &c->max_tokens, &c->max_sequences, &c->host_budget_kib, &c->device_more_kib);

    if (n != 13 || c->max_tokens > RANDOM_MAX_TOKENS)
        return false;
    c->exact = flags[0];
    c->calibrated = flags[1];
    c->only_non_sliding = flags[2];
    c->growth = (KvGrowth)axes[0];
    c->home = (KvHome)axes[1];
    c->transfer = (KvTransfer)axes[2];
    return true;
}

static bool read_layer(RandomConfig *c, const char *line)
{
    unsigned kind, state;
    RandomLayer *layer = &c->layers[c->n_layers];

    if (c->n_layers == RANDOM_MAX_LAYERS ||
        sscanf(line, "layer %u window %u source %u shape %u form %u state %u", &kind, &layer->window, &layer->source, &layer->shape,
               &layer->form, &state) != 6 ||
        kind >= RANDOM_KIND_X_MAX || (kind == RANDOM_SHARED && layer->source >= c->n_layers))
        return false;
    layer->kind = (RandomKind)kind;
    layer->state = state;
    c->n_layers++;
    return true;
}

static bool read_op(RandomProgram *program, const char *line)
{
    RandomOp *op = &program->ops[program->n_ops];
    char name[16];
    int at = 0;

    if (program->n_ops == RANDOM_MAX_OPS || sscanf(line, "%15s %u %u%n", name, &op->n, &op->seed, &at) != 3)
        return false;
    while (op->kind < RANDOM_OP_X_MAX && strcmp(op_names[op->kind], name) != 0)
        op->kind++;
    if (op->kind == RANDOM_OP_X_MAX)
        return false;
    for (line += at;; line += at) {
        RandomArg arg;

        if (sscanf(line, " %u:%u%n", &arg.sequence, &arg.value, &at) != 2)
            break;
        if (op->n_args == RANDOM_MAX_ARGS || arg.sequence >= RANDOM_MAX_SEQUENCES)
            return false;
        op->args[op->n_args++] = arg;
    }
    program->n_ops++;
    return true;
}

int random_program_read(RandomProgram *ret, FILE *from, ErrorDetail *reterr)
{
    char line[512];
    long at = ftell(from);

    memset(ret, 0, sizeof(*ret));
    for (; fgets(line, sizeof(line), from); at = ftell(from)) {
        bool good;

        if (line[0] == '#' || line[0] == '\n')
            continue;
        if (ret->config.n_layers > 0 && strncmp(line, "config ", 7) == 0) {
            fseek(from, at, SEEK_SET); /* of the next one */
            return 0;
        }
        good = strncmp(line, "config ", 7) == 0  ? read_config(&ret->config, line)
               : strncmp(line, "layer ", 6) == 0 ? read_layer(&ret->config, line)
                                                 : read_op(ret, line);
        if (!good)
            return error_detail_set(reterr, -EINVAL, "this makes no sense: %s", line);
    }
    return ret->config.n_layers > 0 ? 0 : 1;
}

/* ---- shrinking ------------------------------------------------------------------------------------------------------------------------ */

static uint64_t now_usec(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

typedef struct Shrink {
    RandomProgram *best;
    bool (*fails)(const RandomProgram *program, void *userdata);
    void *userdata;
    uint64_t end_usec;
} Shrink;

static bool try(Shrink *shrink, const RandomProgram *smaller)
{
    if (now_usec() >= shrink->end_usec || !shrink->fails(smaller, shrink->userdata))
        return false;
    *shrink->best = *smaller;
    return true;
}

static bool without_ops(Shrink *shrink, uint32_t first, uint32_t n)
{
    RandomProgram smaller = *shrink->best;

    memmove(smaller.ops + first, smaller.ops + first + n, (smaller.n_ops - first - n) * sizeof(smaller.ops[0]));
    smaller.n_ops -= n;
    return try(shrink, &smaller);
}

static bool fewer_ops(Shrink *shrink)
{
    bool any = false;

    for (uint32_t n = MAX(shrink->best->n_ops / 2, 1u); n > 0; n /= 2)
        for (uint32_t end = shrink->best->n_ops; end >= n; end -= n)
            any = without_ops(shrink, end - n, n) || any;
    return any;
}

static bool fewer_layers(Shrink *shrink)
{
    RandomProgram smaller = *shrink->best;

    if (smaller.config.n_layers == 1)
        return false;
    smaller.config.n_layers--;
    return try(shrink, &smaller);
}

/* Fewer sequences in an operation, fewer tokens. */
static bool smaller_args(Shrink *shrink)
{
    bool any = false;

    for (uint32_t i = 0; i < shrink->best->n_ops; i++) {
        for (uint32_t a = 0; a < shrink->best->ops[i].n_args; a++) {
            RandomProgram smaller = *shrink->best;
            RandomOp *op = &smaller.ops[i];

            if (op->n_args > 1) {
                memmove(op->args + a, op->args + a + 1, (op->n_args - a - 1) * sizeof(op->args[0]));
                op->n_args--;
                any = try(shrink, &smaller) || any;
            }
        }
        for (uint32_t a = 0; a < shrink->best->ops[i].n_args; a++)
            for (uint32_t less = shrink->best->ops[i].args[a].value / 2; less > 0; less /= 2) {
                RandomProgram smaller = *shrink->best;

                if (smaller.ops[i].kind != RANDOM_PASS && smaller.ops[i].kind != RANDOM_ABORT && smaller.ops[i].kind != RANDOM_CROP)
                    break;
                smaller.ops[i].args[a].value -= less;
                any = try(shrink, &smaller) || any;
            }
    }
    return any;
}

void random_program_shrink(RandomProgram *program, bool (*fails)(const RandomProgram *program, void *userdata), void *userdata,
                           uint64_t usec)
{
    Shrink shrink = {program, fails, userdata, now_usec() + usec};
    bool any = true;

    while (any && now_usec() < shrink.end_usec) {
        any = fewer_ops(&shrink);
        any = fewer_layers(&shrink) || any;
        any = smaller_args(&shrink) || any;
    }
}
