/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A toy model and everything that its caches do, on the simulated small GPU, while one thing fails: each call of OpenCL with one code, each
 * place that calls it with each code that the specification lists for it, each allocation of ours, commands that fail or do not end after
 * they were accepted, a device that is lost.
 *
 * What must hold: who succeeds has the logits of the run without faults, bit for bit; who fails says so, and when the device is still there
 * nothing has changed, so the same once more succeeds, and all that comes after it too; else the device is opened again and the next run is
 * right.  Nothing is left behind: no object of OpenCL, no block, no mapping, no descriptor, no byte of the device's budget.
 *
 * Some cases are taken from each row of cases, evenly spaced from a start that LEAT_FAULT_SEED moves (printed); LEAT_SOAK=1 takes all, and
 * with LEAT_SOAK_SLICES=N the N-th part of all that LEAT_FAULT_SEED names.
 */

#include "tests/lib/fault-rig.h"
#include "tests/lib/fault-script.h"
#include "tests/lib/sim-rig.h"
#include "tests/sim/clsim.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { MAX_ROWS = 160, N_PROMPT = 300 };

/* ---- scripts ------------------------------------------------------------------------------------------------------- */

static const ScriptOp whole[] = {
    {SCRIPT_FORWARD, 0, 0, N_PROMPT}, {SCRIPT_CHECKPOINT, 0, 0, 0}, {SCRIPT_FORWARD, 0, 0, 1},  {SCRIPT_FORK, 0, 1, 0},
    {SCRIPT_DECODE, 0, 0, 3},         {SCRIPT_FORWARD, 1, 0, 40},   {SCRIPT_CROP, 1, 0, 310},   {SCRIPT_DECODE, 0, 0, 3},
    {SCRIPT_RECORD, 0, 0, 0},         {SCRIPT_FORWARD, 0, 0, 2},    {SCRIPT_TAKE_BACK, 0, 0, 1}, {SCRIPT_DECODE, 0, 0, 3},
    {SCRIPT_SAVE, 0, 0, 0},           {SCRIPT_RESTORE, 0, 2, 0},    {SCRIPT_DECODE, 0, 0, 7},   {SCRIPT_MIGRATE, 0, 0, 0},
    {SCRIPT_DECODE, 0, 0, 7},         {SCRIPT_MIGRATE, 0, 0, 0},    {SCRIPT_DROP, 2, 0, 0},     {SCRIPT_SELECT, 2, 0, 4},
    {SCRIPT_DECODE, 0, 0, 15},        {SCRIPT_REORDER, 0, 0, 4},    {SCRIPT_DECODE, 0, 0, 15},  {SCRIPT_CLEAR, 3, 0, 0},
    {SCRIPT_FORWARD, 3, 0, 70},       {SCRIPT_DECODE, 0, 0, 9},
};
static const ScriptOp plain[] = {
    {SCRIPT_FORWARD, 0, 0, N_PROMPT}, {SCRIPT_FORWARD, 0, 0, 1}, {SCRIPT_FORK, 0, 1, 0}, {SCRIPT_DECODE, 0, 0, 3}, {SCRIPT_DECODE, 0, 0, 3},
};

#define OPS(array) .ops = (array), .n_ops = N_ELEMENTS(array)

/* The cache's ring is small, so that a layer takes several tiles. */
static KvPolicy policy_of(KvStrategy strategy)
{
    KvPolicy policy = kv_policy_preset(strategy, false);

    policy.tile_blocks = 1;
    return policy;
}

static const char *const shape_names[] = {"streamed", "resident", "weights"};

static ScriptShape shape_of(const char *name)
{
    ScriptShape shape = {.name = name, .options = {.max_rows = MAX_ROWS, .max_sequences = SCRIPT_CACHES, .deadline_usec = 120000000}};

    if (strcmp(name, "streamed") == 0) {
        shape.file = "tiny-llama-tied.gguf";
        shape.policy = policy_of(KV_STRATEGY_OFFLOADED_QUANTIZED);
        shape.other = policy_of(KV_STRATEGY_QUANTIZED);
        shape.other.form = shape.policy.form;
        shape.has_other = true;
    } else if (strcmp(name, "resident") == 0) {
        shape.file = "tiny-llama-tied.gguf";
        shape.policy = policy_of(KV_STRATEGY_STATIC);
        shape.policy.max_cache_tokens = SCRIPT_TOKENS;
        shape.other = policy_of(KV_STRATEGY_OFFLOADED);
        shape.has_other = true;
    } else {
        shape.file = "tiny-llama-mixed.gguf";
        shape.options.weights = (ModelWeights){.budget_bytes = 50000, .n_slots = 2};
        shape.policy = policy_of(KV_STRATEGY_OFFLOADED_QUANTIZED);
        shape = (ScriptShape){shape.name, shape.file, shape.options, shape.policy, shape.other, false, OPS(plain)};
    }
    if (!shape.ops) {
        shape.ops = whole;
        shape.n_ops = N_ELEMENTS(whole);
    }
    return shape;
}

