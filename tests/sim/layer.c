/* SPDX-License-Identifier: Apache-2.0 */
/* The layer, as the ICD loader sees it (CL/cl_layer.h), from its start to the end of the program. */

#include "tests/sim/sim.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

Sim sim = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

/* Of the initial TLS model, for free() may be what asks. */
static __thread unsigned locked __attribute__((tls_model("initial-exec")));

void sim_lock(void)
{
    (void)pthread_mutex_lock(&sim.lock);
    locked = 1;
}

void sim_unlock(void)
{
    locked = 0;
    (void)pthread_mutex_unlock(&sim.lock);
}

bool sim_is_locked(void)
{
    return locked;
}

void sim_wait(pthread_cond_t *changed)
{
    (void)pthread_cond_wait(changed, &sim.lock);
}

bool sim_wait_until(pthread_cond_t *changed, const struct timespec *until)
{
    return pthread_cond_timedwait(changed, &sim.lock, until) == 0;
}

__attribute__((visibility("default"))) CL_API_ENTRY cl_int CL_API_CALL clGetLayerInfo(cl_layer_info what, size_t size, void *value,
                                                                                      size_t *size_ret)
{
    static const char name[] = "simulated small GPU";
    const cl_layer_api_version version = CL_LAYER_API_VERSION_100;

    switch (what) {
    case CL_LAYER_API_VERSION:
        return sim_answer(&version, sizeof(version), size, value, size_ret);
    case CL_LAYER_NAME:
        return sim_answer(name, sizeof(name), size, value, size_ret);
    }
    return CL_INVALID_VALUE;
}

static int last_processor(void)
{
    cpu_set_t allowed;

    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0)
        return -1;
    for (int i = CPU_SETSIZE; i-- > 0;)
        if (CPU_ISSET((size_t)i, &allowed))
            return i;
    return -1;
}

static void hook_all(void)
{
    context_hook();
    device_hook();
    enqueue_hook();
    event_hook();
    extension_hook();
    kernel_hook();
    map_hook();
    memory_hook();
    pass_hook();
    queue_hook();
    transfer_hook();
}

__attribute__((visibility("default"))) CL_API_ENTRY cl_int CL_API_CALL clInitLayer(cl_uint n, const cl_icd_dispatch *next,
                                                                                   cl_uint *ret_n, const cl_icd_dispatch **ret)
{
    pthread_mutexattr_t recursive;

    if (!next || !ret_n || !ret || sim.ready)
        return CL_INVALID_VALUE;
    memcpy(&sim.next, next, SIM_MIN(n * sizeof(void *), sizeof(sim.next)));
    /* A loader would go on without the layer, and the program would be tested on something else than was asked for. */
    if (!config_load(&sim.config)) {
        report_note("the settings are wrong: the program is ended");
        _exit(2);
    }
    (void)pthread_mutexattr_init(&recursive);
    (void)pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
    (void)pthread_mutex_init(&sim.enqueuing, &recursive);
    (void)pthread_mutexattr_destroy(&recursive);
    sim.table = sim.next;
    hook_all();
    sim.owner = getpid();
    sim.copy_processor = last_processor();
    sim.ready = true;
    *ret_n = SIM_MIN(n, (cl_uint)SIM_N_FUNCTIONS);
    *ret = &sim.table;
    return CL_SUCCESS;
}

/* After the program's own exit handlers and destructors. */
__attribute__((destructor)) static void finish(void)
{
    int code;

    if (!sim.ready || sim.owner != getpid())
        return;
    pacer_stop();
    callbacks_stop();
    if (sim.config.checks & SIM_CHECK_LEAK)
        object_report_leaks();
    if (sim.config.counts)
        fault_write_counts(sim.config.counts);
    code = report_finish();
    if (code) {
        (void)fflush(NULL);
        _exit(code);
    }
}
