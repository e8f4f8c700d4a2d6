/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counting calls, and what happens at the n-th.  CLSIM_FAULT is a list of FUNCTION:N:ACTION, separated by ';' (README.md):
 *   CODE            the call fails        event=CODE   the command is accepted and fails when its turn comes
 *   hang[=MSEC]     it does not return    stall[=MSEC] the command is accepted and does not complete
 *   lost[=CODE]     this call and all later ones fail   reset[=CODE] those on contexts that exist now
 */

#include "tests/sim/sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define FAULTS_MAX 32

typedef enum FaultAction { FAULT_CODE, FAULT_EVENT, FAULT_HANG, FAULT_STALL, FAULT_LOST, FAULT_RESET } FaultAction;

typedef struct Fault {
    unsigned function; /* SIM_N_FUNCTIONS: any */
    uint64_t at;
    bool onwards;      /* from there on, each */
    FaultAction action;
    cl_int code;
    int64_t msec;      /* < 0: for ever */
} Fault;

typedef struct Faults {
    Fault items[FAULTS_MAX];
    size_t n_items;
} Faults;

static pthread_mutex_t faults_lock = PTHREAD_MUTEX_INITIALIZER;
static Faults faults;
static atomic_bool armed;
static atomic_int lost;
static atomic_ullong counts[SIM_N_FUNCTIONS], count_any;

#define CODE(name) {#name, name}
static const struct {
    const char *name;
    cl_int code;
} codes[] = {
    CODE(CL_DEVICE_NOT_FOUND),
    CODE(CL_DEVICE_NOT_AVAILABLE),
    CODE(CL_COMPILER_NOT_AVAILABLE),
    CODE(CL_MEM_OBJECT_ALLOCATION_FAILURE),
    CODE(CL_OUT_OF_RESOURCES),
    CODE(CL_OUT_OF_HOST_MEMORY),
    CODE(CL_PROFILING_INFO_NOT_AVAILABLE),
    CODE(CL_MEM_COPY_OVERLAP),
    CODE(CL_IMAGE_FORMAT_MISMATCH),
    CODE(CL_IMAGE_FORMAT_NOT_SUPPORTED),
    CODE(CL_BUILD_PROGRAM_FAILURE),
    CODE(CL_MAP_FAILURE),
    CODE(CL_MISALIGNED_SUB_BUFFER_OFFSET),
    CODE(CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST),
    CODE(CL_COMPILE_PROGRAM_FAILURE),
    CODE(CL_LINKER_NOT_AVAILABLE),
    CODE(CL_LINK_PROGRAM_FAILURE),
    CODE(CL_DEVICE_PARTITION_FAILED),
    CODE(CL_KERNEL_ARG_INFO_NOT_AVAILABLE),
    CODE(CL_INVALID_VALUE),
    CODE(CL_INVALID_DEVICE_TYPE),
    CODE(CL_INVALID_PLATFORM),
    CODE(CL_INVALID_DEVICE),
    CODE(CL_INVALID_CONTEXT),
    CODE(CL_INVALID_QUEUE_PROPERTIES),
    CODE(CL_INVALID_COMMAND_QUEUE),
    CODE(CL_INVALID_HOST_PTR),
    CODE(CL_INVALID_MEM_OBJECT),
    CODE(CL_INVALID_IMAGE_FORMAT_DESCRIPTOR),
    CODE(CL_INVALID_IMAGE_SIZE),
    CODE(CL_INVALID_SAMPLER),
    CODE(CL_INVALID_BINARY),
    CODE(CL_INVALID_BUILD_OPTIONS),
    CODE(CL_INVALID_PROGRAM),
    CODE(CL_INVALID_PROGRAM_EXECUTABLE),
    CODE(CL_INVALID_KERNEL_NAME),
    CODE(CL_INVALID_KERNEL_DEFINITION),
    CODE(CL_INVALID_KERNEL),
    CODE(CL_INVALID_ARG_INDEX),
    CODE(CL_INVALID_ARG_VALUE),
    CODE(CL_INVALID_ARG_SIZE),
    CODE(CL_INVALID_KERNEL_ARGS),
    CODE(CL_INVALID_WORK_DIMENSION),
    CODE(CL_INVALID_WORK_GROUP_SIZE),
    CODE(CL_INVALID_WORK_ITEM_SIZE),
    CODE(CL_INVALID_GLOBAL_OFFSET),
    CODE(CL_INVALID_EVENT_WAIT_LIST),
    CODE(CL_INVALID_EVENT),
    CODE(CL_INVALID_OPERATION),
    CODE(CL_INVALID_GL_OBJECT),
    CODE(CL_INVALID_BUFFER_SIZE),
    CODE(CL_INVALID_MIP_LEVEL),
    CODE(CL_INVALID_GLOBAL_WORK_SIZE),
    CODE(CL_INVALID_PROPERTY),
    CODE(CL_INVALID_COMPILER_OPTIONS),
    CODE(CL_INVALID_LINKER_OPTIONS),
};