/* ---- cases --------------------------------------------------------------------------------------------------------- */

/* The layer's own faults: events, losses, stalls. */
static clsim_set_faults_fn set_layer_faults;
static clsim_count_calls_fn count_layer_calls;

static void find_layer(void)
{
    cl_platform_id platforms[8];
    cl_uint n = 0;

    CHECK(clGetPlatformIDs(8, platforms, &n) == CL_SUCCESS && n > 0);
    for (cl_uint i = 0; i < n && i < 8 && !count_layer_calls; i++) {
        *(void **)&set_layer_faults = clGetExtensionFunctionAddressForPlatform(platforms[i], "clsimSetFaults");
        *(void **)&count_layer_calls = clGetExtensionFunctionAddressForPlatform(platforms[i], "clsimCountCalls");
    }
    CHECK(count_layer_calls);
}

typedef struct Bench {
    ScriptShape shape;
    ScriptWorld world;
    ScriptTape tape;
    FaultLive none; /* what is there when no world is open */
    uint64_t n_blocks_before;
    uint32_t n_cases, n_hit, n_lost, n_survived;
    bool hung; /* what a hung driver holds is left to it */
} Bench;

static void close_world(Bench *bench)
{
    script_world_close(&bench->world);
    if (!bench->hung)
        fault_rig_check_none_left(&bench->none, bench->n_blocks_before);
    fault_live(&bench->none);
    bench->hung = false;
}

static void open_world(Bench *bench)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;

    bench->n_blocks_before = fault_n_blocks_ever();
    if (script_world_open(&bench->shape, &bench->world, &detail))
        script_fail(__FILE__, __LINE__, "the world does not open: %s", detail.text);
}

static void run_clean(Bench *bench)
{
    ScriptEnd end;

    script_run(&bench->world, &bench->shape, &bench->tape, false, &end);
}

static void bench_open(Bench *bench, const char *name)
{
    *bench = (Bench){.shape = shape_of(name), .world = SCRIPT_WORLD_NULL};
    script_say("%s: without faults", name);
    /* What is made once and stays: in drivers, and in the files of compiled kernels. */
    open_world(bench);
    run_clean(bench);
    script_world_close(&bench->world);
    fault_live(&bench->none);
    open_world(bench);
    run_clean(bench);
    run_clean(bench);
    close_world(bench);
    open_world(bench);
}

static void bench_close(Bench *bench, const char *what)
{
    close_world(bench);
    (void)printf("%s, %s: %u cases, %u hit, %u ended in a lost device, %u were survived\n", bench->shape.name, what, bench->n_cases,
                 bench->n_hit, bench->n_lost, bench->n_survived);
    (void)fflush(stdout);
}

/* A fault is armed: runs the script, then, when the device was lost, opens it again and runs the next.  Whether the fault hit. */
static bool run_case(Bench *bench, bool layer)
{
    const char *function;
    ScriptEnd end;
    bool hit;

    script_run(&bench->world, &bench->shape, &bench->tape, true, &end);
    hit = fault_disarm(&function) || layer;
    if (layer)
        CHECK(set_layer_faults(NULL) == CL_SUCCESS);
    if (getenv("LEAT_FAULT_VERBOSE"))
        (void)printf("  %s: %s\n", function, end.n_failed ? end.said : "survived");
    if (end.n_failed && !hit)
        script_fail(__FILE__, __LINE__, "%s, though no fault was met", end.said);
    bench->n_cases++;
    bench->n_hit += hit;
    bench->n_lost += end.lost;
    bench->n_survived += hit && end.n_failed == 0;
    if (end.lost) {
        bench->hung = gpu_is_hung(bench->world.gpu);
        if (bench->hung && !layer)
            script_fail(__FILE__, __LINE__, "%s fails, and the device does not come to rest: %s", function, end.said);
        close_world(bench);
        open_world(bench);
        if (!getenv("LEAT_SOAK") || bench->n_lost % 8 == 0) /* the next case is as good, up to its fault */
            run_clean(bench);
    } else if (bench->n_cases % 16 == 0) {
        close_world(bench);
        open_world(bench);
    }
    return hit;
}

