/* SPDX-License-Identifier: Apache-2.0 */
/* Opening the device, and what happens when it is lost. */

#include "daemon/engine/engine-internal.h"
#include "quant/base/log.h"

#include <string.h>

/* A device that cannot be opened is tried again when a job arrives, at most this often. */
#define DEVICE_BACKOFF_FIRST_USEC UINT64_C(1000000)
#define DEVICE_BACKOFF_LAST_USEC  UINT64_C(60000000)

static void device_open_failed(Engine *engine, const ErrorDetail *detail, uint64_t now)
{
    /* The same reason once, not at every try. */
    if (strcmp(engine->device_error.text, detail->text) != 0)
        log_warning("No device: %s", detail->text);
    engine->device_error = *detail;
    engine->device_backoff_usec = engine->device_backoff_usec
                                      ? MIN(2 * engine->device_backoff_usec, DEVICE_BACKOFF_LAST_USEC)
                                      : DEVICE_BACKOFF_FIRST_USEC;
    engine->device_retry_usec = now + engine->device_backoff_usec;
    status_device_state(engine);
}

EngineResult device_ensure(Engine *engine, ErrorDetail *reterr)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    uint64_t now = now_usec();
    int r;

    if (engine->gpu && gpu_is_lost(engine->gpu)) {
        (void)error_detail_set(&detail, -ENODEV, "%s was lost", gpu_info(engine->gpu)->name);
        device_abandon(engine, &detail);
    }
    if (engine->gpu)
        return ENGINE_RESULT_DONE;
    if (now < engine->device_retry_usec) {
        if (reterr)
            *reterr = engine->device_error;
        return ENGINE_RESULT_NO_DEVICE;
    }
    mailbox_allow(engine->mailbox, now + ENGINE_LOAD_ALLOWANCE_USEC);
    r = gpu_open(&engine->gpu_options, &engine->gpu, &detail);
    mailbox_allow(engine->mailbox, 0);
    if (r) {
        if (!detail.text[0])
            (void)error_detail_set(&detail, r, "cannot open an OpenCL device: %s", strerror(r < 0 ? -r : EIO));
        device_open_failed(engine, &detail, now_usec());
        if (reterr)
            *reterr = detail;
        return ENGINE_RESULT_NO_DEVICE;
    }
    engine->device_error = ERROR_DETAIL_NULL;
    engine->device_backoff_usec = engine->device_retry_usec = 0;
    log_info("Device: %s (%s), %llu MiB for leat; %s", gpu_info(engine->gpu)->name, gpu_info(engine->gpu)->platform,
             (unsigned long long)(gpu_info(engine->gpu)->budget_bytes >> 20), gpu_info(engine->gpu)->reason);
    status_device_state(engine);
    return ENGINE_RESULT_DONE;
}

void device_close(Engine *engine)
{
    engine->overlap_job = 0;
    engine->gpu = gpu_free(engine->gpu);
}

void device_abandon(Engine *engine, const ErrorDetail *detail)
{
    ErrorDetail complete = *detail;
    EngineResult result = engine->gpu && gpu_is_hung(engine->gpu) ? ENGINE_RESULT_DEVICE_HUNG : ENGINE_RESULT_DEVICE_LOST;
    bool again;

    if (engine->gpu)
        gpu_explain(engine->gpu, &complete);
    result_explain(result, &complete);
    log_error("Device %s: %s", result == ENGINE_RESULT_DEVICE_HUNG ? "hung" : "lost", complete.text);
    engine->device_error = complete;
    do {
        again = false;
        for (Job *job = engine->jobs; job && !again; job = job->next)
            if (job->active) {
                jobs_finish(engine, job, result, &complete);
                again = true;
            }
    } while (again);
    for (ModelSlot *slot = engine->slots; slot; slot = slot->next)
        if (slot->model)
            slot_unload(engine, slot);
    device_close(engine);
    status_device_state(engine);
}