static bool parse_code(const char *text, cl_int *ret)
{
    char *end;
    long code;

    for (size_t i = 0; i < SIM_N_ELEMENTS(codes); i++)
        if (strcmp(codes[i].name, text) == 0 || strcmp(codes[i].name + strlen("CL_"), text) == 0) {
            *ret = codes[i].code;
            return true;
        }
    code = strtol(text, &end, 10);
    if (end == text || *end || code >= 0 || code < INT32_MIN)
        return false;
    *ret = (cl_int)code;
    return true;
}

static bool parse_msec(const char *text, int64_t *ret)
{
    double number;

    if (!config_number(text, &number) || number > 1e12)
        return false;
    *ret = (int64_t)number;
    return true;
}

static bool parse_action(char *text, Fault *fault)
{
    char *value = strchr(text, '=');

    if (value)
        *value++ = '\0';
    fault->code = CL_OUT_OF_RESOURCES;
    fault->msec = -1;
    if (strcmp(text, "hang") == 0 || strcmp(text, "stall") == 0) {
        fault->action = *text == 'h' ? FAULT_HANG : FAULT_STALL;
        return !value || parse_msec(value, &fault->msec);
    }
    if (strcmp(text, "lost") == 0 || strcmp(text, "reset") == 0 || strcmp(text, "event") == 0) {
        fault->action = *text == 'l' ? FAULT_LOST : *text == 'r' ? FAULT_RESET : FAULT_EVENT;
        return !value || parse_code(value, &fault->code);
    }
    fault->action = FAULT_CODE;
    return !value && parse_code(text, &fault->code);
}

static bool parse_fault(char *text, Fault *fault)
{
    char *at = strchr(text, ':'), *action = at ? strchr(at + 1, ':') : NULL, *end;

    if (!action)
        return false;
    *at++ = *action++ = '\0';
    fault->function = strcmp(text, "any") == 0 || strcmp(text, "*") == 0 ? SIM_N_FUNCTIONS : sim_function_find(text);
    if (fault->function == SIM_N_FUNCTIONS && strcmp(text, "any") != 0 && strcmp(text, "*") != 0)
        return false;
    fault->at = strtoull(at, &end, 10);
    fault->onwards = *end == '+';
    if (end == at || fault->at == 0 || end[fault->onwards])
        return false;
    return parse_action(action, fault);
}