/* ---- scenarios ----------------------------------------------------------------------------------------------------- */

static Bench bench;

static void every_call(const char *name)
{
    uint32_t n, stride;

    bench_open(&bench, name);
    fault_count(false);
    run_clean(&bench);
    n = fault_n_calls();
    stride = fault_rig_stride(n, 5);
    (void)printf("%s: %u calls of OpenCL\n", name, n);
    for (uint32_t i = 1 + fault_rig_seed() % stride;; i += stride) {
        script_say("%s: call %u of OpenCL gives CL_OUT_OF_RESOURCES", name, i);
        fault_call(i, CL_OUT_OF_RESOURCES);
        if (!run_case(&bench, false))
            break;
    }
    bench_close(&bench, "every call");
}

static void every_site(const char *name)
{
    uint32_t n = 0, stride, next;
    size_t n_sites;

    bench_open(&bench, name);
    fault_count(true);
    run_clean(&bench);
    n_sites = fault_n_sites();
    for (size_t i = 0; i < n_sites; i++)
        n += (uint32_t)fault_site_at(i)->n_codes;
    stride = fault_rig_stride(n, 5);
    next = fault_rig_seed() % stride;
    (void)printf("%s: %zu places call OpenCL, %u cases\n", name, n_sites, n);
    for (size_t i = 0; i < n_sites; i++) {
        FaultSite site = *fault_site_at(i);

        for (uint32_t c = 0; c < site.n_codes; c++) {
            uint32_t at = 1 + (fault_rig_seed() + c) % site.n_calls;

            bool always = c == 0 && strcmp(site.function, "clSetEventCallback") == 0; /* what waits is not to wait in vain */

            if (next > 0 && !always) {
                next--;
                continue;
            }
            next = next > 0 ? next - 1 : stride - 1;
            script_say("%s: %s, place %zu, call %u of %u, gives %d", name, site.function, i, at, site.n_calls, (int)site.codes[c]);
            fault_site(&site, at, site.codes[c]);
            (void)run_case(&bench, false);
        }
    }
    bench_close(&bench, "every place with every code");
}

static void every_allocation(const char *name)
{
    uint32_t n, stride;

    bench_open(&bench, name);
    fault_count(false);
    run_clean(&bench);
    n = fault_n_allocations();
    stride = fault_rig_stride(n, 16);
    (void)printf("%s: %u allocations\n", name, n);
    for (uint32_t i = 1 + fault_rig_seed() % stride;; i += stride) {
        script_say("%s: allocation %u", name, i);
        fault_allocation(i);
        if (!run_case(&bench, false))
            break;
    }
    bench_close(&bench, "every allocation");
}

static void layer_fault(const char *name, const char *function, uint32_t i, const char *action)
{
    char fault[96];

    (void)snprintf(fault, sizeof(fault), "%s:%u:%s", function, i, action);
    script_say("%s: %s", name, fault);
    fault_count(false);
    CHECK(set_layer_faults(fault) == CL_SUCCESS);
    (void)run_case(&bench, true);
}

static uint32_t count_clean(const char *function)
{
    CHECK(set_layer_faults(NULL) == CL_SUCCESS);
    run_clean(&bench);
    return (uint32_t)count_layer_calls(function);
}

/* Commands that are accepted and then fail; contexts that are lost.  The last calls of a run are always among them: nothing comes after. */
static void layer_faults(const char *name, const char *function, const char *action, uint32_t wanted)
{
    uint32_t n = count_clean(function), stride;

    stride = fault_rig_stride(n, wanted);
    for (uint32_t i = 1 + fault_rig_seed() % stride, k = 0; i <= n && (k < wanted || getenv("LEAT_SOAK")); i += stride, k++)
        layer_fault(name, function, i, action);
    if (n > 0)
        layer_fault(name, function, n, action);
}

