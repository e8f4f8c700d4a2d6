/* SPDX-License-Identifier: Apache-2.0 */
/* A script, once for each fault that may befall it. */

#include "tests/lib/fault-cases.h"
#include "tests/lib/fault-rig.h"
#include "tests/lib/sim-rig.h"
#include "tests/sim/clsim.h"

#include <string.h>
#include <unistd.h>

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

#define SHORT_USEC (4 * 1000 * 1000)

typedef struct FaultBench {
    ScriptShape shape;
    ScriptWorld world;
    ScriptTape tape;
    FaultLive none; /* what is there when no world is open */
    uint64_t n_blocks_before;
    uint32_t n_cases, n_hit, n_lost, n_survived;
    bool has_hung;
    bool hung; /* what a hung driver holds is left to it */
    bool hurries; /* waits SHORT_USEC for what does not end, but in runs without faults, which take their time on a busy machine */
    uint64_t patience_usec;
} FaultBench;

static FaultBench bench;

/* What was left to a hung driver may be given back later. */
static void allow_less(void)
{
    FaultLive live;

    fault_live(&live);
    bench.none = (FaultLive){MIN(bench.none.objects, live.objects), MIN(bench.none.blocks, live.blocks),
                             MIN(bench.none.mapped_bytes, live.mapped_bytes), MIN(bench.none.descriptors, live.descriptors)};
}

static void close_world(void)
{
    script_world_close(&bench.world);
    if (bench.has_hung)
        allow_less();
    if (!bench.hung)
        fault_rig_check_none_left(&bench.none, bench.n_blocks_before);
    fault_live(&bench.none);
    bench.hung = false;
}

static void open_world(void)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;

    bench.n_blocks_before = fault_n_blocks_ever();
    if (script_world_open(&bench.shape, &bench.world, &detail))
        script_fail(__FILE__, __LINE__, "the world does not open: %s", detail.text);
}

static void run_clean(void)
{
    ScriptEnd end;

    script_run(&bench.world, &bench.shape, &bench.tape, false, &end);
}

/* After a loss. */
static void reopen_world(void)
{
    close_world();
    bench.shape.deadline_usec = bench.patience_usec;
    open_world();
    if (!getenv("LEAT_SOAK") || bench.n_lost % 8 == 0) /* the next case is as good, up to its fault */
        run_clean();
    if (!bench.hurries)
        return;
    close_world();
    bench.shape.deadline_usec = SHORT_USEC;
    open_world();
}

static void bench_open(const ScriptShape *shape)
{
    script_init();
    find_layer();
    bench = (FaultBench){.shape = *shape, .world = SCRIPT_WORLD_NULL, .patience_usec = shape->deadline_usec};
    script_say("%s: without faults", shape->name);
    /* What is made once and stays: in drivers, and in the files of compiled kernels. */
    open_world();
    run_clean();
    script_world_close(&bench.world);
    fault_live(&bench.none);
    open_world();
    run_clean();
    run_clean();
    close_world();
    open_world();
}

static void bench_close(const char *what)
{
    close_world();
    (void)printf("%s, %s: %u cases, %u hit, %u ended in a lost device, %u were survived\n", bench.shape.name, what, bench.n_cases,
                 bench.n_hit, bench.n_lost, bench.n_survived);
    (void)fflush(stdout);
}

/* What fails: the call of that number, or of that number at a site, or an allocation, or what the layer is told. */
typedef struct Fault {
    uint32_t at;
    cl_int code;
    const FaultSite *site;
    bool allocation;
    const char *layer, *function; /* of whose calls the layer has it */
} Fault;

static void arm(const Fault *fault)
{
    if (fault->layer)
        CHECK(set_layer_faults(fault->layer) == CL_SUCCESS);
    else if (fault->allocation)
        fault_allocation(fault->at);
    else if (fault->site)
        fault_site(fault->site, fault->at, fault->code);
    else
        fault_call(fault->at, fault->code);
}

/* Runs the script, then, when the device was lost, opens it again and runs the next.  Whether the fault hit. */
static bool try_case(const Fault *fault, bool *ret_rests)
{
    const char *function;
    ScriptEnd end;
    bool hit;

    arm(fault);
    script_run(&bench.world, &bench.shape, &bench.tape, true, &end);
    hit = fault_disarm(&function);
    if (fault->layer) {
        hit = count_layer_calls(fault->function) >= fault->at;
        function = fault->function;
        CHECK(set_layer_faults(NULL) == CL_SUCCESS);
    }
    if (getenv("LEAT_FAULT_VERBOSE"))
        (void)printf("  %s: %s\n", function, end.n_failed ? end.said : "survived");
    if (end.n_failed && !hit)
        script_fail(__FILE__, __LINE__, "%s, though no fault was met", end.said);
    bench.n_cases++;
    bench.n_hit += hit;
    bench.n_lost += end.lost;
    bench.n_survived += hit && end.n_failed == 0;
    bench.hung = end.lost && gpu_is_hung(bench.world.gpu);
    bench.has_hung = bench.has_hung || bench.hung;
    *ret_rests = !bench.hung || fault->layer;
    if (!*ret_rests)
        (void)fprintf(stderr, "%s fails, and the device does not come to rest: %s\n", function, end.said);
    if (end.lost) {
        reopen_world();
    } else if (bench.n_cases % 16 == 0) {
        close_world();
        open_world();
    }
    return hit;
}

/* A device is given some seconds to come to rest, which may be few on a machine that does nearly nothing else but other things: what happens twice
 * is no chance. */
static bool run_case(const Fault *fault)
{
    bool rests, hit = try_case(fault, &rests);

    if (!rests) {
        hit = try_case(fault, &rests);
        MUST(rests);
    }
    return hit;
}