cl_int fault_set(const char *text)
{
    char *copy = strdup(text ? text : ""), *rest = copy;
    Faults parsed = {.n_items = 0};
    bool good = copy != NULL;

    for (char *item; good && (item = strsep(&rest, ";"));) {
        if (*item == '\0')
            continue;
        good = parsed.n_items < FAULTS_MAX && parse_fault(item, &parsed.items[parsed.n_items]);
        parsed.n_items++;
    }
    free(copy);
    if (!good)
        return CL_INVALID_VALUE;
    (void)pthread_mutex_lock(&faults_lock);
    faults = parsed;
    for (size_t i = 0; i < SIM_N_FUNCTIONS; i++)
        atomic_store(&counts[i], 0);
    atomic_store(&count_any, 0);
    atomic_store(&armed, parsed.n_items > 0);
    (void)pthread_mutex_unlock(&faults_lock);
    return CL_SUCCESS;
}

static void sleep_msec(int64_t msec)
{
    struct timespec time = {.tv_sec = msec < 0 ? 3600 : msec / 1000, .tv_nsec = msec < 0 ? 0 : msec % 1000 * 1000000};

    do
        (void)nanosleep(&time, NULL);
    while (msec < 0);
}

/* What is lost can still be given back. */
static bool outlives_loss(unsigned function)
{
    return strncmp(sim_function_name(function), "clRelease", 9) == 0;
}

static cl_int apply(SimCall *call, const Fault *fault)
{
    report_detail("%s #%llu: fault", sim_function_name(call->function), (unsigned long long)call->ordinal);
    switch (fault->action) {
    case FAULT_CODE:
        return fault->code;
    case FAULT_EVENT:
        call->event_status = fault->code;
        return CL_SUCCESS;
    case FAULT_HANG:
        sleep_msec(fault->msec);
        return CL_SUCCESS;
    case FAULT_STALL:
        call->stalls = true;
        call->stall_msec = fault->msec;
        return CL_SUCCESS;
    case FAULT_LOST:
        atomic_store(&lost, fault->code);
        pacer_lose();
        return outlives_loss(call->function) ? CL_SUCCESS : fault->code;
    case FAULT_RESET:
        context_reset(fault->code);
        pacer_lose();
        return outlives_loss(call->function) ? CL_SUCCESS : fault->code;
    }
    return CL_SUCCESS;
}

cl_int fault_enter(SimCall *call, unsigned function)
{
    uint64_t any = atomic_fetch_add(&count_any, 1) + 1;
    Fault hit = {.at = 0};
    cl_int dead;

    *call = (SimCall){.function = function, .ordinal = atomic_fetch_add(&counts[function], 1) + 1};
    dead = fault_lost();
    if (dead != CL_SUCCESS && !outlives_loss(function))
        return dead;
    if (!atomic_load(&armed))
        return CL_SUCCESS;
    (void)pthread_mutex_lock(&faults_lock);
    for (size_t i = 0; i < faults.n_items && hit.at == 0; i++) {
        const Fault *fault = &faults.items[i];
        uint64_t n = fault->function == SIM_N_FUNCTIONS ? any : fault->function == function ? call->ordinal : 0;

        if (n == fault->at || (fault->onwards && n > fault->at))
            hit = *fault;
    }
    (void)pthread_mutex_unlock(&faults_lock);
    return hit.at ? apply(call, &hit) : CL_SUCCESS;
}

cl_int fault_lost(void)
{
    return atomic_load(&lost);
}

cl_ulong fault_count(const char *function)
{
    unsigned index;

    if (!function || strcmp(function, "any") == 0 || strcmp(function, "*") == 0)
        return atomic_load(&count_any);
    index = sim_function_find(function);
    return index < SIM_N_FUNCTIONS ? atomic_load(&counts[index]) : 0;
}

void fault_write_counts(const char *path)
{
    FILE *file = fopen(path, "we");

    if (!file)
        return;
    (void)fprintf(file, "any %llu\n", (unsigned long long)atomic_load(&count_any));
    for (unsigned i = 0; i < SIM_N_FUNCTIONS; i++)
        if (atomic_load(&counts[i]) > 0)
            (void)fprintf(file, "%s %llu\n", sim_function_name(i), (unsigned long long)atomic_load(&counts[i]));
    (void)fclose(file);
}