static void every_event(const char *name)
{
    static const char *const functions[] = {"clEnqueueNDRangeKernel", "clEnqueueWriteBuffer", "clEnqueueReadBuffer", "clEnqueueCopyBuffer"};

    bench_open(&bench, name);
    for (size_t f = 0; f < N_ELEMENTS(functions); f++)
        layer_faults(name, functions[f], "event=CL_OUT_OF_RESOURCES", 2);
    bench_close(&bench, "every event");
}

/* Commands that do not end, one of each kind; the last of some.  The deadline is short.  A few even of all cases, for what a hung device holds
 * is never given back. */
static void stalls(const char *name)
{
    static const char *const functions[] = {"clEnqueueNDRangeKernel", "clEnqueueWriteBuffer", "clEnqueueReadBuffer", "clEnqueueCopyBuffer"};

    bench_open(&bench, name);
    bench.shape.options.deadline_usec = 4000000;
    close_world(&bench);
    open_world(&bench);
    for (size_t f = 0; f < N_ELEMENTS(functions); f++) {
        uint32_t n = count_clean(functions[f]);

        for (uint32_t k = getenv("LEAT_SOAK") ? 8 : 1; n > 0 && k > 0; k--)
            layer_fault(name, functions[f], (f + k) % 2 ? n - (k - 1) * n / 8 : 1 + (fault_rig_seed() + 7 * k) % n, "stall");
    }
    MUST(bench.n_lost == bench.n_cases);
    layer_faults(name, "any", "reset", 4);
    bench_close(&bench, "stalls and resets");
}

#define SCENARIOS(kind)                                                                                                                 \
    static void kind##_streamed(void) { script_init(); find_layer(); kind("streamed"); }                                                 \
    static void kind##_resident(void) { script_init(); find_layer(); kind("resident"); }                                                 \
    static void kind##_weights(void) { script_init(); find_layer(); kind("weights"); }
SCENARIOS(every_call)
SCENARIOS(every_site)
SCENARIOS(every_allocation)
SCENARIOS(every_event)
SCENARIOS(stalls)

static const SimScenario scenarios[] = {
#define ROWS(kind) {#kind "-streamed", kind##_streamed}, {#kind "-resident", kind##_resident}, {#kind "-weights", kind##_weights}
    ROWS(every_call), ROWS(every_site), ROWS(every_allocation), ROWS(every_event), ROWS(stalls),
};

/* ---- tests --------------------------------------------------------------------------------------------------------- */

static void each_shape(const char *kind, const char *settings)
{
    for (size_t i = 0; i < N_ELEMENTS(shape_names); i++) {
        char name[64];

        (void)snprintf(name, sizeof(name), "%s-%s", kind, shape_names[i]);
        sim_rig_run_well(name, settings);
    }
}

static void a_failing_call_is_told_and_the_next_run_is_right(void **state)
{
    (void)state;
    each_shape("every_call", FAULT_RIG_DEVICE);
}

static void every_place_with_every_code(void **state)
{
    (void)state;
    each_shape("every_site", FAULT_RIG_DEVICE);
}

static void every_refused_allocation(void **state)
{
    (void)state;
    each_shape("every_allocation", FAULT_RIG_DEVICE);
}

static void every_command_that_fails_later(void **state)
{
    (void)state;
    each_shape("every_event", FAULT_RIG_LATER);
}

static void a_device_that_does_not_answer_is_left_and_the_next_run_is_right(void **state)
{
    (void)state;
    sim_rig_run_well("stalls-streamed", FAULT_RIG_STALLS);
    sim_rig_run_well("stalls-weights", FAULT_RIG_STALLS);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_failing_call_is_told_and_the_next_run_is_right),
        cmocka_unit_test(every_place_with_every_code),
        cmocka_unit_test(every_refused_allocation),
        cmocka_unit_test(every_command_that_fails_later),
        cmocka_unit_test(a_device_that_does_not_answer_is_left_and_the_next_run_is_right),
    };

    if (sim_rig_is_scenario(argc, argv, scenarios, N_ELEMENTS(scenarios)))
        return EXIT_SUCCESS;
    fault_rig_set_seed();
    cmocka_set_test_filter(getenv("CMOCKA_TEST_FILTER"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