/* ---- kinds of faults ------------------------------------------------------------------------------------------------ */

static void refusals(const ScriptShape *shape)
{
    bench_open(shape);
    script_say("%s: what is refused after each operation", shape->name);
    bench.shape.refuses = true;
    run_clean();
    run_clean();
    bench_close("refusals");
}

static void every_call(const ScriptShape *shape)
{
    const char *name = shape->name;
    uint32_t n, stride;

    bench_open(shape);
    fault_count(false);
    run_clean();
    n = fault_n_calls();
    stride = fault_rig_stride(n, 5);
    (void)printf("%s: %u calls of OpenCL\n", name, n);
    for (uint32_t i = 1 + fault_rig_seed() % stride;; i += stride) {
        script_say("%s: call %u of OpenCL gives CL_OUT_OF_RESOURCES", name, i);
        if (!run_case(&(Fault){.at = i, .code = CL_OUT_OF_RESOURCES}))
            break;
    }
    bench_close("every call");
}

static void every_site(const ScriptShape *shape)
{
    const char *name = shape->name;
    uint32_t n = 0, stride, next;
    size_t n_sites;

    bench_open(shape);
    fault_count(true);
    run_clean();
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
            if (!run_case(&(Fault){.site = &site, .at = at, .code = site.codes[c]}) && at > 1) /* how often it is called there varies */
                (void)run_case(&(Fault){.site = &site, .at = 1, .code = site.codes[c]});
        }
    }
    bench_close("every place with every code");
}

static void every_allocation(const ScriptShape *shape)
{
    const char *name = shape->name;
    uint32_t n, stride;

    bench_open(shape);
    fault_count(false);
    run_clean();
    n = fault_n_allocations();
    stride = fault_rig_stride(n, 16);
    (void)printf("%s: %u allocations\n", name, n);
    for (uint32_t i = 1 + fault_rig_seed() % stride;; i += stride) {
        script_say("%s: allocation %u", name, i);
        if (!run_case(&(Fault){.allocation = true, .at = i}))
            break;
    }
    bench_close("every allocation");
}

static void layer_fault(const char *name, const char *function, uint32_t i, const char *action)
{
    char fault[96];

    (void)snprintf(fault, sizeof(fault), "%s:%u:%s", function, i, action);
    script_say("%s: %s", name, fault);
    fault_count(false);
    (void)run_case(&(Fault){.layer = fault, .function = function, .at = i});
}

static uint32_t count_clean(const char *function)
{
    CHECK(set_layer_faults(NULL) == CL_SUCCESS);
    run_clean();
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

static void every_event(const ScriptShape *shape)
{
    const char *name = shape->name;
    static const char *const functions[] = {"clEnqueueNDRangeKernel", "clEnqueueWriteBuffer", "clEnqueueReadBuffer", "clEnqueueCopyBuffer"};

    bench_open(shape);
    for (size_t f = 0; f < N_ELEMENTS(functions); f++)
        layer_faults(name, functions[f], "event=CL_OUT_OF_RESOURCES", 2);
    bench_close("every event");
}

/* Commands that do not end, one of each kind; the last of some.  The deadline is short.  A few even of all cases, for what a hung device holds
 * is never given back. */
static void stalls(const ScriptShape *shape)
{
    const char *name = shape->name;
    static const char *const functions[] = {"clEnqueueNDRangeKernel", "clEnqueueWriteBuffer", "clEnqueueReadBuffer", "clEnqueueCopyBuffer"};

    uint32_t n[N_ELEMENTS(functions)];

    bench_open(shape);
    for (size_t f = 0; f < N_ELEMENTS(functions); f++)
        n[f] = count_clean(functions[f]);
    bench.hurries = true;
    reopen_world();
    for (size_t f = 0; f < N_ELEMENTS(functions); f++)
        for (uint32_t k = getenv("LEAT_SOAK") ? 8 : 1; n[f] > 0 && k > 0; k--)
            layer_fault(name, functions[f], (f + k) % 2 ? n[f] - (k - 1) * n[f] / 8 : 1 + (fault_rig_seed() + 7 * k) % n[f], "stall");
    MUST(bench.n_lost == bench.n_hit && bench.n_hit > 0);
    bench.hurries = false;
    reopen_world();
    layer_faults(name, "any", "reset", 4);
    bench_close("stalls and resets");
}

/* ---- scenarios ------------------------------------------------------------------------------------------------------ */

static const struct {
    const char *name;
    void (*run)(const ScriptShape *shape);
} kinds[] = {
    {"refusals", refusals}, {"every_call", every_call}, {"every_site", every_site}, {"every_allocation", every_allocation},
    {"every_event", every_event}, {"stalls", stalls},
};

static ScriptShape named_shape;
static void (*named_kind)(const ScriptShape *shape);

static void run_named(void)
{
    named_kind(&named_shape);
}

bool fault_cases_is_scenario(int argc, char **argv, ScriptShape (*shape_of)(const char *name))
{
    const char *name = argc == 3 ? argv[2] : "", *dash = strchr(name, '-');

    for (size_t i = 0; i < N_ELEMENTS(kinds) && dash; i++)
        if (strlen(kinds[i].name) == (size_t)(dash - name) && strncmp(kinds[i].name, name, (size_t)(dash - name)) == 0) {
            named_shape = shape_of(dash + 1);
            named_kind = kinds[i].run;
        }
    return sim_rig_is_scenario(argc, argv, &(SimScenario){name, run_named}, named_kind ? 1 : 0);
}

void fault_cases_run_well(const char *kind, const char *const *shapes, size_t n, const char *settings)
{
    for (size_t i = 0; i < n; i++) {
        char name[64];

        (void)snprintf(name, sizeof(name), "%s-%s", kind, shapes[i]);
        sim_rig_run_well(name, settings);
    }
}
